"""Many small queries in one driver: their start, the time of checkpoints without and under data, threads, memory, idle time.

Half of the queries are sources of files, the other half windows behind channels with a sink each.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from bench.control import request, run_under_control, wait_until
from bench.environment import BY_DEFAULT, Environment
from bench.measures import Measure, below
from bench.processes import cpu_seconds, pss_mb, threads, tree
from dagster_checkpoints.pipeline import Pipeline, Stage, StageContext, StageInput, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.job.events import CheckpointDone, FirstBatch
from dagster_checkpoints.spark.job.job_execution import JobExecution

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PART = "Many queries"
COUNTS = (10, 30, 100)
SCHEMA = "ts timestamp, k string, v bigint"
INTERVAL = 2.0
IDLE_SECONDS, BUSY_SECONDS = 20.0, 40.0
SETTLING_SECONDS = 30.0
"""Seconds after the first micro-batches: Java still compiles what these have used, which is no cost of an idle job."""
ROWS, FEED_SECONDS = 50, 2.0
START_GOAL, CHECKPOINT_GOAL, IDLE_GOAL = 60.0, 0.5, 25.0


@dataclass
class Observed:
    """One run.

    Attributes:
        started: Seconds from the start of the run to its first checkpoint.
        idle, busy: Seconds of each checkpoint without data, and under data.
        idle_use, busy_use: Processor time per second.
        threads: Number of threads of this process and the JVM.
        memory: Their memory, MB (PSS).
    """

    started: float = 0.0
    idle: tuple[float, ...] = ()
    busy: tuple[float, ...] = ()
    idle_use: float = 0.0
    busy_use: float = 0.0
    threads: int = 0
    memory: float = 0.0


def measure(environment: Environment) -> Iterator[Measure]:
    for count in COUNTS:
        seen = observe(environment, count)
        environment.say(f"  {count} queries: {seen}")
        is_last = count == COUNTS[-1]
        what = f"{count} queries"
        for name, value, unit, goal in (
            ("start to the first checkpoint", seen.started, "s", START_GOAL),
            ("checkpoint without data, median", median(seen.idle), "s", CHECKPOINT_GOAL),
            ("checkpoint under data, median", median(seen.busy) if seen.busy else BUSY_SECONDS, "s", CHECKPOINT_GOAL),
            ("processor time without data, of one core", 100 * seen.idle_use, "%", IDLE_GOAL),
        ):
            yield below(PART, f"{what}: {name}", value, unit, goal) if is_last else Measure(PART, f"{what}: {name}", value, unit)
        yield Measure(PART, f"{what}: checkpoints in {BUSY_SECONDS:.0f} s under data", len(seen.busy), "")
        yield Measure(PART, f"{what}: processor time under data, of one core", 100 * seen.busy_use, "%")
        yield Measure(PART, f"{what}: threads", seen.threads, "")
        yield Measure(PART, f"{what}: memory", seen.memory, "MB")


def observe(environment: Environment, count: int) -> Observed:
    folder = environment.fresh("many")
    names = [f"s{number:02d}" for number in range(count // 2)]
    seen = Observed()
    done: list[tuple[float, float]] = []
    begun: set[tuple[str, ...]] = set()

    def control(job: JobExecution) -> None:
        began = time.monotonic()
        wait_until(lambda: bool(done))
        seen.started = time.monotonic() - began
        wait_until(lambda: len(begun) == count)
        time.sleep(SETTLING_SECONDS)
        seen.idle, seen.idle_use = _watched(done, IDLE_SECONDS)
        over = threading.Event()
        feeding = threading.Thread(target=feed, args=(folder, names, over))
        feeding.start()
        try:
            seen.busy, seen.busy_use = _watched(done, BUSY_SECONDS)
        finally:
            over.set()
            feeding.join()
        seen.threads, seen.memory = threads(os.getpid()), sum(map(pss_mb, tree(os.getpid())))
        request(job, "stop")

    def note(event: object, job: JobExecution) -> None:
        if isinstance(event, CheckpointDone):
            done.append((time.monotonic(), event.duration))
        elif isinstance(event, FirstBatch):
            begun.add(event.stages)

    for number in range(2):  # the first rows
        write(folder, names, number)
    run_under_control(environment, pipeline(folder, names), folder, control, note, interval=INTERVAL, checkpoints=BY_DEFAULT)
    return seen


def _watched(done: list[tuple[float, float]], seconds: float) -> tuple[tuple[float, ...], float]:
    """The durations of the checkpoints that are completed in the next seconds, and the processor time used, per second."""
    before, began = cpu_seconds(os.getpid()), time.monotonic()
    time.sleep(seconds)
    until = time.monotonic()
    used = (cpu_seconds(os.getpid()) - before) / (until - began)
    return tuple(duration for at, duration in list(done) if began <= at <= until), used


def feed(folder: Path, names: list[str], over: threading.Event) -> None:
    number = 2
    while not over.wait(FEED_SECONDS):
        write(folder, names, number)
        number += 1


def write(folder: Path, names: list[str], number: int) -> None:
    moment = dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=30 * number)
    rows = [json.dumps({"ts": moment.isoformat(), "k": f"k{key % 10}", "v": key}) for key in range(ROWS)]
    text = "\n".join(rows) + "\n"
    for name in names:
        (folder / name).mkdir(exist_ok=True)
        file = folder / f"{name}-{number}"
        file.write_text(text)
        file.rename(folder / name / f"{number:06d}.json")


def pipeline(folder: Path, names: list[str]) -> Pipeline:
    stages: list[Stage] = []
    for name in names:
        stages += [
            _source(folder / name),
            Minutes(f"{name}_minutes", inputs={name: StageInput()}, sink=ParquetSink(folder / f"out-{name}")),
        ]
    return Pipeline("many", stages, chaining=False)


def _source(folder: Path) -> Stage:
    def read(context: StageContext) -> DataFrame:
        return context.spark.readStream.schema(SCHEMA).json(str(folder))

    return unbounded_source(name=folder.name, watermark=("ts", "10 seconds"))(read)


class Minutes(Stage):
    """Counts the rows of each minute and key."""

    def transform(self, context: StageContext, **inputs: DataFrame) -> DataFrame:
        (rows,) = inputs.values()
        counted = rows.groupBy(F.window("ts", "1 minute"), "k").agg(F.count("*").alias("n"), F.sum("v").alias("v"))
        return counted.select(F.col("window.start").alias("start"), "k", "n", "v")
