"""Searches for a way in which the same rows reach a pipeline and give another result: a property test of a user's stages.

The rows are cut into micro-batches at random, come in another order, the job is suspended, cancelled and restored, and gets other
instances. Whatever happens, the result is that of a batch over all rows. A history with another result is made smaller until only
the rows and the steps are left that it needs.
"""

from __future__ import annotations

import logging
import random
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from dagster_checkpoints.pipeline import Pipeline, StageKind
from dagster_checkpoints.spark.job.pipeline_checks import check_plans
from dagster_checkpoints.state.errors import RestoreError
from dagster_checkpoints.testing.check_errors import HistoryFailure, HistoryMismatchError, StageFindingError
from dagster_checkpoints.testing.histories import Feed, History, Run, in_order, on_time, random_history, shrink, simpler
from dagster_checkpoints.testing.replaced_pipeline import ReplacedPipeline, RunEnd, kept_stages, session_for_tests
from dagster_checkpoints.testing.row_differences import column_names, differences, in_column_order
from dagster_checkpoints.testing.source_rows import InvalidTestRowsError, SourceRows, instance_name, rows_by_instance
from dagster_checkpoints.testing.stage_results import NoBatchError, batch_results, findings, local_time

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Rows = Mapping[str, Sequence[Any]]
"""By stage or source, rows."""

_OTHER_ZONE = "Pacific/Chatham"  # 12:45 or 13:45 ahead of UTC: another day, another hour and another quarter of an hour
_LOG = logging.getLogger("dagster_checkpoints")


@dataclass(frozen=True)
class CheckedPipeline:
    """What a check has tried without finding a difference.

    Attributes:
        histories: The histories, in order.
        reference: What they were compared with: "batch", "expected", or "one micro-batch" where Spark has no batch of a stage.
        rows: The number of rows of each stage that were compared.
    """

    histories: tuple[History, ...] = field(repr=False)
    reference: str
    rows: Mapping[str, int]


def check_pipeline(
    pipeline: Pipeline,
    inputs: Mapping[str, SourceRows],
    *,
    expected: Callable[[Rows], Rows] | None = None,
    stages: Sequence[str] | None = None,
    histories: int = 6,
    seed: int = 0,
    in_order: Collection[str] = (),
    ignore: Mapping[str, Collection[str]] | None = None,
    allow: Collection[str] = (),
    shrink_attempts: int = 24,
    spark: SparkSession | None = None,
) -> CheckedPipeline:
    """Check that a pipeline's result depends on the rows of its sources only, and equals that of a batch.

    Sources and sinks are replaced, as in :func:`run_pipeline`.

    First the plans are looked at: tables beside the inputs, the clock, chance, joins without a time bound and the other warnings
    of `dagster-checkpoints check`. Then the stages are evaluated as batches: twice, with the rows in another order, in another
    time zone. Then they run as a job: rows in one micro-batch, in random ones, suspended and restored, cancelled, with other
    instances. No row is later than the source's watermark allows. The same seed gives the same histories.

    Args:
        pipeline: The pipeline.
        inputs: The rows of each source, or of one of its instances; steps do not matter.
        expected: Gives the expected rows of stages for the rows of the sources, where a batch is not what is wanted; it is also
            called with fewer rows. Rows are dictionaries, or tuples in the order of the stage's columns.
        stages: The stages whose rows are compared; default: those with a sink.
        histories: The number of histories in which the pipeline runs as a job; each takes two to ten seconds.
        seed: The seed of all that is random.
        in_order: Sources whose rows come in the given order.
        ignore: Columns that are not compared, by stage.
        allow: Parts of the text of findings that are accepted.
        shrink_attempts: The largest number of attempts to make a failing history smaller.
        spark: The session; default: one with two local cores.

    Raises:
        StageFindingError: A plan depends on more than the rows.
        HistoryMismatchError: A history gives other rows, or fails.
        InvalidTestRowsError: The rows or another argument do not fit the pipeline, or there is nothing to compare.
        UnknownStageError: An argument names a stage that the pipeline does not have.
        DagsterCheckpointsError: A stage fails with all rows at once.

    Examples:
        >>> check_pipeline(shop, {"orders": SourceRows("shop string, at timestamp, price long", rows)})
    """
    kept = kept_stages(pipeline, stages)
    given = rows_by_instance(pipeline, inputs)
    _check_names(pipeline, allow, in_order, ignore or {})
    session = spark if spark is not None else session_for_tests()
    check = _Check(pipeline, kept, given, session, expected, in_order, ignore or {})
    check.look(allow)
    reference = check.find_reference()
    tried = []
    for history in check.histories(histories, random.Random(seed)):
        failure = check.failure(history)
        if failure is None:
            tried.append(history)
            continue
        if isinstance(failure.error, RestoreError) and any(run.instances for run in history.runs):
            _LOG.warning(
                "Pipeline %r: other instances are not tried, since a restore refuses them: %s", pipeline.name, failure.error
            )
            continue
        if failure.error is not None and not list(simpler(history)):
            raise failure.error  # all rows at once: it fails as it is, not for the way of the rows
        raise check.mismatch(*check.smallest(history, failure, shrink_attempts), seed)
    return CheckedPipeline(tuple(tried), reference, check.compared)


