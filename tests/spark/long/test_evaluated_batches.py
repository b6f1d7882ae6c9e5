"""Checkpoints, a suspend and a crash while Spark evaluates a micro-batch: none waits for it, and every row is there once.
What a user has ended before the suspend ends in the next run.

The rows of the batch wait for a file that the test makes, so that a checkpoint that waited for the batch would not complete.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, unbounded_source
from dagster_checkpoints.sinks import ParquetSink, SinkContext
from dagster_checkpoints.spark.job.events import CheckpointDone

ROWS = "k string, ts timestamp, v long"
SLOW = 1_000_000
"""Rows from this value on are not evaluated before they may be."""


def held(folder: Path) -> Any:
    """A function of `v`, evaluated in Spark's workers: slow rows wait for the file `go`."""
    waits, go = str(folder / "waits"), str(folder / "go")

    def pass_on(v: int) -> int:
        if v >= SLOW:
            Path(waits).touch()
            while not Path(go).exists():
                time.sleep(0.02)
        return v

    return F.udf(pass_on, "long").asNondeterministic()


class Hours(Stage):
    """Counts and sums the rows of all inputs by hour and key."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(**options)
        self.folder = folder

    def transform(self, context: Any, **inputs: Any) -> Any:
        first, *others = inputs.values()
        for other in others:
            first = first.unionByName(other)
        return in_hours(first.withColumn("v", held(self.folder)("v")))


def in_hours(frame: Any) -> Any:
    counted = frame.groupBy(F.window("ts", "1 hour"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return counted.select(F.col("window.start").alias("start"), "k", "v", "n")


def pipeline_of(lab: Any, layout: str) -> Pipeline:
    def source(name: str) -> Stage:
        def read(context: Any) -> Any:
            return lab.stream(name, ROWS)

        return unbounded_source(name=name, watermark=("ts", "1 minute"))(read)

    names = ("left",) if layout == "chained" else ("left", "right")
    inputs = {name: StageInput(fuse=False if layout == "behind channels" else None) for name in names}
    return Pipeline("held", [*map(source, names), Hours(lab.folder, name="hours", inputs=inputs, sink=lab.sink())])


@pytest.mark.parametrize("layout", ["chained", "fused", "behind channels"])
def test_no_checkpoint_waits_for_the_evaluation_of_a_batch(lab: Any, layout: str) -> None:
    pipeline = pipeline_of(lab, layout)
    sources = [one.name for one in pipeline.stages if one.kind.is_source]
    overtakes = {"unaligned": True} if layout == "behind channels" else {}  # where nothing waits, aligned is enough

    def put(value: int) -> None:
        for number, name in enumerate(sources):
            first = value + 100 * number
            lab.put(name, ROWS, [("ab"[v % 2], lab.at(240 * (v % SLOW)), v) for v in range(first, first + 30)])

    put(0)
    job = lab.start(pipeline, interval=3600.0, checkpoints=overtakes)
    assert len(job.chains) == (3 if layout == "behind channels" else 1)
    job.wait_until(lambda: all(job.execution.rows().get(name) == 30 for name in sources))
    job.done("checkpoint")

    put(SLOW + 50)
    job.wait_until((lab.folder / "waits").exists)
    job.done("checkpoint")
    if layout == "behind channels":
        job.cancel()  # a suspend's savepoint is aligned: it waits for what is in front of its barrier
        job.result()
    else:
        for name in sources:
            job.done("end_source", stage=name)  # it ends behind the batch: in the next run
        job.done("checkpoint")
        job.done("stop")
        job.finished()
    assert len(job.of(CheckpointDone)) >= 2
    assert not (lab.folder / "go").exists()

    (lab.folder / "go").touch()
    again = lab.start(pipeline, interval=3600.0, checkpoints=overtakes)
    if layout == "behind channels":
        again.wait_until(lambda: all(again.execution.rows().get(name) == 60 for name in sources))
        again.done("checkpoint")
        again.drain()
    again.finished()
    whole = lab.table(sources[0], ROWS)
    for name in sources[1:]:
        whole = whole.unionByName(lab.table(name, ROWS))
    lab.check(in_hours(whole))


class OneCallSink(ParquetSink):
    """Writes down a call that begins during another one. Its commits wait for the file `go`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "out")
        self.folder = folder

    def open(self, context: SinkContext) -> None:
        self.busy = threading.Lock()
        super().open(context)

    def write(self, batch: Any, files: Sequence[str], batch_id: int) -> None:
        with self.alone("write"):
            super().write(batch, files, batch_id)

    def pre_commit(self, checkpoint_id: int) -> str | None:
        with self.alone("pre_commit"):
            return super().pre_commit(checkpoint_id)

    def commit(self, transaction: str) -> Any:
        with self.alone("commit"):
            (self.folder / "commits").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.02)
            return super().commit(transaction)

    @contextmanager
    def alone(self, method: str) -> Iterator[None]:
        if not self.busy.acquire(blocking=False):
            (self.folder / f"{method} beside another call").touch()
            self.busy.acquire()
        try:
            yield
        finally:
            self.busy.release()


def test_the_methods_of_a_sink_are_called_one_after_another(lab: Any) -> None:
    """A batch is evaluated while the sink commits, and is written behind the commit."""

    @unbounded_source(watermark=("ts", "1 minute"), sink=OneCallSink(lab.folder))
    def live(context: Any) -> Any:
        return lab.stream("live", ROWS)

    def put(first: int) -> None:
        lab.put("live", ROWS, [("a", lab.at(v), v) for v in range(first, first + 30)])

    put(0)
    job = lab.start(Pipeline("held", [live]), interval=3600.0)
    job.wait_until(lambda: job.execution.rows().get("live") == 30)
    job.ask("checkpoint")
    job.wait_until((lab.folder / "commits").exists)
    put(100)
    job.wait_until(lambda: any(lab.folder.glob("work/**/000001/*.parquet")))  # only the commit keeps them from the sink
    time.sleep(1.0)
    (lab.folder / "go").touch()
    job.wait_until(lambda: job.execution.rows().get("live") == 60)
    job.drain()
    job.finished()
    assert not list(lab.folder.glob("* beside another call"))
    lab.check(lab.table("live", ROWS))
