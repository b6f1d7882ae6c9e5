"""A backfill and a live feed that meet in one window: rows per second, compared with one hand-written query.

Five sixths of the rows are history, one sixth is the feed; both are CSV files. The hand-written query reads the union of both, in
complete mode: it needs no lateness, but writes every window again with every batch; in append mode it writes each window once, as
this project does, and never the last ones. The same runs again with a checkpoint twice a second, while each micro-batch takes
longer than that.
"""

from __future__ import annotations

import datetime as dt
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from bench.environment import BY_DEFAULT, Environment
from bench.measures import Measure, at_least, below, percentile
from bench.processes import cpu_seconds
from bench.throughput import compare
from dagster_checkpoints.pipeline import Pipeline, StageContext, StageInput, bounded_source, stage
from dagster_checkpoints.sinks import ParquetSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PART = "Fan-in"
SCHEMA = "ts timestamp, k string, v bigint"
EVENT_TIME, LATENESS, WINDOW = "ts", "60 minutes", "10 seconds"
FILES = {"history": 25, "feed": 5}
FILES_PER_BATCH = 5
INTERVAL = 0.5
GOALS = {"one": 0.95, "few": 0.9, "channels": 0.8}
GOAL_P99 = 1.0
START = int(dt.datetime(2026, 1, 1, tzinfo=dt.UTC).timestamp())
HOURS = 10
APPENDING = "one hand-written query, append mode, one batch"


@dataclass(frozen=True)
class Feeds:
    """The generated input: a folder of CSV files for each source, and the number of rows of both.

    Attributes:
        files_per_batch: The largest number of files of a source in a micro-batch; None: fused sources are limited by the run.
        fuse: False: the stage reads the sources through channels; None: as by default, in one query with them.
    """

    folder: Path
    count: int
    files_per_batch: int | None = FILES_PER_BATCH
    fuse: bool | None = None

    def stream(self, spark: SparkSession, name: str) -> DataFrame:
        reader = spark.readStream.schema(SCHEMA)
        if self.files_per_batch is not None:
            reader = reader.option("maxFilesPerTrigger", self.files_per_batch)
        return reader.csv(str(self.folder / name))


@dataclass(frozen=True)
class Timed:
    """One run: its duration and its processor time, seconds, and its result."""

    seconds: float
    processor: float
    windows: list[tuple[Any, ...]]


Variant = Callable[[Environment, Feeds], Timed]


