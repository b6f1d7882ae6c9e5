"""What becomes of a job when its stop with savepoint fails: before the savepoint, and after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F

from dagster_checkpoints.coordination import FixedDelayRestart
from dagster_checkpoints.pipeline import Pipeline, stage, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.events import CheckpointDone, CheckpointNotDone, JobRestarting, JobStarted, SavepointDone

ROWS = "k string, ts timestamp, v long"
PER_FILE = 40


class FragileSink(ParquetSink):
    """Does not commit, once, if a file says so."""

    def __init__(self, path: Path, fault: Path) -> None:
        super().__init__(path)
        self.fault = fault

    def commit(self, transaction: str) -> None:
        if self.fault.exists():
            self.fault.unlink()
            raise OSError("the disk has gone to lunch")
        super().commit(transaction)


def in_hours(frame: Any) -> Any:
    counted = frame.groupBy(F.window("ts", "1 hour"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return counted.select(F.col("window.start").alias("start"), "k", "v", "n")


def test_a_job_goes_on_whatever_its_stop_fails_with(lab: Any) -> None:
    fault = lab.folder / "fault"
    files = 0

    @unbounded_source(watermark=("ts", "1 minute"))
    def live(context):
        return lab.stream("live", ROWS)

    @stage(sink=FragileSink(lab.folder / "rows", fault))
    def rows(live):
        return live

    @stage(sink=lab.sink("hours"))
    def hours(rows):
        return in_hours(rows)

    def more() -> None:
        nonlocal files
        lab.put("live", ROWS, [("ab"[m % 2], lab.at(60 * m), m) for m in range(files * PER_FILE, (files + 1) * PER_FILE)])
        files += 1

    def goes_on() -> None:
        """The sources read, and periodic checkpoints commit."""
        more()
        wanted = files * PER_FILE
        job.wait_for(CheckpointDone, lambda done: done.stages["rows"].rows == wanted)
        job.wait_until(lambda: lab.count("rows") == wanted)

    def stop_with_rows_that_cannot_be_committed(**fields: Any) -> Any:
        with store.failing("/checkpoints/"):  # only the savepoint can commit them
            failed = len(job.of(CheckpointNotDone))
            job.wait_until(lambda: len(job.of(CheckpointNotDone)) > failed)
            more()
            job.wait_until(lambda: job.execution.rows().get("rows") == files * PER_FILE)
            fault.touch()
            return job.ask("stop", **fields).result(150)

    def nothing_is_left() -> bool:
        return not any(file.is_file() for file in savepoints.rglob("*"))

    savepoints = lab.folder / "store/stoppable/savepoints"
    store = lab.troubled_store()
    job = lab.start(
        Pipeline("stoppable", [live, rows, hours], chaining=False),
        interval=0.5,
        storage=lab.storage("stoppable", store),
        restart=FixedDelayRestart(10, 0.1),
        checkpoints={"tolerable_failed_checkpoints": 1000},
    )
    goes_on()

    # Suspend: there can be no savepoint at that place.
    occupied = lab.folder / "occupied"
    occupied.write_text("a file, not a directory")
    refused = job.ask("stop", target=str(occupied)).result(150)
    assert (refused.status, refused.reason) == ("failed", "IO_EXCEPTION"), refused
    assert str(occupied) in refused.message
    goes_on()

    # Suspend: storage takes no files.
    with store.failing("/savepoints/"):
        failed = job.ask("stop", name="failing").result(150)
    assert (failed.status, failed.reason) == ("failed", "IO_EXCEPTION"), failed
    assert "the test says so" in failed.message and not failed.location
    goes_on()
    job.wait_until(nothing_is_left)

    # Suspend: it takes too long. The tasks go on while their files still lie with the uploading threads.
    with store.holding("/state/"):
        late = job.ask("stop", name="late", deadline_seconds=2.0).result(150)
        assert (late.status, late.reason) == ("failed", "CHECKPOINT_EXPIRED"), late
        assert "2 s" in late.message
        more()
        job.wait_until(lambda: job.execution.rows().get("rows") == files * PER_FILE)
    goes_on()
    job.wait_until(nothing_is_left)
    told = [event.checkpoint_id for event in job.of(CheckpointNotDone)]
    assert None not in told and len(set(told)) == len(told), "a failure is told once"
    assert not job.of(JobRestarting), "a suspend that fails is no reason to restart"

    # Drain: what it has closed cannot be opened again, so the job starts again from its latest checkpoint.
    with store.failing("/savepoints/"):
        undrained = job.ask("stop", drain=True, name="undrained").result(150)
    assert (undrained.status, undrained.reason) == ("failed", "IO_EXCEPTION"), undrained
    assert "the test says so" in job.wait_for(JobRestarting).cause
    restarted = job.wait_for(JobStarted, lambda started: started.attempt == 2)
    assert restarted.restored_location is not None and restarted.restored_location.startswith("checkpoints/")
    goes_on()
    job.wait_until(nothing_is_left)
    assert not job.of(SavepointDone)

    # Suspend: a sink does not commit what the savepoint holds. That is kept, and the commit made up for.
    uncommitted = stop_with_rows_that_cannot_be_committed(name="uncommitted")
    assert (uncommitted.status, uncommitted.reason) == ("failed", "TASK_FAILURE"), uncommitted
    assert "gone to lunch" in uncommitted.message and uncommitted.location in uncommitted.message
    assert "-uncommitted-" in uncommitted.location and uncommitted.url.endswith(uncommitted.location)
    restarted = job.wait_for(JobStarted, lambda started: started.attempt == 3)
    assert restarted.restored_location == uncommitted.location
    job.wait_until(lambda: lab.count("rows") == files * PER_FILE)
    goes_on()
    assert (savepoints.parent / uncommitted.location / "_metadata").exists(), "retained or not, it is the user's"

    # Drain: the same. What starts again from its savepoint has drained, and ends.
    drained = stop_with_rows_that_cannot_be_committed(name="drained", drain=True)
    assert drained.status == "failed" and "-drained-" in drained.location, drained
    assert drained.location in drained.message
    result = job.finished()
    assert job.wait_for(JobStarted, lambda started: started.attempt == 4).restored_location == drained.location
    lab.check(lab.table("live", ROWS), "rows")
    lab.check(in_hours(lab.table("live", ROWS)), "hours")
    assert [done.stops for done in job.of(SavepointDone)] == ["suspend", "drain"]
    assert result.ended_by == "end_of_data"
    state = json.loads((savepoints.parent / "state.json").read_text())
    assert (state["job"]["status"], state["newest"]) == ("FINISHED", None)
    assert {path.name for path in savepoints.iterdir()} == {Path(answer.location).name for answer in (uncommitted, drained)}, (
        "a savepoint that completed is kept, whatever came of the stop"
    )
