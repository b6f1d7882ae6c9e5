"""PROTOCOL section 6, the coordinator's side: rows of events, and the expected outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

from dagster_checkpoints.coordination.checkpoints import CheckpointProperties, TaskStatistics
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.coordinator import CheckpointCoordinator
from dagster_checkpoints.coordination.events import (
    Acknowledged,
    CheckpointFailed,
    CheckpointRequested,
    CheckpointTriggered,
    CoordinatorAction,
    CoordinatorEvent,
    Declined,
    DiscardCheckpoint,
    EndOfDataReached,
    FailJob,
    MetadataOutcomeUnknown,
    MetadataWriteFailed,
    MetadataWritten,
    NotifyTasks,
    RequestCompleted,
    RequestNotCompleted,
    RequestWithdrawn,
    Shutdown,
    StopRequested,
    TasksRestarting,
    TaskStateChanged,
    Tick,
    TriggerTask,
    WriteMetadata,
)
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.lifecycle import (
    CheckpointAbortedNotice,
    CheckpointCompletedNotice,
    CheckpointNotice,
    SavepointCompletedNotice,
)
from dagster_checkpoints.coordination.plan import TaskState
from dagster_checkpoints.coordination.retention import JobStatus
from dagster_checkpoints.pipeline import ExecutionGraph, TaskId

Graphs = Callable[[str], ExecutionGraph]
T = TypeVar("T")
A, B, C = TASKS = TaskId("V0", 0), TaskId("V1", 0), TaskId("V2", 0)
SAVEPOINT = CheckpointProperties.for_savepoint()
SUSPENDED = FailureReason.CHECKPOINT_COORDINATOR_SUSPEND


class Job:
    """Three tasks in a row and their coordinator, driven by words of a row."""

    def __init__(self, graph_of: Graphs, words: str = "", *, running: bool = True, **settings: object) -> None:
        defaults: dict[str, object] = {"interval": 10.0, "timeout": 60.0, "tolerable_failed_checkpoints": 0}
        config = CheckpointConfig(**{**defaults, **settings})  # type: ignore[arg-type]
        self.coordinator = CheckpointCoordinator(graph_of("V0 p1 -ALL-> V1 p1 -ALL-> V2 p1"), config)
        self.now = 0.0
        self.actions: list[CoordinatorAction] = []
        if running:
            self.start()
        self.do(words)

    def start(self) -> None:
        for task in TASKS:
            self.handle(TaskStateChanged(task, TaskState.RUNNING))

    def handle(self, event: CoordinatorEvent) -> list[CoordinatorAction]:
        actions = self.coordinator.handle(event, self.now)
        self.actions += actions
        return actions

    def do(self, words: str) -> list[CoordinatorAction]:
        """Performs e.g. ``suspend ack1 written1 A-finished +10``."""
        return [action for word in words.split() for action in self._word(word)]

    def _word(self, word: str) -> list[CoordinatorAction]:
        if word.startswith("+"):
            return self.turn(self.now + float(word))
        if word.startswith("ack"):
            finished = self.coordinator.all_at_end_of_data
            running = [task for task in TASKS if self.coordinator.state_of(task) is TaskState.RUNNING]
            measured = TaskStatistics(operators_finished=finished)
            return [a for task in running for a in self.handle(Acknowledged(task, int(word[3:]), str(task), measured))]
        task, _, what = word.partition("-")
        if what:
            states = {"finished": TaskState.FINISHED, "failed": TaskState.FAILED, "runs": TaskState.RUNNING}
            event = TaskStateChanged({"A": A, "B": B, "C": C}[task], states[what])
            return self.handle(event)
        if word == "ends":
            return [action for task in TASKS for action in self.handle(EndOfDataReached(task))]
        if word == "finish":
            return [action for task in TASKS for action in self.handle(TaskStateChanged(task, TaskState.FINISHED))]
        fixed: dict[str, CoordinatorEvent] = {
            "suspend": StopRequested("stop"),
            "drain": StopRequested("stop", drain=True),
            "checkpoint": CheckpointRequested("checkpoint"),
            "savepoint": CheckpointRequested("savepoint", SAVEPOINT),
            "again": StopRequested("second stop"),
            "withdrawn": RequestWithdrawn("stop", "the requester has left"),
            "restart": TasksRestarting(),
        }
        if word in fixed:
            return self.handle(fixed[word])
        kind, checkpoint_id = word.rstrip("0123456789"), int("".join(c for c in word if c.isdigit()))
        events: dict[str, CoordinatorEvent] = {
            "written": MetadataWritten(checkpoint_id, f"at-{checkpoint_id}"),
            "unwritten": MetadataWriteFailed(checkpoint_id, "no space"),
            "unknown": MetadataOutcomeUnknown(checkpoint_id, "time-out"),
            "declined": Declined(B, checkpoint_id, message="not now"),
        }
        return self.handle(events[kind])

    def turn(self, now: float) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        while (due := self.coordinator.next_deadline()) is not None and due <= now:
            self.now = max(self.now, due)
            actions += self.handle(Tick())
        self.now = now
        return actions

    @property
    def answers(self) -> dict[str, str]:
        """The answer to each request: a location or a reason. A second answer is an error."""
        found: dict[str, str] = {}
        for action in self.actions:
            if isinstance(action, RequestCompleted | RequestNotCompleted):
                assert action.request_id not in found
                failed = isinstance(action, RequestNotCompleted)
                found[action.request_id] = action.reason.name if failed else action.checkpoint.location
        return found


def pick(actions: Iterable[CoordinatorAction], kind: type[T]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


def notified(actions: Iterable[CoordinatorAction], notice: type[CheckpointNotice]) -> list[tuple[set[TaskId], int]]:
    return [(set(a.tasks), a.notice.checkpoint_id) for a in pick(actions, NotifyTasks) if isinstance(a.notice, notice)]


def triggered(actions: Iterable[CoordinatorAction]) -> list[int]:
    ids = [action.checkpoint_id for action in pick(actions, CheckpointTriggered)]
    assert sorted({a.barrier.checkpoint_id for a in pick(actions, TriggerTask)}) == ids
    return ids


# Savepoints of a job that runs on


def test_a_savepoint_commits_nothing_and_no_restart_begins_from_it(graph_of: Graphs) -> None:
    job = Job(graph_of, "savepoint ack1")
    actions = job.do("written1")
    assert notified(actions, SavepointCompletedNotice) == [(set(TASKS), 1)]
    assert notified(actions, CheckpointCompletedNotice) == []
    assert job.answers == {"savepoint": "at-1"}
    assert job.coordinator.latest_completed is None


def test_no_task_ends_with_a_savepoint(graph_of: Graphs) -> None:
    # Every task took it after its finish(), and none may end with it: the final checkpoint follows.
    job = Job(graph_of, "checkpoint savepoint ends ack2 written2")
    assert triggered(job.do("ack1 written1")) == []
    job = Job(graph_of, "savepoint ends", max_concurrent=2)
    assert job.coordinator.pending_ids == (1, 2)
    assert triggered(job.do("ack1 written1 ack2 written2")) == []


def test_the_request_is_carried_in_the_properties(graph_of: Graphs) -> None:
    properties = CheckpointProperties.for_savepoint(request_id="asked")
    job = Job(graph_of)
    announced, *triggers = job.handle(CheckpointRequested("r", properties))
    assert announced == CheckpointTriggered(1, properties, "r", waiting=3)
    assert [t.barrier.properties.request_id for t in pick(triggers, TriggerTask)] == ["asked"]
    assert len(triggers) == 1
    job.do("ack1")
    (write,) = pick(job.actions, WriteMetadata)
    assert write.checkpoint.request_id == "r"
    assert write.checkpoint.properties == properties


# The stop's savepoint


@pytest.mark.parametrize("begin", ["suspend", "drain ends"])
def test_a_stop_commits_with_one_savepoint_for_every_task(graph_of: Graphs, begin: str) -> None:
    job = Job(graph_of)
    actions = job.do(begin)
    assert triggered(actions) == [1]
    barrier = pick(actions, TriggerTask)[0].barrier
    assert barrier.properties.stops_job and barrier.properties.is_savepoint
    actions = job.do("ack1 written1")
    assert notified(actions, CheckpointCompletedNotice) == [(set(TASKS), 1)]
    assert notified(actions, SavepointCompletedNotice) == []
    assert job.answers == {"stop": "at-1"}
    assert [c.location for c in job.coordinator.completed] == ["at-1"]
    # No other checkpoint is triggered until the last task has ended, nor afterwards.
    assert triggered(job.do("+100 A-finished +100 finish +100")) == []
    assert pick(job.handle(Shutdown(JobStatus.FINISHED)), DiscardCheckpoint) == []


def test_a_drain_waits_for_the_end_of_the_data_and_takes_the_final_checkpoints_place(graph_of: Graphs) -> None:
    job = Job(graph_of)
    assert triggered(job.do("drain +50")) == []
    assert job.coordinator.next_deadline() is None
    assert triggered(job.do("ends +50 ack1 written1 +50")) == [1]


def test_other_checkpoints_are_aborted_when_a_stop_begins(graph_of: Graphs) -> None:
    job = Job(graph_of, "checkpoint savepoint", max_queued=5)
    job.handle(CheckpointRequested("queued"))
    actions = job.do("suspend")
    assert [(a.checkpoint_id, a.reason) for a in pick(actions, CheckpointFailed)] == [(1, SUSPENDED), (2, SUSPENDED)]
    assert [number for _, number in notified(actions, CheckpointAbortedNotice)] == [1, 2]
    assert job.answers == dict.fromkeys(["checkpoint", "savepoint", "queued"], SUSPENDED.name)
    assert all("'stop'" in a.message for a in pick(actions, RequestNotCompleted))
    assert triggered(actions) == [3]
    assert pick(job.actions, FailJob) == []


def test_a_stop_waits_for_a_checkpoint_that_is_being_finalized(graph_of: Graphs) -> None:
    job = Job(graph_of, "checkpoint ack1", max_concurrent=2)
    assert triggered(job.do("suspend +30")) == []
    actions = job.do("written1")
    assert triggered(actions) == [2]
    assert job.answers == {"checkpoint": "at-1"}


def test_no_task_may_end_during_a_stop(graph_of: Graphs) -> None:
    job = Job(graph_of)
    job.handle(EndOfDataReached(A))
    job.do("checkpoint")
    job.handle(Acknowledged(A, 1, "a", TaskStatistics(operators_finished=True)))
    job.do("ack1 written1")
    assert triggered(job.do("suspend +30")) == []
    assert triggered(job.do("A-finished")) == [2]


def test_a_stop_waits_for_a_task_that_does_not_end_only_until_the_timeout(graph_of: Graphs) -> None:
    job = Job(graph_of)
    job.handle(EndOfDataReached(A))
    job.do("checkpoint")
    job.handle(Acknowledged(A, 1, "a", TaskStatistics(operators_finished=True)))
    job.do("ack1 written1 suspend")
    assert triggered(job.do("+59")) == []
    assert triggered(job.do("+1")) == [2]
    assert triggered(job.do("A-finished")) == [3]
    assert job.answers == {"checkpoint": "at-1"}


@pytest.mark.parametrize("stop", ["suspend", "drain"])
@pytest.mark.parametrize(
    ("so_far", "how_far"),
    [
        ("", ""),
        ("ends", "its savepoint is pending"),
        ("ends ack1", "its savepoint is pending"),
        ("ends ack1 written1", "its savepoint has completed"),
    ],
)
def test_during_a_stop_other_requests_are_refused(graph_of: Graphs, stop: str, so_far: str, how_far: str) -> None:
    job = Job(graph_of, f"{stop} {so_far}")
    actions = job.do("checkpoint savepoint again")
    refusals = pick(actions, RequestNotCompleted)
    assert [(a.request_id, a.reason) for a in refusals] == [
        (name, SUSPENDED) for name in ("checkpoint", "savepoint", "second stop")
    ]
    begins = f"the job is being stopped ({stop}) by request 'stop': {how_far}"
    assert all(a.message.startswith(begins) for a in refusals)
    assert job.coordinator.stopping == "stop"


@pytest.mark.parametrize(
    ("words", "message"), [("A-failed", "task V0[0] is FAILED, not RUNNING"), ("finish", "every task has finished")]
)
@pytest.mark.parametrize("stop", ["suspend", "drain"])
def test_a_stop_without_running_tasks_is_refused(graph_of: Graphs, stop: str, words: str, message: str) -> None:
    job = Job(graph_of, f"{words} {stop}")
    (refusal,) = pick(job.actions, RequestNotCompleted)
    assert refusal.reason is FailureReason.NOT_ALL_REQUIRED_TASKS_RUNNING
    assert refusal.message == message
    assert job.coordinator.stopping is None


def test_a_stop_that_waited_for_finishing_tasks_and_finds_one_ended_is_answered(graph_of: Graphs) -> None:
    job = Job(graph_of, "ends ack1 suspend A-failed written1 +100")
    assert job.answers == {"stop": "NOT_ALL_REQUIRED_TASKS_RUNNING"}


def test_all_requests_that_waited_for_the_end_of_the_tasks_are_answered(graph_of: Graphs) -> None:
    job = Job(graph_of, "ends ack1 written1 savepoint checkpoint")
    assert job.answers == {}
    job.do("finish")
    assert job.answers == dict.fromkeys(("savepoint", "checkpoint"), "NOT_ALL_REQUIRED_TASKS_RUNNING")


def test_a_stop_before_all_tasks_run_changes_nothing(graph_of: Graphs) -> None:
    job = Job(graph_of, "suspend", running=False)
    assert job.answers == {"stop": "NOT_ALL_REQUIRED_TASKS_RUNNING"}
    job.start()
    assert triggered(job.do("+10")) == [1]


@pytest.mark.parametrize("stop", ["suspend", "drain"])
def test_a_job_that_ends_on_its_own_first(graph_of: Graphs, stop: str) -> None:
    job = Job(graph_of, f"ends ack1 {stop} written1 finish")
    assert job.answers == {"stop": "CHECKPOINT_COORDINATOR_SHUTDOWN"}
    assert "every task has finished" in pick(job.actions, RequestNotCompleted)[0].message
    assert [c.checkpoint_id for c in job.coordinator.completed] == [1]


# While the tasks wait for their final checkpoint


@pytest.mark.parametrize("stop", ["suspend", "drain"])
def test_a_stop_that_arrives_while_waiting_for_the_final_checkpoint_replaces_it(graph_of: Graphs, stop: str) -> None:
    job = Job(graph_of, "ends")
    actions = job.do(stop)
    assert [(a.checkpoint_id, a.reason) for a in pick(actions, CheckpointFailed)] == [(1, SUSPENDED)]
    assert triggered(actions) == [2]
    assert triggered(job.do("ack2 written2 finish +100")) == []
    assert job.answers == {"stop": "at-2"}


def test_a_suspend_that_fails_then_is_followed_by_the_final_checkpoint(graph_of: Graphs) -> None:
    job = Job(graph_of, "ends suspend declined2")
    assert triggered(job.do("+1")) == [3]
    assert triggered(job.do("ack3 written3 finish +100")) == []


# A savepoint that fails

WAYS_TO_FAIL = {
    "declined1": "CHECKPOINT_DECLINED",
    "B-failed": "TASK_FAILURE",
    "+60": "CHECKPOINT_EXPIRED",
    "withdrawn": "CHECKPOINT_EXPIRED",
    "ack1 unwritten1": "FINALIZE_CHECKPOINT_FAILURE",
    "ack1 unknown1": "FINALIZE_CHECKPOINT_FAILURE",
}


@pytest.mark.parametrize("stop", ["suspend", "drain ends"])
def test_a_task_that_ends_on_its_own_during_a_stop_is_not_part_of_the_next_try(graph_of: Graphs, stop: str) -> None:
    job = Job(graph_of, f"{stop} A-finished")
    assert [(a.checkpoint_id, a.reason) for a in pick(job.actions, CheckpointFailed)] == [
        (1, FailureReason.CHECKPOINT_DECLINED_TASK_CLOSING)
    ]
    assert {task for tasks, _ in notified(job.actions, CheckpointAbortedNotice) for task in tasks} == {B, C}, (
        "those that paused go on"
    )
    assert triggered(job.actions) == [1, 2]
    job.do("B-finished ack3 written3")
    assert triggered(job.actions) == [1, 2, 3]
    assert (job.answers, job.coordinator.stopping) == ({"stop": "at-3"}, "stop")


@pytest.mark.parametrize("words", WAYS_TO_FAIL)
def test_after_a_failed_suspend_checkpoints_continue(graph_of: Graphs, words: str) -> None:
    job = Job(graph_of, f"+3 suspend {words}")
    assert job.answers == {"stop": WAYS_TO_FAIL[words]}
    assert job.coordinator.stopping is None
    assert pick(job.actions, FailJob) == []
    if words == "B-failed":
        job.do("B-runs")
    assert triggered(job.do("+9.9")) == []
    assert triggered(job.do("+0.1")) == [2]


@pytest.mark.parametrize("words", WAYS_TO_FAIL)
def test_after_a_failed_drain_nothing_is_triggered_until_the_job_restarts(graph_of: Graphs, words: str) -> None:
    job = Job(graph_of, f"drain ends {words}")
    assert job.answers == {"stop": WAYS_TO_FAIL[words]}
    assert pick(job.actions, FailJob) == []
    assert triggered(job.do("+1000 ends +100")) == []
    (refusal,) = pick(job.do("checkpoint"), RequestNotCompleted)
    assert refusal.reason is SUSPENDED and "'stop'" in refusal.message and "has failed" in refusal.message
    job.do("restart")
    job.start()
    # It is no longer draining.
    assert job.coordinator.stopping is None
    assert triggered(job.do("+10")) == [2]
    assert job.answers == {"stop": WAYS_TO_FAIL[words], "checkpoint": SUSPENDED.name}


def test_after_a_failed_suspend_the_initial_delay_does_not_begin_again(graph_of: Graphs) -> None:
    job = Job(graph_of, "+3 suspend declined1", initial_delay=50.0)
    assert job.coordinator.next_deadline() == 13


def test_a_suspend_can_be_tried_again(graph_of: Graphs) -> None:
    job = Job(graph_of, "suspend declined1")
    assert triggered(job.do("again ack2 written2")) == [2]
    assert job.answers == {"stop": "CHECKPOINT_DECLINED", "second stop": "at-2"}


def test_a_stop_is_refused_without_checkpoints_after_tasks_finish(graph_of: Graphs) -> None:
    job = Job(graph_of, "A-finished suspend", checkpoints_after_tasks_finish=False)
    (refusal,) = pick(job.actions, RequestNotCompleted)
    assert "checkpoints_after_tasks_finish" in refusal.message


def test_a_stop_that_fails_while_it_waits_leaves_nothing_overdue(graph_of: Graphs) -> None:
    # The final checkpoint was due, and waited for the one that is being finalized.
    job = Job(graph_of, "checkpoint ack1 ends suspend B-failed +1 written1")
    assert job.answers["stop"] == "NOT_ALL_REQUIRED_TASKS_RUNNING"
    assert job.coordinator.next_deadline() is None


def test_the_task_whose_failure_ends_the_wait_is_named(graph_of: Graphs) -> None:
    job = Job(graph_of, "checkpoint ack1 suspend B-failed")
    assert job.answers == {}
    job.do("written1")
    assert "V1[0] is FAILED" in pick(job.actions, RequestNotCompleted)[0].message


# The requester's deadline


@pytest.mark.parametrize("stop", ["suspend", "drain"])
def test_a_stop_that_waits_can_be_withdrawn(graph_of: Graphs, stop: str) -> None:
    job = Job(graph_of, f"checkpoint ack1 {stop} withdrawn written1")
    assert job.answers == {"stop": "CHECKPOINT_EXPIRED", "checkpoint": "at-1"}
    assert "the requester has left" in pick(job.actions, RequestNotCompleted)[0].message
    # The sources of a drained job are ending: it cannot continue.
    assert bool(triggered(job.do("+20"))) == (stop == "suspend")


def test_withdrawing_another_request_does_not_affect_a_stop(graph_of: Graphs) -> None:
    job = Job(graph_of, "drain")
    assert job.handle(RequestWithdrawn("another", "too late")) == []
    assert triggered(job.do("ends")) == [1]


def test_a_checkpoint_being_written_is_not_withdrawn(graph_of: Graphs) -> None:
    job = Job(graph_of, "suspend ack1")
    assert job.do("withdrawn") == []
    job.do("written1")
    assert job.answers == {"stop": "at-1"}


def test_a_request_can_be_withdrawn_from_the_queue_and_from_the_tasks(graph_of: Graphs) -> None:
    job = Job(graph_of, "checkpoint", tolerable_failed_checkpoints=0)
    job.handle(CheckpointRequested("queued"))
    for request_id in ("queued", "checkpoint", "unknown"):
        job.handle(RequestWithdrawn(request_id, "too late"))
    assert job.answers == {"queued": "CHECKPOINT_EXPIRED", "checkpoint": "CHECKPOINT_EXPIRED"}
    assert [a.message for a in pick(job.actions, RequestNotCompleted)] == ["too late", "too late"]
    assert job.coordinator.pending_ids == ()
    # A withdrawn request does not count as a failure.
    assert pick(job.actions, FailJob) == []


# The job's end and its restarts


@pytest.mark.parametrize(
    "words", ["checkpoint ack1 suspend written1", "suspend", "drain", "drain ends", "suspend declined1 again"]
)
def test_a_restart_fails_the_stop(graph_of: Graphs, words: str) -> None:
    job = Job(graph_of, words)
    job.do("restart")
    assert job.answers["second stop" if "again" in words else "stop"] == SUSPENDED.name
    assert "is restarting" in pick(job.actions, RequestNotCompleted)[-1].message
    job.start()
    assert job.coordinator.stopping is None
    assert len(triggered(job.do("+10"))) == 1


def test_a_restart_after_the_savepoint_begins_from_it_and_continues(graph_of: Graphs) -> None:
    job = Job(graph_of, "checkpoint ack1 written1 suspend ack2 written2")
    job.do("B-failed restart")
    latest = job.coordinator.latest_completed
    assert latest is not None and latest.location == "at-2"
    assert [c.location for c in job.coordinator.completed] == ["at-1", "at-2"]
    job.start()
    assert triggered(job.do("+10")) == [3]
    discarded = pick(job.do("ack3 written3"), DiscardCheckpoint)
    # The savepoint is the user's.
    assert [a.checkpoint.location for a in discarded] == ["at-1"]


@pytest.mark.parametrize("words", ["drain", "suspend", "checkpoint ack1 suspend"])
def test_a_shutdown_answers_the_stop(graph_of: Graphs, words: str) -> None:
    job = Job(graph_of, words)
    job.handle(Shutdown(JobStatus.CANCELED))
    assert job.answers["stop"] == "CHECKPOINT_COORDINATOR_SHUTDOWN"
    assert job.handle(StopRequested("late"))[0] == RequestNotCompleted(
        "late", FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN, FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN.value
    )


# Without periodic checkpoints


@pytest.mark.parametrize("words", ["suspend", "drain ends"])
def test_a_job_without_periodic_checkpoints_can_be_stopped(graph_of: Graphs, words: str) -> None:
    job = Job(graph_of, words, interval=None)
    job.do("ack1 written1")
    assert job.answers == {"stop": "at-1"}
    job = Job(graph_of, "suspend declined1", interval=None)
    assert job.coordinator.next_deadline() is None