def generate(spark: SparkSession, cache: Path, count: int) -> Feeds:
    """Write the input, or find it in the cache. Each file holds a slice of time; history and feed overlap by an hour."""
    folder = cache / f"feeds-{count}"
    if folder.exists():
        return Feeds(folder, count)
    scratch = folder.with_suffix(".part")
    shutil.rmtree(scratch, ignore_errors=True)
    for name, rows, first_hour, hours in (("history", count * 5 // 6, 0, HOURS), ("feed", count // 6, HOURS - 1, 2)):
        row = F.col("id")
        seconds = F.floor(row * hours * 3600 / rows) + F.pmod(F.hash(row), F.lit(60)) + START + first_hour * 3600
        generated = spark.range(0, rows, 1, FILES[name]).select(
            F.timestamp_seconds(seconds).alias("ts"),
            F.format_string("key-%02d", F.pmod(F.hash(row, F.lit(1)), F.lit(100))).alias("k"),
            F.pmod(F.hash(row, F.lit(2)), F.lit(1000)).cast("long").alias("v"),
        )
        generated.write.csv(str(scratch / name))
        for number, file in enumerate(sorted((scratch / name).glob("part-*.csv"))):
            os.utime(file, (1_750_000_000 + number, 1_750_000_000 + number))  # the file source reads in this order
    scratch.rename(folder)
    return Feeds(folder, count)


def windowed(rows: DataFrame) -> DataFrame:
    counted = rows.groupBy(F.window(EVENT_TIME, WINDOW), "k").agg(F.count("*").alias("n"), F.sum("v").alias("v"))
    return counted.select(F.col("window.start").alias("start"), "k", "n", "v")


def hand_written(environment: Environment, feeds: Feeds) -> Timed:
    """One query over the union of both sources, in complete mode."""
    return _hand_written(environment, windowed(_union(environment, feeds)), "complete")


def appending(environment: Environment, feeds: Feeds) -> Timed:
    """The same in append mode, under event time. Windows that are open at the end are never written."""
    return _hand_written(environment, windowed(_union(environment, feeds).withWatermark(EVENT_TIME, LATENESS)), "append")


def _union(environment: Environment, feeds: Feeds) -> DataFrame:
    return feeds.stream(environment.spark, "history").unionByName(feeds.stream(environment.spark, "feed"))


def _hand_written(environment: Environment, frame: DataFrame, mode: str) -> Timed:
    folder = environment.fresh("fan-in-query")

    def write(batch: DataFrame, batch_id: int) -> None:
        batch.write.mode("overwrite" if mode == "complete" else "append").parquet(str(folder / "result"))

    before, began = cpu_seconds(os.getpid()), time.monotonic()
    writer = frame.writeStream.outputMode(mode).option("checkpointLocation", str(folder / "checkpoint"))
    writer.trigger(availableNow=True).foreachBatch(write).start().awaitTermination()
    seconds = time.monotonic() - began
    return Timed(seconds, cpu_seconds(os.getpid()) - before, result(environment.spark, folder / "result"))


def project(environment: Environment, feeds: Feeds) -> Timed:
    """This project: a stage reads both sources."""
    folder = environment.fresh("fan-in")
    before = cpu_seconds(os.getpid())
    run = environment.run_job(pipeline(feeds, folder / "result"), folder)
    return Timed(run.seconds, cpu_seconds(os.getpid()) - before, result(environment.spark, folder / "result"))


def pipeline(feeds: Feeds, output: Path) -> Pipeline:
    @bounded_source(watermark=(EVENT_TIME, LATENESS))
    def history(context: StageContext) -> DataFrame:
        return feeds.stream(context.spark, "history")

    @bounded_source(watermark=(EVENT_TIME, LATENESS))
    def feed(context: StageContext) -> DataFrame:
        return feeds.stream(context.spark, "feed")

    @stage(sink=ParquetSink(output), inputs=dict.fromkeys(("history", "feed"), StageInput(fuse=feeds.fuse)))
    def windows(history: DataFrame, feed: DataFrame) -> DataFrame:
        return windowed(history.unionByName(feed))

    return Pipeline("fan_in", [history, feed, windows])


def result(spark: SparkSession, folder: Path) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in spark.read.parquet(str(folder)).select("start", "k", "n", "v").collect())


def measure(environment: Environment) -> Iterator[Measure]:
    count = environment.rows * 6 // 10
    feeds = generate(environment.spark, environment.cache, count)
    whole, unlimited, apart = (
        replace(feeds, files_per_batch=max(FILES.values())),
        replace(feeds, files_per_batch=None),
        replace(feeds, fuse=False),
    )
    few = generate(environment.spark, environment.cache, min(count, 120_000))
    limited = f"{FILES_PER_BATCH} files per batch"
    variants: dict[str, tuple[Variant, Feeds]] = {
        "one hand-written query, complete mode, one batch": (hand_written, whole),
        f"one hand-written query, complete mode, {limited}": (hand_written, feeds),
        APPENDING: (appending, whole),
        "this project, one batch": (project, whole),
        f"this project, {limited}": (project, feeds),
        "this project, limited by the run": (project, unlimited),
        f"this project through channels, {limited}": (project, apart),
    }
    goals = dict(zip(list(variants)[3:], (GOALS["one"], GOALS["few"], GOALS["few"], GOALS["channels"]), strict=True))
    for variant, of in variants.values():
        variant(environment, replace(few, fuse=of.fuse))
    runs: dict[str, list[Timed]] = defaultdict(list)
    for repeat in range(environment.repeats):
        for name, (variant, rows) in variants.items():
            timed = variant(environment, rows)
            runs[name].append(timed)
            environment.say(
                f"  {repeat + 1}/{environment.repeats} {name}: {timed.seconds:.1f} s, {timed.processor:.1f} s of processor time"
            )
            expected = next(iter(runs.values()))[0].windows
            if name == APPENDING:  # the windows that were closed
                expected = [row for row in expected if row[0] <= timed.windows[-1][0]]
            compare(name, timed.windows, expected)
    for name, timed_runs in runs.items():
        yield Measure(PART, name, count / median(timed.seconds for timed in timed_runs), "rows/s")
    reference = next(iter(runs.values()))
    for name, goal in goals.items():
        ratios = [a.seconds / b.seconds for a, b in zip(reference, runs[name], strict=True)]
        processor = median(a.processor / b.processor for a, b in zip(reference, runs[name], strict=True))
        yield at_least(PART, f"{name} / hand-written, one batch", median(ratios), "", goal, f"processor time {processor:.2f}")
    once = [a.seconds / b.seconds for a, b in zip(runs[APPENDING], runs["this project, one batch"], strict=True)]
    yield Measure(PART, "this project, one batch / hand-written, append mode, one batch", median(once), "")
    yield from _checkpoints(environment, {"fused": unlimited, "through channels": replace(unlimited, fuse=False)})


def _checkpoints(environment: Environment, layouts: Mapping[str, Feeds]) -> Iterator[Measure]:
    settings: dict[str, Mapping[str, Any]] = {"by default": BY_DEFAULT, "aligned": {}, "unaligned": {"unaligned": True}}
    for layout, feeds in layouts.items():
        for barriers in settings if feeds.fuse is False else ("by default",):
            folder = environment.fresh("fan-in-checkpoints")
            run = environment.run_job(pipeline(feeds, folder / "result"), folder, INTERVAL, checkpoints=settings[barriers])
            durations = sorted(done.duration for done in run.checkpoints)
            what = f"checkpoint under data, {layout}, {barriers}"
            environment.say(f"  {what}: {[round(seconds, 2) for seconds in durations]}")
            yield Measure(PART, f"{what}: p50", median(durations), "s", note=f"of {len(durations)} in {run.seconds:.0f} s")
            p99 = f"{what}: p99", percentile(durations, 99), "s"
            yield below(PART, *p99, GOAL_P99) if barriers == "by default" else Measure(PART, *p99)
