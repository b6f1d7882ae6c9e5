"""A job whose stop with savepoint fails: before the savepoint, and after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dagster_checkpoints.spark.job.events import CheckpointNotDone, JobRestarting, JobStarted, SavepointDone


def test_a_job_continues_after_every_failure_of_a_stop(lab: Any, fragile: Any) -> None:
    def stop_with_rows_that_cannot_be_committed(**fields: Any) -> Any:
        with store.failing("/checkpoints/"):  # only the savepoint can commit them
            failed = len(job.of(CheckpointNotDone))
            job.wait_until(lambda: len(job.of(CheckpointNotDone)) > failed)
            scene.more()
            scene.wait_for_rows()
            scene.fail_once("commit")
            return job.ask("stop", **fields).result(150)

    def nothing_is_left() -> bool:
        return not any(file.is_file() for file in savepoints.rglob("*"))

    scene = fragile("stoppable")
    job, store = scene.job, scene.store
    savepoints = lab.folder / "store/stoppable/savepoints"
    scene.check_progress()

    # Suspend: the target location cannot be used.
    occupied = lab.folder / "occupied"
    occupied.write_text("a file, not a directory")
    refused = job.ask("stop", target=str(occupied)).result(150)
    assert (refused.status, refused.reason) == ("failed", "IO_EXCEPTION"), refused
    assert str(occupied) in refused.message
    scene.check_progress()

    # Suspend: storage takes no files.
    with store.failing("/savepoints/"):
        failed = job.ask("stop", name="failing").result(150)
    assert (failed.status, failed.reason) == ("failed", "IO_EXCEPTION"), failed
    assert "the test says so" in failed.message and not failed.location
    scene.check_progress()
    job.wait_until(nothing_is_left)

    # Suspend: it takes too long. The tasks continue while their files are still being uploaded.
    with store.holding("/state/"):
        late = job.ask("stop", name="late", deadline_seconds=2.0).result(150)
        assert (late.status, late.reason) == ("failed", "CHECKPOINT_EXPIRED"), late
        assert "2 s" in late.message
        scene.more()
        scene.wait_for_rows()
    scene.check_progress()
    job.wait_until(nothing_is_left)
    reported = [event.checkpoint_id for event in job.of(CheckpointNotDone)]
    assert None not in reported and len(set(reported)) == len(reported), "a failure is reported once"
    assert not job.of(JobRestarting), "a suspend that fails is no reason to restart"

    # Drain: closed stages cannot be opened again, so the job restarts from its latest checkpoint.
    with store.failing("/savepoints/"):
        undrained = job.ask("stop", drain=True, name="undrained").result(150)
    assert (undrained.status, undrained.reason) == ("failed", "IO_EXCEPTION"), undrained
    assert "the test says so" in job.wait_for(JobRestarting).cause
    restarted = job.wait_for(JobStarted, lambda started: started.attempt == 2)
    assert restarted.restored_location is not None and restarted.restored_location.startswith("checkpoints/")
    scene.check_progress()
    job.wait_until(nothing_is_left)
    assert not job.of(SavepointDone)

    # Suspend: a sink does not commit the rows of the savepoint. The savepoint is kept, and the commit repeated.
    uncommitted = stop_with_rows_that_cannot_be_committed(name="uncommitted")
    assert (uncommitted.status, uncommitted.reason) == ("failed", "TASK_FAILURE"), uncommitted
    assert "gone to lunch" in uncommitted.message and uncommitted.location in uncommitted.message
    assert "-uncommitted-" in uncommitted.location and uncommitted.url.endswith(uncommitted.location)
    restarted = job.wait_for(JobStarted, lambda started: started.attempt == 3)
    assert restarted.restored_location == uncommitted.location
    job.wait_until(lambda: lab.count("rows") == scene.written)
    scene.check_progress()
    assert (savepoints.parent / uncommitted.location / "_metadata").exists(), "retained or not, it is the user's"

    # Drain: the same. The job that restarts from its savepoint has drained, and ends.
    drained = stop_with_rows_that_cannot_be_committed(name="drained", drain=True)
    assert drained.status == "failed" and "-drained-" in drained.location, drained
    assert drained.location in drained.message
    result = job.finished()
    assert job.wait_for(JobStarted, lambda started: started.attempt == 4).restored_location == drained.location
    scene.check()
    assert [done.stops for done in job.of(SavepointDone)] == ["suspend", "drain"]
    assert result.ended_by == "end_of_data"
    state = json.loads((savepoints.parent / "state.json").read_text())
    assert (state["job"]["status"], state["newest"]) == ("FINISHED", None)
    assert {path.name for path in savepoints.iterdir()} == {Path(answer.location).name for answer in (uncommitted, drained)}, (
        "a completed savepoint is kept, also if the stop fails"
    )
