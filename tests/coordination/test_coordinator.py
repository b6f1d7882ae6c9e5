"""The coordinator's rules, one by one: each test drives a job event by event, with a manual clock."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest
from msgspec.structs import replace

from dagster_checkpoints.coordination.checkpoints import (
    AcknowledgeAnswer,
    CheckpointProperties,
    CompletedCheckpoint,
    TaskStatistics,
)
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.coordinator import CheckpointCoordinator
from dagster_checkpoints.coordination.errors import CheckpointStillFinalizing, InvalidCheckpointConfig, UnknownTask
from dagster_checkpoints.coordination.events import (
    AcknowledgeAnswered,
    Acknowledged,
    BacklogChanged,
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointRequested,
    CheckpointTriggered,
    CoordinatorAction,
    CoordinatorEvent,
    Declined,
    DiscardCheckpoint,
    DiscardLateState,
    DiscardStates,
    DrainBegan,
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
from dagster_checkpoints.coordination.plan import CheckpointPlan, TaskState
from dagster_checkpoints.coordination.retention import JobStatus
from dagster_checkpoints.pipeline import ExecutionGraph, TaskId

Graphs = Callable[[str], ExecutionGraph]
T = TypeVar("T")
A, B, C = TaskId("V0", 0), TaskId("V1", 0), TaskId("V2", 0)
CHAIN = "V0 p1 -ALL-> V1 p1 -ALL-> V2 p1"
SAVEPOINT = CheckpointProperties.for_savepoint()
AFTER_FINISH = TaskStatistics(operators_finished=True)


class Job:
    """A coordinator, its clock, and all its actions."""

    def __init__(
        self,
        graph: ExecutionGraph,
        *,
        running: bool = True,
        finished: Iterable[TaskId] = (),
        completed: Iterable[CompletedCheckpoint] = (),
        next_checkpoint_id: int = 1,
        interval: float | None = 10.0,
        **settings: object,
    ) -> None:
        config = CheckpointConfig(interval=interval, **settings)  # type: ignore[arg-type]
        self.now = 0.0
        self.finished = frozenset(finished)
        self.coordinator = CheckpointCoordinator(
            graph,
            config,
            next_checkpoint_id=next_checkpoint_id,
            finished=self.finished,
            completed=tuple(completed),
        )
        self.tasks = [TaskId(v.name, i) for v in graph.vertices for i in range(v.parallelism)]
        self.actions: list[CoordinatorAction] = []
        if running:
            self.start()

    def start(self) -> None:
        for task in self.tasks:
            if task not in self.finished:
                self.state(task, TaskState.RUNNING)

    def do(self, event: CoordinatorEvent) -> list[CoordinatorAction]:
        actions = self.coordinator.handle(event, self.now)
        self.actions += actions
        return actions

    def state(self, task: TaskId, state: TaskState) -> list[CoordinatorAction]:
        return self.do(TaskStateChanged(task, state))

    def at(self, now: float) -> list[CoordinatorAction]:
        """Advance the clock, with a Tick at every deadline in between."""
        actions: list[CoordinatorAction] = []
        while (due := self.coordinator.next_deadline()) is not None and due <= now:
            self.now = max(self.now, due)
            actions += self.do(Tick())
        self.now = now
        return actions

    def ack(self, checkpoint_id: int, *tasks: TaskId, statistics: TaskStatistics | None = None) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        for task in tasks or self.tasks:
            if self.coordinator.state_of(task) is not TaskState.FINISHED:
                state = f"{task}@{checkpoint_id}"
                actions += self.do(Acknowledged(task, checkpoint_id, state, statistics or TaskStatistics()))
        return actions

    def complete(self, checkpoint_id: int, statistics: TaskStatistics | None = None) -> list[CoordinatorAction]:
        self.ack(checkpoint_id, statistics=statistics)
        return self.do(MetadataWritten(checkpoint_id, f"chk-{checkpoint_id}"))

    def checkpoint(self) -> int:
        """Request a checkpoint and return its id."""
        actions = self.do(CheckpointRequested("by hand"))
        return next(a.barrier.checkpoint_id for a in actions if isinstance(a, TriggerTask))

    @property
    def completed_ids(self) -> list[int]:
        return [a.checkpoint.checkpoint_id for a in pick(self.actions, CheckpointCompleted)]


def pick(actions: Iterable[CoordinatorAction], kind: type[T]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


def notified(actions: Iterable[CoordinatorAction], notice: type[CheckpointNotice]) -> list[tuple[set[TaskId], int]]:
    return [(set(a.tasks), a.notice.checkpoint_id) for a in pick(actions, NotifyTasks) if isinstance(a.notice, notice)]


def triggered(actions: Iterable[CoordinatorAction]) -> list[tuple[int, TaskId]]:
    return [(a.barrier.checkpoint_id, a.task) for a in pick(actions, TriggerTask)]


def failed(actions: Iterable[CoordinatorAction]) -> list[tuple[int | None, FailureReason]]:
    return [(a.checkpoint_id, a.reason) for a in pick(actions, CheckpointFailed)]


# The life of a checkpoint


def test_from_trigger_to_completion(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    assert triggered(job.at(10)) == [(1, A)]
    assert job.coordinator.pending_ids == (1,)
    job.now = 11
    assert pick(job.ack(1, A, C), WriteMetadata) == []
    (write,) = pick(job.ack(1, B), WriteMetadata)
    assert dict(write.checkpoint.states) == {A: "V0[0]@1", B: "V1[0]@1", C: "V2[0]@1"}
    assert write.checkpoint.triggered_at == 10
    assert dict(write.checkpoint.statistics) == dict.fromkeys((A, B, C), TaskStatistics())
    job.now = 12
    actions = job.do(MetadataWritten(1, "s3://b/chk-1"))
    (completed,) = pick(actions, CheckpointCompleted)
    assert completed.checkpoint.location == "s3://b/chk-1"
    assert completed.checkpoint.duration == 2
    assert notified(actions, CheckpointCompletedNotice) == [({A, B, C}, 1)]
    assert job.coordinator.latest_completed == completed.checkpoint
    assert job.coordinator.pending_ids == ()


def test_finished_tasks_count_as_acknowledged_at_once(graph_of: Graphs) -> None:
    job = Job(graph_of("V0 p2 -ALL-> V1 p1"), finished=[TaskId("V0", 0)])
    assert triggered(job.at(10)) == [(1, TaskId("V0", 1))]
    assert len(pick(job.ack(1, TaskId("V0", 1), B), WriteMetadata)) == 1
    actions = job.do(MetadataWritten(1, "x"))
    (completed,) = pick(actions, CheckpointCompleted)
    assert completed.checkpoint.finished == {TaskId("V0", 0)}
    assert (completed.checkpoint.fully_finished, completed.checkpoint.roots) == (frozenset(), ("v0",))
    assert notified(actions, CheckpointCompletedNotice) == [({TaskId("V0", 1), B}, 1)]


def test_a_completed_checkpoint_records_its_finished_stages_and_its_triggered_tasks(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), finished=[A])
    job.checkpoint()
    (completed,) = pick(job.complete(1), CheckpointCompleted)
    assert (completed.checkpoint.fully_finished, completed.checkpoint.roots) == ({"v0"}, ("v1",))


def test_ids_start_at_1_and_continue_after_the_restored_one(graph_of: Graphs) -> None:
    assert Job(graph_of(CHAIN)).checkpoint() == 1
    job = Job(graph_of(CHAIN), next_checkpoint_id=43)
    assert job.checkpoint() == 43
    job.do(TasksRestarting())
    job.start()
    assert job.checkpoint() == 44


def test_a_failed_attempt_to_trigger_uses_no_id(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), running=False)
    actions = job.do(CheckpointRequested("r"))
    assert pick(actions, RequestNotCompleted) == [
        RequestNotCompleted("r", FailureReason.NOT_ALL_REQUIRED_TASKS_RUNNING, "task V0[0] is CREATED, not RUNNING")
    ]
    job.start()
    assert job.checkpoint() == 1


# Answers to acknowledgements


def answers(actions: Iterable[CoordinatorAction]) -> list[AcknowledgeAnswer]:
    return [a.answer for a in pick(actions, AcknowledgeAnswered)]


def test_success_and_duplicate(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.checkpoint()
    assert answers(job.ack(1, A)) == [AcknowledgeAnswer.SUCCESS]
    again = job.do(Acknowledged(A, 1, "another"))
    assert answers(again) == [AcknowledgeAnswer.DUPLICATE]
    assert pick(again, DiscardStates) == []
    (write,) = pick(job.ack(1, B, C), WriteMetadata)
    assert write.checkpoint.states[A] == "V0[0]@1"


def test_a_duplicate_after_completion_throws_nothing_away(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.checkpoint()
    job.complete(1)
    assert job.ack(1, A) == [AcknowledgeAnswered(A, 1, AcknowledgeAnswer.DUPLICATE)]


@pytest.mark.parametrize(
    "after",
    [
        # It is unknown whether the store names it.
        [MetadataOutcomeUnknown(1, "?")],
        [MetadataOutcomeUnknown(1, "?"), Shutdown(JobStatus.FAILED)],
        [Shutdown(JobStatus.FAILED)],
        [Shutdown(JobStatus.CANCELED), MetadataWritten(1, "chk-1")],
        # The store names it.
        [MetadataWritten(1, "chk-1"), Shutdown(JobStatus.FAILED)],
    ],
    ids=lambda events: ", ".join(type(event).__name__ for event in events),
)
def test_a_repeated_acknowledgement_throws_nothing_away_that_the_store_may_name(
    graph_of: Graphs, after: list[CoordinatorEvent]
) -> None:
    job = Job(graph_of(CHAIN))
    job.checkpoint()
    job.ack(1)
    for event in after:
        job.do(event)
    assert job.ack(1, A) == [AcknowledgeAnswered(A, 1, AcknowledgeAnswer.DUPLICATE)]


def test_a_task_that_had_finished_before_has_no_part_in_the_checkpoint(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), finished=[A])
    job.checkpoint()
    late = job.do(Acknowledged(A, 1, "late"))
    assert answers(late) == [AcknowledgeAnswer.UNKNOWN]
    # Its own state only: the checkpoint continues.
    assert pick(late, DiscardLateState) == [DiscardLateState(A, 1, "late")]
    assert pick(late, DiscardStates) == []
    (write,) = pick(job.ack(1, B, C), WriteMetadata)
    assert set(write.checkpoint.states) == {B, C}


@pytest.mark.parametrize(
    ("checkpoint_id", "answer"),
    [
        # 43 and 44 were triggered in this job, and declined.
        (42, AcknowledgeAnswer.UNKNOWN),
        (43, AcknowledgeAnswer.DISCARDED),
        (44, AcknowledgeAnswer.DISCARDED),
        (45, AcknowledgeAnswer.UNKNOWN),
    ],
)
def test_a_late_or_unknown_state_is_thrown_away(graph_of: Graphs, checkpoint_id: int, answer: AcknowledgeAnswer) -> None:
    job = Job(graph_of(CHAIN), next_checkpoint_id=43, tolerable_failed_checkpoints=9)
    for _ in range(2):
        job.do(Declined(B, job.checkpoint()))
    late = job.do(Acknowledged(A, checkpoint_id, "late"))
    assert late == [AcknowledgeAnswered(A, checkpoint_id, answer), DiscardStates(checkpoint_id, {A: "late"})]


def test_an_unknown_task_is_an_error(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.checkpoint()
    with pytest.raises(UnknownTask, match=r"V7\[0\]"):
        job.do(Acknowledged(TaskId("V7", 0), 1))


# Early aborts


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (TaskState.FINISHED, FailureReason.CHECKPOINT_DECLINED_TASK_CLOSING),
        (TaskState.FAILED, FailureReason.TASK_FAILURE),
        (TaskState.CANCELED, FailureReason.TASK_FAILURE),
    ],
)
def test_a_task_that_ends_before_it_acknowledged_aborts_at_once(
    graph_of: Graphs, state: TaskState, reason: FailureReason
) -> None:
    job = Job(graph_of(CHAIN), tolerable_failed_checkpoints=0)
    job.checkpoint()
    job.ack(1, A)
    actions = job.state(B, state)
    assert failed(actions) == [(1, reason)]
    assert f"V1[0] is {state.name}" in pick(actions, CheckpointFailed)[0].message
    assert notified(actions, CheckpointAbortedNotice) == [({A, C}, 1)]
    assert [dict(a.states) for a in pick(actions, DiscardStates)] == [{A: "V0[0]@1"}]
    assert pick(actions, FailJob) == []


def test_a_task_that_ends_after_it_acknowledged_aborts_nothing(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.checkpoint()
    job.ack(1, A)
    assert failed(job.state(A, TaskState.FINISHED)) == []
    assert len(pick(job.ack(1, B, C), WriteMetadata)) == 1


@pytest.mark.parametrize(("reason", "shown"), [("disk full", "disk full"), ("", FailureReason.CHECKPOINT_DECLINED.value)])
def test_the_message_names_the_task_that_declined_and_why(graph_of: Graphs, reason: str, shown: str) -> None:
    job = Job(graph_of(CHAIN))
    job.checkpoint()
    (failure,) = pick(job.do(Declined(B, 1, message=reason)), CheckpointFailed)
    assert failure.message == f"V1[0]: {shown}"


def test_the_end_of_data_aborts_nothing(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.checkpoint()
    assert failed(job.do(EndOfDataReached(A))) == []
    assert job.coordinator.pending_ids == (1,)


def test_a_task_that_reports_once_more_that_it_runs_aborts_nothing(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.checkpoint()
    assert failed(job.state(A, TaskState.RUNNING)) == []
    assert job.coordinator.pending_ids == (1,)


def test_a_decline_after_the_last_acknowledgement_is_late(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.checkpoint()
    job.ack(1)
    assert job.do(Declined(A, 1)) == []
    assert job.do(TaskStateChanged(A, TaskState.FAILED)) == []
    assert pick(job.do(MetadataWritten(1, "x")), CheckpointCompleted) != []


# Time


def test_expiry_names_who_is_missing(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), interval=1000.0, timeout=60.0)
    job.checkpoint()
    job.ack(1, A)
    assert job.coordinator.next_deadline() == 60
    assert failed(job.at(59)) == []
    actions = job.at(60)
    assert failed(actions) == [(1, FailureReason.CHECKPOINT_EXPIRED)]
    assert "2 tasks have not acknowledged, among them V1[0], V2[0]" in pick(actions, CheckpointFailed)[0].message


def test_all_that_have_expired_are_aborted(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), interval=1000.0, timeout=60.0, max_concurrent=2)
    job.do(CheckpointRequested("1"))
    job.do(CheckpointRequested("2"))
    expired = FailureReason.CHECKPOINT_EXPIRED
    assert failed(job.at(60)) == [(1, expired), (2, expired)]


def test_no_expiry_while_metadata_is_written(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), interval=1000.0, timeout=60.0)
    job.checkpoint()
    job.ack(1)
    assert failed(job.at(500)) == []
    assert job.do(Tick()) == []
    assert job.do(MetadataWritten(1, "x")) != []
    assert job.completed_ids == [1]


def test_the_interval_counts_from_when_all_tasks_run(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), running=False)
    job.now = 5
    job.state(A, TaskState.RUNNING)
    job.state(B, TaskState.RUNNING)
    assert job.coordinator.next_deadline() is None
    job.now = 7
    job.state(C, TaskState.RUNNING)
    assert job.coordinator.next_deadline() == 17
    assert triggered(job.at(17)) == [(1, A)]


@pytest.mark.parametrize("graph", [CHAIN, "V0 p1"])
@pytest.mark.parametrize("delay", [0.0, 2.0, 25.0])
def test_initial_delay(graph_of: Graphs, graph: str, delay: float) -> None:
    job = Job(graph_of(graph), initial_delay=delay)
    job.at(delay)
    assert [a.barrier.timestamp for a in pick(job.actions, TriggerTask)] == [delay]
    job.complete(1)
    assert triggered(job.at(delay + 9)) == []
    assert triggered(job.at(delay + 10)) == [(2, A)]


def test_a_periodic_checkpoint_that_finds_a_task_not_running_tries_again(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.state(B, TaskState.INITIALIZING)
    actions = job.at(10)
    assert failed(actions) == [(None, FailureReason.NOT_ALL_REQUIRED_TASKS_RUNNING)]
    assert "V1[0] is INITIALIZING" in pick(actions, CheckpointFailed)[0].message
    job.state(B, TaskState.RUNNING)
    assert triggered(job.at(20)) == [(1, A)]


def test_without_an_interval_there_is_the_final_checkpoint_and_none_before(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), interval=None, tolerable_failed_checkpoints=1)
    for task in job.tasks:
        assert job.coordinator.next_deadline() is None
        assert triggered(job.actions) == []
        job.do(EndOfDataReached(task))
    assert triggered(job.actions) == [(1, A)]
    job.do(Declined(B, 1))
    assert triggered(job.at(1)) == [(2, A)]
    job.complete(2, AFTER_FINISH)
    assert triggered(job.at(50)) == []


def test_without_an_interval_a_checkpoint_can_be_requested(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), interval=None)
    assert job.checkpoint() == 1


def test_min_pause_counts_from_the_last_completion_and_only_for_periodic(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), min_pause=8.0)
    job.at(10)
    job.at(15)
    job.complete(1)
    assert triggered(job.at(20)) == []
    assert job.coordinator.next_deadline() == 23
    assert job.checkpoint() == 2
    job.now = 21
    job.complete(2)
    assert triggered(job.at(28.9)) == []
    assert triggered(job.at(29)) == [(3, A)]


def test_a_periodic_checkpoint_waits_for_a_slot_and_only_one_waits(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    assert triggered(job.at(45)) == [(1, A)]
    assert triggered(job.complete(1)) == [(2, A)]
    assert triggered(job.complete(2)) == []


def test_the_intervals_own_has_its_place_in_time(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.checkpoint()
    job.at(10)
    job.now = 11
    job.do(CheckpointRequested("later", CheckpointProperties.for_periodic()))
    for checkpoint_id in (1, 2):
        job.complete(checkpoint_id)
    assert [a.request_id for a in pick(job.actions, CheckpointTriggered)] == ["by hand", None, "later"]


def test_intervals_that_were_missed_are_not_made_up_for(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.now = 45
    assert triggered(job.do(Tick())) == [(1, A)]
    job.complete(1)
    assert job.coordinator.next_deadline() == 50


@pytest.mark.parametrize(
    ("longer", "events", "at"),
    [
        # What happens when (+ a backlog begins, - it ends), and when a checkpoint is triggered until 120; interval 10.
        (30.0, "", [*range(10, 121, 10)]),
        (None, "1+", [*range(10, 121, 10)]),
        # A checkpoint that is due soon stays due, then the longer interval applies.
        (30.0, "1+", [10, 40, 70, 100]),
        # After a backlog no checkpoint is due later than without one …
        (30.0, "1+ 12-", [10, 22, 32, 42, 52, 62, 72, 82, 92, 102, 112]),
        # … and one that is due earlier stays due.
        (30.0, "1+ 35-", [10, 40, 50, 60, 70, 80, 90, 100, 110, 120]),
        # No checkpoint during a backlog.
        (0.0, "1+", []),
        (0.0, "1+ 95-", [105, 115]),
        (0.0, "1+ 5-", [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120]),
        (0.0, "15+ 96-", [10, 106, 116]),
        # A checkpoint that is due just when the backlog ends is not delayed.
        (0.0, "1+ 10-", [*range(10, 121, 10)]),
    ],
)
def test_the_interval_during_a_backlog(graph_of: Graphs, longer: float | None, events: str, at: list[float]) -> None:
    job = Job(graph_of("V0 p2 -ALL-> V1 p1"), interval_during_backlog=longer)
    found: list[float] = []

    def turn(now: float) -> None:
        while (due := job.coordinator.next_deadline()) is not None and due <= now:
            complete(job.at(due))
        job.at(now)

    def complete(actions: list[CoordinatorAction]) -> None:
        for checkpoint_id, _ in triggered(actions)[:1]:
            found.append(job.now)
            job.complete(checkpoint_id)

    for event in events.split():
        turn(float(event[:-1]))
        complete(job.do(BacklogChanged(A, event.endswith("+"))))
    turn(120)
    assert found == at


@pytest.mark.parametrize(
    ("events", "due"),
    [
        ([BacklogChanged(A, True)], None),
        ([BacklogChanged(A, True), BacklogChanged(TaskId("V0", 1), True), BacklogChanged(A, False)], None),
        ([BacklogChanged(A, True), BacklogChanged(A, False)], 10),
        # A source that has ended has no backlog any more, nor has one that starts again.
        ([BacklogChanged(A, True), EndOfDataReached(A)], 10),
        ([BacklogChanged(A, True), TaskStateChanged(A, TaskState.FINISHED)], 10),
        ([TaskStateChanged(A, TaskState.FINISHED), BacklogChanged(A, True)], 10),
        ([BacklogChanged(A, True), TasksRestarting()], None),
    ],
)
def test_which_sources_have_a_backlog(graph_of: Graphs, events: list[CoordinatorEvent], due: float | None) -> None:
    job = Job(graph_of("V0 p2 -ALL-> V1 p1"), interval_during_backlog=0.0)
    for event in events:
        job.do(event)
    assert job.coordinator.next_deadline() == due
    if isinstance(events[-1], TasksRestarting):
        job.start()
        assert job.coordinator.next_deadline() == 10


@pytest.mark.parametrize(("begins_at", "due"), [(0.0, 25), (1.0, 25), (24.0, 25)])
def test_a_backlog_that_begins_does_not_shorten_the_initial_delay(graph_of: Graphs, begins_at: float, due: float) -> None:
    job = Job(graph_of(CHAIN), initial_delay=25.0, interval_during_backlog=30.0)
    job.at(begins_at)
    job.do(BacklogChanged(A, True))
    assert job.coordinator.next_deadline() == due


def test_a_backlog_that_ends_before_all_tasks_run_changes_nothing(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), running=False, interval_during_backlog=0.0)
    job.do(BacklogChanged(A, True))
    job.do(BacklogChanged(A, False))
    job.now = 3
    job.start()
    assert job.coordinator.next_deadline() == 13


def test_since_when_the_interval_counts(graph_of: Graphs) -> None:
    """A periodic checkpoint is due at most an interval later: what looks at the job from outside counts from there."""
    job = Job(graph_of(CHAIN), running=False, initial_delay=25.0, interval_during_backlog=30.0)
    assert job.coordinator.interval_since is None
    job.now = 5
    job.state(A, TaskState.RUNNING)
    assert job.coordinator.interval_since == 5
    job.now = 7
    job.start()
    assert job.coordinator.interval_since == 22, "the first one is due at 32"
    job.at(40)
    job.complete(1)
    job.do(BacklogChanged(A, True))
    assert (job.coordinator.interval, job.coordinator.interval_since) == (30, 22)
    job.at(50)
    job.do(BacklogChanged(A, False))
    assert (job.coordinator.interval, job.coordinator.interval_since) == (10, 50), "after a backlog"
    job.at(55)
    job.do(StopRequested("stop", drain=False, properties=SAVEPOINT))
    job.now = 300
    job.do(RequestWithdrawn("stop", "too late"))
    assert job.coordinator.stopping is None and job.coordinator.interval_since == 300, "after a stop that has failed"
    job.now = 400
    job.do(TasksRestarting())
    assert job.coordinator.interval_since == 400
    job.now = 900
    job.start()
    assert job.coordinator.interval_since == 915, "the initial delay counts again"


def test_a_backlog_does_not_delay_the_final_checkpoint(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), interval_during_backlog=0.0)
    job.do(BacklogChanged(B, True))
    for task in job.tasks:
        job.do(EndOfDataReached(task))
    assert triggered(job.actions) == [(1, A)]


def test_max_concurrent_and_forced_savepoints(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), max_concurrent=2)
    assert [triggered(job.do(CheckpointRequested(f"c{i}"))) for i in range(3)] == [[(1, A)], [(2, A)], []]
    assert triggered(job.do(CheckpointRequested("s", SAVEPOINT))) == [(3, A)]
    job.complete(1)
    assert job.coordinator.pending_ids == (2, 3)


@pytest.mark.parametrize("stops_job", [False, True])
@pytest.mark.parametrize(
    "properties", [CheckpointProperties(), CheckpointProperties(unaligned=True), CheckpointProperties(forced=True)]
)
@pytest.mark.parametrize(
    ("settings", "forced", "unaligned"),
    [
        ({}, True, False),
        ({"mode": "at_least_once"}, True, False),
        ({"unaligned": True}, False, True),
        ({"unaligned": True, "aligned_checkpoint_timeout": 0.0}, False, True),
        # It is aligned as long as the timeout has not passed.
        ({"unaligned": True, "aligned_checkpoint_timeout": 5.0}, False, False),
    ],
)
def test_the_settings_decide_who_is_forced_and_unaligned(
    graph_of: Graphs,
    settings: dict[str, object],
    forced: bool,
    unaligned: bool,
    properties: CheckpointProperties,
    stops_job: bool,
) -> None:
    job = Job(graph_of(CHAIN), **settings)
    job.do(CheckpointRequested("c", properties))
    savepoint = replace(CheckpointProperties.for_savepoint(stops_job=stops_job), unaligned=properties.unaligned)
    job.do(StopRequested("s", properties=savepoint) if stops_job else CheckpointRequested("s", savepoint))
    # Not forced, a savepoint waits for its turn.
    assert job.coordinator.pending_ids == ((2,) if stops_job else (1, 2) if forced else (1,))
    job.complete(1)
    checkpoint, second = (barrier.properties for barrier in dict.fromkeys(a.barrier for a in pick(job.actions, TriggerTask)))
    assert (checkpoint.forced, checkpoint.unaligned) == (properties.forced, unaligned)
    assert (second.forced, second.unaligned, second.is_savepoint) == (forced, False, True)


def test_periodic_and_final_checkpoints_are_unaligned_too(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), unaligned=True)
    job.at(10)
    job.complete(1)
    for task in job.tasks:
        job.do(EndOfDataReached(task))
    assert [(a.checkpoint_id, a.properties.unaligned) for a in pick(job.actions, CheckpointTriggered)] == [(1, True), (2, True)]


def test_a_full_queue_drops_its_last(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), max_queued=1)
    job.do(CheckpointRequested("runs"))
    job.do(CheckpointRequested("waits"))
    assert pick(job.do(CheckpointRequested("too many")), RequestNotCompleted) == [
        RequestNotCompleted(
            "too many",
            FailureReason.TOO_MANY_CHECKPOINT_REQUESTS,
            FailureReason.TOO_MANY_CHECKPOINT_REQUESTS.value,
        )
    ]
    unaligned = Job(graph_of(CHAIN), max_queued=1, unaligned=True)
    unaligned.do(CheckpointRequested("runs"))
    unaligned.do(CheckpointRequested("waits"))
    (dropped,) = pick(unaligned.do(CheckpointRequested("better", SAVEPOINT)), RequestNotCompleted)
    assert dropped.request_id == "waits"


def test_requests_are_answered_exactly_once(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.do(CheckpointRequested("a"))
    job.do(CheckpointRequested("b"))
    job.complete(1)
    job.do(Declined(A, 2))
    assert [(a.request_id, a.checkpoint.location) for a in pick(job.actions, RequestCompleted)] == [("a", "chk-1")]
    assert [a.request_id for a in pick(job.actions, RequestNotCompleted)] == ["b"]


# Subsumption, retention


def test_a_completed_checkpoint_subsumes_older_pending_ones_except_savepoints(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), max_concurrent=3)
    job.do(CheckpointRequested("1"))
    job.do(CheckpointRequested("2", SAVEPOINT))
    job.do(CheckpointRequested("3"))
    job.do(CheckpointRequested("4", SAVEPOINT))
    job.ack(1, A)
    actions = job.complete(3)
    assert failed(actions) == [(1, FailureReason.CHECKPOINT_SUBSUMED)]
    assert "checkpoint 3 has completed" in pick(actions, CheckpointFailed)[0].message
    assert [dict(a.states) for a in pick(actions, DiscardStates)] == [{A: "V0[0]@1"}]
    assert [a.request_id for a in pick(actions, RequestNotCompleted)] == ["1"]
    assert job.coordinator.pending_ids == (2, 4)
    assert failed(job.complete(4)) == []
    assert pick(job.complete(2), RequestCompleted)[0].request_id == "2"


def test_a_completed_savepoint_subsumes_nothing(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.checkpoint()
    job.do(CheckpointRequested("s", SAVEPOINT))
    assert failed(job.complete(2)) == []
    assert job.coordinator.pending_ids == (1,)
    assert job.coordinator.completed == ()


def test_metadata_is_written_one_at_a_time(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), max_concurrent=3)
    for request in "123":
        job.do(CheckpointRequested(request))
    assert [w.checkpoint.checkpoint_id for w in pick(job.ack(2), WriteMetadata)] == [2]
    assert pick(job.ack(3), WriteMetadata) == []
    assert pick(job.ack(1), WriteMetadata) == []
    actions = job.do(MetadataWritten(2, "x"))
    # 1 is subsumed although it was complete but for its metadata.
    assert failed(actions) == [(1, FailureReason.CHECKPOINT_SUBSUMED)]
    assert [w.checkpoint.checkpoint_id for w in pick(actions, WriteMetadata)] == [3]


def test_the_newest_are_retained(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), retained=2)
    discarded = []
    for _ in range(4):
        checkpoint_id = job.checkpoint()
        actions = job.complete(checkpoint_id)
        discarded.append([a.checkpoint.checkpoint_id for a in pick(actions, DiscardCheckpoint)])
    assert discarded == [[], [], [1], [2]]
    assert [c.checkpoint_id for c in job.coordinator.completed] == [3, 4]


def test_states_are_discarded_after_all_tasks_were_notified(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.checkpoint()
    job.complete(1)
    job.checkpoint()
    kinds = [type(action) for action in job.complete(2)]
    assert kinds.index(CheckpointCompleted) < kinds.index(NotifyTasks) < kinds.index(DiscardCheckpoint)


def test_restored_checkpoints_are_subsumed_like_any_other(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), completed=[CompletedCheckpoint(7, "old")], next_checkpoint_id=8)
    assert pick(job.complete(job.checkpoint()), DiscardCheckpoint)[0].checkpoint.location == "old"


# Failures


def test_more_than_tolerable_failures_in_a_row_fail_the_job(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), tolerable_failed_checkpoints=2)
    for _ in range(2):
        assert pick(job.do(Declined(A, job.checkpoint())), FailJob) == []
    (fail,) = pick(job.do(Declined(A, job.checkpoint(), message="disk full")), FailJob)
    assert fail.reason is FailureReason.CHECKPOINT_DECLINED
    assert re.search("more than 2 .*tolerable_failed_checkpoints.* 3: .*disk full", fail.message)


def test_a_completed_checkpoint_resets_the_count(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), tolerable_failed_checkpoints=1)
    job.do(Declined(A, job.checkpoint()))
    job.complete(job.checkpoint())
    assert pick(job.do(Declined(A, job.checkpoint())), FailJob) == []


def test_failing_the_job_is_the_last_action(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), max_concurrent=2)
    job.checkpoint()
    job.do(CheckpointRequested("s", SAVEPOINT))
    job.ack(1)
    job.ack(2)
    actions = job.do(MetadataWriteFailed(1))
    assert [type(action) for action in actions[-2:]] == [WriteMetadata, FailJob]
    assert len(pick(actions, DiscardStates)) == 1


@pytest.mark.parametrize("late", [TaskState.RUNNING, TaskState.FAILED, TaskState.CREATED])
def test_a_task_that_has_finished_stays_finished_until_the_job_restarts(graph_of: Graphs, late: TaskState) -> None:
    job = Job(graph_of(CHAIN))
    job.state(A, TaskState.FINISHED)
    assert job.state(A, late) == []
    assert job.coordinator.state_of(A) is TaskState.FINISHED
    assert triggered(job.at(10)) == [(1, B)]
    job.do(TasksRestarting())
    job.start()
    assert triggered(job.at(20)) == [(2, A)]


def test_when_the_job_fails_nothing_more_is_triggered_until_it_has_restarted(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), max_concurrent=2)
    job.checkpoint()
    job.do(CheckpointRequested("second"))
    job.do(CheckpointRequested("waits"))
    (_, *_, fail) = actions = job.do(Declined(A, 1))
    assert isinstance(fail, FailJob)
    assert triggered(actions) == []
    # Whatever events come in between; the job is failed once.
    assert job.do(CheckpointRequested("later")) == []
    assert triggered(job.at(599)) == []
    actions = job.at(601)
    assert (failed(actions), triggered(actions)) == ([(2, FailureReason.CHECKPOINT_EXPIRED)], [])
    assert pick(actions, FailJob) == []
    assert job.coordinator.next_deadline() is None
    actions = job.do(TasksRestarting())
    assert [answer.request_id for answer in pick(actions, RequestNotCompleted)] == ["waits", "later"]
    job.start()
    assert triggered(job.at(611)) == [(3, A)]
    (fail,) = pick(job.do(Declined(A, 3)), FailJob)
    assert fail.message.endswith("the last, 3: V0[0]: A task declined the checkpoint.")


def test_checkpoints_that_expire_together_fail_the_job_once(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), interval=None, max_concurrent=2)
    job.checkpoint()
    job.checkpoint()
    actions = job.at(600)
    assert failed(actions) == [(1, FailureReason.CHECKPOINT_EXPIRED), (2, FailureReason.CHECKPOINT_EXPIRED)]
    (fail,) = pick(actions, FailJob)
    assert "the last, 1: " in fail.message
    assert actions[-1] is fail


@pytest.mark.parametrize("drain", [False, True])
def test_a_stop_requested_while_the_job_fails_is_answered_by_the_restart(graph_of: Graphs, drain: bool) -> None:
    job = Job(graph_of(CHAIN), interval=None)
    for task in job.tasks:
        job.do(EndOfDataReached(task))
    assert pick(job.do(Declined(A, 1)), FailJob)
    assert job.do(StopRequested("stop", drain)) == []
    actions = job.do(TasksRestarting())
    assert [(answer.request_id, answer.reason) for answer in pick(actions, RequestNotCompleted)] == [
        ("stop", FailureReason.CHECKPOINT_COORDINATOR_SUSPEND)
    ]
    assert job.coordinator.stopping is None


def test_a_task_that_hangs_while_it_finishes_is_not_waited_for_by_a_job_that_fails(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), interval=None, max_concurrent=2)
    job.checkpoint()
    job.do(CheckpointRequested("second"))
    job.now = 1
    job.complete(1, AFTER_FINISH)
    job.do(Declined(A, 2))
    assert job.coordinator.next_deadline() == 601
    job.at(601)
    assert job.coordinator.next_deadline() is None


def test_a_savepoints_failure_does_not_count(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), tolerable_failed_checkpoints=0)
    job.do(CheckpointRequested("s", SAVEPOINT))
    actions = job.do(Declined(A, 1))
    assert pick(actions, RequestNotCompleted)[0].request_id == "s"
    assert pick(actions, FailJob) == []


def test_failures_are_counted_across_a_restart(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), tolerable_failed_checkpoints=1)
    job.checkpoint()
    assert pick(job.do(Declined(A, 1)), FailJob) == []
    job.do(TasksRestarting())
    job.start()
    job.checkpoint()
    assert len(pick(job.do(Declined(A, 2)), FailJob)) == 1


def test_a_write_that_failed_discards_and_one_of_unknown_outcome_does_not(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), tolerable_failed_checkpoints=2)
    job.checkpoint()
    job.ack(1)
    actions = job.do(MetadataWriteFailed(1, "no space"))
    assert failed(actions) == [(1, FailureReason.FINALIZE_CHECKPOINT_FAILURE)]
    assert pick(actions, CheckpointFailed)[0].message == "no space"
    assert len(pick(actions, DiscardStates)) == 1
    job.checkpoint()
    job.ack(2)
    actions = job.do(MetadataOutcomeUnknown(2, "time-out"))
    assert failed(actions) == [(2, FailureReason.FINALIZE_CHECKPOINT_FAILURE)]
    assert pick(actions, CheckpointFailed)[0].message == "time-out"
    assert pick(actions, DiscardStates) == []
    job.checkpoint()
    job.ack(3)
    actions = job.do(MetadataWriteFailed(3))
    assert len(pick(actions, FailJob)) == 1, "both counted"
    (failure,) = pick(actions, CheckpointFailed)
    assert failure.message == FailureReason.FINALIZE_CHECKPOINT_FAILURE.value


def test_write_outcomes_of_checkpoints_that_are_not_being_written_are_ignored(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.checkpoint()
    assert job.do(MetadataWritten(1, "x")) == []
    assert job.do(MetadataWriteFailed(1)) == []
    assert job.do(MetadataWritten(5, "x")) == []
    assert job.coordinator.pending_ids == (1,)


# The end of the data


def test_when_every_task_is_at_its_end_one_checkpoint_is_triggered_at_once(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), min_pause=100.0)
    job.now = 1
    assert job.do(EndOfDataReached(A)) == []
    assert job.do(EndOfDataReached(B)) == []
    assert not job.coordinator.all_at_end_of_data
    assert triggered(job.do(EndOfDataReached(C))) == [(1, A)]
    assert job.coordinator.all_at_end_of_data
    # Nothing is due but its timeout.
    assert job.coordinator.next_deadline() == 601
    # Not one per tick, and no periodic one beside or after it.
    assert triggered(job.at(35)) == []
    assert triggered(job.complete(1, AFTER_FINISH)) == []
    for task in job.tasks:
        assert triggered(job.state(task, TaskState.FINISHED)) == []
    assert triggered(job.at(100)) == []
    assert job.completed_ids == [1]


def test_finished_tasks_need_not_reach_the_end_of_data_again(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), finished=[A])
    job.do(EndOfDataReached(B))
    assert triggered(job.do(EndOfDataReached(C))) == [(1, B)]


def test_the_last_running_task_may_make_it_true_by_finishing(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.do(EndOfDataReached(B))
    job.do(EndOfDataReached(C))
    assert triggered(job.state(A, TaskState.FINISHED)) == [(1, B)]


def test_a_task_that_is_not_running_yet_delays_it(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.state(C, TaskState.INITIALIZING)
    for task in job.tasks:
        job.do(EndOfDataReached(task))
    assert triggered(job.actions) == []
    assert triggered(job.state(C, TaskState.RUNNING)) == [(1, A)]


def test_it_follows_a_pending_one_that_began_before(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.checkpoint()
    job.ack(1, A)
    for task in job.tasks:
        job.do(EndOfDataReached(task))
    assert job.coordinator.pending_ids == (1,)
    assert triggered(job.complete(1)) == [(2, A)]


def test_it_runs_beside_a_pending_one_where_there_is_room(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), max_concurrent=2)
    job.checkpoint()
    for task in job.tasks[:2]:
        job.do(EndOfDataReached(task))
    assert triggered(job.do(EndOfDataReached(C))) == [(2, A)]


def test_a_pending_one_that_serves_every_task_makes_it_needless(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.do(EndOfDataReached(A))
    job.checkpoint()
    job.do(EndOfDataReached(B))
    job.do(EndOfDataReached(C))
    # Every task took its snapshot behind EndOfData, that is after its finish().
    assert triggered(job.complete(1, AFTER_FINISH)) == []
    assert triggered(job.at(30)) == []
    for task in job.tasks:
        job.state(task, TaskState.FINISHED)
    assert failed(job.actions) == []


def test_a_requested_checkpoint_serves_as_the_final_one(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), max_concurrent=1)
    job.checkpoint()
    for task in job.tasks:
        job.do(EndOfDataReached(task))
    job.do(CheckpointRequested("c"))
    assert triggered(job.complete(1)) == [(2, A)]
    assert triggered(job.complete(2, AFTER_FINISH)) == []
    assert triggered(job.at(50)) == []


def test_a_savepoint_does_not(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.checkpoint()
    for task in job.tasks:
        job.do(EndOfDataReached(task))
    job.do(CheckpointRequested("s", SAVEPOINT))
    assert job.coordinator.pending_ids == (1, 2)
    actions = job.complete(2, AFTER_FINISH)
    assert notified(actions, SavepointCompletedNotice) == [(set(job.tasks), 2)]
    assert notified(actions, CheckpointCompletedNotice) == []
    assert triggered(job.complete(1)) == [(3, A)]


def test_the_final_checkpoint_does_not_wait_for_a_savepoint(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), max_concurrent=2)
    job.checkpoint()
    job.do(CheckpointRequested("c"))
    for task in job.tasks:
        job.do(EndOfDataReached(task))
    job.do(CheckpointRequested("s", SAVEPOINT))
    assert job.coordinator.pending_ids == (1, 2, 3)
    assert triggered(job.complete(2)) == [(4, A)]


def test_of_two_that_could_serve_only_one_is_triggered(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), max_concurrent=2)
    for request in "123":
        job.do(CheckpointRequested(request))
    for task in job.tasks:
        job.do(EndOfDataReached(task))
    # Two places become free at once, since 1 is subsumed; the third request serves all.
    assert triggered(job.complete(2)) == [(3, A)]


def test_a_failed_one_is_repeated_after_a_back_off(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), tolerable_failed_checkpoints=5)
    for task in job.tasks:
        job.do(EndOfDataReached(task))
    assert triggered(job.do(Declined(B, 1))) == []
    assert job.coordinator.next_deadline() == 1
    assert triggered(job.at(1)) == [(2, A)]
    job.do(Declined(B, 2))
    assert triggered(job.at(2)) == [(3, A)]
    job.complete(3, AFTER_FINISH)
    assert triggered(job.at(50)) == []


@pytest.mark.parametrize(("interval", "again_at"), [(10.0, 1), (1.0, 1), (0.25, 0.25), (None, 1)])
def test_the_back_off_is_never_longer_than_the_interval(graph_of: Graphs, interval: float | None, again_at: float) -> None:
    job = Job(graph_of(CHAIN), interval=interval, tolerable_failed_checkpoints=5)
    for task in job.tasks:
        job.do(EndOfDataReached(task))
    job.do(Declined(B, 1))
    assert job.coordinator.next_deadline() == again_at


def test_a_task_that_is_just_finishing_is_let_go_first(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.do(EndOfDataReached(A))
    job.checkpoint()
    job.ack(1, A, statistics=AFTER_FINISH)
    job.ack(1, B, C)
    job.do(MetadataWritten(1, "x"))
    job.do(EndOfDataReached(B))
    # A is committing and will end soon, which would abort a checkpoint triggered now.
    assert triggered(job.do(EndOfDataReached(C))) == []
    assert triggered(job.state(A, TaskState.FINISHED)) == [(2, B)]


@pytest.mark.parametrize("properties", [CheckpointProperties(), SAVEPOINT])
def test_nothing_is_triggered_while_a_task_is_just_finishing(graph_of: Graphs, properties: CheckpointProperties) -> None:
    job = job_whose_first_task_is_leaving(graph_of)
    assert triggered(job.at(25)) == []
    assert triggered(job.do(CheckpointRequested("r", properties))) == []
    assert (2, B) in triggered(job.state(A, TaskState.FINISHED))
    assert failed(job.actions) == []


def test_a_checkpoint_waits_for_a_committing_task_only_until_the_timeout(graph_of: Graphs) -> None:
    job = job_whose_first_task_is_leaving(graph_of, timeout=60.0)
    assert triggered(job.at(59)) == []
    assert job.coordinator.next_deadline() == 60
    assert triggered(job.at(60)) == [(2, A)]
    assert failed(job.at(120)) == [(2, FailureReason.CHECKPOINT_EXPIRED)]


def test_a_restart_forgets_who_was_just_finishing(graph_of: Graphs) -> None:
    job = job_whose_first_task_is_leaving(graph_of)
    job.do(TasksRestarting())
    job.start()
    assert triggered(job.at(10)) == [(2, A)]


def test_a_task_that_is_gone_when_the_checkpoint_completes_is_not_waited_for(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.do(EndOfDataReached(A))
    job.checkpoint()
    job.ack(1, A, statistics=AFTER_FINISH)
    job.ack(1, B, C)
    job.state(A, TaskState.FINISHED)
    job.do(MetadataWritten(1, "x"))
    assert triggered(job.at(10)) == [(2, B)]


def test_a_task_that_starts_again_has_its_end_before_it(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.do(EndOfDataReached(A))
    job.state(A, TaskState.INITIALIZING)
    job.state(A, TaskState.RUNNING)
    job.do(EndOfDataReached(B))
    assert triggered(job.do(EndOfDataReached(C))) == []
    assert triggered(job.do(EndOfDataReached(A))) == [(1, A)]


def test_a_task_that_starts_again_after_the_final_checkpoint_gets_another_at_once(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    for task in job.tasks:
        job.do(EndOfDataReached(task))
    job.complete(1, AFTER_FINISH)
    job.state(A, TaskState.INITIALIZING)
    job.state(A, TaskState.RUNNING)
    job.do(EndOfDataReached(A))
    job.state(B, TaskState.FINISHED)
    assert triggered(job.state(C, TaskState.FINISHED)) == [(2, A)]


def test_a_final_checkpoint_whose_commits_all_hang_is_followed_by_another(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), timeout=60.0)
    for task in job.tasks:
        job.do(EndOfDataReached(task))
    job.complete(1, AFTER_FINISH)
    assert triggered(job.at(59)) == []
    assert triggered(job.at(60)) == [(2, A)]


def job_whose_first_task_is_leaving(graph_of: Graphs, **settings: object) -> Job:
    job = Job(graph_of(CHAIN), **settings)  # type: ignore[arg-type]
    job.do(EndOfDataReached(A))
    job.checkpoint()
    job.ack(1, A, statistics=AFTER_FINISH)
    job.ack(1, B, C)
    job.do(MetadataWritten(1, "x"))
    return job


def test_the_final_checkpoint_waits_in_the_queue_once(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), max_queued=2)
    job.checkpoint()
    for task in job.tasks:
        job.do(EndOfDataReached(task))
    for _ in range(3):
        job.do(Tick())
    job.do(CheckpointRequested("there is room"))
    assert pick(job.actions, RequestNotCompleted) == []


def test_a_periodic_checkpoint_that_waits_in_the_queue_is_not_wanted_after_a_drain(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.checkpoint()
    job.at(10)
    job.do(DrainBegan())
    assert triggered(job.complete(1)) == []


def test_nothing_is_due_while_the_final_checkpoint_waits_in_the_queue(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), timeout=60.0)
    job.checkpoint()
    for task in job.tasks:
        job.do(EndOfDataReached(task))
    assert job.coordinator.next_deadline() == 60


def test_a_final_checkpoint_that_a_full_queue_dropped_comes_back_after_a_back_off(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), max_queued=1)
    job.checkpoint()
    job.do(CheckpointRequested("queued"))
    for task in job.tasks:
        job.do(EndOfDataReached(task))
    assert job.coordinator.next_deadline() == 1
    job.do(RequestWithdrawn("queued", "the requester has left"))
    job.at(1)
    assert triggered(job.complete(1)) == [(2, A)]


def test_so_does_one_that_a_better_request_has_pushed_out(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), max_queued=1)
    job.checkpoint()
    for task in job.tasks:
        job.do(EndOfDataReached(task))
    assert triggered(job.do(CheckpointRequested("better", SAVEPOINT))) == [(2, A)]
    assert job.coordinator.next_deadline() == 1
    job.at(1)
    job.complete(2)
    assert triggered(job.complete(1)) == [(3, A)]


def test_when_only_some_tasks_are_at_their_end_the_next_periodic_checkpoint_serves(graph_of: Graphs) -> None:
    job = Job(graph_of("V0 p2 -ALL-> V1 p1"))
    job.do(EndOfDataReached(TaskId("V0", 0)))
    assert triggered(job.actions) == []
    assert len(triggered(job.at(10))) == 2


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_a_chain_of_any_depth_ends_with_one_checkpoint(graph_of: Graphs, depth: int) -> None:
    job = Job(graph_of(" -ALL-> ".join(f"V{i} p2" for i in range(depth))))
    for task in job.tasks:
        job.do(EndOfDataReached(task))
    job.complete(1, AFTER_FINISH)
    for task in job.tasks:
        job.state(task, TaskState.FINISHED)
    job.at(1000)
    assert job.completed_ids == [1]
    assert failed(job.actions) == []


def test_without_checkpoints_after_tasks_finish_no_task_waits(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), checkpoints_after_tasks_finish=False)
    for task in job.tasks:
        job.do(EndOfDataReached(task))
    assert triggered(job.actions) == []


# Restart, shutdown


def test_a_restart_aborts_pending_checkpoints_and_keeps_completed_ones(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), tolerable_failed_checkpoints=3)
    job.do(Declined(A, job.checkpoint()))
    job.complete(job.checkpoint())
    job.do(Declined(A, job.checkpoint()))
    job.do(CheckpointRequested("pending"))
    job.do(CheckpointRequested("queued"))
    job.ack(4, A)
    actions = job.do(TasksRestarting(finished=frozenset({A})))
    reason = FailureReason.CHECKPOINT_COORDINATOR_SUSPEND
    assert failed(actions) == [(4, reason)]
    assert all(a.message == "the job is restarting" for a in pick(actions, RequestNotCompleted) + pick(actions, CheckpointFailed))
    assert {(a.request_id, a.reason) for a in pick(actions, RequestNotCompleted)} == {
        ("pending", reason),
        ("queued", reason),
    }
    assert [dict(a.states) for a in pick(actions, DiscardStates)] == [{A: "V0[0]@4"}]
    assert job.coordinator.state_of(A) is TaskState.FINISHED
    assert job.coordinator.state_of(B) is TaskState.CREATED
    assert [c.checkpoint_id for c in job.coordinator.completed] == [2]
    assert job.coordinator.next_deadline() is None
    job.now = 100
    job.finished = frozenset({A})
    job.start()
    assert triggered(job.at(110)) == [(5, B)]


def test_a_drain_ends_with_the_final_checkpoint_alone(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), interval=10.0)
    assert triggered(job.at(10.0)) == [(1, A)]
    job.complete(1)
    job.do(DrainBegan())
    # Three intervals pass while the tasks come to their ends one after the other: nothing is triggered.
    for now, task in ((25.0, A), (35.0, B)):
        assert triggered(job.at(now)) == []
        assert triggered(job.do(EndOfDataReached(task))) == []
    assert triggered(job.do(EndOfDataReached(C))) == [(2, A)]


def test_an_unknown_event_is_refused(graph_of: Graphs) -> None:
    with pytest.raises(AssertionError, match="'no event'"):
        Job(graph_of(CHAIN)).do("no event")  # type: ignore[arg-type]


def test_a_restart_forgets_the_end_of_data(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    for task in job.tasks:
        job.do(EndOfDataReached(task))
    job.do(TasksRestarting())
    job.start()
    assert not job.coordinator.all_at_end_of_data
    for task in job.tasks[:-1]:
        assert triggered(job.do(EndOfDataReached(task))) == []
    assert triggered(job.do(EndOfDataReached(C))) == [(2, A)]


def test_no_restart_before_the_outcome_of_a_write_is_known(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.checkpoint()
    job.ack(1)
    assert job.coordinator.finalizing == 1
    with pytest.raises(CheckpointStillFinalizing) as found:
        job.do(TasksRestarting())
    assert str(found.value) == (
        "TasksRestarting was sent while the metadata of checkpoint 1 is being written. A restart from an older checkpoint would "
        "abort the transactions that it holds. Wait for the outcome (MetadataWritten, MetadataWriteFailed, "
        "MetadataOutcomeUnknown) and send TasksRestarting then."
    )
    job.do(MetadataOutcomeUnknown(1))
    assert job.coordinator.finalizing is None
    job.do(TasksRestarting())


def test_a_restart_from_a_checkpoint_of_unknown_outcome_retains_it(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), tolerable_failed_checkpoints=1)
    job.checkpoint()
    job.complete(1)
    job.checkpoint()
    job.ack(2)
    job.do(MetadataOutcomeUnknown(2))
    found = CompletedCheckpoint(2, "it had landed", finished=frozenset({A}))
    assert job.checkpoint() == 3
    actions = job.do(TasksRestarting(found.finished, restored=found))
    assert failed(actions) == [(3, FailureReason.CHECKPOINT_COORDINATOR_SUSPEND)]
    assert [a.checkpoint.checkpoint_id for a in pick(actions, DiscardCheckpoint)] == [1]
    assert job.coordinator.latest_completed == found
    assert pick(job.do(TasksRestarting(found.finished, restored=found)), DiscardCheckpoint) == []
    assert job.coordinator.completed == (found,)


@pytest.mark.parametrize(
    ("status", "keep", "discarded"),
    [
        (JobStatus.FINISHED, False, ["chk-1"]),
        (JobStatus.FINISHED, True, []),
        (JobStatus.FAILED, False, []),
        (JobStatus.CANCELED, False, []),
        (JobStatus.SUSPENDED, False, []),
    ],
)
def test_only_a_finished_job_gives_its_checkpoints_up(
    graph_of: Graphs, status: JobStatus, keep: bool, discarded: list[str]
) -> None:
    job = Job(graph_of(CHAIN), keep_on_finish=keep)
    job.checkpoint()
    job.complete(1)
    actions = job.do(Shutdown(status))
    assert [a.checkpoint.location for a in pick(actions, DiscardCheckpoint)] == discarded


def test_after_shutdown_nothing_is_triggered_and_every_request_is_answered(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.checkpoint()
    job.ack(1, A)
    actions = job.do(Shutdown(JobStatus.CANCELED))
    reason = FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN
    assert failed(actions) == [(1, reason)]
    assert pick(actions, RequestNotCompleted) == [RequestNotCompleted("by hand", reason, reason.value)]
    assert job.coordinator.next_deadline() is None
    assert pick(job.do(CheckpointRequested("late")), RequestNotCompleted)[0].reason is reason
    late = job.ack(1, B)
    assert answers(late) == [AcknowledgeAnswer.DISCARDED]
    assert len(pick(late, DiscardStates)) == 1
    assert job.do(Tick()) == []


def test_shutdown_keeps_the_states_of_a_checkpoint_being_written(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN))
    job.checkpoint()
    job.ack(1)
    assert pick(job.do(Shutdown(JobStatus.CANCELED)), DiscardStates) == []


# Settings and properties


WITH_LONGER = "1 or more together with interval_during_backlog, or None"
LONGER = "0, or at least `interval`, which must be set, or None"


@pytest.mark.parametrize(
    ("others", "name", "refused", "expected", "taken"),
    [
        ({}, "interval", 0, "a positive number or None", [0.1, None]),
        ({}, "timeout", 0, "a positive number", [0.1]),
        ({}, "min_pause", -0.1, "0 or more", [0]),
        ({}, "max_concurrent", 0, "1 or more", [1]),
        ({}, "tolerable_failed_checkpoints", -1, "0 or more", [0]),
        ({}, "retained", 0, "1 or more", [1]),
        ({}, "mode", "at_most_once", "exactly_once or at_least_once", ["exactly_once", "at_least_once"]),
        ({"mode": "at_least_once"}, "unaligned", True, "False with mode='at_least_once'", [False]),
        ({"unaligned": True}, "max_concurrent", 2, "1 with unaligned=True", [1]),
        (
            {"unaligned": True},
            "aligned_checkpoint_timeout",
            -1,
            "None, or 0 or more together with unaligned=True",
            [0, 0.1, None],
        ),
        ({"unaligned": False}, "aligned_checkpoint_timeout", 1, "None, or 0 or more together with unaligned=True", [None]),
        ({}, "initial_delay", -0.1, "0 or more, or None", [0, None]),
        ({}, "max_queued", 0, "1 or more", [1]),
        ({}, "history", -1, "0 or more", [0]),
        ({"interval": 2}, "interval_during_backlog", 1, LONGER, [0, 2, 3, None]),
        ({"interval": None}, "interval_during_backlog", 1, LONGER, [None]),
        ({"interval": 2}, "backlog_rows", 5, WITH_LONGER, [None]),
        ({"interval": 2, "interval_during_backlog": 3}, "backlog_rows", 0, WITH_LONGER, [None, 1]),
        ({"interval": None}, "initial_delay", 5, "None with interval=None: nothing waits for it", [None]),
        ({"interval": None}, "min_pause", 5, "0 with interval=None: nothing waits for it", [0]),
        ({}, "unaligned", 1, "True or False", [False]),
        ({}, "keep_on_finish", "no", "True or False", [False, True]),
        ({}, "checkpoints_after_tasks_finish", None, "True or False", [False, True]),
    ],
)
def test_settings_outside_their_range_are_refused_by_name(
    others: dict[str, object], name: str, refused: object, expected: str, taken: list[object]
) -> None:
    def config(value: object) -> CheckpointConfig:
        return CheckpointConfig(**{"interval": 1, **others, name: value})  # type: ignore[arg-type]

    with pytest.raises(InvalidCheckpointConfig, match=re.escape(f"{name} is {refused!r}; expected {expected}.") + "$"):
        config(refused)
    assert [getattr(config(value), name) for value in taken] == taken


SECONDS = ("interval", "timeout", "min_pause", "initial_delay", "interval_during_backlog", "aligned_checkpoint_timeout")
COUNTS = ("max_concurrent", "tolerable_failed_checkpoints", "retained", "max_queued", "history", "backlog_rows")


@pytest.mark.parametrize("name", [*SECONDS, *COUNTS])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "5", 1.5])
def test_what_is_no_number_of_its_kind_is_refused(name: str, value: object) -> None:
    others = {"interval": 1, "interval_during_backlog": 3, "unaligned": name == "aligned_checkpoint_timeout"}
    if name in SECONDS and value == 1.5:
        CheckpointConfig(**{**others, name: value})  # type: ignore[arg-type]
        return
    with pytest.raises(InvalidCheckpointConfig, match=re.escape(f"{name} is {value!r}; expected ")):
        CheckpointConfig(**{**others, name: value})  # type: ignore[arg-type]


def test_the_plan_and_its_roots_can_be_read(graph_of: Graphs) -> None:
    job = Job(graph_of(CHAIN), finished=[A])
    assert isinstance(job.coordinator.plan(), CheckpointPlan)
    assert job.coordinator.roots == ("v1",)
    job.state(C, TaskState.FAILED)
    assert job.coordinator.roots == ()
