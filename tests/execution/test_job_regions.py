"""What restarts after a failure: the region of the failed task, or all tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dagster_checkpoints.coordination import lifecycle as life
from dagster_checkpoints.coordination.checkpoints import CompletedCheckpoint
from dagster_checkpoints.coordination.events import (
    Acknowledged,
    CheckpointFailed,
    CheckpointTriggered,
    Declined,
    DiscardStates,
    EndOfDataReached,
    MetadataOutcomeUnknown,
    MetadataWriteFailed,
    MetadataWritten,
    TaskStateChanged,
    Tick,
)
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.plan import TaskState
from dagster_checkpoints.coordination.restarts import FixedDelayRestart, NoRestart
from dagster_checkpoints.coordination.retention import JobStatus
from dagster_checkpoints.execution import job_actions as do
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.execution.job_actions import JobAction
from dagster_checkpoints.execution.job_events import Failure, JobBeginning, RestorePoint
from dagster_checkpoints.execution.job_machine import RETRY_SECONDS
from dagster_checkpoints.execution.job_phases import JobPhase
from dagster_checkpoints.execution.job_requests import AnswerRequest, SourceInstance
from dagster_checkpoints.execution.task_events import EndInput
from dagster_checkpoints.pipeline import EdgePattern, ExecutionGraph, TaskId, Vertex, VertexEdge
from tests.execution.job_harness import BROKEN, Job, pick, restore_point, sent

LIVE, DELAYS, STORMS, PLANES = TaskId("live", 0), TaskId("delays", 0), TaskId("storms", 0), TaskId("planes", 0)
FLIGHTS, WEATHER, FLEET = frozenset({"live", "delays"}), frozenset({"storms"}), frozenset({"planes"})
THREE = ExecutionGraph(
    tuple(Vertex(name, (name,), 1) for name in ("live", "delays", "storms", "planes")),
    (VertexEdge(0, 1, EdgePattern.ALL_TO_ALL),),
)
TWO = ExecutionGraph(THREE.vertices[:3], THREE.edges)
OWN = CompletedCheckpoint(1, "chk-1")
OTHER = Failure("no plane at all")


def running(graph: ExecutionGraph = TWO, restart: Any = None, **settings: Any) -> Job:
    job = Job(restart or FixedDelayRestart(2, 5.0), graph=graph, **settings)
    job.begin()
    return job


def fail(job: Job, task: TaskId = STORMS, failure: Failure = BROKEN) -> list[JobAction]:
    """Let a task fail, and stop what has to be stopped; returns the actions behind StopTasks."""
    [stop] = job.report(on.TaskFailure(task, failure))
    assert isinstance(stop, do.StopTasks)
    return job.do(on.TasksStopped())


def restart(job: Job, newest: CompletedCheckpoint | None = None, after: float = 5.0, *finished: TaskId) -> list[JobAction]:
    """Let the tasks that were stopped restart and run; returns the actions from the deployment on."""
    job.do(Tick(), after=after)
    actions = job.confirm(newest)
    if newest is not None:
        actions = job.do(on.NewestRead(RestorePoint(newest.checkpoint_id, newest.location, frozenset(finished))))
    deployed = pick(actions, do.Deploy)
    actions += job.deploy(*finished)
    actions += job.confirm(newest)
    for task in job.tasks:
        if task not in job.machine.finished and (deployed[0].vertices is None or task.vertex in deployed[0].vertices):
            actions += job.report(TaskStateChanged(task, TaskState.RUNNING))
    return actions


def complete(job: Job, checkpoint_id: int = 1, **how: Any) -> list[JobAction]:
    job.ask("checkpoint", request_id=f"r{checkpoint_id}")
    return job.complete(checkpoint_id, **how)


def states(job: Job) -> list[TaskState]:
    coordinator = job.machine.coordinator
    assert coordinator is not None
    return [coordinator.state_of(task) for task in job.tasks]


@pytest.mark.parametrize(("task", "vertices"), [(LIVE, FLIGHTS), (DELAYS, FLIGHTS), (STORMS, WEATHER), (PLANES, FLEET)])
def test_only_the_region_of_the_failed_task_restarts(task: TaskId, vertices: frozenset[str]) -> None:
    job = running(THREE)
    complete(job)
    assert job.report(on.TaskFailure(task, BROKEN)) == [do.StopTasks(vertices)]
    assert job.do(on.TasksStopped()) == [do.AttemptRestarting(2, 5.0, BROKEN, vertices)]
    assert job.machine.runs_partly
    unfinished = [t for t in job.tasks if t.vertex in vertices]
    expected = {t: TaskState.FAILED if t == task else TaskState.CANCELED for t in unfinished}
    assert states(job) == [expected.get(t, TaskState.RUNNING) for t in job.tasks]
    assert job.do(Tick(), after=5.0) == [do.ConfirmOwnership()]
    assert job.confirm(OWN) == [do.ReadNewest(OWN)]
    newest = restore_point(1)
    assert job.do(on.NewestRead(newest)) == [do.Deploy(2, newest, frozenset(), vertices)]
    assert states(job) == [TaskState.CREATED if t in unfinished else TaskState.RUNNING for t in job.tasks]
    assert job.deploy() == [do.AttemptBegan(2, newest, vertices), do.ConfirmOwnership()]
    assert job.confirm(OWN) == [do.StartTasks(vertices)]
    assert not job.machine.runs_partly
    for t in unfinished:
        job.report(TaskStateChanged(t, TaskState.RUNNING))
    assert pick(complete(job, 2), AnswerRequest)[0].done
    assert job.machine.coordinator is not None and job.machine.coordinator.statistics.counts.restored == 1


@pytest.mark.parametrize("task", [LIVE, STORMS])
def test_all_tasks_restart_if_the_user_says_so(task: TaskId) -> None:
    job = running(failover="full")
    assert job.report(on.TaskFailure(task, BROKEN)) == [do.StopTasks()]
    assert job.do(on.TasksStopped()) == [do.AttemptRestarting(2, 5.0, BROKEN)]
    assert restart(job)[0] == do.Deploy(2, None)


def test_a_region_restarts_from_the_start_of_the_run_before_its_first_checkpoint() -> None:
    restored = restore_point(4)
    job = running(beginning=JobBeginning(restored, 6, (CompletedCheckpoint(4, "chk-4"),)))
    fail(job)
    assert restart(job, None)[0] == do.Deploy(2, restored, frozenset(), WEATHER)


@pytest.mark.parametrize("acknowledged", [(), (STORMS,), (LIVE, DELAYS), (LIVE, STORMS)])
def test_a_pending_checkpoint_is_aborted_also_if_the_region_has_acknowledged(acknowledged: Sequence[TaskId]) -> None:
    """Its transactions are discarded by the region, which goes back to the checkpoint before."""
    job = running()
    job.ask("checkpoint")
    for task in acknowledged:
        job.report(Acknowledged(task, 1))
    actions = fail(job)
    [failed] = pick(actions, CheckpointFailed)
    assert (failed.checkpoint_id, failed.reason) == (1, FailureReason.JOB_FAILOVER_REGION)
    assert "storms[0] has failed" in failed.message and failed.message.endswith("restarts: storms")
    assert sent(actions) == [((LIVE, DELAYS), life.CheckpointAbortedNotice(1))], "the tasks that were stopped are not notified"
    assert [set(discarded.states) for discarded in pick(actions, DiscardStates)] == [set(acknowledged)]
    assert [answer.reason for answer in pick(actions, AnswerRequest)] == [FailureReason.JOB_FAILOVER_REGION]


def test_an_abort_because_of_a_region_is_no_failed_checkpoint() -> None:
    job = running(tolerable_failed_checkpoints=0, restart=FixedDelayRestart(9, 5.0))
    for checkpoint_id in (1, 2, 3):
        job.ask("checkpoint", request_id=f"r{checkpoint_id}")
        assert [type(action) for action in fail(job)][:2] == [do.AttemptRestarting, CheckpointFailed]
        restart(job)
    assert job.machine.phase is JobPhase.RUNNING


def test_a_checkpoint_being_written_is_waited_for_and_the_tasks_that_go_on_hear_of_it() -> None:
    job = running()
    job.ask("checkpoint")
    job.acknowledge(1)
    assert not pick(fail(job), CheckpointFailed)
    assert job.do(Tick(), after=5.0) == []
    actions = job.do(MetadataWritten(1, "chk-1"))
    assert sent(actions) == [((LIVE, DELAYS), life.CheckpointCompletedNotice(1))], "the others commit when they are restored"
    assert actions[-1] == do.ConfirmOwnership()
    assert job.confirm(OWN) == [do.ReadNewest(OWN)]


def test_a_region_is_restored_from_a_checkpoint_whose_outcome_was_unknown() -> None:
    job = running(tolerable_failed_checkpoints=1)
    job.ask("checkpoint")
    job.acknowledge(1)
    fail(job)
    actions = job.do(MetadataOutcomeUnknown(1, "no answer"), after=5.0)
    assert sent(actions) == [((LIVE, DELAYS), life.CheckpointAbortedNotice(1))]
    assert job.confirm(OWN) == [do.ReadNewest(OWN)], "storage names it"
    job.do(on.NewestRead(restore_point(1)))
    assert job.machine.coordinator is not None and job.machine.coordinator.latest_completed == OWN
    job.deploy()
    job.confirm(OWN)
    job.report(TaskStateChanged(STORMS, TaskState.RUNNING))
    actions = complete(job, 2)
    assert sent(actions)[-1] == ((LIVE, DELAYS, STORMS), life.CheckpointCompletedNotice(2)), "which commits the first as well"


def test_no_checkpoint_is_triggered_while_a_region_restarts() -> None:
    job = running(interval=10.0)
    fail(job)
    assert not pick(job.do(Tick(), after=4.0), CheckpointTriggered)
    assert job.ask("checkpoint") == [], "it waits"
    assert pick(restart(job, None, 1.0), CheckpointTriggered), "of the request that has waited"
    assert job.machine.coordinator is not None
    due = job.machine.coordinator.next_deadline()
    assert due == job.now + 10.0, "an interval after all tasks run"


def test_reports_of_the_tasks_that_were_stopped_do_not_count() -> None:
    job = running()
    complete(job)
    fail(job)
    late = (Acknowledged(STORMS, 1), TaskStateChanged(STORMS, TaskState.FINISHED), on.TaskFailure(STORMS, OTHER))
    assert [job.report(event, attempt=1) for event in late] == [[], [], []]
    restart(job, OWN)
    assert [job.report(event, attempt=1) for event in late] == [[], [], []]
    assert job.report(TaskStateChanged(LIVE, TaskState.FINISHED), attempt=2) == [], "it is of the first attempt"
    assert job.report(TaskStateChanged(LIVE, TaskState.FINISHED), attempt=1) == [do.TaskHasFinished(LIVE)]


def test_finished_tasks_of_other_regions_stay_finished_and_those_of_the_region_follow_the_checkpoint() -> None:
    job = running(THREE)
    complete(job)
    job.finish(LIVE, PLANES)
    assert job.machine.finished == {LIVE, PLANES}
    fail(job, DELAYS)
    actions = restart(job, OWN)
    assert job.machine.finished == {PLANES} and actions[0].vertices == FLIGHTS  # type: ignore[union-attr]
    assert states(job) == [TaskState.RUNNING, TaskState.RUNNING, TaskState.RUNNING, TaskState.FINISHED]
    job.finish(LIVE, DELAYS)
    assert job.finish(STORMS) == [do.TaskHasFinished(STORMS), do.StopTasks()]
    job.do(on.TasksStopped())
    assert job.machine.outcome is not None and job.machine.outcome.status is JobStatus.FINISHED


def test_a_region_whose_tasks_had_finished_in_the_checkpoint_is_restored_so() -> None:
    job = running()
    complete(job)
    fail(job, DELAYS)
    restart(job, OWN, 5.0, LIVE, STORMS)
    assert job.machine.finished == {LIVE}, "of the other region only its own news counts"


def test_a_region_at_its_end_of_data_has_not_reached_it_after_a_restart() -> None:
    job = running()
    for task in job.tasks[:-1]:
        job.report(EndOfDataReached(task))
    [triggered] = pick(job.report(EndOfDataReached(STORMS)), CheckpointTriggered)
    actions = fail(job)
    assert [failed.reason for failed in pick(actions, CheckpointFailed)] == [FailureReason.JOB_FAILOVER_REGION]
    assert not pick(restart(job), CheckpointTriggered), "the final checkpoint waits for the region"
    assert not pick(job.do(Tick(), after=60.0), CheckpointTriggered)
    [again] = pick(job.report(EndOfDataReached(STORMS)), CheckpointTriggered)
    assert again.checkpoint_id == triggered.checkpoint_id + 1


def test_another_region_that_fails_during_the_delay_joins_the_restart() -> None:
    job = running(THREE)
    fail(job)
    job.now += 3.0
    assert job.report(on.TaskFailure(LIVE, OTHER)) == [do.StopTasks(FLIGHTS)]
    assert job.do(on.TasksStopped()) == [do.AttemptRestarting(2, 5.0, OTHER, FLIGHTS | WEATHER)]
    assert job.do(Tick(), after=2.0) == [], "both wait for the longer delay"
    assert restart(job, None, 3.0)[0] == do.Deploy(2, None, frozenset(), FLIGHTS | WEATHER)
    assert fail(job, PLANES)[-1] == do.StopTasks(), "the third failure: each region that fails counts, once"
    job.do(on.TasksStopped())
    assert job.machine.outcome is not None and "has been restarted 2 times" in job.machine.outcome.message


def test_the_last_region_that_fails_makes_it_a_restart_of_all_tasks() -> None:
    job = running()
    fail(job)
    assert job.report(on.TaskFailure(LIVE, OTHER)) == [do.StopTasks(FLIGHTS)]
    assert job.do(on.TasksStopped())[0] == do.AttemptRestarting(2, 5.0, OTHER)
    assert restart(job)[0] == do.Deploy(2, None)


def test_two_regions_that_fail_at_once_restart_together_and_count_once() -> None:
    job = running(THREE, FixedDelayRestart(1, 5.0))
    job.report(on.TaskFailure(STORMS, BROKEN))
    assert job.report(on.TaskFailure(PLANES, OTHER)) == []
    assert job.report(on.TaskFailure(PLANES, OTHER)) == [], "a second time"
    assert job.do(on.TasksStopped()) == [do.StopTasks(WEATHER | FLEET)]
    assert job.do(on.TasksStopped()) == [do.AttemptRestarting(2, 5.0, BROKEN, WEATHER | FLEET)]


@pytest.mark.parametrize("until", ["reading", "confirming"])
def test_another_region_that_fails_while_storage_is_silent_joins_the_restart(until: str) -> None:
    job = running(THREE, FixedDelayRestart(9, 0.0))
    fail(job)
    if until == "confirming":
        job.confirm()
        job.deploy()
    job.do(on.StorageSilent())
    both = FLIGHTS | WEATHER
    assert job.report(on.TaskFailure(DELAYS, OTHER)) == [do.StopTasks(FLIGHTS if until == "reading" else both)]
    assert job.do(on.TasksStopped()) == [do.AttemptRestarting(job.machine.attempt + 1, 0.0, OTHER, both), do.ConfirmOwnership()]
    assert job.confirm()[0].vertices == both  # type: ignore[union-attr]
    assert job.do(Tick(), after=RETRY_SECONDS) == [], "the question before is not repeated"


def test_a_region_that_cannot_be_built_or_started_is_another_failure_of_it() -> None:
    job = running(restart=FixedDelayRestart(9, 0.0))
    fail(job)
    job.confirm()
    assert job.do(on.DeployFailed(OTHER, may_pass=True))[0] == do.AttemptRestarting(3, 0.0, OTHER, WEATHER)
    assert job.confirm() == [do.Deploy(3, None, frozenset(), WEATHER)]
    job.deploy()
    assert job.confirm() == [do.StartTasks(WEATHER)]
    assert job.do(on.StartFailed(OTHER)) == [do.StopTasks(WEATHER)]
    assert job.do(on.TasksStopped())[0] == do.AttemptRestarting(4, 0.0, OTHER, WEATHER)
    assert states(job)[:2] == [TaskState.RUNNING] * 2


@pytest.mark.parametrize("how", ["gives up", "repeats", "unusable"])
def test_a_job_that_cannot_be_restarted_stops_the_tasks_that_still_run(how: str) -> None:
    job = running(restart=NoRestart() if how == "gives up" else FixedDelayRestart(9, 0.0))
    actions = fail(job, failure=Failure("wings", repeats=how == "repeats"))
    if how == "unusable":
        job.confirm()
        actions = job.do(on.DeployFailed(Failure("wings")))
    assert actions[-1] == do.StopTasks()
    assert job.do(on.TasksStopped()) == [do.FinishWork()]
    because = {"gives up": "the restart strategy is none", "repeats": "another attempt would fail in the same way"}.get(how)
    message = f"Pipeline 'flights' failed, and {because}. wings" if because else "wings"
    assert job.machine.outcome is not None
    assert (job.machine.outcome.status, job.machine.outcome.message) == (JobStatus.FAILED, message)
    assert job.machine.outcome.given_up is (because is not None)


@pytest.mark.parametrize("canceled", [True, False])
@pytest.mark.parametrize("until", ["stopping", "restarting", "reading", "deploying", "confirming"])
def test_a_job_that_is_ended_while_a_region_restarts_stops_all_tasks(until: str, canceled: bool) -> None:
    job = running()
    job.report(on.TaskFailure(STORMS, BROKEN))
    steps = {
        "restarting": lambda: job.do(on.TasksStopped()),
        "reading": lambda: job.do(Tick(), after=5.0),
        "deploying": job.confirm,
        "confirming": job.deploy,
    }
    for step in list(steps)[: list(steps).index(until) + 1 if until in steps else 0]:
        steps[step]()
    actions = job.do(on.CancelRequested() if canceled else on.FatalError(OTHER))
    if until == "stopping":
        assert actions == []
        actions = job.do(on.TasksStopped())
    assert actions == [do.StopTasks()]
    assert job.do(on.TasksStopped()) == [do.FinishWork()]
    assert job.machine.outcome is not None
    assert job.machine.outcome.status is (JobStatus.CANCELED if canceled else JobStatus.FAILED)


def test_too_many_failed_checkpoints_while_a_region_restarts_restart_all_tasks() -> None:
    job = running(tolerable_failed_checkpoints=0)
    job.ask("checkpoint")
    job.acknowledge(1)
    fail(job)
    assert job.do(MetadataWriteFailed(1, "disk full"))[-1] == do.StopTasks()
    assert job.do(on.TasksStopped())[0].vertices is None  # type: ignore[union-attr]
    assert restart(job)[0] == do.Deploy(2, None)


def test_too_many_failed_checkpoints_restart_all_tasks() -> None:
    job = running(tolerable_failed_checkpoints=0)
    job.ask("checkpoint")
    assert job.report(Declined(STORMS, 1, message="no room"))[-1] == do.StopTasks()


@pytest.mark.parametrize("when", ["waiting", "pending", "acknowledged by the region"])
def test_a_suspend_fails_with_a_region_and_the_job_goes_on(when: str) -> None:
    job = running()
    if when == "waiting":  # until a checkpoint is written
        job.ask("checkpoint")
        job.acknowledge(1)
    job.ask("stop")
    if when.startswith("acknowledged"):
        job.report(Acknowledged(STORMS, 1))
    actions = fail(job)
    [answer] = pick(actions, AnswerRequest)
    assert (answer.request_id, answer.reason) == ("stop", FailureReason.JOB_FAILOVER_REGION)
    assert answer.location == ""
    notified = [] if when == "waiting" else [((LIVE, DELAYS), life.CheckpointAbortedNotice(1))]
    assert sent(actions) == notified, "they process again"
    if when == "waiting":
        job.do(MetadataWritten(1, "chk-1"))
    assert restart(job)[0].vertices == WEATHER  # type: ignore[union-attr]
    assert pick(complete(job, 2), AnswerRequest)[0].done


@pytest.mark.parametrize("when", ["the savepoint is written", "the savepoint is complete", "a drain"])
def test_a_stop_that_has_ended_tasks_or_may_have_restarts_all(when: str) -> None:
    job = running()
    job.ask("stop", drain=when == "a drain")
    if when != "a drain":
        job.acknowledge(1)
    if when == "the savepoint is complete":
        job.do(MetadataWritten(1, "chk-1"))
        job.finish(LIVE)
    assert job.report(on.TaskFailure(STORMS, BROKEN)) == [do.StopTasks()]
    actions = job.do(on.TasksStopped())
    assert pick(actions, do.AttemptRestarting)[0].vertices is None


def test_a_drain_that_waits_behind_a_suspend_begins_when_a_region_has_made_the_suspend_fail() -> None:
    sources = (SourceInstance("live", "EWR", LIVE), SourceInstance("storms", "0", STORMS))
    job = Job(FixedDelayRestart(2, 5.0), graph=TWO)
    job.do(on.BeginningChosen(job.beginning))
    job.do(on.Deployed(TWO, frozenset(), sources))
    job.do(on.JobBegun())
    job.run_tasks()
    job.ask("stop")
    assert job.do(on.DrainRequested()) == []
    fail(job)
    job.do(Tick(), after=5.0)
    actions = job.confirm()
    assert sent(actions) == [((LIVE,), EndInput())], "the region is built with ended sources"
    assert pick(actions, do.Deploy)[0].ended_sources == {("live", "EWR"), ("storms", "0")}


def test_a_source_of_a_region_that_is_stopped_ends_when_it_is_built_again() -> None:
    job = running()
    fail(job, LIVE)
    assert job.do(on.EndSourceRequested("live")) == []
    assert restart(job)[0].ended_sources == {("live", "EWR")}  # type: ignore[union-attr]
