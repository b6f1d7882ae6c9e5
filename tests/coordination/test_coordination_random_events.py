"""Any events in any order: the coordinator's invariants always hold."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dagster_checkpoints.coordination.checkpoints import AcknowledgeAnswer, CheckpointProperties, TaskStatistics
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.coordinator import CheckpointCoordinator
from dagster_checkpoints.coordination.events import (
    AcknowledgeAnswered,
    Acknowledged,
    BacklogChanged,
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointRequested,
    CheckpointTriggered,
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
)
from dagster_checkpoints.coordination.plan import TaskState
from dagster_checkpoints.coordination.retention import JobStatus
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
        backlog=st.sampled_from([None, 0, 15]),
        timing=st.sampled_from([(5.0, None), (5.0, 0.0), (5.0, 30.0), (None, None)]),
        after_finish=st.sampled_from([True, True, True, False]),
        end=st.sampled_from(JobStatus),
    )
    def start(
        self,
        concurrent: int,
        tolerable: int,
        retained: int,
        pause: int,
        backlog: float | None,
        timing: tuple[float | None, float | None],
        after_finish: bool,
        end: JobStatus,
    ) -> None:
        interval, initial_delay = timing
        config = CheckpointConfig(
            interval=interval,
            initial_delay=initial_delay,
            checkpoints_after_tasks_finish=after_finish,
            timeout=12.0,
            min_pause=pause if interval is not None else 0,
            max_concurrent=concurrent,
            tolerable_failed_checkpoints=tolerable,
            retained=retained,
            max_queued=3,
            interval_during_backlog=backlog if interval is not None else None,
        )
        self.coordinator = CheckpointCoordinator(GRAPH, config)
        self.end = end
        self.now = 0.0
        self.requests = 0
        self.requested: set[str] = set()
        self.answered: list[str] = []
        self.triggered: list[int] = []
        self.acknowledged: dict[int, set[TaskId]] = {}
        self.held: dict[int, set[TaskId]] = {}
        """Acknowledged states that belong to no completed checkpoint and were not discarded."""
        self.unknown: set[int] = set()
        """Aborted with an unknown outcome of their write."""
        self.finished: dict[int, frozenset[TaskId]] = {}
        """By checkpoint, the tasks that it does not wait for."""
        self.completed: list[int] = []
        self.ended: set[int] = set()
        self.given_up: set[int] = set()
        self.writing: int | None = None
        self.properties: dict[int, CheckpointProperties] = {}
        self.leaving: set[TaskId] = set()
        """Tasks that may end after a completed checkpoint and have not ended."""
        self.leaving_until = 0.0
        self.failing = False
        """The coordinator has failed the job, which has not restarted."""
        for task in TASKS:
            self.do(TaskStateChanged(task, TaskState.RUNNING))

    def do(self, event: CoordinatorEvent) -> None:
        if isinstance(event, TaskStateChanged) and event.state is not TaskState.RUNNING:
            self.leaving.discard(event.task)
        if self.now >= self.leaving_until or isinstance(event, TasksRestarting):
            self.leaving.clear()
        if isinstance(event, TasksRestarting):
            self.failing = False
        actions = self.coordinator.handle(event, self.now)
        fails = [action for action in actions if isinstance(action, FailJob)]
        # Once, and last: a runtime stops performing actions when it fails the job.
        assert fails == (actions[-1:] if fails else [])
        assert not (fails and self.failing)
        self.failing |= bool(fails)
        for action in actions:
            assert not (self.failing and isinstance(action, CheckpointTriggered | TriggerTask))
            match action:
                case CheckpointTriggered(checkpoint_id, properties, request_id, waiting, finished):
                    self.finished[checkpoint_id] = frozenset(finished)
                    assert checkpoint_id == max(self.triggered, default=0) + 1
                    self.triggered.append(checkpoint_id)
                    self.properties[checkpoint_id] = properties
                    assert 0 < waiting <= len(TASKS)
                    # A stop's savepoint is the only pending checkpoint, and no task is about to abort it.
                    assert properties.stops_job == (self.coordinator.stopping is not None)
                    assert not properties.stops_job or request_id == self.coordinator.stopping
                    assert not self.leaving
                case TriggerTask(task, barrier):
                    assert self.coordinator.state_of(task) is TaskState.RUNNING
                    assert barrier.checkpoint_id == self.triggered[-1]
                case AcknowledgeAnswered(task, checkpoint_id, answer):
                    self.acknowledgement(task, checkpoint_id, answer)
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
                    if checkpoint.properties.commits:
                        self.leaving |= {
                            task
                            for task, measured in checkpoint.statistics.items()
                            if measured.operators_finished and self.coordinator.state_of(task) is TaskState.RUNNING
                        }
                        self.leaving_until = self.now + self.coordinator.config.timeout
                case CheckpointFailed(checkpoint_id):
                    if checkpoint_id is not None:
                        assert checkpoint_id not in self.ended
                        self.ended.add(checkpoint_id)
                case DiscardStates(checkpoint_id, states):
                    assert checkpoint_id not in self.completed
                    assert checkpoint_id not in self.unknown
                    # This discards all states of the checkpoint.
                    assert checkpoint_id not in self.coordinator.pending_ids
                    self.held[checkpoint_id] = self.held.get(checkpoint_id, set()) - set(states)
                case DiscardLateState(task, checkpoint_id):
                    self.held[checkpoint_id].remove(task)
                case DiscardCheckpoint(checkpoint):
                    assert checkpoint.checkpoint_id in self.completed
                    assert checkpoint.checkpoint_id not in self.given_up
                    assert not checkpoint.is_savepoint
                    self.given_up.add(checkpoint.checkpoint_id)
                case NotifyTasks(_, CheckpointAbortedNotice(checkpoint_id)):
                    assert checkpoint_id in self.ended
                case NotifyTasks(tasks, notice):
                    assert notice.checkpoint_id == self.completed[-1]
                    assert isinstance(notice, CheckpointCompletedNotice) == self.properties[notice.checkpoint_id].commits
                    assert all(self.coordinator.state_of(t) is TaskState.RUNNING for t in tasks)
                case RequestCompleted(request_id, _) | RequestNotCompleted(request_id, _, _):
                    self.answered.append(request_id)

    def acknowledgement(self, task: TaskId, checkpoint_id: int, answer: AcknowledgeAnswer) -> None:
        acknowledged = self.acknowledged.setdefault(checkpoint_id, set())
        kept = checkpoint_id in self.completed or checkpoint_id in self.unknown
        pending = checkpoint_id in self.triggered and checkpoint_id not in self.ended
        awaited = task not in self.finished.get(checkpoint_id, frozenset())
        if pending:
            fresh = AcknowledgeAnswer.SUCCESS if awaited else AcknowledgeAnswer.UNKNOWN
            assert answer is (AcknowledgeAnswer.DUPLICATE if task in acknowledged else fresh)
        else:
            thrown_away = AcknowledgeAnswer.DISCARDED if checkpoint_id in self.triggered else AcknowledgeAnswer.UNKNOWN
            assert answer is (AcknowledgeAnswer.DUPLICATE if kept else thrown_away)
        if answer is AcknowledgeAnswer.SUCCESS:
            acknowledged.add(task)
        if answer is not AcknowledgeAnswer.DUPLICATE:
            self.held.setdefault(checkpoint_id, set()).add(task)

    def near(self, offset: int) -> int:
        return max(self.triggered, default=0) + offset

    @rule(seconds=st.integers(0, 7))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.do(Tick())

    @rule(task=some_task, offset=near_id, after_finish=st.booleans())
    def acknowledges(self, task: TaskId, offset: int, after_finish: bool) -> None:
        self.do(Acknowledged(task, self.near(offset), task, TaskStatistics(operators_finished=after_finish)))

    @precondition(lambda self: self.triggered)
    @rule(data=st.data())
    def acknowledges_again(self, data: st.DataObject) -> None:
        checkpoint_id = data.draw(st.sampled_from(self.triggered))
        self.do(Acknowledged(data.draw(some_task), checkpoint_id, "again"))

    @rule(offset=near_id)
    def all_tasks_acknowledge(self, offset: int) -> None:
        for task in TASKS:
            self.do(Acknowledged(task, self.near(offset), task))

    @rule(savepoint=st.booleans(), after_finish=st.booleans())
    def a_checkpoint_is_acknowledged(self, savepoint: bool, after_finish: bool) -> None:
        """Random events alone would complete hardly any."""
        if not self.coordinator.pending_ids:
            self.asks(savepoint)
        for checkpoint_id in self.coordinator.pending_ids:
            for task in TASKS:
                self.do(Acknowledged(task, checkpoint_id, task, TaskStatistics(operators_finished=after_finish)))

    @rule(task=some_task, offset=near_id, reason=st.sampled_from(FailureReason))
    def declines(self, task: TaskId, offset: int, reason: FailureReason) -> None:
        self.do(Declined(task, self.near(offset), reason))

    @rule(task=some_task, state=st.sampled_from([TaskState.RUNNING] * 5 + [TaskState.FINISHED] * 5 + list(TaskState)))
    def changes(self, task: TaskId, state: TaskState) -> None:
        finished = self.coordinator.state_of(task) is TaskState.FINISHED
        self.do(TaskStateChanged(task, state))
        # A later report on a finished task is an old one.
        assert self.coordinator.state_of(task) is (TaskState.FINISHED if finished else state)

    @rule(task=some_task)
    def is_at_its_end(self, task: TaskId) -> None:
        self.do(EndOfDataReached(task))

    @rule(savepoint=st.booleans())
    def asks(self, savepoint: bool) -> None:
        self.requests += 1
        self.requested.add(str(self.requests))
        kind = CheckpointProperties.for_savepoint() if savepoint else CheckpointProperties()
        self.do(CheckpointRequested(str(self.requests), kind))

    @rule(drain=st.booleans())
    def asks_to_stop(self, drain: bool) -> None:
        self.requests += 1
        self.requested.add(str(self.requests))
        self.do(StopRequested(str(self.requests), drain))

    @precondition(lambda self: self.requests)
    @rule(back=st.integers(0, 3))
    def gives_up_waiting(self, back: int) -> None:
        self.do(RequestWithdrawn(str(max(1, self.requests - back)), "too late"))

    @rule(task=some_task, backlog=st.booleans())
    def works_off_a_backlog(self, task: TaskId, backlog: bool) -> None:
        self.do(BacklogChanged(task, backlog))

    @rule()
    def sources_are_ended(self) -> None:
        self.do(DrainBegan())

    @precondition(lambda self: self.writing is not None)
    @rule(outcome=st.sampled_from([MetadataWritten] * 2 + [MetadataWriteFailed, MetadataOutcomeUnknown]))
    def written(self, outcome: type[MetadataWritten | MetadataWriteFailed | MetadataOutcomeUnknown]) -> None:
        assert self.writing is not None
        checkpoint_id, self.writing = self.writing, None
        if outcome is MetadataOutcomeUnknown:
            kept = set(self.held[checkpoint_id])
            self.do(outcome(checkpoint_id, "?"))
            assert self.held.pop(checkpoint_id) == kept
            self.unknown.add(checkpoint_id)
        else:
            self.do(outcome(checkpoint_id, "x"))

    @precondition(lambda self: self.writing is None)
    @rule()
    def restarts(self) -> None:
        latest = self.coordinator.latest_completed
        finished = frozenset(latest.finished) if latest is not None else frozenset()
        self.do(TasksRestarting(finished))
        assert self.coordinator.pending_ids == ()
        for task in TASKS:
            if task not in finished:
                self.do(TaskStateChanged(task, TaskState.RUNNING))

    @invariant()
    def nothing_leaks(self) -> None:
        pending = set(self.coordinator.pending_ids)
        assert pending == set(self.triggered) - self.ended
        assert {i for i, tasks in self.held.items() if tasks} <= pending
        assert all(self.held.get(i, set()) == self.acknowledged.get(i, set()) for i in pending)
        assert len(self.answered) == len(set(self.answered))
        assert set(self.answered) <= self.requested

    @invariant()
    def a_tick_is_never_overdue(self) -> None:
        due = self.coordinator.next_deadline()
        assert due is None or due > self.now

    @invariant()
    def the_statistics_agree(self) -> None:
        counts = self.coordinator.statistics.counts
        assert (counts.triggered, counts.in_progress) == (len(self.triggered), len(self.coordinator.pending_ids))
        assert counts.completed == len(self.completed)
        in_progress = self.coordinator.statistics.in_progress
        assert [record.checkpoint_id for record in in_progress] == list(self.coordinator.pending_ids)
        for record in in_progress:
            assert set(record.acknowledgements) == self.acknowledged.get(record.checkpoint_id, set())

    @invariant()
    def what_a_restart_needs_is_kept(self) -> None:
        kept = {c.checkpoint_id for c in self.coordinator.completed}
        assert not kept & self.given_up
        assert kept <= {i for i in self.completed if self.properties[i].commits}
        # The newest of all, and the newest checkpoint, are always kept.
        committed = [i for i in self.completed if self.properties[i].commits]
        assert not committed or max(committed) in kept
        checkpoints = [i for i in committed if not self.properties[i].is_savepoint]
        assert not checkpoints or max(checkpoints) in kept

    def teardown(self) -> None:
        if not hasattr(self, "coordinator"):
            return
        self.do(Shutdown(self.end))
        assert self.coordinator.pending_ids == ()
        assert set(self.answered) == self.requested
        if self.writing is not None:
            assert self.held.pop(self.writing) == self.acknowledged[self.writing]
            self.unknown.add(self.writing)
        for checkpoint_id in [*self.triggered, self.near(1)]:
            for task in TASKS:
                self.do(Acknowledged(task, checkpoint_id, "late"))
        assert not any(self.held.values())


TestAnyEvents = AnyEvents.TestCase
TestAnyEvents.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
