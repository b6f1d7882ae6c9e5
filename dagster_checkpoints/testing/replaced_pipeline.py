"""A pipeline whose sources and sinks are replaced by files in a temporary directory; its other stages run as they are.

A test writes the rows of each micro-batch, and runs the job several times: each run goes on where the one before it has ended.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Row
from pyspark.sql import functions as F

from dagster_checkpoints.control.requests import ControlRequest
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.restarts import NoRestart
from dagster_checkpoints.files.opening import open_store
from dagster_checkpoints.pipeline import REFUSED_IN_CHECKPOINT, Pipeline, Quarantine, RefusedRows, Stage, StageContext, StageKind
from dagster_checkpoints.pipeline.errors import PipelineDefinitionError
from dagster_checkpoints.pipeline.names import suggestion
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.job.events import CheckpointDone, FirstBatch, JobEvent, QueryStarted, SavepointDone
from dagster_checkpoints.spark.job.job_execution import JobExecution
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.session.spark_session import build_session
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.testing.source_rows import InvalidTestRowsError, instance_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RunEnd = Literal["suspend", "pause", "crash", "drain", "end"]
"""How a run ends: suspended when it has read what is there; suspended, or cancelled, when each query has processed a micro-batch;
drained; or at the end of its sources, as if all of them were bounded."""

RunOutcome = Literal["ended", "stopped", "lost"]
"""The job has come to its end; it goes on from what the run has read; or from where the run began, which has read for nothing."""

_SESSION = {"spark.master": "local[2]", "spark.sql.shuffle.partitions": 2}
_FIRST_FILE = 1_700_000_000  # modification time: Spark reads the oldest file first


def session_for_tests() -> SparkSession:
    """The session with two local cores, made once for all tests of a process."""
    return build_session(_SESSION)


def kept_stages(pipeline: Pipeline, stages: Sequence[str] | None) -> list[str]:
    """The stages whose rows a test looks at: those that it names, or else those with a sink."""
    if stages is not None:
        return [pipeline.stage(name).name for name in stages]
    return [stage.name for stage in pipeline.stages if stage.sink is not None]


def newest_by_key(rows: Sequence[Row], key: Sequence[str]) -> list[Row]:
    """The newest row of each key.

    Args:
        rows: The rows in the order in which they were written.
        key: The columns of the key; empty if each row stays.
    """
    if not key:
        return list(rows)
    return list({repr([row[name] for name in key]): row for row in rows}.values())


class ReplacedPipeline:
    """A pipeline with replaced sources and sinks.

    Args:
        pipeline: The pipeline.
        schemas: The columns of each source's instance, by :func:`instance_name`.
        kept: The stages whose rows are kept.
        folder: An empty directory.
        spark: The session.
        on_event: Receives the events of the runs.

    Raises:
        InvalidTestRowsError: Rows of a stage replace earlier ones, and its sink does not say by which columns.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        schemas: Mapping[str, str],
        kept: Sequence[str],
        folder: Path,
        spark: SparkSession,
        on_event: Callable[[JobEvent], None] = lambda event: None,
    ) -> None:
        self._given = pipeline
        self._schemas = schemas
        self._kept = kept
        self._folder = folder
        self._spark = spark
        self._on_event = on_event
        self._inputs = {name: folder / "input" / str(number) for number, name in enumerate(schemas)}
        for each in self._inputs.values():
            each.mkdir(parents=True)
            (each / ".rows-of-test").touch()  # an empty directory of a bounded source would be warned of
        self._files = 0
        self._seen: set[Path] = set()
        self.keys = {stage.name: _key(stage) for stage in pipeline.stages if stage.output_mode != "append"}

    def add(self, name: str, rows: pa.Table) -> Path | None:
        """Write the rows of the next micro-batch of a source's instance.

        Returns:
            The file; None if there are no rows.
        """
        if not rows.num_rows:
            return None
        file = self._inputs[name] / f"{self._files:06d}.parquet"
        hidden = file.with_name(f".{file.name}")
        pq.write_table(_as_parquet(rows), hidden)
        os.utime(hidden, (_FIRST_FILE + self._files,) * 2)
        hidden.rename(file)
        self._files += 1
        return file

    def run(self, end: RunEnd, instances: Mapping[str, Sequence[str]] | None = None) -> RunOutcome:
        """Run the job, from where it has ended before, to the end of the run.

        Args:
            end: How the run ends. A run that shall be paused or crash, and has nothing to process, ends as a run does: suspended
                when it has read what is there, or at the end of its bounded sources.
            instances: Other names of instances, by stage.

        Raises:
            DagsterCheckpointsError: The run has failed, as it would in production.
        """
        job = JobExecution(
            self.pipeline(ends=end == "end", instances=instances),
            storage=CheckpointStorage(open_store(str(self._folder / "store")), self._given.name),
            options=JobOptions(
                CheckpointConfig(interval=None),
                NoRestart(),
                self._folder / "work",
                until="caught_up" if end in ("suspend", "crash") else "end",
            ),
            session=lambda: self._spark,
            on_event=lambda event: on_event(event),
            run_id="test",
        )
        interrupt = _AtFirstBatches(job, end) if end in ("pause", "crash") else None
        checkpoints = 0

        def on_event(event: JobEvent) -> None:
            nonlocal checkpoints
            checkpoints += isinstance(event, CheckpointDone | SavepointDone)
            self._on_event(event)
            if interrupt is not None:
                interrupt.see(event)

        if end == "drain":
            job.drain()
        result = job.run()
        if end == "crash" and result.status == "CANCELED":
            return "stopped" if checkpoints else "lost"
        if result.error is not None:
            raise result.error
        return "stopped" if result.ended_by == "suspend" else "ended"

    def committed(self) -> dict[str, list[Row]]:
        """The rows that have become visible since the last call, by stage; by key, the newest of each key.

        Raises:
            InvalidTestRowsError: The rows of a stage have no column of its key.
        """
        found = {}
        for stage in self._kept:
            new = [file for file in (self._output / stage).glob("checkpoint=*/*.parquet") if file not in self._seen]
            self._seen.update(new)
            rows = self._rows(sorted(new, key=_written)) if new else []
            if self._given.stage(stage).takes_refused_rows:  # another run takes other checkpoints
                rows = [Row(**{**row.asDict(), REFUSED_IN_CHECKPOINT: None}) for row in rows]
            found[stage] = newest_by_key(rows, self._key_of(stage, rows))
        return found

    def _rows(self, files: Sequence[Path]) -> list[Row]:
        """The rows of files, in the order of the files."""

        number = {file.name: position for position, file in enumerate(files)}  # a name has the token of its attempt
        frame = self._spark.read.parquet(*map(str, files))
        place = frame.metadataColumn("_metadata")
        rows = frame.select(F.struct("*"), place["file_name"], place["row_index"]).collect()
        return [row for row, _, _ in sorted(rows, key=lambda row: (number[row[1]], row[2]))]

    def _key_of(self, stage: str, rows: Sequence[Row]) -> Sequence[str]:
        key = self.keys.get(stage, ())
        missing = [name for name in key if rows and name not in rows[0].asDict()]
        if missing:
            raise InvalidTestRowsError(
                f"Stage {stage!r}: expected the columns of its sink's key {list(key)} in its rows, found none of the name "
                f"{', '.join(missing)}: its sink refuses these rows. {suggestion(missing[0], rows[0].asDict())}"
            )
        return key

    def pipeline(self, *, ends: bool = False, instances: Mapping[str, Sequence[str]] | None = None) -> Pipeline:
        """The pipeline as it runs.

        Args:
            ends: Whether all its sources are bounded.
            instances: Other names of instances, by stage.

        Raises:
            PipelineDefinitionError: The stages cannot have these instances.
        """
        stages: list[Stage] = []
        for stage in self._given.stages:
            if isinstance(stage, RefusedRows):
                continue  # the pipeline adds it again
            last = not self._given.downstream(stage.name)
            sink = _KeptRows(self._output / stage.name) if last or stage.name in self._kept else None
            if stage.kind.is_source:
                stages.append(_RowsOfTest(stage, self._schemas, self._inputs, sink, self._quarantine(stage), ends=ends))
                continue
            made = copy.copy(stage)
            made.sink = sink
            made.checks = stage.checks if sink is not None else ()
            made.quarantine = self._quarantine(stage)
            made.instances = tuple((instances or {}).get(stage.name, stage.instances))
            stages.append(made)
        return Pipeline(self._given.name, stages, chaining=self._given.chaining)

    def _quarantine(self, stage: Stage) -> Quarantine | None:
        if stage.quarantine is None:
            return None
        [name] = [each.target for each in self._given.edges if each.source == stage.name and each.refused]
        kept = name in self._kept or not self._given.downstream(name)
        sink = ParquetSink(self._output / name) if kept else None
        return replace(stage.quarantine, sink=sink, most_rows=None, most_share=None)  # limits are for many rows

    def other_instances(self) -> Iterator[dict[str, tuple[str, ...]]]:
        """The ways to give stages another number of instances that the pipeline allows: one more, and one less.

        Only stages that have several instances, or that get rows by key: others are not meant to be divided.
        """
        for change in (1, -1):
            instances = {
                stage.name: tuple(f"i{index}" for index in range(stage.parallelism + change))
                for stage in self._given.stages
                if not stage.kind.is_source and _divisible(stage) and stage.parallelism + change > 0
            }
            with suppress(PipelineDefinitionError):
                if instances and self.pipeline(instances=instances):
                    yield instances

    @property
    def _output(self) -> Path:
        return self._folder / "output"


