"""Savepoints and drains by the size of the state: how long they take, and what they cost a pipeline that runs on.

The state is RocksDB's: one large value per key in a window that only a drain closes. A savepoint of it is compared with a plain
parallel copy of the same files on the same disk.
"""

from __future__ import annotations

import datetime as dt
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import functions as F

from bench import computation
from bench.computation import Rows
from bench.measures import Measure, at_least, below
from bench.setting import BenchFailed, Setting
from dagster_checkpoints.control import Answer, ControlRequest
from dagster_checkpoints.pipeline import Pipeline, Stage, StageContext, stage, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.job.events import JobEvent
from dagster_checkpoints.spark.job.job_execution import JobExecution

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PART = "Savepoints"
VALUE_BYTES = 1_024
KEYS = {"1 MB": 1_000, "100 MB": 100_000, "1 GB": 1_000_000}
KEYS_PER_FILE = 25_000
HELD = "k long, ts timestamp, payload binary"
COPY_THREADS = 8
RUNNING_ROWS = 4_000_000
DEADLINE_SECONDS = 900.0
_REQUESTS = itertools.count()


def measure(setting: Setting) -> Iterator[Measure]:
    for size, keys in KEYS.items():
        took = by_state(setting, keys)
        note = f"{took.files} files, {took.bytes / 1e6:,.0f} MB; median of {len(took.savepoints)}"
        yield Measure(PART, f"{size} of state: request to savepoint", median(took.savepoints), "s", note=note)
        if keys >= KEYS["100 MB"]:
            ratio = median(took.copies) / median(took.savepoints)
            yield at_least(PART, f"{size} of state: speed against a plain parallel copy", ratio, "", 0.5)
        yield Measure(PART, f"{size} of state: drain request to FINISHED", took.drain, "s", note="writes all of it out")
    yield below(PART, "throughput lost while savepoints of 100 MB are written", 100 * lost(setting), "%", 20)


class Took:
    """What the runs over one size of state took, seconds each."""

    def __init__(self) -> None:
        self.savepoints: list[float] = []
        self.copies: list[float] = []
        self.drain = 0.0
        self.files = 0
        self.bytes = 0


def by_state(setting: Setting, keys: int) -> Took:
    """Fill the state, take a checkpoint, then savepoints one after the other, and drain."""
    took, folder = Took(), setting.fresh(f"savepoints-{keys}")

    def conduct(job: JobExecution) -> None:
        _until(lambda: job.rows().get("events", 0) >= keys)
        _done(job, "checkpoint")
        for _ in range(setting.repeats):
            began = time.monotonic()
            answer = _done(job, "savepoint")
            took.savepoints.append(time.monotonic() - began)
            files = [file for file in Path(answer.url.removeprefix("file://")).rglob("*") if file.is_file()]
            took.files, took.bytes = len(files), sum(file.stat().st_size for file in files)
            took.copies.append(copy_seconds(files, setting.fresh("copies")))
        began = time.monotonic()
        _done(job, "stop", drain=True)
        took.drain = time.monotonic() - began

    _run(setting, Pipeline("held", holding(keys, folder), chaining=False), folder, conduct)
    return took


def lost(setting: Setting) -> float:
    """The part of a computation's throughput that is lost while savepoints of a stage beside it are taken without a pause."""
    rows = computation.generate(setting.spark, setting.cache, min(setting.rows, RUNNING_ROWS))
    ratios = []
    for _ in range(setting.repeats):
        without, during = (_beside(setting, rows, savepoints) for savepoints in (False, True))
        ratios.append(1 - without / during)
    return median(ratios)


