"""What a restart finds in storage, or does not get from it, and what waited behind the attempt that has failed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F

from dagster_checkpoints.coordination import FixedDelayRestart
from dagster_checkpoints.pipeline import Pipeline, stage, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.events import CheckpointDone, JobRestarting, JobStarted, SavepointDone, StageFinished

ROWS = "k string, ts timestamp, v long"
PER_FILE = 40


class FragileSink(ParquetSink):
    """Does not write, once, if a file says so."""

    def __init__(self, path: Path, fault: Path) -> None:
        super().__init__(path)
        self.fault = fault

    def write(self, batch: Any, files: Sequence[str], batch_id: int) -> None:
        if self.fault.exists():
            self.fault.unlink()
            raise OSError("the disk has gone to lunch")
        super().write(batch, files, batch_id)


def in_hours(frame: Any) -> Any:
    counted = frame.groupBy(F.window("ts", "1 hour"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return counted.select(F.col("window.start").alias("start"), "k", "v", "n")


def test_a_job_goes_on_from_whatever_its_restart_finds(lab: Any) -> None:
    """State that cannot be fetched yet; a stop's savepoint that nobody knows of; a drain that waited behind a stop."""
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
        more()
        wanted = files * PER_FILE
        job.wait_for(CheckpointDone, lambda done: done.stages["rows"].rows == wanted)
        job.wait_until(lambda: lab.count("rows") == wanted)

    store = lab.troubled_store()
    job = lab.start(
        Pipeline("found", [live, rows, hours], chaining=False),
        interval=0.5,
        storage=lab.storage("found", store),
        restart=FixedDelayRestart(50, 0.1),
        checkpoints={"tolerable_failed_checkpoints": 1000, "retained": 1},
    )
    goes_on()

    # Storage does not give the state away at once: the restart strategy is asked again, as for any failure.
    with store.unreadable("/shared/"):
        fault.touch()
        more()
        job.wait_until(lambda: store.unread > 0 and len(job.of(JobRestarting)) >= 2)
    assert "gone to lunch" in job.of(JobRestarting)[0].cause
    assert "the test says so" in job.of(JobRestarting)[1].cause
    goes_on()

    # A stop's savepoint is complete, and nobody hears of it: the restart begins from it, and it stays the user's.
    with store.failing("/checkpoints/"):
        with store.unanswered("/state.json", b"-unheard-"):
            answer = job.ask("stop", name="unheard").result(150)
        assert (answer.status, answer.reason) == ("failed", "FINALIZE_CHECKPOINT_FAILURE"), answer
        fault.touch()
        more()
        found = job.wait_for(JobStarted, lambda started: "-unheard-" in (started.restored_location or ""))
    goes_on()
    goes_on()
    assert (lab.folder / "store/found" / found.restored_location / "_metadata").exists()

    # A drain is asked for while a drain with savepoint is under way, which then fails and costs a restart.
    with store.holding("/state/"):
        stop: Future[Any] = job.ask("stop", drain=True, name="undrained", deadline_seconds=3.0)
        job.wait_until(lambda: store.held > 0)
        job.drain()
        assert stop.result(150).status == "failed"
    result = job.result()
    assert (result.status, result.ended_by) == ("FINISHED", "drain"), job.story()
    assert not job.of(SavepointDone)
    lab.check(in_hours(lab.table("live", ROWS)), "hours")
    assert lab.count("rows") == files * PER_FILE


def test_a_savepoint_that_is_being_written_when_the_last_task_ends_is_answered(lab: Any) -> None:
    @unbounded_source
    def live(context):
        return lab.stream("live", ROWS)

    @stage(sink=lab.sink("rows"))
    def rows(live):
        return live

    store = lab.troubled_store()
    lab.put("live", ROWS, [("a", lab.at(0), 1)])
    # Without checkpoints no task waits for a final one.
    job = lab.start(Pipeline("written", [live, rows], chaining=False), interval=None, storage=lab.storage("written", store))
    job.wait_until(lambda: job.execution.rows().get("rows") == 1)
    with store.holding("/_metadata"):
        asked = job.ask("savepoint", name="last")
        job.wait_until(lambda: store.held > 0)
        job.drain()
        job.wait_for(StageFinished, lambda finished: finished.stage == "rows")
    answer = asked.result(150)
    assert (answer.status, answer.checkpoint_id) == ("done", 1), answer
    assert (lab.folder / "store/written" / answer.location / "_metadata").exists()
    assert job.result().status == "FINISHED"
    assert [done.location for done in job.of(SavepointDone)] == [answer.location]
    assert lab.count("rows") == 1