def _check_names(
    pipeline: Pipeline, allow: Collection[str], in_order: Collection[str], ignore: Mapping[str, Collection[str]]
) -> None:
    """Refuse a text in place of several, whose characters would be taken one by one, and names of no stage."""
    for argument, texts in {
        "allow": allow,
        "in_order": in_order,
        **{f"ignore[{name!r}]": ignore[name] for name in ignore},
    }.items():
        if isinstance(texts, str):
            raise InvalidTestRowsError(f"{argument}: expected a list of texts, found the text {texts!r}. Write [{texts!r}]")
    for name in (*in_order, *ignore):
        pipeline.stage(name)


class _Check:
    def __init__(
        self,
        pipeline: Pipeline,
        kept: Sequence[str],
        given: Mapping[str, SourceRows],
        spark: SparkSession,
        expected: Callable[[Rows], Rows] | None,
        keeps_order: Collection[str],
        ignored: Mapping[str, Collection[str]],
    ) -> None:
        self._pipeline = pipeline
        self._kept = kept
        self._spark = spark
        self._expected = expected
        self._ignored = ignored
        self._schemas = {name: each.schema for name, each in given.items()}
        self._sources = {
            instance_name(stage, instance): stage
            for stage in pipeline.stages
            if stage.kind.is_source
            for instance in stage.instances
        }
        self._tables: dict[str, pa.Table] = {}
        self._feeds: dict[str, Feed] = {}
        for name, source in self._sources.items():
            table = pa.concat_tables(given[name].tables(spark, name))
            times: Sequence[int | None] = [None] * table.num_rows
            if (watermark := source.watermark) is not None:
                column = _event_time(table, watermark.column, name)
                if source.name not in keeps_order:
                    order = pc.sort_indices(column)
                    table, column = table.take(order), column.take(order)
                times = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64()).to_pylist()
            self._tables[name] = table
            self._feeds[name] = Feed(
                tuple(times),
                watermark.lateness_ms if watermark is not None else None,
                source.kind is StageKind.BOUNDED_SOURCE,
                source.name in keeps_order,
            )
        self._batch = True
        self._reference: dict[tuple[Any, ...], Rows] = {}
        self.compared: dict[str, int] = {}

    def look(self, allow: Collection[str]) -> None:
        """Look at the plans.

        Raises:
            StageFindingError: A plan depends on more than the rows.
            StageError: A plan cannot run.
        """
        with tempfile.TemporaryDirectory(prefix="dagster-checkpoints-check-") as folder:
            replaced = self._replaced(Path(folder)).pipeline()
            report = check_plans(replaced, self._spark)
        for error in report.failed.values():
            raise error
        found = list(report.warnings)
        try:
            found += findings(self._pipeline, self._frames(in_order(self._feeds, "batch")), self._spark)
        except Exception as error:
            self._without_batch(error)
        found = [text for text in found if not any(part in text for part in allow)]
        if found:
            raise StageFindingError.of(self._pipeline.name, found)

    def find_reference(self) -> str:
        """Compute what all histories are compared with; returns its name.

        Raises:
            InvalidTestRowsError: There is nothing to compare.
        """
        history = in_order(self._feeds, "batch")
        if self._batch:
            try:
                self._expect(history) if self._expected is None else self._results(history)
            except Exception as error:
                self._without_batch(error)
        found = self._expect(history)
        self.compared = {stage: len(rows) for stage, rows in found.items()}
        empty = [stage for stage in self._kept if not found.get(stage)]
        if empty or not self._kept:
            raise InvalidTestRowsError(
                f"Pipeline {self._pipeline.name!r}: expected rows to compare, found none of {', '.join(empty) or 'any stage'}. "
                "Give sources rows from which each stage emits some, or name other stages with stages="
            )
        return "expected" if self._expected is not None else "batch" if self._batch else "one micro-batch"

    def histories(self, number: int, chance: random.Random) -> list[History]:
        """The histories to try, the cheap ones first."""
        feeds = self._feeds
        found = []
        if self._batch:
            found = [
                in_order(feeds, "batch"),
                random_history(feeds, chance, engine="batch"),
                random_history(feeds, chance, engine="batch", time_zone=_OTHER_ZONE),
            ]
        with tempfile.TemporaryDirectory(prefix="dagster-checkpoints-check-") as folder:
            others = list(self._replaced(Path(folder)).other_instances()) or [{}]
        zone = None if self._batch else _OTHER_ZONE
        ways: list[Callable[[], History]] = [
            lambda: in_order(feeds, "stream"),
            lambda: random_history(feeds, chance),
            lambda: random_history(feeds, chance, runs=2),
            lambda: random_history(feeds, chance, runs=2, crash=True, time_zone=zone),
            lambda: random_history(feeds, chance, runs=2, instances=others[0]),
            lambda: random_history(feeds, chance, runs=3, crash=True, instances=others[-1]),
        ]
        made = [way() for way in ways[:number]]
        while len(made) < number:
            runs = chance.randint(1, 3)
            made.append(
                random_history(feeds, chance, runs=runs, crash=chance.random() < 0.5, instances=chance.choice([{}, *others]))
            )
        return found + made

    def failure(self, history: History) -> HistoryFailure | None:
        """How a history fails; None if it does not, or is none in which all rows are in time."""
        if not on_time(history, self._feeds):
            return None
        try:
            found = self._results(history)
        except Exception as error:
            return HistoryFailure(error=error)
        expected = self._expect(history)
        for stage in self._kept:
            missing, unexpected = differences(*self._compared(stage, expected.get(stage, ()), found[stage]))
            if missing or unexpected:
                return HistoryFailure(stage, missing, unexpected)
        return None

    def smallest(self, history: History, failure: HistoryFailure, attempts: int) -> tuple[History, HistoryFailure]:
        """The smallest history that fails in the same way, with other rows or an error of the same kind; and how it fails."""
        latest = failure

        def fails(smaller: History) -> bool:
            nonlocal latest
            try:
                found = self.failure(smaller)
            except Exception:  # with fewer rows there may be no result to expect
                return False
            if found is None or type(found.error) is not type(failure.error):
                return False
            latest = found
            return True

        return shrink(history, fails, attempts), latest

    def mismatch(self, history: History, failure: HistoryFailure, seed: int) -> HistoryMismatchError:
        """The error for a failing history."""
        rows: dict[str, dict[int, Mapping[str, Any]]] = {}
        for name, number in history.rows:
            rows.setdefault(name, {})[number] = self._tables[name].slice(number, 1).to_pylist()[0]
        total = sum(table.num_rows for table in self._tables.values())
        return HistoryMismatchError.of(
            self._pipeline.name, history, failure, rows, f"seed {seed}, {len(history.rows)} of {total} rows"
        )

    # What a history gives

    def _results(self, history: History) -> Rows:
        if history.engine == "stream":
            return self._run(history)
        with local_time(self._spark, history.time_zone):
            frames = batch_results(self._pipeline, self._frames(history), self._spark)
        with local_time(self._spark, history.time_zone, here=False):
            return {stage: frames[stage].collect() for stage in self._kept}

    def _run(self, history: History) -> Rows:
        with tempfile.TemporaryDirectory(prefix="dagster-checkpoints-check-") as folder:
            replaced = self._replaced(Path(folder))
            with local_time(self._spark, history.time_zone):
                self._run_all(history, replaced)
            return replaced.committed()

    def _run_all(self, history: History, replaced: ReplacedPipeline) -> None:
        left = set(history.rows)
        for number, run in enumerate(history.runs, start=1):
            files = [
                replaced.add(name, self._rows(name, [row for row in batch if (name, row) in left]))
                for name, batches in run.batches.items()
                for batch in batches
            ]
            outcome = replaced.run(self._end(run, number == 1, number == len(history.runs)), run.instances)
            if outcome == "ended":
                return
            if outcome == "stopped":  # also a run that was to crash, and had a checkpoint before
                left -= set(History((run,)).rows)
                continue
            for file in files:
                if file is not None:
                    file.unlink()
        replaced.run("drain", history.runs[-1].instances)

    def _end(self, run: Run, first: bool, last: bool) -> RunEnd:
        if run.crashes:
            return "crash"
        if last and first:
            return "end"
        # A bounded pipeline is suspended in the middle of its rows, or not at all.
        return "pause" if self._pipeline.bounded and not last else "end" if self._pipeline.bounded else "suspend"

    def _expect(self, history: History) -> Rows:
        """The expected rows of a history's rows."""
        rows = history.rows
        if rows not in self._reference:
            plain = in_order(self._feeds, "batch" if self._batch else "stream").keeping(rows)
            if self._expected is None:
                self._reference[rows] = self._results(plain)
            else:
                frames = self._frames(plain)
                self._reference[rows] = self._expected({name: frame.collect() for name, frame in frames.items()})
        return self._reference[rows]

    def _frames(self, history: History) -> dict[str, DataFrame]:
        """The rows of each source as a batch; each micro-batch is a partition of its own."""
        parts: dict[str, list[DataFrame]] = {}
        for name, source in self._sources.items():
            batches = [batch for run in history.runs for batch in run.batches.get(name, ())] or [()]
            for batch in batches:
                frame = self._spark.createDataFrame(self._rows(name, batch), self._schemas[name]).coalesce(1)
                parts.setdefault(source.name, []).append(frame)
        return {source: _union(frames) for source, frames in parts.items()}

    def _rows(self, name: str, numbers: Sequence[int]) -> pa.Table:
        return self._tables[name].take(pa.array(numbers, pa.int64()))

    def _replaced(self, folder: Path) -> ReplacedPipeline:
        return ReplacedPipeline(self._pipeline, self._schemas, self._kept, folder, self._spark)

    def _compared(self, stage: str, expected: Sequence[Any], found: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        order = column_names(found[0]) if found else None
        ignored = set(self._ignored.get(stage, ()))
        return in_column_order(stage, expected, order, ignored), in_column_order(stage, found, order, ignored)

    def _without_batch(self, error: Exception) -> None:
        if not _no_batch(error):
            raise error
        self._batch = False
        if self._expected is not None:
            return
        _LOG.warning(
            "Pipeline %r: Spark does not evaluate its stages as a batch (%s). Histories are compared with one in which "
            "all rows are one micro-batch; give expected= to compare with what you expect.",
            self._pipeline.name,
            str(error).splitlines()[0],
        )


def _event_time(table: pa.Table, column: str, name: str) -> pa.ChunkedArray:
    found = [each for each in table.column_names if each.lower() == column.lower()]
    if not found:
        raise InvalidTestRowsError(
            f"The rows of {name}: expected the watermark's column {column!r}, found {', '.join(map(repr, table.column_names))}"
        )
    times = table.column(found[0])
    if not pa.types.is_timestamp(times.type):
        raise InvalidTestRowsError(
            f"The rows of {name}: expected the watermark's column {column!r} as a timestamp, found {times.type}"
        )
    return times


def _union(frames: Sequence[DataFrame]) -> DataFrame:
    found = frames[0]
    for other in frames[1:]:
        found = found.union(other)
    return found


def _no_batch(error: BaseException) -> bool:
    """Whether an operator exists in streams only."""
    if isinstance(error, NoBatchError):
        return True
    text = str(error).lower()
    known = ("batch dataframe", "batch quer", "non-streaming", "streaming dataframe", "to reassign event time column")
    return any(each in text for each in known)