class _KeptRows(ParquetSink):
    """Keeps all rows that a stage has written, also those that replace others in the sink that it stands in for."""

    @property
    def supported_output_modes(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"append", "update", "complete"})


class _RowsOfTest(Stage):
    """Stands in for a source: reads the files that the test writes, one in each micro-batch."""

    def __init__(
        self,
        source: Stage,
        schemas: Mapping[str, str],
        folders: Mapping[str, Path],
        sink: ParquetSink | None,
        quarantine: Quarantine | None,
        *,
        ends: bool,
    ) -> None:
        super().__init__(
            source.name,
            uid=source.uid,
            kind=StageKind.BOUNDED_SOURCE if ends else source.kind,
            instances=source.instances,
            watermark=source.watermark,
            sink=sink,
            checks=source.checks if sink is not None else (),
            quarantine=quarantine,
        )
        self._schemas = schemas
        self._folders = folders

    def transform(self, context: StageContext) -> DataFrame:
        name = instance_name(self, context.instance)
        files = context.spark.readStream.schema(self._schemas[name])
        return files.option("maxFilesPerTrigger", 1).option("maxFileAge", "36500d").parquet(str(self._folders[name]))


class _AtFirstBatches:
    """Cancels or suspends a run when each of its queries has processed a micro-batch."""

    def __init__(self, job: JobExecution, end: RunEnd) -> None:
        self._job = job
        self._end = end
        self._queries: int | None = None
        self._processed: set[tuple[str, ...]] = set()
        self._done = False

    def see(self, event: JobEvent) -> None:
        if isinstance(event, QueryStarted):
            self._queries = event.total
        if isinstance(event, FirstBatch):
            self._processed.add(event.stages)
            if len(self._processed) == self._queries and not self._done:
                self._done = True
                self._interrupt()

    def _interrupt(self) -> None:
        if self._end == "crash":
            self._job.cancel()
            return
        request = ControlRequest(
            request_id="pause",
            kind="stop",
            epoch=0,  # the request is not stored
            deadline_seconds=60.0,
            asked_by="test",
            asked_at=datetime.now(UTC),
        )
        self._job.ask(request, lambda answer: None)


