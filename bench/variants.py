"""Four variants of the computation: one hand-written query, three hand-written queries, this project chained and unchained."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import computation
from bench.computation import EVENT_TIME, LATENESS, Rows
from bench.environment import NO_PERIODIC, Environment, JobRun
from dagster_checkpoints.pipeline import Pipeline, StageContext, bounded_source, stage
from dagster_checkpoints.sinks import ParquetSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass(frozen=True)
class Timed:
    """One run: its duration in seconds, and the folder with its result."""

    seconds: float
    output: Path
    job: JobRun | None = None


Variant = Callable[[Environment, Rows], Timed]


def one_query(environment: Environment, rows: Rows) -> Timed:
    """(a) All stages in one query, which reads the existing files and ends."""
    folder = environment.fresh("one-query")
    began = time.monotonic()
    frame = computation.parsed(rows.stream(environment.spark)).withWatermark(EVENT_TIME, LATENESS)
    query = _start(computation.windowed(computation.enriched(frame)), folder, "result", available_now=True)
    query.awaitTermination()
    return Timed(time.monotonic() - began, folder / "result")


def three_queries(environment: Environment, rows: Rows) -> Timed:
    """(b) A query per stage, running at the same time, connected by Parquet file sinks and sources."""
    folder, spark = environment.fresh("three-queries"), environment.spark
    began = time.monotonic()
    first_frame = computation.parsed(rows.stream(spark))
    second_frame = computation.enriched(_follow(environment, folder / "parsed", first_frame))
    third_frame = _follow(environment, folder / "enriched", second_frame).withWatermark(EVENT_TIME, LATENESS)
    first = _start(first_frame, folder, "parsed", available_now=True)
    second = _start(second_frame, folder, "enriched")
    third = _start(computation.windowed(third_frame), folder, "result")
    try:
        first.awaitTermination()
        second.processAllAvailable()
        third.processAllAvailable()
        seconds = time.monotonic() - began
    finally:
        for query in (first, second, third):
            query.stop()
    return Timed(seconds, folder / "result")


def chained(environment: Environment, rows: Rows, interval: float = NO_PERIODIC) -> Timed:
    """(c) This project; the three stages share one query."""
    return _project(environment, rows, "chained", True, interval)


def unchained(
    environment: Environment, rows: Rows, interval: float = NO_PERIODIC, checkpoints: Mapping[str, Any] | None = None
) -> Timed:
    """(d) This project; a query per stage, connected by channels. `checkpoints`: more settings of `CheckpointConfig`."""
    return _project(environment, rows, "unchained", False, interval, checkpoints)


VARIANTS: dict[str, tuple[str, Variant]] = {
    "a": ("one hand-written query", one_query),
    "b": ("three hand-written queries, connected by files", three_queries),
    "c": ("this project, chained", chained),
    "d": ("this project, chaining off", unchained),
}


def pipeline(rows: Rows, output: Path, chaining: bool) -> Pipeline:
    """The computation as a pipeline."""

    @bounded_source(watermark=(EVENT_TIME, LATENESS))
    def readings(context: StageContext) -> DataFrame:
        return computation.parsed(rows.stream(context.spark))

    @stage
    def details(readings: DataFrame) -> DataFrame:
        return computation.enriched(readings)

    @stage(sink=ParquetSink(output))
    def windows(details: DataFrame) -> DataFrame:
        return computation.windowed(details)

    return Pipeline("bench", [readings, details, windows], chaining=chaining)


def _project(
    environment: Environment,
    rows: Rows,
    name: str,
    chaining: bool,
    interval: float,
    checkpoints: Mapping[str, Any] | None = None,
) -> Timed:
    folder = environment.fresh(name)
    run = environment.run_job(pipeline(rows, folder / "result", chaining), folder, interval, checkpoints=checkpoints)
    return Timed(run.seconds, folder / "result", run)


def _follow(environment: Environment, folder: Path, like: DataFrame) -> DataFrame:
    folder.mkdir(parents=True)
    return environment.spark.readStream.schema(like.schema).parquet(str(folder))


def _start(frame: DataFrame, folder: Path, name: str, *, available_now: bool = False) -> StreamingQuery:
    writer = frame.writeStream.format("parquet").outputMode("append")
    writer = writer.option("checkpointLocation", str(folder / f"{name}-checkpoint"))
    if available_now:
        writer = writer.trigger(availableNow=True)
    return writer.start(str(folder / name))
