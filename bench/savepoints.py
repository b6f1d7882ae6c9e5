"""Savepoints and drains by the size of the state: their duration, and the throughput that a running pipeline loses.

The state is in RocksDB: one large value per key in a window that only a drain closes. A savepoint is compared with a plain
parallel copy of the same files on the same disk.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import functions as F

from bench import computation
from bench.computation import Rows
from bench.control import request, run_under_control, wait_until
from bench.environment import BenchFailed, Environment
from bench.measures import Measure, at_least, below
from bench.processes import cpu_seconds
from dagster_checkpoints.pipeline import Pipeline, Stage, StageContext, StageInput, stage, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.job.job_execution import JobExecution

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PART = "Savepoints"
VALUE_BYTES = 1_024
KEYS = {"1 MB": 1_000, "100 MB": 100_000, "1 GB": 1_000_000}
KEYS_PER_FILE = 25_000
EVENTS_SCHEMA = "k long, ts timestamp, payload binary"
COPY_THREADS = 8
RUNNING_ROWS = 4_000_000
PAUSE_SECONDS = 1.0


def measure(environment: Environment) -> Iterator[Measure]:
    for size, keys in KEYS.items():
        took = by_state(environment, keys)
        note = f"{took.files} files, {took.bytes / 1e6:,.0f} MB; median of {len(took.savepoints)}"
        yield Measure(PART, f"{size} of state: request to savepoint", median(took.savepoints), "s", note=note)
        if keys >= KEYS["100 MB"]:
            ratio = median(took.copies) / median(took.savepoints)
            yield at_least(PART, f"{size} of state: speed against a plain parallel copy", ratio, "", 0.5)
        yield Measure(PART, f"{size} of state: drain request to FINISHED", took.drain, "s", note="emits all of the state")
    for pause, lost in lost_throughput(environment, (PAUSE_SECONDS, 0.0)).items():
        what = f"throughput lost while savepoints of 100 MB are written, {'a second apart' if pause else 'without a pause'}"
        note = f"{lost.savepoints} savepoints; {100 * lost.processor:.0f} % of the processor time is theirs"
        share = 100 * lost.throughput  # without a pause a faster savepoint would lose more: more of them are written
        yield below(PART, what, share, "%", 10, note) if pause else Measure(PART, what, share, "%", note=note)


class SavepointTimes:
    """Seconds of each savepoint, each plain copy and the drain for one size of state; number and bytes of its files."""

    def __init__(self) -> None:
        self.savepoints: list[float] = []
        self.copies: list[float] = []
        self.drain = 0.0
        self.files = 0
        self.bytes = 0


def by_state(environment: Environment, keys: int) -> SavepointTimes:
    """Fill the state, take a checkpoint, then savepoints one after the other, and drain."""
    took, folder = SavepointTimes(), environment.fresh(f"savepoints-{keys}")

    def control(job: JobExecution) -> None:
        wait_until(lambda: job.rows().get("events", 0) >= keys)
        request(job, "checkpoint")
        for _ in range(environment.repeats):
            began = time.monotonic()
            answer = request(job, "savepoint")
            took.savepoints.append(time.monotonic() - began)
            files = [file for file in Path(answer.url.removeprefix("file://")).rglob("*") if file.is_file()]
            took.files, took.bytes = len(files), sum(file.stat().st_size for file in files)
            took.copies.append(copy_seconds(files, environment.fresh("copies")))
        began = time.monotonic()
        request(job, "stop", drain=True)
        took.drain = time.monotonic() - began

    run_under_control(environment, Pipeline("held", stages_with_state(keys, folder), chaining=False), folder, control)
    return took


@dataclass(frozen=True)
class Passed:
    """All rows passed a stage: in these seconds, with this processor time in seconds, beside this number of savepoints."""

    seconds: float
    processor: float
    savepoints: int


@dataclass(frozen=True)
class Lost:
    """What savepoints take from a computation: shares, and the number of savepoints in the last round."""

    throughput: float
    processor: float
    savepoints: int


def lost_throughput(environment: Environment, pauses: Sequence[float]) -> dict[float, Lost]:
    """What is lost while savepoints of an independent stage are taken, by the seconds between two of them."""
    rows = computation.generate(environment.spark, environment.cache, min(environment.rows, RUNNING_ROWS))
    rounds = [{each: _beside(environment, rows, each) for each in (None, *pauses)} for _ in range(environment.repeats)]
    return {
        pause: Lost(
            median(1 - each[None].seconds / each[pause].seconds for each in rounds),
            median(1 - each[None].processor / each[pause].processor for each in rounds),
            rounds[-1][pause].savepoints,
        )
        for pause in pauses
    }


def _beside(environment: Environment, rows: Rows, pause: float | None) -> Passed:
    """Let all rows pass a stage, in a pipeline that also has a stage with 100 MB of state.

    Args:
        pause: Seconds between a savepoint's answer and the next request; None for no savepoints.
    """
    folder = environment.fresh("beside")
    keys = min(KEYS["100 MB"], environment.rows)
    expected = computation.parsed(environment.spark.read.schema(computation.SCHEMA).parquet(str(rows.folder))).count()
    gate = folder / "gate"
    gate.mkdir()
    passed: list[Passed] = []

    @unbounded_source(sink=ParquetSink(folder / "enriched"))
    def readings(context: StageContext) -> DataFrame:
        return computation.enriched(computation.parsed(Rows(gate, rows.count, rows.files).stream(context.spark)))

    def control(job: JobExecution) -> None:
        wait_until(lambda: job.rows().get("events", 0) >= keys)
        request(job, "checkpoint")
        all_read = threading.Event()
        pool = ThreadPoolExecutor(1)
        taken = pool.submit(_savepoints_until, job, all_read, pause) if pause is not None else None
        before, began = cpu_seconds(os.getpid()), time.monotonic()
        for file in sorted(rows.folder.glob("part-*.parquet")):
            os.link(file, gate / file.name)
        wait_until(lambda: job.rows().get("readings", 0) >= expected)
        seconds, processor = time.monotonic() - began, cpu_seconds(os.getpid()) - before
        all_read.set()
        pool.shutdown(wait=True)
        passed.append(Passed(seconds, processor, taken.result() if taken is not None else 0))
        if taken is not None and taken.result() < 1:
            raise BenchFailed("no savepoint was complete while the rows passed")
        request(job, "stop", drain=True)

    run_under_control(
        environment, Pipeline("beside", [*stages_with_state(keys, folder), readings], chaining=False), folder, control
    )
    return passed[0]


def _savepoints_until(job: JobExecution, end: threading.Event, pause: float) -> int:
    taken = 0
    while not end.wait(pause):
        request(job, "savepoint")
        taken += 1
    return taken


# The pipeline whose state grows


def stages_with_state(keys: int, folder: Path, instances: Sequence[str] = ("0",)) -> list[Stage]:
    """A source with `keys` keys, each with a large value, and a stage that keeps them all in state until the drain.

    The instances of that stage share the keys.
    """
    events = source_of_values(keys, folder)

    @stage(inputs={"events": StageInput(key="k")}, instances=instances, sink=ParquetSink(folder / "held"))
    def held(events: DataFrame) -> DataFrame:
        return events.groupBy(F.window("ts", "365 days"), "k").agg(F.first("payload").alias("payload")).select("k", "payload")

    return [events, held]


def source_of_values(keys: int, folder: Path) -> Stage:
    """A source with `keys` keys, each with a large value; the files are written if they are not there yet."""
    if not (folder / "events").exists():
        write_values(folder / "events", keys)

    @unbounded_source(watermark=("ts", "1 minute"))
    def events(context: StageContext) -> DataFrame:
        reader = context.spark.readStream.schema(EVENTS_SCHEMA).option("maxFilesPerTrigger", 4)
        return reader.parquet(str(folder / "events"))

    return events


def write_values(folder: Path, keys: int) -> None:
    """Write Parquet files of random values, which cannot be compressed."""
    folder.mkdir()
    random = np.random.default_rng(0)
    moment = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
    for first in range(0, keys, KEYS_PER_FILE):
        count = min(KEYS_PER_FILE, keys - first)
        values = random.bytes(count * VALUE_BYTES)
        columns = {
            "k": pa.array(range(first, first + count), pa.int64()),
            "ts": pa.array([moment] * count, pa.timestamp("us", tz="UTC")),
            "payload": pa.array([values[i : i + VALUE_BYTES] for i in range(0, len(values), VALUE_BYTES)], pa.binary()),
        }
        pq.write_table(pa.table(columns), folder / f"{first:09d}.parquet", compression="none")


def copy_seconds(files: list[Path], target: Path, *, checked: bool = False) -> float:
    """Seconds of a plain parallel copy, or of one that also computes the sha256 of each file."""

    def copy(file: Path) -> None:
        copied = shutil.copyfile(file, target / file.name)
        if checked:
            with copied.open("rb") as content:
                hashlib.file_digest(content, "sha256")

    began = time.monotonic()
    with ThreadPoolExecutor(COPY_THREADS) as pool:
        list(pool.map(copy, files))
    seconds = time.monotonic() - began
    shutil.rmtree(target)
    return seconds
