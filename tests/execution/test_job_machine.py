"""One execution of a job: its beginning, its attempts and restarts, its end; row by row."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dagster_checkpoints.coordination import lifecycle as life
from dagster_checkpoints.coordination.barriers.events import TriggerReceived
from dagster_checkpoints.coordination.checkpoints import CheckpointProperties, CompletedCheckpoint
from dagster_checkpoints.coordination.errors import UnexpectedEvent
from dagster_checkpoints.coordination.events import (
    Acknowledged,
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointRequested,
    CheckpointTriggered,
    Declined,
    DiscardCheckpoint,
    DiscardStates,
    EndOfDataReached,
    MetadataOutcomeUnknown,
    MetadataWriteFailed,
    MetadataWritten,
    RequestCompleted,
    RequestNotCompleted,
    TaskStateChanged,
    Tick,
    WriteMetadata,
)
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.plan import TaskState
from dagster_checkpoints.coordination.restarts import FailureRateRestart, FixedDelayRestart, NoRestart
from dagster_checkpoints.coordination.retention import JobStatus
from dagster_checkpoints.execution import job_actions as do
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.execution.job_events import Failure, JobBeginning, JobMachineEvent, JobOutcome
from dagster_checkpoints.execution.job_machine import RETRY_SECONDS
from dagster_checkpoints.execution.job_phases import JobPhase
from dagster_checkpoints.execution.job_requests import AnswerRequest
from dagster_checkpoints.execution.task_events import EndInput, SourceEnded
from tests.execution.job_harness import (
    ALL,
    BROKEN,
    EPOCH,
    GRAPH,
    SOURCES,
    A,
    B,
    C,
    Job,
    pick,
    restore_point,
    sent,
)

OWN = CompletedCheckpoint(4, "chk-4")
RESTORED = restore_point(3, A)
RESUMED = JobBeginning(RESTORED, 6, (CompletedCheckpoint(3, "chk-3"),), (CompletedCheckpoint(5, "chk-5"),))


# The beginning


def test_a_job_begins_in_this_order() -> None:
    job = Job()
    assert job.machine.next_deadline() is None and job.machine.coordinator is None
    assert job.machine.finished == frozenset()
    assert job.do(on.BeginningChosen(JobBeginning())) == [do.Deploy(1, None)]
    assert job.machine.attempt == 1 and job.machine.begun is False
    assert job.deploy() == [do.BeginJob()], "only once all of its state is here"
    assert not job.machine.begun
    assert job.do(on.JobBegun()) == [do.Sweep(), do.AttemptBegan(1, None), do.ConfirmOwnership()]
    assert job.machine.begun and job.machine.phase is JobPhase.CONFIRMING
    assert job.confirm() == [do.StartTasks()], "the sinks are touched only now"
    assert job.machine.phase is JobPhase.RUNNING and job.machine.outcome is None


def test_the_coordinator_continues_from_the_restored_checkpoint() -> None:
    job = Job(beginning=RESUMED)
    job.begin()
    coordinator = job.machine.coordinator
    assert coordinator is not None
    assert job.machine.finished == {A} and coordinator.state_of(A) is TaskState.FINISHED
    assert coordinator.completed == RESUMED.retained
    assert coordinator.statistics.counts.restored == 1
    [triggered] = pick(job.ask("checkpoint"), CheckpointTriggered)
    assert triggered.checkpoint_id == 6


def test_a_new_start_restores_nothing() -> None:
    job = Job(beginning=JobBeginning(None, 1, (CompletedCheckpoint(3, "chk-3"),)))
    job.begin()
    assert job.machine.coordinator is not None
    assert job.machine.coordinator.statistics.counts.restored == 0


def test_storage_without_an_answer_is_asked_again_after_a_delay() -> None:
    job = Job()
    job.do(on.BeginningChosen(JobBeginning()))
    job.deploy()
    job.do(on.JobBegun())
    assert job.do(on.StorageSilent()) == []
    assert job.machine.next_deadline() == job.now + 0.5
    assert job.do(Tick(), after=RETRY_SECONDS / 2) == []
    assert job.do(Tick(), after=RETRY_SECONDS / 2) == [do.ConfirmOwnership()]
    assert job.machine.next_deadline() is None
    assert job.do(Tick(), after=RETRY_SECONDS) == [], "once"
    assert job.do(on.StorageSilent()) == []
    assert job.do(Tick(), after=RETRY_SECONDS) == [do.ConfirmOwnership()]
    assert job.do(on.StorageSilent()) == []
    assert job.confirm() == [do.StartTasks()]
    assert job.do(Tick(), after=RETRY_SECONDS) == []


@pytest.mark.parametrize("requested", [on.CancelRequested(), on.FatalError(BROKEN)])
@pytest.mark.parametrize("until", range(4))
def test_a_job_that_is_ended_before_its_tasks_run(until: int, requested: JobMachineEvent) -> None:
    job = Job(beginning=JobBeginning(RESTORED, 4))
    steps: list[JobMachineEvent] = [
        on.BeginningChosen(job.beginning),
        on.Deployed(GRAPH, frozenset({A}), SOURCES),
        on.JobBegun(),
    ]
    for step in steps[:until]:
        job.do(step)
    begun = until >= 3
    canceled = isinstance(requested, on.CancelRequested)
    status = JobStatus.CANCELED if canceled else JobStatus.FAILED
    actions = job.do(requested)
    if begun:
        assert actions == [do.StopTasks()], "they were deployed"
        actions = job.do(on.TasksStopped())
    assert actions == [do.FinishWork()]
    assert job.machine.outcome == JobOutcome(status, "" if canceled else BROKEN.message, None if canceled else BROKEN)
    assert job.machine.phase is JobPhase.CLOSING
    assert job.do(on.WorkEnded()) == [do.Release(status if begun else None)]
    assert job.machine.phase is JobPhase.OVER
    for late in (on.CancelRequested(), on.FatalError(BROKEN), Tick()):
        assert job.do(late) == []


def test_a_first_deployment_that_fails_ends_the_job_and_nothing_is_swept() -> None:
    """After a lost `state.json` no checkpoint is listed: a sweep would delete all of them, and the next run would find none."""
    job = Job()
    assert not pick(job.do(on.BeginningChosen(JobBeginning())), do.Sweep)
    assert job.do(on.DeployFailed(BROKEN, may_pass=True)) == [do.FinishWork()]
    assert job.machine.outcome == JobOutcome(JobStatus.FAILED, BROKEN.message, BROKEN)
    assert job.do(on.WorkEnded()) == [do.Release(None)]


def test_a_start_that_cannot_be_read_is_followed_by_an_older_one() -> None:
    job = Job()
    job.do(on.BeginningChosen(RESUMED))
    assert job.do(on.DeployFailed(BROKEN, unusable=True)) == [do.ChooseOlderStart(BROKEN)]
    older = restore_point(2)
    assert job.do(on.BeginningChosen(JobBeginning(older, 6))) == [do.Deploy(2, older)]
    assert job.deploy() == [do.BeginJob()]
    assert job.do(on.JobBegun()) == [do.Sweep(), do.AttemptBegan(2, older), do.ConfirmOwnership()]


# Running


def test_the_coordinators_messages_are_sent_to_the_tasks() -> None:
    job = Job(retained=1)
    job.begin()
    actions = job.ask("checkpoint")
    [triggered] = pick(actions, CheckpointTriggered)
    messages = sent(actions)
    assert [tasks for tasks, _ in messages] == [(A,), (B,)], "the roots"
    assert all(isinstance(message, TriggerReceived) and message.barrier.checkpoint_id == 1 for _, message in messages)
    actions = job.complete(triggered.checkpoint_id)
    assert sent(actions) == [(ALL, life.CheckpointCompletedNotice(1))]
    assert [type(action) for action in actions] == [
        do.ForgetSavepoints,
        CheckpointCompleted,
        do.SendToTasks,
        RequestCompleted,
        AnswerRequest,
    ]
    assert pick(actions, do.ForgetSavepoints) == [do.ForgetSavepoints(frozenset({"chk-1"}))]
    job.ask("savepoint")
    actions = job.complete(2)
    assert sent(actions) == [(ALL, life.SavepointCompletedNotice(2))]
    assert not pick(actions, do.ForgetSavepoints)
    job.ask("checkpoint")
    actions = job.report(Declined(B, 3))
    assert sent(actions) == [(ALL, life.CheckpointAbortedNotice(3))]
    assert pick(actions, CheckpointFailed) and pick(actions, DiscardStates)
    [answer] = pick(actions, AnswerRequest)
    assert answer.reason is FailureReason.CHECKPOINT_DECLINED


def test_an_older_checkpoint_is_deleted_when_a_newer_one_completes() -> None:
    job = Job(retained=1)
    job.begin()
    for number in (1, 2):
        job.ask("checkpoint")
        actions = job.complete(number)
    assert [action.checkpoint.location for action in pick(actions, DiscardCheckpoint)] == ["chk-1"]


def test_acknowledgements_are_answered_with_nothing() -> None:
    job = Job()
    job.begin()
    job.ask("checkpoint")
    assert job.report(Acknowledged(A, 1)) == []
    assert job.report(Acknowledged(A, 1)) == [], "a duplicate"


def test_an_acknowledgement_of_a_task_that_does_not_take_part_is_answered_with_nothing() -> None:
    job = Job()
    job.begin()
    job.finish(A)
    job.ask("checkpoint")
    assert job.report(Acknowledged(A, 1)) == [], "its state is deleted with the checkpoint"


def test_checkpoints_that_a_resumed_job_does_not_use_are_deleted_after_its_first_checkpoint() -> None:
    job = Job(beginning=RESUMED)
    actions = job.begin()
    job.ask("savepoint")
    actions += job.complete(6)  # no restart begins from it
    job.ask("checkpoint")
    actions += job.acknowledge(7)
    assert not pick(actions, DiscardCheckpoint)
    actions = job.do(MetadataWritten(7, "chk-7"))
    assert actions[0] == DiscardCheckpoint(CompletedCheckpoint(5, "chk-5"))
    assert [action.checkpoint.location for action in pick(actions, DiscardCheckpoint)] == ["chk-5", "chk-3"]
    job.ask("checkpoint")
    assert [a.checkpoint.location for a in pick(job.complete(8), DiscardCheckpoint)] == ["chk-7"], "once"


def test_a_report_of_another_attempt_is_ignored() -> None:
    job = Job()
    job.begin()
    for attempt in (0, 2):
        assert job.report(TaskStateChanged(A, TaskState.FINISHED), attempt=attempt) == []
        assert job.report(on.TaskFailure(A, BROKEN), attempt=attempt) == []
    assert job.machine.finished == frozenset() and job.machine.phase is JobPhase.RUNNING


def test_a_report_is_ignored_once_the_tasks_are_stopping() -> None:
    job = Job()
    job.begin()
    job.report(on.TaskFailure(A, BROKEN))
    assert job.report(TaskStateChanged(B, TaskState.FINISHED)) == []
    assert job.report(on.TaskFailure(B, Failure("another"))) == []
    [restarting] = pick(job.do(on.TasksStopped()), do.AttemptRestarting)
    assert restarting.failure == BROKEN


def test_periodic_checkpoints_are_triggered_when_they_are_due() -> None:
    job = Job(interval=10.0)
    job.begin()
    assert job.machine.next_deadline() == job.now + 10.0
    assert job.do(Tick(), after=9.0) == []
    assert len(pick(job.do(Tick(), after=1.0), CheckpointTriggered)) == 1


def test_a_checkpoint_can_be_requested_without_an_answer() -> None:
    job = Job()
    job.begin()
    assert pick(job.do(CheckpointRequested("by hand", CheckpointProperties())), CheckpointTriggered)
    assert pick(job.complete(1), AnswerRequest) == []


# Requests


def test_a_request_waits_until_every_task_runs() -> None:
    job = Job()
    job.do(on.BeginningChosen(JobBeginning()))
    assert job.ask("checkpoint") == []
    job.deploy()
    job.do(on.JobBegun())
    job.confirm()
    assert job.report(TaskStateChanged(A, TaskState.RUNNING)) == []
    assert job.report(TaskStateChanged(B, TaskState.RUNNING)) == []
    assert pick(job.report(TaskStateChanged(C, TaskState.RUNNING)), CheckpointTriggered)


def test_a_request_is_not_passed_on_before_the_tasks_are_started() -> None:
    job = Job()
    job.do(on.BeginningChosen(JobBeginning()))
    job.deploy()
    job.do(on.JobBegun())
    for task in ALL:
        job.report(TaskStateChanged(task, TaskState.RUNNING))
    assert job.ask("checkpoint") == []
    assert pick(job.confirm(), CheckpointTriggered)


def test_a_request_is_not_passed_on_to_an_attempt_that_an_overdue_drain_has_just_ended() -> None:
    job = Job()
    job.begin()
    job.ask("stop", drain=True, seconds=5.0)
    job.now += 5.0
    actions = job.ask("checkpoint")
    assert [answer.request_id for answer in pick(actions, AnswerRequest)] == ["stop"] and actions[-1] == do.StopTasks()
    job.do(on.TasksStopped())
    job.do(Tick(), after=5.0)
    job.confirm()
    job.deploy()
    assert pick(job.run_tasks(), CheckpointTriggered)


def test_a_request_fails_at_its_deadline_also_before_the_start() -> None:
    job = Job()
    job.ask("checkpoint", seconds=5.0)
    assert job.machine.next_deadline() == job.now + 5.0
    [answer] = pick(job.do(Tick(), after=5.0), AnswerRequest)
    assert answer.reason is FailureReason.CHECKPOINT_EXPIRED


def test_a_checkpoint_that_takes_too_long_is_withdrawn() -> None:
    job = Job()
    job.begin()
    job.ask("checkpoint", seconds=5.0)
    actions = job.do(Tick(), after=5.0)
    [answer] = pick(actions, AnswerRequest)
    assert answer.reason is FailureReason.CHECKPOINT_EXPIRED and "5 s" in answer.message
    assert sent(actions) == [(ALL, life.CheckpointAbortedNotice(1))]


def test_a_suspend_ends_the_job_and_is_answered_at_its_end() -> None:
    job = Job()
    job.begin()
    actions = job.ask("stop", asked_by="termination")
    assert pick(actions, CheckpointTriggered) and not any(isinstance(message, EndInput) for _, message in sent(actions))
    actions = job.complete(1)
    assert sent(actions) == [(ALL, life.CheckpointCompletedNotice(1))] and not pick(actions, AnswerRequest)
    assert job.machine.requests.stopped is not None
    actions = job.finish()
    assert actions == [do.TaskHasFinished(C), do.StopTasks()]
    assert job.do(on.TasksStopped()) == [do.EndJob(True, "suspend", "termination")], "its savepoint is the user's"
    assert job.do(on.JobEndRecorded()) == [do.FinishWork()]
    [answer, release] = job.do(on.WorkEnded())
    assert isinstance(answer, AnswerRequest) and answer.done and answer.location == "chk-1"
    assert release == do.Release(JobStatus.FINISHED)
    assert job.machine.outcome == JobOutcome(JobStatus.FINISHED, ended_by="suspend")


def test_a_drain_with_savepoint_is_announced_to_every_task_and_ends_the_sources() -> None:
    job = Job()
    job.begin()
    actions = job.ask("stop", drain=True)
    assert sent(actions) == [(ALL, life.DrainAnnounced()), ((A, B), EndInput())]
    for task in (A, B):
        assert not pick(job.report(EndOfDataReached(task)), CheckpointTriggered)
    assert pick(job.report(EndOfDataReached(C)), CheckpointTriggered)
    job.complete(1, finished=True)
    job.finish()
    assert job.do(on.TasksStopped()) == [do.EndJob(True, "drain", "request")]


def test_a_stop_that_is_refused_is_answered_and_ends_nothing() -> None:
    job = Job()
    job.begin()
    job.ask("stop", request_id="first")
    actions = job.ask("stop", request_id="second", drain=True)
    [answer] = pick(actions, AnswerRequest)
    assert (answer.request_id, answer.reason) == ("second", FailureReason.CHECKPOINT_COORDINATOR_SUSPEND)
    assert sent(actions) == []
    assert job.machine.requests.stop is not None and job.machine.requests.stop.request_id == "first"


def test_a_drain_whose_savepoint_fails_restarts_the_job_and_its_sources_continue() -> None:
    job = Job()
    job.begin()
    job.ask("stop", drain=True, seconds=5.0)
    actions = job.do(Tick(), after=5.0)
    [answer] = pick(actions, AnswerRequest)
    assert answer.reason is FailureReason.CHECKPOINT_EXPIRED
    assert actions[-1] == do.StopTasks()
    [restarting] = pick(job.do(on.TasksStopped()), do.AttemptRestarting)
    assert restarting.failure.message.startswith("the drain's savepoint failed: not done within")
    job.do(Tick(), after=5.0)
    assert job.confirm()[-1] == do.Deploy(2, None, frozenset())


def test_after_a_failed_suspend_the_job_continues() -> None:
    job = Job()
    job.begin()
    job.ask("stop")
    actions = job.report(Declined(B, 1))
    assert pick(actions, AnswerRequest) and job.machine.phase is JobPhase.RUNNING
    assert job.machine.requests.stop is None


def test_a_source_ends_by_request_and_again_after_every_restart() -> None:
    job = Job()
    job.begin()
    actions = job.ask("end_source", stage="live")
    assert sent(actions) == [((B,), EndInput("live"))]
    [answer] = pick(actions, AnswerRequest)
    assert answer.ended == ("live[EWR]",)
    for attempt in (2, 3):
        job.fail()
        job.do(Tick(), after=5.0)
        assert job.confirm()[-1] == do.Deploy(attempt, None, frozenset({("live", "EWR")}))
        job.deploy()
        job.run_tasks()


def test_a_source_that_the_job_does_not_have_is_named_with_its_pipeline() -> None:
    job = Job()
    job.begin()
    [answer] = pick(job.ask("end_source", stage="departures"), AnswerRequest)
    assert answer.message.startswith("expected a source of pipeline 'flights', found 'departures'; its sources are ")


@pytest.mark.parametrize(
    ("stage", "instance", "tasks"), [("live", None, (B,)), ("live", "EWR", (B,)), ("history", "0", (A,)), ("live", "LGA", ())]
)
def test_a_source_ends_at_the_word_of_the_runs_own_process(stage: str, instance: str | None, tasks: Any) -> None:
    job = Job()
    job.begin()
    assert sent(job.do(on.EndSourceRequested(stage, instance))) == ([(tasks, EndInput(stage))] if tasks else [])


def test_a_drain_ends_every_source_that_has_not_finished_and_is_remembered() -> None:
    job = Job(interval=10.0)
    job.begin()
    job.finish(A)
    assert sent(job.do(on.DrainRequested())) == [((B,), EndInput())]
    assert job.machine.next_deadline() is None, "no periodic checkpoint any more"
    job.fail()
    job.do(Tick(), after=5.0)
    assert job.confirm()[-1] == do.Deploy(2, None, frozenset({("live", "EWR")})), "the bounded one ends by itself"


def test_a_drain_behind_a_stop_continues_when_the_stop_fails() -> None:
    job = Job()
    job.begin()
    job.report(SourceEnded(A))
    job.ask("stop")
    assert job.do(on.DrainRequested()) == []
    actions = job.report(Declined(B, 1))
    assert sent(actions)[-1] == ((A, B), EndInput())


def test_a_drain_behind_a_stop_continues_after_the_restart() -> None:
    job = Job(interval=10.0)
    job.begin()
    job.ask("stop")
    job.do(on.DrainRequested())
    job.fail()
    job.do(Tick(), after=5.0)
    actions = job.confirm()
    assert sent(actions) == [], "there are no tasks"
    assert actions[-1] == do.Deploy(2, None, frozenset({("live", "EWR")}))
    job.deploy()
    job.run_tasks()
    assert job.machine.next_deadline() is None, "no periodic checkpoint any more"


def test_a_drain_behind_a_stop_continues_after_the_restart_also_if_the_stop_is_overdue_when_a_task_fails() -> None:
    job = Job()
    job.begin()
    job.ask("stop", seconds=5.0)
    job.do(on.DrainRequested())
    job.now += 5.0
    actions = job.report(on.TaskFailure(B, BROKEN))
    assert [answer.reason for answer in pick(actions, AnswerRequest)] == [FailureReason.CHECKPOINT_EXPIRED]
    assert sent(actions) == [(ALL, life.CheckpointAbortedNotice(1))], "no source ends in an attempt that is about to end"
    assert actions[-1] == do.StopTasks()
    job.do(on.TasksStopped())
    job.do(Tick(), after=5.0)
    assert job.confirm()[-1] == do.Deploy(2, None, frozenset({("live", "EWR")}))


# Restarts


def test_a_failed_attempt_is_followed_by_another_after_the_delay() -> None:
    job = Job()
    job.begin()
    job.ask("checkpoint")
    actions = job.fail()
    assert actions[0] == do.AttemptRestarting(2, 5.0, BROKEN)
    [answer] = pick(actions, AnswerRequest)
    assert answer.reason is FailureReason.TASK_FAILURE, "the checkpoint waits for no task that is gone"
    assert sent(actions) == []
    assert job.machine.coordinator is not None
    assert [job.machine.coordinator.state_of(task) for task in ALL] == [
        TaskState.CANCELED,
        TaskState.FAILED,
        TaskState.CANCELED,
    ]
    assert job.machine.next_deadline() == job.now + 5.0
    assert job.do(Tick(), after=4.9) == []
    assert job.ask("checkpoint") == [], "no task runs"
    assert job.do(Tick(), after=0.1) == [do.ConfirmOwnership()]
    assert job.machine.phase is JobPhase.READING
    assert job.confirm() == [do.Deploy(2, None)]
    assert job.deploy() == [do.AttemptBegan(2, None), do.ConfirmOwnership()], "the job begins once"
    assert pick(job.run_tasks(), CheckpointTriggered), "of the request that has waited"


def test_a_restart_waits_for_the_outcome_of_the_checkpoint_being_finalized() -> None:
    job = Job()
    job.begin()
    job.ask("checkpoint")
    job.acknowledge(1)
    job.fail()
    assert job.machine.next_deadline() == job.now + 60.0, "the request's; not the restart's"
    assert job.do(Tick(), after=5.0) == []
    actions = job.do(MetadataWritten(1, "chk-1"))
    assert sent(actions) == [] and pick(actions, AnswerRequest)[0].done
    assert actions[-1] == do.ConfirmOwnership()


def test_a_restart_begins_from_the_newest_checkpoint_in_storage() -> None:
    job = Job(beginning=RESUMED)
    job.begin()
    job.fail()
    job.do(Tick(), after=5.0)
    assert job.confirm(OWN) == [do.ReadNewest(OWN)]
    newest = restore_point(4, A, B)
    actions = job.do(on.NewestRead(newest))
    assert actions[-1] == do.Deploy(2, newest, frozenset())
    assert job.machine.finished == {A, B}
    assert job.machine.coordinator is not None and job.machine.coordinator.latest_completed == OWN, "the coordinator was notified"
    job.deploy(A, B)
    assert job.machine.finished == {A, B}


@pytest.mark.parametrize(("newest", "epoch"), [(None, 0), (None, EPOCH), (OWN, EPOCH - 1)])
def test_a_restart_without_a_checkpoint_of_its_own_begins_where_the_run_began(
    newest: CompletedCheckpoint | None, epoch: int
) -> None:
    job = Job(beginning=RESUMED)
    job.begin()
    job.finish(B)
    assert job.machine.finished == {A, B}
    job.fail(task=C)
    job.do(Tick(), after=5.0)
    assert job.confirm(newest, epoch) == [do.Deploy(2, RESTORED)]
    assert job.machine.finished == {A}
    assert job.machine.coordinator is not None and job.machine.coordinator.state_of(B) is TaskState.CREATED


def test_a_second_restart_ignores_the_newest_checkpoint_of_the_first() -> None:
    job = Job()
    job.begin()
    job.fail()
    job.do(Tick(), after=5.0)
    job.confirm(OWN)
    job.do(on.NewestRead(restore_point(4)))
    job.deploy()
    job.run_tasks()
    job.fail()
    job.do(Tick(), after=5.0)
    assert job.confirm(CompletedCheckpoint(9, "chk-9"), EPOCH - 1)[-1] == do.Deploy(3, None)


def test_a_restart_waits_for_storage() -> None:
    job = Job()
    job.begin()
    job.fail()
    job.do(Tick(), after=5.0)
    assert job.do(on.StorageSilent()) == []
    assert job.do(Tick(), after=RETRY_SECONDS) == [do.ConfirmOwnership()]
    job.confirm(OWN)
    assert job.do(on.StorageSilent()) == []
    assert job.do(Tick(), after=RETRY_SECONDS) == [do.ConfirmOwnership()], "the newest may be another one by now"
    assert job.confirm(OWN) == [do.ReadNewest(OWN)]


def test_a_stage_that_cannot_be_built_again_is_another_failure() -> None:
    job = Job(FixedDelayRestart(2, 5.0))
    job.begin()
    job.fail()
    job.do(Tick(), after=5.0)
    job.confirm()
    other = Failure("no such column")
    assert job.do(on.DeployFailed(other, may_pass=True))[0] == do.AttemptRestarting(3, 5.0, other)
    job.do(Tick(), after=5.0)
    assert job.confirm()[-1] == do.Deploy(3, None)
    assert job.do(on.DeployFailed(other, may_pass=True)) == [do.FinishWork()]
    assert job.machine.outcome is not None and job.machine.outcome.given_up


@pytest.mark.parametrize("unusable", [False, True])
def test_a_restart_whose_restore_fails_ends_the_job(unusable: bool) -> None:
    job = Job()
    job.begin()
    job.fail()
    job.do(Tick(), after=5.0)
    job.confirm()
    assert job.do(on.DeployFailed(BROKEN, unusable=unusable)) == [do.FinishWork()]
    assert job.machine.outcome == JobOutcome(JobStatus.FAILED, BROKEN.message, BROKEN)
    assert job.do(on.WorkEnded()) == [do.Release(JobStatus.FAILED)]


@pytest.mark.parametrize(
    ("restart", "failure", "because"),
    [
        (FixedDelayRestart(2, 5.0), Failure("wings", repeats=True), "another attempt would fail in the same way"),
        (NoRestart(), Failure("wings"), "the restart strategy is none"),
    ],
)
def test_a_job_gives_up(restart: Any, failure: Failure, because: str) -> None:
    job = Job(restart)
    job.begin()
    assert job.fail(failure) == [do.FinishWork()]
    message = f"Pipeline 'flights' failed, and {because}. wings"
    assert job.machine.outcome == JobOutcome(JobStatus.FAILED, message, failure, given_up=True)


def test_failures_that_are_far_enough_apart_are_not_counted_together() -> None:
    job = Job(FailureRateRestart(max_failures=1, interval=60.0, delay=5.0))
    job.begin()
    assert job.fail()[0] == do.AttemptRestarting(2, 5.0, BROKEN)
    job.do(Tick(), after=60.0)
    job.confirm()
    job.deploy()
    job.run_tasks()
    assert job.fail()[0] == do.AttemptRestarting(3, 5.0, BROKEN)
    job.do(Tick(), after=5.0)
    job.confirm()
    job.deploy()
    job.run_tasks()
    assert job.fail() == [do.FinishWork()]
    assert job.machine.outcome is not None and "2 failures within 60.0 s" in job.machine.outcome.message


def test_tasks_that_cannot_be_started_are_a_failure_of_the_attempt() -> None:
    job = Job()
    job.do(on.BeginningChosen(JobBeginning()))
    job.deploy()
    job.do(on.JobBegun())
    job.confirm()
    assert job.do(on.StartFailed(BROKEN)) == [do.StopTasks()]
    assert job.do(on.TasksStopped())[0] == do.AttemptRestarting(2, 5.0, BROKEN)


@pytest.mark.parametrize("restart", [FixedDelayRestart(2, 5.0), NoRestart()])
def test_the_answer_to_a_stop_whose_commits_fail_names_the_savepoint(restart: Any) -> None:
    job = Job(restart)
    job.begin()
    job.ask("stop")
    job.complete(1)
    [answer] = pick(job.fail(), AnswerRequest)
    assert answer.location == "chk-1" and BROKEN.message in answer.message
    assert job.machine.requests.stopped is None


def test_a_savepoint_of_a_stop_that_completes_while_the_job_restarts_is_named_as_well() -> None:
    job = Job()
    job.begin()
    job.ask("stop")
    job.acknowledge(1)
    assert not pick(job.fail(), AnswerRequest), "its outcome is open"
    job.do(Tick(), after=5.0)
    actions = job.do(MetadataWritten(1, "chk-1"))
    [answer] = pick(actions, AnswerRequest)
    assert answer.location == "chk-1" and BROKEN.message in answer.message
    assert actions[-1] == do.ConfirmOwnership()


def test_too_many_failed_checkpoints_are_a_failure_of_the_attempt() -> None:
    job = Job(tolerable_failed_checkpoints=0)
    job.begin()
    job.ask("checkpoint")
    actions = job.report(Declined(B, 1, message="no room"))
    assert actions[-1] == do.StopTasks()
    [restarting] = pick(job.do(on.TasksStopped()), do.AttemptRestarting)
    assert re.fullmatch(r"Pipeline 'flights': .*no room \(CHECKPOINT_DECLINED\)\.", restarting.failure.message)


@pytest.mark.parametrize("attempts", [2, 1])
def test_too_many_failed_checkpoints_between_two_attempts_are_another_failure(attempts: int) -> None:
    job = Job(FixedDelayRestart(attempts, 5.0), tolerable_failed_checkpoints=0)
    job.begin()
    job.ask("checkpoint")
    job.acknowledge(1)
    job.fail()
    job.now += 3.0
    actions = job.do(MetadataWriteFailed(1, "disk full"))
    if attempts == 1:
        assert actions[-1] == do.FinishWork()
        assert job.machine.outcome is not None
        assert (job.machine.outcome.status, job.machine.outcome.given_up) == (JobStatus.FAILED, True)
        assert "has been restarted 1 times" in job.machine.outcome.message
        assert "disk full (FINALIZE_CHECKPOINT_FAILURE)" in job.machine.outcome.message
        return
    [again] = pick(actions, do.AttemptRestarting)
    assert (again.attempt, again.delay, again.vertices) == (2, 5.0, None)
    assert "disk full (FINALIZE_CHECKPOINT_FAILURE)" in again.failure.message
    assert job.do(Tick(), after=2.0) == [], "it waits for the later delay"
    assert job.do(Tick(), after=3.0) == [do.ConfirmOwnership()]
    assert job.confirm() == [do.Deploy(2, None)]
    job.deploy()
    job.run_tasks()
    assert pick(job.ask("checkpoint", request_id="r2"), CheckpointTriggered), "the job runs again"


def test_the_first_failure_of_an_attempt_is_the_one_that_counts() -> None:
    job = Job()
    job.begin()
    job.ask("stop", drain=True, seconds=5.0)
    job.do(Tick(), after=5.0)
    assert job.report(on.TaskFailure(A, BROKEN)) == []
    [restarting] = pick(job.do(on.TasksStopped()), do.AttemptRestarting)
    assert restarting.failure != BROKEN


@pytest.mark.parametrize("requested", [on.CancelRequested(), on.FatalError(BROKEN)])
@pytest.mark.parametrize("when", ["running", "stopping", "restarting", "reading", "deploying", "finalizing"])
def test_a_job_can_be_ended_in_every_phase(when: str, requested: JobMachineEvent) -> None:
    job = Job()
    job.begin()
    tasks = when in ("running", "finalizing")
    if when == "finalizing":
        job.ask("savepoint")
        job.acknowledge(1)
        assert job.finish() == [do.TaskHasFinished(C)], "the outcome of the savepoint is waited for"
    elif when == "stopping":
        job.report(on.TaskFailure(A, Failure("another")))
        assert job.do(requested) == []
        tasks = False
    elif when != "running":
        job.fail(Failure("another"))
        if when != "restarting":
            job.do(Tick(), after=5.0)
        if when == "deploying":
            job.confirm()
    actions = job.do(on.TasksStopped() if when == "stopping" else requested)
    if tasks:
        assert actions == [do.StopTasks()]
        actions = job.do(on.TasksStopped())
    assert actions[-1] == do.FinishWork() and not pick(actions, do.AttemptRestarting)
    status = JobStatus.CANCELED if isinstance(requested, on.CancelRequested) else JobStatus.FAILED
    assert job.machine.outcome is not None
    assert (job.machine.outcome.status, job.machine.outcome.given_up) == (status, False)
    actions = job.do(on.WorkEnded())
    assert actions[-1] == do.Release(status)
    assert len(pick(actions, AnswerRequest)) == (when == "finalizing")


def test_the_first_of_two_end_requests_counts() -> None:
    job = Job()
    job.begin()
    job.do(on.CancelRequested())
    assert job.do(on.FatalError(BROKEN)) == []
    job.do(on.TasksStopped())
    assert job.machine.outcome == JobOutcome(JobStatus.CANCELED)


def test_a_job_is_canceled_while_its_final_checkpoint_is_pending() -> None:
    job = Job()
    job.begin()
    for task in ALL:
        actions = job.report(EndOfDataReached(task))
    assert pick(actions, CheckpointTriggered)
    job.do(on.CancelRequested())
    assert job.do(on.TasksStopped())[-1] == do.FinishWork()
    assert job.machine.outcome == JobOutcome(JobStatus.CANCELED)


def test_a_canceled_job_discards_the_uploads_of_its_pending_checkpoints() -> None:
    job = Job()
    job.begin()
    job.ask("checkpoint")
    job.do(on.CancelRequested())
    actions = job.do(on.TasksStopped())
    assert [type(action) for action in actions] == [DiscardStates, do.FinishWork]


# The end


def finished(*, own: bool = True, **config: Any) -> Job:
    """A job whose tasks have all finished and stopped."""
    job = Job(retained=2, **config)
    job.begin()
    if own:
        job.ask("checkpoint")
        job.complete(1)
    assert job.finish()[-1] == do.StopTasks()
    return job


def test_the_end_of_a_job_is_recorded_before_its_checkpoints_are_deleted() -> None:
    job = finished()
    assert job.do(on.TasksStopped()) == [do.EndJob(False, "end_of_data")]
    older = CompletedCheckpoint(1, "chk-older")
    actions = job.do(on.JobEndRecorded((CompletedCheckpoint(1, "chk-1"), older)))
    assert [action.checkpoint.location for action in pick(actions, DiscardCheckpoint)] == ["chk-1", "chk-older"]
    assert actions[-1] == do.FinishWork()
    assert job.machine.outcome == JobOutcome(JobStatus.FINISHED, ended_by="end_of_data")


def test_an_end_that_storage_does_not_record_deletes_nothing() -> None:
    job = finished()
    job.do(on.TasksStopped())
    assert job.do(on.JobEndNotRecorded()) == [do.FinishWork()]
    assert job.do(on.WorkEnded()) == [do.Release(JobStatus.FINISHED)]


def test_checkpoints_that_the_configuration_keeps_are_kept() -> None:
    job = finished(keep_on_finish=True)
    assert job.do(on.TasksStopped()) == [do.EndJob(True, "end_of_data")]
    assert job.do(on.JobEndRecorded()) == [do.FinishWork()]


def test_a_drained_job_is_recorded_as_drained() -> None:
    job = Job()
    job.begin()
    job.do(on.DrainRequested())
    job.finish()
    assert job.do(on.TasksStopped()) == [do.EndJob(True, "drain")]
    assert job.machine.outcome == JobOutcome(JobStatus.FINISHED, ended_by="drain")


def test_a_canceled_drain_has_not_ended_by_the_drain() -> None:
    job = Job()
    job.begin()
    job.do(on.DrainRequested())
    job.do(on.CancelRequested())
    job.do(on.TasksStopped())
    assert job.machine.outcome == JobOutcome(JobStatus.CANCELED)


def test_a_checkpoint_being_written_has_an_outcome_before_the_job_ends() -> None:
    job = Job()
    job.begin()
    job.ask("savepoint")
    job.acknowledge(1)
    assert job.finish() == [do.TaskHasFinished(C)]
    actions = job.do(MetadataOutcomeUnknown(1, "time-out"))
    assert pick(actions, AnswerRequest) and actions[-1] == do.StopTasks()


def test_a_finished_job_stays_finished() -> None:
    job = finished()
    for late in (on.CancelRequested(), on.FatalError(BROKEN), on.DrainRequested()):
        assert pick(job.do(late), do.StopTasks) == []
    job.do(on.TasksStopped())
    for result in (on.JobEndRecorded(), on.WorkEnded()):
        for late in (on.CancelRequested(), on.FatalError(BROKEN), on.DrainRequested(), on.EndSourceRequested("live")):
            assert job.do(late) == []
        actions = job.do(result)
    assert actions == [do.Release(JobStatus.FINISHED)]
    assert job.machine.outcome is not None and job.machine.outcome.status is JobStatus.FINISHED


def test_a_drain_that_comes_when_the_job_has_ended_has_not_ended_it() -> None:
    job = finished()
    job.do(on.TasksStopped())
    job.do(on.DrainRequested())
    assert job.machine.outcome is not None and job.machine.outcome.ended_by == "end_of_data"


def test_requests_that_come_late_are_answered() -> None:
    job = finished()
    job.do(on.TasksStopped())
    job.do(on.JobEndRecorded())
    assert job.ask("checkpoint", requester=7) == []
    answer, release = job.do(on.WorkEnded())
    assert isinstance(answer, AnswerRequest) and answer.requesters == (7,)
    assert answer.message == "the pipeline's run has ended FINISHED" and isinstance(release, do.Release)
    [later] = job.ask("stop", requester=8)
    assert isinstance(later, AnswerRequest) and later.requesters == (8,)
    assert job.machine.next_deadline() is None


def test_a_request_to_a_job_that_could_not_start_is_answered_with_the_failure() -> None:
    job = Job()
    job.ask("checkpoint")
    job.do(on.FatalError(BROKEN))
    [answer] = pick(job.do(on.WorkEnded()), AnswerRequest)
    assert answer.message == "the pipeline's run has ended before it began"


def test_a_stop_that_a_failure_overtakes_names_the_failure() -> None:
    job = Job(NoRestart())
    job.begin()
    job.ask("stop")
    job.fail()
    [answer] = pick(job.do(on.WorkEnded()), AnswerRequest)
    assert answer.reason is FailureReason.JOB_FAILURE and "wings" in answer.message


def test_a_metadata_outcome_after_the_end_changes_nothing() -> None:
    job = Job()
    job.begin()
    job.ask("checkpoint")
    assert pick(job.acknowledge(1), WriteMetadata)
    job.do(on.CancelRequested())
    job.do(on.TasksStopped())
    assert job.do(MetadataWritten(1, "chk-1")) == []
    assert pick(job.do(CheckpointRequested("late")), RequestNotCompleted)


# Events out of order


RESULTS: tuple[JobMachineEvent, ...] = (
    on.BeginningChosen(JobBeginning()),
    on.Deployed(GRAPH),
    on.DeployFailed(BROKEN),
    on.JobBegun(),
    on.OwnershipConfirmed(),
    on.StorageSilent(),
    on.NewestRead(RESTORED),
    on.StartFailed(BROKEN),
    on.TasksStopped(),
    on.JobEndRecorded(),
    on.JobEndNotRecorded(),
    on.WorkEnded(),
)
EXPECTED: dict[JobPhase, tuple[type, ...]] = {
    JobPhase.CHOOSING: (on.BeginningChosen,),
    JobPhase.DEPLOYING: (on.Deployed, on.DeployFailed),
    JobPhase.BEGINNING: (on.JobBegun,),
    JobPhase.CONFIRMING: (on.OwnershipConfirmed, on.StorageSilent),
    JobPhase.RUNNING: (on.StartFailed,),
    JobPhase.STOPPING: (on.TasksStopped,),
    JobPhase.RESTARTING: (),
    JobPhase.READING: (on.OwnershipConfirmed, on.StorageSilent, on.NewestRead),
    JobPhase.ENDING: (on.JobEndRecorded, on.JobEndNotRecorded),
    JobPhase.CLOSING: (on.WorkEnded,),
    JobPhase.OVER: (),
}


def in_phase(phase: JobPhase) -> Job:
    """A job in this phase."""
    job = Job(beginning=JobBeginning(RESTORED, 4))
    way: dict[JobPhase, Any] = {
        JobPhase.CHOOSING: lambda: job.do(on.BeginningChosen(job.beginning)),
        JobPhase.DEPLOYING: lambda: job.deploy(A),
        JobPhase.BEGINNING: lambda: job.do(on.JobBegun()),
        JobPhase.CONFIRMING: lambda: job.confirm(),
        JobPhase.RUNNING: lambda: job.report(on.TaskFailure(B, BROKEN)) if restarts else job.finish(B, C),
        JobPhase.STOPPING: lambda: job.do(on.TasksStopped()),
        JobPhase.RESTARTING: lambda: job.do(Tick(), after=5.0),
        JobPhase.ENDING: lambda: job.do(on.JobEndRecorded()),
        JobPhase.CLOSING: lambda: job.do(on.WorkEnded()),
    }
    restarts = phase in (JobPhase.RESTARTING, JobPhase.READING)
    while job.machine.phase is not phase:
        way[job.machine.phase]()
    return job


@pytest.mark.parametrize("phase", JobPhase)
@pytest.mark.parametrize("event", RESULTS, ids=lambda event: type(event).__name__)
def test_an_unexpected_result_is_refused(phase: JobPhase, event: JobMachineEvent) -> None:
    job = in_phase(phase)
    if isinstance(event, EXPECTED[phase]):
        job.do(event)
        return
    with pytest.raises(UnexpectedEvent) as found:
        job.do(event)
    assert str(found.value) == (
        f"A job that is {phase.name} cannot take {event!r}: the driver hands in the result of an action that was not asked for, "
        "or what needs tasks before the first attempt is deployed."
    )


@pytest.mark.parametrize("phase", [JobPhase.CHOOSING, JobPhase.DEPLOYING])
@pytest.mark.parametrize(
    "event",
    [on.DrainRequested(), on.EndSourceRequested("live"), CheckpointRequested("r"), MetadataWritten(1, "chk-1")],
    ids=lambda event: type(event).__name__,
)
def test_events_that_need_tasks_are_refused_before_the_first_deployment(phase: JobPhase, event: JobMachineEvent) -> None:
    with pytest.raises(UnexpectedEvent, match=f"cannot take {type(event).__name__}.* needs tasks before the first attempt"):
        in_phase(phase).do(event)
    assert in_phase(phase).do(Tick()) == []


@pytest.mark.parametrize("phase", [JobPhase.CHOOSING, JobPhase.RUNNING])
def test_an_unknown_event_is_refused(phase: JobPhase) -> None:
    with pytest.raises(AssertionError, match="'no event'"):
        in_phase(phase).do("no event")  # type: ignore[arg-type]
