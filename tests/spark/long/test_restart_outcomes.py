"""Restarts after failures of storage, and with requests that waited during the failed attempt."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from dagster_checkpoints.pipeline import Pipeline, stage, unbounded_source
from dagster_checkpoints.spark.job.events import JobRestarting, JobStarted, SavepointDone, StageFinished


def test_a_job_continues_after_failures_during_its_restart(lab: Any, fragile: Any) -> None:
    """State that cannot be fetched yet; a stop's savepoint with an unknown outcome; a drain that waited behind a stop."""
    scene = fragile("found", retained=1)
    job, store = scene.job, scene.store
    scene.check_progress()

    # The state cannot be fetched at once: the restart strategy decides again, as for any failure.
    with store.unreadable("/shared/"):
        scene.fail_once("write")
        scene.more()
        job.wait_until(lambda: store.unread > 0 and len(job.of(JobRestarting)) >= 2)
    assert "gone to lunch" in job.of(JobRestarting)[0].cause
    assert "the test says so" in job.of(JobRestarting)[1].cause
    scene.check_progress()

    # A stop's savepoint is complete, but its write has an unknown outcome: the restart begins from it, and it stays the user's.
    with store.failing("/checkpoints/"):
        with store.unanswered("/state.json", b"-unheard-"):
            answer = job.ask("stop", name="unheard").result(150)
        assert (answer.status, answer.reason) == ("failed", "FINALIZE_CHECKPOINT_FAILURE"), answer
        scene.fail_once("write")
        scene.more()
        found = job.wait_for(JobStarted, lambda started: "-unheard-" in (started.restored_location or ""))
    scene.check_progress()
    scene.check_progress()
    assert (lab.folder / "store/found" / found.restored_location / "_metadata").exists()

    # A drain is requested during a drain with savepoint, which then fails and costs a restart.
    with store.holding("/state/"):
        stop: Future[Any] = job.ask("stop", drain=True, name="undrained", deadline_seconds=15.0)
        job.wait_until(lambda: store.held > 0)
        job.drain()
        assert stop.result(150).status == "failed"
    result = job.result()
    assert (result.status, result.ended_by) == ("FINISHED", "drain"), job.story()
    assert not job.of(SavepointDone)
    scene.check()


def test_a_savepoint_that_is_being_written_when_the_last_task_ends_is_answered(lab: Any) -> None:
    @unbounded_source
    def live(context):
        return lab.stream("live", "v long")

    @stage(sink=lab.sink("rows"))
    def rows(live):
        return live

    store = lab.troubled_store()
    lab.put("live", "v long", [(1,)])
    job = lab.start(Pipeline("written", [live, rows], chaining=False), interval=None, storage=lab.storage("written", store))
    job.wait_until(lambda: job.execution.rows().get("rows") == 1)
    with store.holding("/_metadata"):
        asked = job.ask("savepoint", name="last")
        job.wait_until(lambda: store.held > 0)
        job.drain()
        job.wait_until(lambda: job.execution.coordinator is not None and job.execution.coordinator.all_at_end_of_data)
        assert not job.of(StageFinished), "the job waits for its outcome, and then for the final checkpoint"
    answer = asked.result(150)
    assert (answer.status, answer.checkpoint_id) == ("done", 1), answer
    assert (lab.folder / "store/written" / answer.location / "_metadata").exists()
    assert job.result().status == "FINISHED"
    assert [done.location for done in job.of(SavepointDone)] == [answer.location]
    assert lab.count("rows") == 1
