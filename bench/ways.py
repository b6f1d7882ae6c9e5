"""Four ways to run the computation: one hand-written query, three of them, and this project chained and unchained."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench import computation
from bench.computation import EVENT_TIME, LATENESS, Rows
from bench.setting import NO_PERIODIC, JobRun, Setting
from dagster_checkpoints.pipeline import Pipeline, StageContext, bounded_source, stage
from dagster_checkpoints.sinks import ParquetSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass(frozen=True)
class Timed:
    """One run: how long it took, and where its result lies."""

    seconds: float
    output: Path
    job: JobRun | None = None


Way = Callable[[Setting, Rows], Timed]


def one_query(setting: Setting, rows: Rows) -> Timed:
    """(a) Everything in one query that reads what is there and ends."""
    folder = setting.fresh("one-query")
    began = time.monotonic()
    frame = computation.parsed(rows.stream(setting.spark)).withWatermark(EVENT_TIME, LATENESS)
    query = _start(computation.windowed(computation.enriched(frame)), folder, "result", available_now=True)
    query.awaitTermination()
    return Timed(time.monotonic() - began, folder / "result")


def three_queries(setting: Setting, rows: Rows) -> Timed:
    """(b) A query per stage, running at the same time, joined by Parquet file sinks and sources."""
    folder, spark = setting.fresh("three-queries"), setting.spark
    began = time.monotonic()
    first_frame = computation.parsed(rows.stream(spark))
    second_frame = computation.enriched(_follow(setting, folder / "parsed", first_frame))
    third_frame = _follow(setting, folder / "enriched", second_frame).withWatermark(EVENT_TIME, LATENESS)
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


def chained(setting: Setting, rows: Rows, interval: float = NO_PERIODIC) -> Timed:
    """(c) This project; the three stages share one query."""
    return _project(setting, rows, "chained", True, interval)


def unchained(setting: Setting, rows: Rows, interval: float = NO_PERIODIC) -> Timed:
    """(d) This project; a query per stage, joined by channels."""
    return _project(setting, rows, "unchained", False, interval)


WAYS: dict[str, tuple[str, Way]] = {
    "a": ("one hand-written query", one_query),
    "b": ("three hand-written queries, joined by files", three_queries),
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


def _project(setting: Setting, rows: Rows, name: str, chaining: bool, interval: float) -> Timed:
    folder = setting.fresh(name)
    run = setting.run_job(pipeline(rows, folder / "result", chaining), folder, interval)
    return Timed(run.seconds, folder / "result", run)


def _follow(setting: Setting, folder: Path, like: DataFrame) -> DataFrame:
    folder.mkdir(parents=True)
    return setting.spark.readStream.schema(like.schema).parquet(str(folder))


def _start(frame: DataFrame, folder: Path, name: str, *, available_now: bool = False) -> StreamingQuery:
    writer = frame.writeStream.format("parquet").outputMode("append")
    writer = writer.option("checkpointLocation", str(folder / f"{name}-checkpoint"))
    if available_now:
        writer = writer.trigger(availableNow=True)
    return writer.start(str(folder / name))
