"""Any events in any order: whatever the runtime says, the coordinator's promises hold."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dagster_checkpoints.coordination import (
    AcknowledgeAnswer,
    AcknowledgeAnswered,
    Acknowledged,
    CheckpointCompleted,
    CheckpointConfig,
    CheckpointCoordinator,
    CheckpointFailed,
    CheckpointProperties,
    CheckpointRequested,
    CoordinatorEvent,
    Declined,
    DiscardCheckpoint,
    DiscardStates,
    EndOfDataReached,
    FailureReason,
    JobRestarting,
    JobStatus,
    MetadataOutcomeUnknown,
    MetadataWriteFailed,
    MetadataWritten,
    NotifyAborted,
    NotifyComplete,
    RequestCompleted,
    RequestFailed,
    Shutdown,
    TaskState,
    TaskStateChanged,
    TaskStatistics,
    Tick,
    TriggerFailed,
    TriggerTask,
    WriteMetadata,
)
from dagster_checkpoints.pipeline import EdgePattern, ExecutionGraph, TaskId, Vertex, VertexEdge

GRAPH = ExecutionGraph(
    (Vertex("a", ("a",), 2), Vertex("b", ("b",), 2), Vertex("c", ("c",), 1)),
    (VertexEdge(0, 1, EdgePattern.POINTWISE), VertexEdge(1, 2, EdgePattern.ALL_TO_ALL)),
)
TASKS = [TaskId(v.name, i) for v in GRAPH.vertices for i in range(v.parallelism)]
some_task = st.sampled_from(TASKS)
near_id = st.integers(-2, 1)


class AnyEvents(RuleBasedStateMachine):
    @initialize(
        concurrent=st.integers(1, 3),
        tolerable=st.integers(0, 2),
        retained=st.integers(1, 2),
        pause=st.integers(0, 9),
    )
    def start(self, concurrent: int, tolerable: int, retained: int, pause: int) -> None:
        config = CheckpointConfig(
            interval=5.0,
            timeout=12.0,
            min_pause=pause,
            max_concurrent=concurrent,
            tolerable_failed_checkpoints=tolerable,
            retained=retained,
            max_queued=3,
        )
        self.coordinator = CheckpointCoordinator(GRAPH, config)
        self.now = 0.0
        self.requests = 0
        self.asked: set[str] = set()
        self.answered: list[str] = []
        self.triggered: list[int] = []
        self.acknowledged: dict[int, set[TaskId]] = {}
        self.held: dict[int, set[TaskId]] = {}
        """Acknowledged states that belong to no completed checkpoint and were not thrown away."""
        self.unknown: set[int] = set()
        self.completed: list[int] = []
        self.ended: set[int] = set()
        self.given_up: set[int] = set()
        self.writing: int | None = None
        for task in TASKS:
            self.do(TaskStateChanged(task, TaskState.RUNNING))

    def do(self, event: CoordinatorEvent) -> None:
        for action in self.coordinator.handle(event, self.now):
            match action:
                case TriggerTask(task, barrier):
                    assert self.coordinator.state_of(task) is TaskState.RUNNING
                    if barrier.checkpoint_id not in self.triggered:
                        assert barrier.checkpoint_id == max(self.triggered, default=0) + 1
                        self.triggered.append(barrier.checkpoint_id)
                case AcknowledgeAnswered(task, checkpoint_id, answer):
                    if answer is AcknowledgeAnswer.SUCCESS:
                        assert task not in self.acknowledged.setdefault(checkpoint_id, set())
                        self.acknowledged[checkpoint_id].add(task)
                        self.held.setdefault(checkpoint_id, set()).add(task)
                case WriteMetadata(checkpoint):
                    assert self.writing is None
                    self.writing = checkpoint.checkpoint_id
                    assert set(checkpoint.states) == self.acknowledged[checkpoint.checkpoint_id]
                    assert checkpoint.plan.wait == set(checkpoint.states)
                    assert set(checkpoint.plan.wait) | set(checkpoint.plan.finished) == set(TASKS)
                case CheckpointCompleted(checkpoint):
                    assert checkpoint.checkpoint_id not in self.ended
                    self.ended.add(checkpoint.checkpoint_id)
                    self.completed.append(checkpoint.checkpoint_id)
                    self.held.pop(checkpoint.checkpoint_id)
                case CheckpointFailed(checkpoint_id):
                    if checkpoint_id is not None:
                        assert checkpoint_id not in self.ended
                        self.ended.add(checkpoint_id)
                case DiscardStates(checkpoint_id, states):
                    assert checkpoint_id not in self.completed
                    assert checkpoint_id not in self.unknown or checkpoint_id in self.ended
                    for task in states:
                        self.held.get(checkpoint_id, set()).discard(task)
                case DiscardCheckpoint(checkpoint):
                    assert checkpoint.checkpoint_id in self.completed
                    assert checkpoint.checkpoint_id not in self.given_up
                    self.given_up.add(checkpoint.checkpoint_id)
                case NotifyComplete(tasks, checkpoint_id):
                    assert checkpoint_id == self.completed[-1]
                    assert all(self.coordinator.state_of(t) is TaskState.RUNNING for t in tasks)
                case NotifyAborted(_, checkpoint_id, _, latest):
                    assert checkpoint_id in self.ended
                    assert latest == self.coordinator_latest()
                case RequestCompleted(request_id, _) | RequestFailed(request_id, _, _):
                    self.answered.append(request_id)

    def coordinator_latest(self) -> int:
        latest = self.coordinator.latest_completed
        return latest.checkpoint_id if latest is not None else 0

    def near(self, offset: int) -> int:
        return max(self.triggered, default=0) + offset

    @rule(seconds=st.integers(0, 7))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.do(Tick())
        due = self.coordinator.next_deadline()
        assert due is None or due > self.now or self.coordinator.pending_ids or due <= self.now + 5

    @rule(task=some_task, offset=near_id, after_finish=st.booleans())
    def acknowledges(self, task: TaskId, offset: int, after_finish: bool) -> None:
        self.do(Acknowledged(task, self.near(offset), task, TaskStatistics(operators_finished=after_finish)))

    @rule(offset=near_id)
    def everybody_acknowledges(self, offset: int) -> None:
        for task in TASKS:
            self.do(Acknowledged(task, self.near(offset), task))

    @rule(task=some_task, offset=near_id, reason=st.sampled_from(FailureReason))
    def declines(self, task: TaskId, offset: int, reason: FailureReason) -> None:
        self.do(Declined(task, self.near(offset), reason))

    @rule(task=some_task, offset=near_id)
    def cannot_be_triggered(self, task: TaskId, offset: int) -> None:
        self.do(TriggerFailed(task, self.near(offset)))

    @rule(task=some_task, state=st.sampled_from([TaskState.RUNNING] * 3 + list(TaskState)))
    def changes(self, task: TaskId, state: TaskState) -> None:
        if self.coordinator.state_of(task) is not TaskState.FINISHED:
            self.do(TaskStateChanged(task, state))

    @rule(task=some_task)
    def is_at_its_end(self, task: TaskId) -> None:
        self.do(EndOfDataReached(task))

    @rule(savepoint=st.booleans())
    def asks(self, savepoint: bool) -> None:
        self.requests += 1
        self.asked.add(str(self.requests))
        kind = CheckpointProperties.for_savepoint() if savepoint else CheckpointProperties()
        self.do(CheckpointRequested(str(self.requests), kind))

    @precondition(lambda self: self.writing is not None)
    @rule(outcome=st.sampled_from([MetadataWritten] * 2 + [MetadataWriteFailed, MetadataOutcomeUnknown]))
    def written(self, outcome: type[MetadataWritten | MetadataWriteFailed | MetadataOutcomeUnknown]) -> None:
        assert self.writing is not None
        checkpoint_id, self.writing = self.writing, None
        if outcome is MetadataOutcomeUnknown:
            self.unknown.add(checkpoint_id)
            kept = set(self.held[checkpoint_id])
            self.do(outcome(checkpoint_id, "?"))
            assert self.held.pop(checkpoint_id) == kept
        else:
            self.do(outcome(checkpoint_id, "x"))

    @precondition(lambda self: self.writing is None)
    @rule()
    def restarts(self) -> None:
        latest = self.coordinator.latest_completed
        finished = frozenset(latest.finished) if latest is not None else frozenset()
        self.do(JobRestarting(finished))
        assert self.coordinator.pending_ids == ()
        for task in TASKS:
            if task not in finished:
                self.do(TaskStateChanged(task, TaskState.RUNNING))

    @invariant()
    def nothing_leaks(self) -> None:
        pending = set(self.coordinator.pending_ids)
        assert pending == set(self.triggered) - self.ended
        assert {i for i, tasks in self.held.items() if tasks} <= pending
        assert len(self.answered) == len(set(self.answered))
        assert set(self.answered) <= self.asked

    @invariant()
    def what_a_restart_needs_is_kept(self) -> None:
        kept = {c.checkpoint_id for c in self.coordinator.completed}
        assert not kept & self.given_up
        assert kept <= set(self.completed)

    def teardown(self) -> None:
        if not hasattr(self, "coordinator"):
            return
        self.do(Shutdown(JobStatus.FAILED))
        assert self.coordinator.pending_ids == ()
        assert set(self.answered) == self.asked
        assert {i for i, tasks in self.held.items() if tasks} <= {self.writing}


TestAnyEvents = AnyEvents.TestCase
TestAnyEvents.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