def _beside(setting: Setting, rows: Rows, savepoints: bool) -> float:
    """Seconds for all rows to pass a stage beside one with 100 MB of state."""
    folder = setting.fresh("beside")
    keys = min(KEYS["100 MB"], setting.rows)
    expected = computation.parsed(setting.spark.read.schema(computation.SCHEMA).parquet(str(rows.folder))).count()
    gate = folder / "gate"
    gate.mkdir()
    seconds = 0.0

    @unbounded_source(sink=ParquetSink(folder / "enriched"))
    def readings(context: StageContext) -> DataFrame:
        return computation.enriched(computation.parsed(Rows(gate, rows.count, rows.files).stream(context.spark)))

    def conduct(job: JobExecution) -> None:
        nonlocal seconds
        _until(lambda: job.rows().get("events", 0) >= keys)
        _done(job, "checkpoint")
        over = threading.Event()
        taking = ThreadPoolExecutor(1)
        taken = taking.submit(_savepoints_until, job, over) if savepoints else None
        began = time.monotonic()
        for file in sorted(rows.folder.glob("part-*.parquet")):
            os.link(file, gate / file.name)
        _until(lambda: job.rows().get("readings", 0) >= expected)
        seconds = time.monotonic() - began
        over.set()
        taking.shutdown(wait=True)
        if taken is not None and taken.result() < 1:
            raise BenchFailed("no savepoint was complete while the rows passed")
        _done(job, "stop", drain=True)

    _run(setting, Pipeline("beside", [*holding(keys, folder), readings], chaining=False), folder, conduct)
    return seconds


def _savepoints_until(job: JobExecution, over: threading.Event) -> int:
    taken = 0
    while not over.is_set():
        _done(job, "savepoint")
        taken += 1
    return taken


# The pipeline whose state grows


def holding(keys: int, folder: Path) -> list[Stage]:
    """A source of so many keys, each with a large value, and a stage that holds them all until the drain."""
    keep_values(folder / "events", keys)

    @unbounded_source(watermark=("ts", "1 minute"))
    def events(context: StageContext) -> DataFrame:
        reader = context.spark.readStream.schema(HELD).option("maxFilesPerTrigger", 4)
        return reader.parquet(str(folder / "events"))

    @stage(sink=ParquetSink(folder / "held"))
    def held(events: DataFrame) -> DataFrame:
        return events.groupBy(F.window("ts", "365 days"), "k").agg(F.first("payload").alias("payload")).select("k", "payload")

    return [events, held]


def keep_values(folder: Path, keys: int) -> None:
    """Parquet files of random values, which nothing can compress."""
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


# Asking


def _run(setting: Setting, pipeline: Pipeline, folder: Path, conduct: Callable[[JobExecution], None]) -> None:
    """Run a pipeline that somebody conducts, to its end."""
    conducting: list[Future[None]] = []
    conductor = ThreadPoolExecutor(1)

    def told(event: JobEvent, job: JobExecution) -> None:
        if not conducting:
            conducting.append(conductor.submit(_or_cancel, job, conduct))

    try:
        setting.run_job(pipeline, folder, on_event=told)
    except BenchFailed:
        if conducting and conducting[0].done():
            conducting[0].result()
        raise
    conducting[0].result()


def _or_cancel(job: JobExecution, conduct: Callable[[JobExecution], None]) -> None:
    try:
        conduct(job)
    except BaseException:
        job.cancel()
        raise


def _done(job: JobExecution, kind: Any, **fields: Any) -> Answer:
    answered: Future[Answer] = Future()
    request = ControlRequest(
        request_id=f"{kind}-{next(_REQUESTS)}",
        kind=kind,
        epoch=0,
        deadline_seconds=DEADLINE_SECONDS,
        asked_by="bench",
        asked_at=dt.datetime.now(dt.UTC),
        **fields,
    )
    job.ask(request, answered.set_result)
    answer = answered.result(DEADLINE_SECONDS)
    if answer.status != "done":
        raise BenchFailed(f"a request of kind {kind!r} failed: {answer.reason}: {answer.message}")
    return answer


def _until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > until:
            raise BenchFailed(f"expected the rows to be through within {DEADLINE_SECONDS:.0f} s")
        time.sleep(0.02)


def copy_seconds(files: list[Path], target: Path) -> float:
    """A plain parallel copy."""
    began = time.monotonic()
    with ThreadPoolExecutor(COPY_THREADS) as pool:
        list(pool.map(lambda file: shutil.copyfile(file, target / file.name), files))
    seconds = time.monotonic() - began
    shutil.rmtree(target)
    return seconds
