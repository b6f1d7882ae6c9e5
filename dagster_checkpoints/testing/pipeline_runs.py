"""A pipeline's stages over a few rows, for the tests of whoever wrote them: no storage, no Dagster, no source to reach.

The rows of each source are given in steps. A step is a run of its own (a burst): it reads the step's rows, emits what is due, and
suspends; the next one restores that. So a test also shows that the stages survive a restore. At the end the pipeline is drained.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.coordination import CheckpointConfig, NoRestart
from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline import Pipeline, Stage, StageContext, StageKind
from dagster_checkpoints.pipeline.names import suggestion
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.job.events import JobEvent
from dagster_checkpoints.spark.job.job_execution import JobExecution
from dagster_checkpoints.spark.job.job_options import JobOptions, Until
from dagster_checkpoints.spark.session.spark_session import build_session
from dagster_checkpoints.storage import CheckpointStorage, open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

_SESSION = {"spark.master": "local[2]", "spark.sql.shuffle.partitions": 2}


class InvalidTestRowsError(DagsterCheckpointsError):
    """The rows of a test do not fit the pipeline."""


class SourceRows:
    """The rows of one source, or of one of its instances, in steps.

    Args:
        schema: The columns, as Spark writes them: ``"k string, ts timestamp"``.
        steps: The rows of each step: tuples in the order of the columns, dictionaries, or a batch DataFrame.

    Examples:
        >>> SourceRows("who string, at timestamp", [("a", noon)], [("a", noon + hour), ("late", noon - hour)])
    """

    def __init__(self, schema: str, *steps: Sequence[Any] | DataFrame) -> None:
        self.schema = schema
        self.steps = steps


@dataclass(frozen=True)
class PipelineOutput:
    """What the stages have committed.

    Attributes:
        steps: By stage, the rows of each step, those of the drain last.
    """

    steps: Mapping[str, Sequence[Sequence[Row]]] = field(default_factory=dict)

    def rows(self, stage: str, step: int | None = None) -> list[Row]:
        """The rows of a stage, sorted by their text.

        Args:
            stage: Name of the stage.
            step: Number of the step, from 0; -1 for what the drain has added. None for all.

        Raises:
            InvalidTestRowsError: The rows of this stage are not kept.
        """
        if stage not in self.steps:
            raise InvalidTestRowsError(f"expected a stage whose rows are kept, found {stage!r}. {suggestion(stage, self.steps)}")
        found = self.steps[stage]
        return sorted([row for rows in found for row in rows] if step is None else found[step], key=repr)


def run_pipeline(
    pipeline: Pipeline,
    inputs: Mapping[str, SourceRows],
    *,
    stages: Sequence[str] | None = None,
    spark: SparkSession | None = None,
    on_event: Callable[[JobEvent], None] = lambda event: None,
) -> PipelineOutput:
    """Run a pipeline over a few rows, to its end.

    The sources are replaced: their functions are not called, their watermark and instances count. Sinks are replaced, too, and
    nothing is written outside of a temporary directory. All other stages run as they are.

    Args:
        pipeline: The pipeline.
        inputs: The rows of each source, by its name; or by ``name[instance]``, for one of its instances. Rows of a source with
            several instances are dealt out to them in turn.
        stages: The stages whose rows are kept; default: those with a sink.
        spark: The session; default: one with two local cores, which stays for the next test.
        on_event: Receives the events of the runs.

    Raises:
        InvalidTestRowsError: A source has no rows, a name is unknown, or a bounded source has more than one step.
        DagsterCheckpointsError: A run has failed, as it would in production.

    Examples:
        >>> output = run_pipeline(shop, {"orders": SourceRows("id long, at timestamp", [(1, noon)], [(2, noon + day)])})
        >>> assert [row.n for row in output.rows("daily")] == [1, 1]
    """
    kept = _kept(pipeline, stages)
    rows = _checked(pipeline, inputs)
    session = spark if spark is not None else build_session(_SESSION)
    with tempfile.TemporaryDirectory(prefix="dagster-checkpoints-test-") as scratch:
        folder = Path(scratch)
        found: dict[str, list[list[Row]]] = {stage: [] for stage in kept}
        seen: set[Path] = set()
        folders = {name: folder / "input" / str(number) for number, name in enumerate(rows)}
        for each in folders.values():
            each.mkdir(parents=True)
        replaced = _replaced(pipeline, rows, folders, kept, folder / "output")
        count = max(len(each.steps) for each in rows.values())
        for step in range(count):
            for name, given in rows.items():
                if step < len(given.steps):
                    _write(session, given.schema, given.steps[step], folders[name], step, name)
            ended = _run(replaced, folder, session, "caught_up", on_event)
            _collect(session, folder / "output", found, seen)
        if not ended:
            _run(replaced, folder, session, "end", on_event)
        _collect(session, folder / "output", found, seen)
        return PipelineOutput(found)


def _kept(pipeline: Pipeline, stages: Sequence[str] | None) -> list[str]:
    if stages is not None:
        return [pipeline.stage(name).name for name in stages]
    return [stage.name for stage in pipeline.stages if stage.sink is not None]


def _checked(pipeline: Pipeline, inputs: Mapping[str, SourceRows]) -> dict[str, SourceRows]:
    """The rows by ``source[instance]``; a source's own rows are dealt out to its instances."""
    sources = {stage.name: stage for stage in pipeline.stages if stage.kind.is_source}
    instances = {f"{source.name}[{name}]": source for source in sources.values() for name in source.instances}
    rows: dict[str, SourceRows] = {}
    for name, given in inputs.items():
        if name not in sources and name not in instances:
            raise InvalidTestRowsError(
                f"run_pipeline: expected rows of sources of pipeline {pipeline.name!r}, found {name!r}. "
                f"{suggestion(name, [*sources, *instances])}"
            )
        source = sources.get(name) or instances[name]
        if source.kind is StageKind.BOUNDED_SOURCE and len(given.steps) > 1:
            raise InvalidTestRowsError(
                f"run_pipeline: expected one step for the bounded source {name!r}, which ends when it has been read, found "
                f"{len(given.steps)} steps. Give all rows in one step, or make the stage unbounded"
            )
        rows |= _dealt_out(source, given) if name in sources else {name: given}
    missing = sorted(instances.keys() - rows.keys())
    if missing:
        raise InvalidTestRowsError(
            f"run_pipeline: expected rows of every source of pipeline {pipeline.name!r}, found none of {', '.join(missing)}. "
            'For a source without rows give SourceRows("its columns", [])'
        )
    return rows


