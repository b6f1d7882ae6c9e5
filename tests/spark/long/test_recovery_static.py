"""Crashes around a static input: before its first row, in the middle of it, and after the table is complete."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, stage, unbounded_source
from dagster_checkpoints.pipeline import Watermark as EventTime
from dagster_checkpoints.pipeline.stages import StageKind
from dagster_checkpoints.spark.job.events import JobStarted
from dagster_checkpoints.spark.stored_state import read_state
from dagster_checkpoints.state.metadata import CheckpointMetadata, Segment, TaskSnapshot, in_flight_files
from dagster_checkpoints.state.metadata_file import decode

ROWS = "k string, ts timestamp, v long"
NAMES = "k string, name string"


class SlowNames(Stage):
    """A bounded source that delays every micro-batch until a file exists."""

    kind = StageKind.BOUNDED_SOURCE

    def __init__(self, folder: Path, hurry: Path, **options: Any) -> None:
        super().__init__(**options)
        self.folder = folder
        self.hurry = hurry

    def transform(self, context: Any) -> Any:
        return context.spark.readStream.schema(NAMES).option("maxFilesPerTrigger", 1).parquet(str(self.folder))

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        until = time.monotonic() + 1.0
        while time.monotonic() < until and not self.hurry.exists():
            time.sleep(0.02)
        return batch.where("name is not null")


def take_checkpoint(job: Any) -> Any:
    before = len(job.checkpoints())
    job.wait_until(lambda: job.execution.coordinator is not None and bool(job.execution.coordinator.roots))
    job.ask("checkpoint")
    job.wait_until(lambda: len(job.checkpoints()) > before)
    return job.checkpoints()[-1]


def consumer(lab: Any, done: Any) -> TaskSnapshot:
    """The part of a checkpoint for the task that reads the static input, the only task with in-flight records."""
    metadata: CheckpointMetadata = decode(lab.storage("static").read_metadata(done.location), done.location)
    task = next(chain.tasks[0] for chain in metadata.chains if chain.name == "named")
    in_flight = {file.name: file.size for file in in_flight_files(task)}
    assert metadata.statistics["in_flight_bytes"] == sum(in_flight.values())
    assert sum(in_flight.values()) <= metadata.statistics["total_bytes"]
    return task


def in_flight_rows(task: TaskSnapshot) -> int:
    return sum(e.rows for channel in task.channels for e in channel.in_flight if isinstance(e, Segment))


def table_rows(task: TaskSnapshot) -> int:
    return sum(segment.rows for table in task.static for segment in table.segments)


def test_crashes_before_during_and_after_a_static_input_is_ready(lab: Any) -> None:
    hurry = lab.folder / "hurry"

    @unbounded_source(watermark=EventTime("ts", "10 minutes"))
    def live(context):
        return lab.stream("live", ROWS)

    @stage(inputs={"names": StageInput(mode="static")})
    def named(live, names):
        return live.join(F.broadcast(names), "k", "left").select("name", "ts", "v")

    @stage(sink=lab.sink("hours"))
    def hours(named):
        return in_hours(named)

    names = SlowNames(lab.input("names"), hurry, name="names")
    pipeline = Pipeline("static", [live, names, named, hours], chaining=False)
    for _ in range(6):
        lab.put("names", NAMES, [("nobody", None)])  # the first batches emit nothing
    for k in "abcdef":
        lab.put("names", NAMES, [(k, k.upper())])
    minute = 0

    def more_live() -> None:
        nonlocal minute
        lab.put("live", ROWS, [(k, lab.at(60 * m), m) for m in range(minute, minute + 40, 2) for k in "abcdef"])
        minute += 40

    def run(stage: str, rows: int) -> tuple[Any, TaskSnapshot]:
        """Run until a stage has emitted a number of rows, take a checkpoint, and crash right after it."""
        more_live()
        job = lab.start(pipeline, interval=3600.0)
        job.wait_until(lambda: job.execution.rows().get("live", 0) >= minute * 3)
        job.wait_until(lambda: job.execution.rows()[stage] >= rows)
        task = consumer(lab, take_checkpoint(job))
        job.cancel()
        assert job.result().status == "CANCELED"
        shutil.rmtree(lab.folder / "work", ignore_errors=True)
        return job.wait_for(JobStarted).restored_checkpoint, task

    restored, before = run("live", 0)
    assert restored is None
    assert (table_rows(before), in_flight_rows(before), before.query) == (0, 120, None)

    restored, during = run("names", 1)
    assert restored == 1
    assert (in_flight_rows(during), during.query) == (240, None)
    assert 0 < table_rows(during) < 6

    newest = lab.storage("static").read_state().newest
    state = read_state(lab.spark, lab.storage("static").url_of(newest.location), stage="named")
    live_rows = lab.table("live", ROWS).where(F.col("ts") < lab.at(60 * 80)).selectExpr("'0' AS instance", "v")
    assert lab.rows(state.in_flight["live"].select("instance", "v")) == lab.rows(live_rows)
    assert 0 < state.static["names"].count() < 6
    assert (state.keyed, state.offsets) == ((), ()), "its query has not begun"

    hurry.touch()
    restored, after = run("named", 360)
    assert restored == 2
    assert (table_rows(after), in_flight_rows(after)) == (6, 0)
    assert after.query is not None

    (lab.folder / "input/names").rename(lab.folder / "input/names-gone")
    more_live()
    last = lab.start(pipeline, interval=3600.0)
    last.wait_until(lambda: last.execution.rows().get("live", 0) >= minute * 3)
    last.drain()
    last.finished()
    wanted = lab.table("live", ROWS).select(F.upper("k").alias("name"), "ts", "v")
    lab.check(in_hours(wanted), "hours")


def in_hours(frame: Any) -> Any:
    counted = frame.groupBy(F.window("ts", "1 hour"), "name").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return counted.select(F.col("window.start").alias("start"), "name", "v", "n")


def test_a_cancel_while_a_long_batch_runs_ends_the_job_at_once_and_loses_nothing(lab: Any) -> None:
    began, go_on = lab.folder / "began", lab.folder / "go-on"
    began_name, go_on_name = str(began), str(go_on)

    @F.udf("long")
    def for_ever(value):
        import pathlib
        import time

        if value >= 100:
            pathlib.Path(began_name).touch()
        while value >= 100 and not pathlib.Path(go_on_name).exists():
            time.sleep(0.05)
        return value

    @unbounded_source
    def live(context):
        return lab.stream("live", ROWS)

    @stage(sink=lab.sink("out"))
    def slow(live):
        return live.withColumn("v", for_ever("v"))

    pipeline = Pipeline("long", [live, slow], chaining=False)
    quick = [("a", lab.at(n), n) for n in range(5)]
    lab.put("live", ROWS, quick)
    job = lab.start(pipeline, interval=3600.0)
    job.wait_until(lambda: job.execution.rows().get("slow", 0) == 5)
    take_checkpoint(job)
    lab.put("live", ROWS, [("a", lab.at(n), n) for n in range(100, 103)])
    job.wait_until(began.exists)
    job.cancel()
    assert job.result(deadline=60.0).status == "CANCELED"  # the batch itself would never end
    assert len(lab.committed("out")) == 5

    go_on.touch()
    again = lab.start(pipeline, interval=3600.0)
    again.wait_until(lambda: again.execution.rows().get("slow", 0) == 8)
    again.drain()
    again.finished()
    lab.check(lab.table("live", ROWS), "out")