def _key(stage: Stage) -> tuple[str, ...]:
    """The columns by which a stage's rows replace earlier ones: the `key` of its sink, as the sinks of the plugin have it."""
    key = getattr(stage.sink, "key", None)
    if not key:
        raise InvalidTestRowsError(
            f'Stage {stage.name!r} has output_mode="{stage.output_mode}": expected a sink with an attribute `key`, the columns '
            f"by which a row replaces an earlier one, found none in {type(stage.sink).__name__}, so a test cannot tell "
            "which rows its readers see. Give it the attribute, or take another sink, such as SqlSink(..., key=...)"
        )
    return (key,) if isinstance(key, str) else tuple(key)


def _written(file: Path) -> tuple[int, str]:
    """The order in which a stage's files were written: `checkpoint=42-job1-0/00000-…`."""
    return int(file.parent.name.removeprefix("checkpoint=").partition("-")[0]), file.name


def _as_parquet(rows: pa.Table) -> pa.Table:
    """Day-time intervals as whole microseconds, as Spark writes them into Parquet files."""
    for position, column in enumerate(rows.schema):
        if pa.types.is_duration(column.type):
            rows = rows.set_column(position, column.name, rows.column(position).cast(pa.duration("us")).cast(pa.int64()))
    return rows


def _divisible(stage: Stage) -> bool:
    return stage.parallelism > 1 or any(each.key is not None for each in stage.inputs.values())