def _dealt_out(source: Stage, given: SourceRows) -> dict[str, SourceRows]:
    number = source.parallelism
    if number == 1:
        return {f"{source.name}[{source.instances[0]}]": given}
    parts = [
        [step[index::number] if isinstance(step, Sequence) else step if index == 0 else [] for step in given.steps]
        for index in range(number)
    ]
    return {f"{source.name}[{name}]": SourceRows(given.schema, *part) for name, part in zip(source.instances, parts, strict=True)}


class _RowsOfTest(Stage):
    """Stands in for a source: reads the files that the test writes, one in each micro-batch."""

    def __init__(
        self, source: Stage, rows: Mapping[str, SourceRows], folders: Mapping[str, Path], sink: ParquetSink | None
    ) -> None:
        super().__init__(
            source.name,
            uid=source.uid,
            kind=source.kind,
            instances=source.instances,
            watermark=source.watermark,
            sink=sink,
            checks=source.checks if sink is not None else (),
        )
        self._rows = rows
        self._folders = folders

    def transform(self, context: StageContext) -> DataFrame:
        name = f"{self.name}[{context.instance}]"
        files = context.spark.readStream.schema(self._rows[name].schema).option("maxFilesPerTrigger", 1)
        return files.parquet(str(self._folders[name]))


def _replaced(
    pipeline: Pipeline, rows: Mapping[str, SourceRows], folders: Mapping[str, Path], kept: Sequence[str], output: Path
) -> Pipeline:
    stages: list[Stage] = []
    for stage in pipeline.stages:
        last = not pipeline.downstream(stage.name)
        sink = ParquetSink(output / stage.name) if last or stage.name in kept else None
        if stage.kind.is_source:
            stages.append(_RowsOfTest(stage, rows, folders, sink))
            continue
        made = copy.copy(stage)
        made.sink = sink
        made.checks = stage.checks if sink is not None else ()
        stages.append(made)
    return Pipeline(pipeline.name, stages)


def _write(spark: SparkSession, schema: str, rows: Sequence[Any] | DataFrame, folder: Path, step: int, name: str) -> None:
    """Write the rows of a step as one file, which readers see as a whole."""
    if isinstance(rows, Sequence):
        if not rows:
            return
        try:
            frame = spark.createDataFrame(rows, schema)
        except Exception as error:
            raise InvalidTestRowsError(
                f"run_pipeline: the rows of {name}, step {step}, do not fit {schema!r}: {error}"
            ) from error
    else:
        frame = rows
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as scratch:
        frame.coalesce(1).write.parquet(f"{scratch}/rows")
        (file,) = Path(scratch, "rows").glob("*.parquet")
        file.rename(folder / f"{step:06d}.parquet")


def _run(pipeline: Pipeline, folder: Path, spark: SparkSession, until: Until, on_event: Callable[[JobEvent], None]) -> bool:
    """A run to its end. Returns whether the job has come to its end, and not been suspended."""
    job = JobExecution(
        pipeline,
        storage=CheckpointStorage(open_store(str(folder / "store")), pipeline.name),
        options=JobOptions(CheckpointConfig(interval=None), NoRestart(), folder / "work", until=until),
        session=lambda: spark,
        on_event=on_event,
        run_id="test",
    )
    if until == "end":
        job.drain()
    result = job.run()
    if result.error is not None:
        raise result.error
    return result.ended_by != "suspend"


def _collect(spark: SparkSession, folder: Path, found: dict[str, list[list[Row]]], seen: set[Path]) -> None:
    """Add the rows that have become visible since the last call."""
    for stage, steps in found.items():
        new = [file for file in sorted((folder / stage).glob("checkpoint=*/*.parquet")) if file not in seen]
        steps.append(list(spark.read.parquet(*map(str, new)).collect()) if new else [])
        seen.update(new)
