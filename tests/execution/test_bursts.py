"""Bursts: when a job whose sources have read what was there is suspended, and what happens if that fails."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.events import CheckpointTriggered, Declined, EndOfDataReached, TaskStateChanged, Tick
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.plan import TaskState
from dagster_checkpoints.coordination.retention import JobStatus
from dagster_checkpoints.execution import job_actions as do
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.execution.burst import AGAIN_SECONDS, Burst
from dagster_checkpoints.execution.job_events import Failure, TaskFailure
from dagster_checkpoints.execution.job_requests import AnswerRequest
from dagster_checkpoints.execution.split_events import EnumeratorStart, SplitRequest, SplitsDiscovered
from dagster_checkpoints.execution.splits import SplitEnumerators
from dagster_checkpoints.execution.task_events import SourceEnded, SourcesRead
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state.metadata import EnumeratorState
from tests.execution.job_harness import A, B, C, Job, pick

CONFIG = CheckpointConfig(interval=None, timeout=30.0, tolerable_failed_checkpoints=1)


def burst(**config: Any) -> Job:
    job = Job(burst=True, **{"timeout": 30.0, "tolerable_failed_checkpoints": 1, **config})
    job.begin()
    return job


def stops(actions: list[Any]) -> list[bool]:
    """For each triggered checkpoint, whether it stops the job."""
    return [action.properties.stops_job for action in pick(actions, CheckpointTriggered)]


@pytest.mark.parametrize(
    ("read", "asks"),
    [
        ({}, False),
        ({A: True}, False),
        ({A: False}, False),
        ({A: True, B: True}, True),
        ({A: False, B: True}, True),
        ({A: False, B: False}, False),  # the job comes to its own end
    ],
)
def test_a_suspend_is_asked_for_when_every_source_has_ended_or_caught_up(read: dict[TaskId, bool], asks: bool) -> None:
    machine = Burst(CONFIG, 7)
    for task in (task for task, more in read.items() if more):
        machine.read(SourcesRead(task))
    ended = [task for task, more in read.items() if not more]
    assert machine.is_due([A, B], ended, (), 5.0) is asks
    if asks:
        request = machine.request()
        assert (request.request_id, request.kind, request.drain) == ("caught-up-e7-1", "stop", False)
        assert request.asked_by == "caught_up"
        assert request.deadline_seconds == 30.0
        assert not machine.is_due([A, B], ended, (), 6.0), "it is asked for once"


def test_a_split_source_has_caught_up_by_its_splits() -> None:
    machine = Burst(CONFIG, 7)
    assert not machine.is_due([A, B], [A], (), 5.0)
    assert machine.is_due([A, B], [A], (B.vertex,), 5.0)


def test_the_job_is_suspended_and_says_who_has_asked() -> None:
    job = burst()
    assert stops(job.report(SourcesRead(A))) == []
    actions = job.report(SourcesRead(B))
    assert stops(actions) == [True]
    assert job.complete(1)
    job.finish()
    assert job.do(on.TasksStopped()) == [do.EndJob(True, "suspend", "caught_up")]


def test_a_run_that_is_no_burst_goes_on() -> None:
    job = Job()
    job.begin()
    job.report(SourcesRead(A))
    assert stops(job.report(SourcesRead(B))) == []


def test_a_source_that_has_finished_is_not_waited_for() -> None:
    job = burst()
    job.finish(A)
    assert stops(job.report(SourcesRead(B))) == [True]


def test_a_user_who_stops_a_burst_is_first() -> None:
    job = burst()
    assert stops(job.ask("stop", drain=True)) == []
    job.report(SourceEnded(A))
    assert stops(job.report(SourcesRead(B))) == []


@pytest.mark.parametrize("waits_for", ["a bounded source", "the tasks"])
def test_a_stop_that_has_waited_is_handed_over_before_the_suspend_that_is_due_at_the_same_moment(waits_for: str) -> None:
    """A suspend of the burst that is refused would count as one that has failed, and fail the job."""
    job = burst(tolerable_failed_checkpoints=0)
    if waits_for == "the tasks":
        job.report(TaskStateChanged(C, TaskState.INITIALIZING))
        job.report(SourceEnded(A))
    job.report(SourcesRead(B))
    assert stops(job.ask("stop", drain=True, bounded="finish")) == []
    actions = job.report(SourceEnded(A) if waits_for == "a bounded source" else TaskStateChanged(C, TaskState.RUNNING))
    assert not pick(actions, AnswerRequest) and not pick(actions, do.StopTasks)
    assert job.machine.requests.stop is not None and job.machine.requests.stop.request_id == "stop"


def test_a_burst_whose_sources_are_drained_is_not_suspended() -> None:
    """The sources end one after the other: some have ended, and others have only read what was there."""
    job = burst()
    job.report(SourcesRead(B))
    job.do(on.DrainRequested())
    assert stops(job.report(SourceEnded(A))) == []
    assert stops(job.report(SourceEnded(B))) == []
    for task in (A, B):
        assert stops(job.report(EndOfDataReached(task))) == []
    assert stops(job.report(EndOfDataReached(C))) == [False]


def test_a_suspend_that_fails_is_asked_for_again_and_then_fails_the_job() -> None:
    job = burst()
    job.report(SourcesRead(A))
    job.report(SourcesRead(B))
    for number in (1, 2):
        actions = job.report(Declined(A, number, FailureReason.CHECKPOINT_DECLINED, "no space"))
        [answer] = pick(actions, AnswerRequest)
        assert answer.requesters == () and not answer.done
        if number == 1:
            assert job.machine.next_deadline() == job.now + AGAIN_SECONDS
            assert stops(job.do(Tick(), after=AGAIN_SECONDS / 2)) == []
            assert stops(job.do(Tick(), after=AGAIN_SECONDS / 2)) == [True]
    assert pick(actions, do.StopTasks)
    job.do(on.TasksStopped())
    outcome = job.machine.outcome
    assert outcome is not None and outcome.status is JobStatus.FAILED
    assert "every source has read what was there" in outcome.message and "no space" in outcome.message
    assert "2 times in a row" in outcome.message


def test_a_suspend_that_is_not_asked_for_again_wakes_the_job_no_more() -> None:
    """Every source has come to its own end in between: a deadline in the past would be one that is always due."""
    job = burst()
    job.report(SourcesRead(A))
    job.report(SourcesRead(B))
    job.report(Declined(A, 1, FailureReason.CHECKPOINT_DECLINED, "no space"))
    job.report(SourceEnded(A))
    job.report(SourceEnded(B))
    assert job.machine.next_deadline() == job.now + AGAIN_SECONDS
    assert stops(job.do(Tick(), after=AGAIN_SECONDS)) == []
    assert job.machine.next_deadline() is None


def test_a_suspend_is_not_asked_for_before_every_task_runs() -> None:
    """A task could fail before the stop has begun: then the sources would read again, and the request would not wait for them."""
    job = burst()
    job.report(TaskFailure(C, Failure("a plane without wings")))
    job.do(on.TasksStopped())
    job.do(Tick(), after=5.0)
    job.do(on.OwnershipConfirmed(None, 0))
    job.deploy()
    job.confirm()
    job.report(TaskStateChanged(A, TaskState.RUNNING))
    job.report(TaskStateChanged(B, TaskState.RUNNING))
    job.report(SourcesRead(A))
    assert not job.report(SourcesRead(B))
    job.report(TaskFailure(C, Failure("again")))
    job.do(on.TasksStopped())
    job.do(Tick(), after=5.0)
    job.do(on.OwnershipConfirmed(None, 0))
    job.deploy()
    assert stops(job.run_tasks()) == []


def test_after_a_restart_a_burst_does_not_wait_for_the_time_of_an_earlier_failure() -> None:
    machine = Burst(CONFIG, 7)
    machine.read(SourcesRead(A))
    assert machine.is_due([A], (), (), 5.0)
    machine.request()
    assert machine.failed("no space", 5.0, restarting=False) == ""
    machine.stopped(None)
    machine.read(SourcesRead(A))
    assert machine.next_deadline is None, "nothing would wake the job then"
    assert machine.is_due([A], (), (), 6.0)


def test_a_suspend_that_a_restart_has_cancelled_does_not_count() -> None:
    job = burst(tolerable_failed_checkpoints=0)
    job.report(SourcesRead(A))
    job.report(SourcesRead(B))
    job.report(TaskFailure(B, Failure("a plane without wings")))
    job.do(on.TasksStopped())
    assert job.machine.outcome is None
    job.do(Tick(), after=5.0)
    job.do(on.OwnershipConfirmed(None, 0))
    job.deploy()
    job.run_tasks()
    job.report(SourcesRead(A))
    assert stops(job.report(SourcesRead(B))) == [True], "in the next attempt, too, when its sources have read what is there"


def test_what_a_source_had_read_before_a_restart_does_not_count() -> None:
    machine = Burst(CONFIG, 7)
    for task in (A, B):
        machine.read(SourcesRead(task))
    machine.stopped({B.vertex})
    assert not machine.is_due([A, B], (), (), 5.0)
    machine.read(SourcesRead(B))
    machine.stopped(None)
    assert not machine.is_due([A, B], (), (), 5.0)


def test_a_job_whose_savepoint_is_complete_and_whose_task_fails_is_suspended_after_its_restart() -> None:
    job = burst()
    job.report(SourcesRead(A))
    job.report(SourcesRead(B))
    job.complete(1)
    job.report(TaskFailure(A, Failure("a plane without wings")))
    job.do(on.TasksStopped())
    job.do(Tick(), after=5.0)
    job.do(on.OwnershipConfirmed(None, 0))
    job.deploy()
    job.run_tasks()
    for task in (A, B):
        actions = job.report(SourcesRead(task))
    assert stops(actions) == [True]


# Splits


def enumerators(*, once: bool, bounded: bool = False) -> SplitEnumerators:
    found = SplitEnumerators(burst=once)
    start = EnumeratorStart(
        "live", (TaskId("live", 0),), bounded=bounded, interval=60.0, state=EnumeratorState(), held=frozenset()
    )
    found.begin([start], frozenset())
    assert found.discover(0.0, ["live"]) == ["live"]
    return found


def test_a_burst_discovers_splits_once_and_waits_until_they_are_read() -> None:
    found = enumerators(once=True)
    assert found.have_read_all == []
    found.take(SplitsDiscovered("live", ("one",)), 1.0)
    found.take(SplitsDiscovered("live", ("two",), last=True), 1.0)
    assert found.next_discovery(["live"]) is None
    task = TaskId("live", 0)
    for split in ("one", "two"):
        assert found.have_read_all == [] and not found.counts["live"].read_all, "the status says so, too: between two splits"
        found.take(SplitRequest(task, asks=True), 2.0)
        assert found.have_read_all == [] and not found.counts["live"].read_all
        found.take(SplitRequest(task, finished=(split,)), 3.0)
    assert found.have_read_all == ["live"] and found.counts["live"].read_all


def test_a_source_without_splits_has_caught_up_when_it_has_looked() -> None:
    found = enumerators(once=True)
    found.take(SplitsDiscovered("live", (), last=True), 1.0)
    assert found.have_read_all == ["live"]


def test_other_runs_discover_again_and_bounded_sources_end() -> None:
    found = enumerators(once=False)
    found.take(SplitsDiscovered("live", (), last=True), 1.0)
    assert found.next_discovery(["live"]) == 61.0
    bounded = enumerators(once=True, bounded=True)
    bounded.take(SplitsDiscovered("live", (), last=True), 1.0)
    assert bounded.have_read_all == []
