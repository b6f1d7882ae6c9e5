"""A case as a whole job: two bounded sources that read a file in each micro-batch, and the stages that hold the program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.errors import AnalysisException

from bench.environment import NO_PERIODIC
from bench.stream_programs.arrivals import SIDES, write_rows
from bench.stream_programs.program import COLUMNS, Input, Program, below, frame_of
from bench.stream_programs.queries import LATENESS, Refused, configure, is_refusal, rows_of
from bench.stream_programs.random_programs import Case
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.restarts import NoRestart
from dagster_checkpoints.pipeline import Pipeline, Stage, StageContext, StageInput, bounded_source, stage
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.errors import StageError
from dagster_checkpoints.spark.job.job_execution import JobExecution
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.storage import CheckpointStorage, open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_INSTANCES = ("0", "1")


def job_rows(
    spark: SparkSession, case: Case, folder: Path, stages: Callable[[ParquetSink], Sequence[Stage]] | None = None
) -> list[tuple[Any, ...]]:
    """The rows that the case's job commits.

    Args:
        stages: Stages that hold the program in the place of the case's own: readers of the sources `a` and `b`. The last one
            has the sink.

    Raises:
        Refused: The program does not run as a stream.
    """
    configure(spark, case, rocksdb=True)
    instances = _INSTANCES if "instances" in case.layout else _INSTANCES[:1]
    for side in SIDES:
        for number, arrival in enumerate(case.arrivals):
            for index, instance in enumerate(instances):
                place = folder / "input" / side / instance
                place.mkdir(parents=True, exist_ok=True)
                if rows := arrival.rows[side][index :: len(instances)]:
                    write_rows(rows, place / f"{number:04d}.parquet", number)
    storage = CheckpointStorage(open_store(str(folder / "store")), "case")
    options = JobOptions(
        CheckpointConfig(interval=0.7 if case.restarts else NO_PERIODIC, retained=1),
        NoRestart(),
        folder / "work",
        lease_seconds=60.0,
    )
    try:
        pipeline = _pipeline(spark, case, folder, stages)
        job = JobExecution(
            pipeline, storage=storage, options=options, session=lambda: spark, on_event=lambda event: None, run_id="case"
        )
        result = job.run()
    except (AnalysisException, StageError) as refusal:
        raise Refused(str(refusal)) from refusal
    if result.error is not None:
        if isinstance(result.error, AnalysisException | StageError) or is_refusal(result.error):
            raise Refused(str(result.error)) from result.error
        raise result.error
    written = folder / "result"
    if not any(written.glob("checkpoint=*/*.parquet")):
        return []
    return rows_of(spark.read.parquet(str(written)).select("k", "ts", "v"))


def _pipeline(spark: SparkSession, case: Case, folder: Path, given: Callable[[ParquetSink], Sequence[Stage]] | None) -> Pipeline:
    names = _INSTANCES if "instances" in case.layout else None

    def source(side: str) -> Any:
        def read(context: StageContext) -> DataFrame:
            place = folder / "input" / side / (context.instance if names else _INSTANCES[0])
            reader = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).option("maxFileAge", "36500d")
            return reader.parquet(str(place))

        watermark = ("ts", LATENESS) if case.event_time else None
        return bounded_source(name=side, watermark=watermark, instances=names)(read)

    sink = ParquetSink(folder / "result")
    if given is not None:
        return Pipeline("case", [source("a"), source("b"), *given(sink)])
    first, rest = _divided(case.program) if "stages" in case.layout else (case.program, None)
    inputs = dict.fromkeys(SIDES, StageInput(fuse="fused" in case.layout))
    readers = None
    if case.layout.endswith("of each stage"):
        inputs, readers = dict.fromkeys(SIDES, StageInput(key="k")), _INSTANCES

    @stage(name="first" if rest else "result", inputs=inputs, instances=readers, sink=None if rest else sink)
    def of_both(a: DataFrame, b: DataFrame) -> DataFrame:
        return frame_of(first, {"a": a, "b": b})

    stages = [source("a"), source("b"), of_both]
    if rest is not None:

        @stage(name="result", sink=sink)
        def result(first: DataFrame) -> DataFrame:
            return frame_of(rest(Input("first")), {"first": first})

        stages.append(result)
    return Pipeline("case", stages, chaining="stages" not in case.layout)


def _divided(program: Program) -> tuple[Program, Callable[[Program], Program] | None]:
    """A program without its last operator, and that operator; the whole program and None if that operator reads two programs."""
    if len(below(program)) != 1:
        return program, None
    return below(program)[0], lambda of: dataclasses.replace(program, of=of)
