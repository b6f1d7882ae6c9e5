"""The whole protocol without an engine: random pipelines, schedules, crashes, savepoints, stops; every record once.

A miniature runtime drives the real coordinator, barrier handlers and life cycles. A record is a number; a
task forwards every record it reads to each of its outputs, and pre-commits it in its sink. What must come out
is known: so many records as there are ways from a source to the task. What the coordinator tells a task lies in
its mailbox for a while. One seed reproduces a run.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from dagster_checkpoints.coordination import (
    AbortAlignment,
    Acknowledged,
    AlignedBarrierHandler,
    AllTasksFinished,
    AnswerDone,
    AnswerFailed,
    BarrierEvent,
    BarrierReceived,
    BlockChannel,
    CancellationReceived,
    CheckpointBarrier,
    CheckpointCompleted,
    CheckpointConfig,
    CheckpointCoordinator,
    CheckpointFailed,
    CheckpointProperties,
    CheckpointRequested,
    CheckpointSnapshot,
    CoordinatorEvent,
    Declined,
    EndOfDataReached,
    EndOfPartitionReceived,
    FailJob,
    FailOver,
    LifecycleState,
    MetadataWriteFailed,
    MetadataWritten,
    NotifyTasks,
    RequestCompleted,
    RequestNotCompleted,
    SavepointCompleted,
    SavepointFailed,
    StopEvent,
    StopRequested,
    StopWithSavepoint,
    TakeSnapshot,
    TaskFailed,
    TaskLifecycle,
    TasksRestarting,
    TaskState,
    TaskStateChanged,
    TaskStatistics,
    Tick,
    TriggerFailed,
    TriggerReceived,
    TriggerTask,
    UnblockChannels,
    WriteMetadata,
    lifecycle,
)
from dagster_checkpoints.pipeline import (
    EdgePattern,
    ExecutionGraph,
    TaskId,
    Vertex,
    VertexEdge,
    pointwise_producers,
)

END_OF_DATA, SUSPENDED, END_OF_PARTITION = "end of data", "suspended", "end of partition"
Element = int | str | CheckpointBarrier


@dataclass
class Snapshot:
    remaining: int
    read: dict[str, int]
    at_end: set[str]
    emitted: int
    pre_committed: list[int]
    operators_finished: bool


@dataclass
class Task:
    id: TaskId
    inputs: list[str]
    outputs: list[str]
    remaining: int
    read: dict[str, int] = field(default_factory=dict)
    at_end: set[str] = field(default_factory=set)
    emitted: int = 0
    open_transaction: list[int] = field(default_factory=list)
    pre_committed: dict[int, list[int]] = field(default_factory=dict)
    blocked: set[str] = field(default_factory=set)
    mailbox: deque[BarrierEvent | lifecycle.LifecycleEvent] = field(default_factory=deque)
    life: TaskLifecycle = field(default_factory=TaskLifecycle)
    barriers: AlignedBarrierHandler = field(init=False)

    def __post_init__(self) -> None:
        self.barriers = AlignedBarrierHandler(self.inputs)
        self.read = dict.fromkeys(self.inputs, 0)


class Simulation:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.graph = self.random_graph()
        self.records = self.random.randint(0, 25)
        self.config = CheckpointConfig(
            interval=self.random.choice([3.0, 20.0, 1000.0]),
            timeout=200.0,
            max_concurrent=self.random.randint(1, 2),
            tolerable_failed_checkpoints=10**6,
        )
        self.now = 0.0
        self.coordinator = CheckpointCoordinator(self.graph, self.config)
        self.store: dict[int, tuple[frozenset[TaskId], dict[TaskId, Snapshot]]] = {}
        self.latest: int | None = None
        self.writing: CheckpointSnapshot | None = None
        self.sinks: dict[TaskId, list[int]] = {t: [] for t in self.all_tasks()}
        self.completed: list[int] = []
        self.savepoints = 0
        """How many of a job that ran on have completed."""
        self.requests = 0
        self.stop: StopWithSavepoint | None = None
        self.drained = False
        """A drain's savepoint has completed: whatever happens, the job ends with what was read by then."""
        self.answer: AnswerDone | AnswerFailed | None = None
        """What came of the latest stop."""
        self.start(frozenset(), {})

    def random_graph(self) -> ExecutionGraph:
        r = self.random
        vertices = tuple(Vertex(f"V{i}", (f"v{i}",), r.randint(1, 3)) for i in range(r.randint(1, 5)))
        edges = []
        for target in range(1, len(vertices)):
            for source in range(target):
                if r.random() < 0.6:
                    edges.append(VertexEdge(source, target, r.choice(list(EdgePattern))))
        return ExecutionGraph(vertices, tuple(edges))

    def all_tasks(self) -> list[TaskId]:
        return [TaskId(v.name, i) for v in self.graph.vertices for i in range(v.parallelism)]

    def channels(self) -> list[tuple[TaskId, TaskId, str]]:
        found = []
        for number, edge in enumerate(self.graph.edges):
            source, target = self.graph.vertices[edge.source], self.graph.vertices[edge.target]
            for i in range(target.parallelism):
                producers = (
                    range(source.parallelism)
                    if edge.pattern is EdgePattern.ALL_TO_ALL
                    else pointwise_producers(source.parallelism, target.parallelism, i)
                )
                for p in producers:
                    producer, consumer = TaskId(source.name, p), TaskId(target.name, i)
                    found.append((producer, consumer, f"{number}:{producer}->{consumer}"))
        return found

    # Starting, from nothing or from a checkpoint

    def start(self, finished: frozenset[TaskId], snapshots: dict[TaskId, Snapshot]) -> None:
        self.fails_over = False
        self.logs: dict[str, deque[Element]] = {name: deque() for _, _, name in self.channels()}
        self.tasks: dict[TaskId, Task] = {}
        for task_id in self.all_tasks():
            if task_id in finished:
                continue
            inputs = [name for _, consumer, name in self.channels() if consumer == task_id]
            outputs = [name for producer, _, name in self.channels() if producer == task_id]
            self.tasks[task_id] = Task(task_id, inputs, outputs, 0 if inputs else self.records)
        for task in self.tasks.values():
            snapshot = snapshots.get(task.id)
            if snapshot is not None:
                self.restore(task, snapshot)
        for producer, consumer, name in self.channels():
            # A finished upstream stage is seen as ended.
            if producer in finished and consumer in self.tasks:
                self.logs[name].extend([END_OF_DATA, END_OF_PARTITION])
        for task in self.tasks.values():
            self.tell(TaskStateChanged(task.id, TaskState.RUNNING))
        for task in self.tasks.values():
            if task.id in snapshots and snapshots[task.id].operators_finished:
                self.live(task, lifecycle.RestoredAfterFinish())

    def restore(self, task: Task, snapshot: Snapshot) -> None:
        task.remaining, task.emitted = snapshot.remaining, snapshot.emitted
        task.read, task.at_end = dict(snapshot.read), set(snapshot.at_end)
        # Two-phase commit: what the checkpoint holds is committed first, and only once.
        held = snapshot.pre_committed
        missing = held[len(self.sinks[task.id]) - (snapshot.emitted - len(held)) :]
        self.sinks[task.id] += missing

    # Coordinator's side

    def tell(self, event: CoordinatorEvent) -> None:
        for action in self.coordinator.handle(event, self.now):
            match action:
                case TriggerTask(task_id, barrier):
                    self.tasks[task_id].mailbox.append(TriggerReceived(barrier))
                case WriteMetadata(checkpoint):
                    assert self.writing is None
                    self.writing = checkpoint
                case CheckpointCompleted(checkpoint):
                    self.completed.append(checkpoint.checkpoint_id)
                case NotifyTasks(tasks, notice):
                    for task_id in tasks:
                        if isinstance(notice, lifecycle.CheckpointAbortedNotice):
                            self.tasks[task_id].mailbox.append(CancellationReceived(None, notice.checkpoint_id))
                        self.tasks[task_id].mailbox.append(notice)
                case RequestCompleted(request_id, checkpoint) if self.stop and request_id == self.stop.request_id:
                    self.drained |= self.stop.drain
                    self.outcome(SavepointCompleted(checkpoint.checkpoint_id, checkpoint.location))
                case RequestNotCompleted(request_id, reason, message) if self.stop and request_id == self.stop.request_id:
                    self.outcome(SavepointFailed(reason, message))
                case FailJob(_, message):
                    raise AssertionError(message)
                case CheckpointFailed():
                    pass

    def write(self) -> None:
        """The metadata of what is waiting is written: this is the commit point."""
        assert self.writing is not None
        checkpoint, self.writing = self.writing, None
        states = {t: s for t, s in checkpoint.states.items() if isinstance(s, Snapshot)}
        assert len(states) == len(checkpoint.states)
        if checkpoint.properties.is_savepoint and self.random.random() < 0.2:
            return self.tell(MetadataWriteFailed(checkpoint.checkpoint_id, "no space"))
        self.check_consistent(frozenset(checkpoint.plan.finished), states)
        if checkpoint.properties.commits:
            self.latest = checkpoint.checkpoint_id
            self.store[self.latest] = (frozenset(checkpoint.plan.finished), states)
        else:
            self.savepoints += 1
        self.tell(MetadataWritten(checkpoint.checkpoint_id, "x"))

    # Requests

    def ask_for_savepoint(self) -> None:
        self.requests += 1
        self.tell(CheckpointRequested(str(self.requests), CheckpointProperties.for_savepoint()))

    def ask_to_stop(self, drain: bool) -> None:
        """Begin a stop unless the coordinator refuses: another is under way, or there is nothing to stop."""
        self.requests += 1
        request_id = str(self.requests)
        self.tell(StopRequested(request_id, drain))
        if self.coordinator.stopping == request_id:
            self.stop = StopWithSavepoint(request_id, drain)

    def outcome(self, event: StopEvent) -> None:
        assert self.stop is not None
        stop = self.stop
        for action in stop.handle(event):
            if isinstance(action, FailOver):
                self.fails_over = True
            else:
                self.answer, self.stop = action, None

    @property
    def draining(self) -> bool:
        """Sources have been told to end, because the stop was accepted."""
        return self.stop is not None and self.stop.drain

    def check_consistent(self, finished: frozenset[TaskId], states: dict[TaskId, Snapshot]) -> None:
        """Across every channel the consumer has read exactly what the producer had sent."""
        for producer, consumer, name in self.channels():
            if producer in states:
                assert consumer in states, f"{consumer} has finished before {producer}"
                assert states[consumer].read[name] == states[producer].emitted
                ended = name in states[consumer].at_end
                assert ended == states[producer].operators_finished
            elif consumer in states:
                assert name in states[consumer].at_end

    def crash(self) -> None:
        while self.writing is not None:
            self.write()
        if self.stop is not None:
            self.outcome(TaskFailed("a crash"))
        finished, states = self.store[self.latest] if self.latest is not None else (frozenset(), {})
        self.tell(TasksRestarting(finished))
        self.start(finished, states)

    def resume(self) -> None:
        """A new job begins from the newest checkpoint, the savepoint of the stop."""
        assert self.latest is not None
        finished, states = self.store[self.latest]
        self.coordinator = CheckpointCoordinator(self.graph, self.config, next_checkpoint_id=self.latest + 1, finished=finished)
        self.start(finished, states)

    # A task's side

    def gate(self, task: Task, event: BarrierEvent) -> None:
        for action in task.barriers.handle(event):
            match action:
                case BlockChannel(channel):
                    task.blocked.add(channel)
                case UnblockChannels(channels):
                    task.blocked -= set(channels)
                case TakeSnapshot(barrier):
                    self.snapshot(task, barrier)
                case AbortAlignment(checkpoint_id, reason):
                    self.tell(Declined(task.id, checkpoint_id, reason))

    def snapshot(self, task: Task, barrier: CheckpointBarrier) -> None:
        task.pre_committed[barrier.checkpoint_id], task.open_transaction = task.open_transaction, []
        held = [record for records in task.pre_committed.values() for record in records]
        after_finish = task.life.operators_finished
        state = Snapshot(task.remaining, dict(task.read), set(task.at_end), task.emitted, held, after_finish)
        for name in task.outputs:
            self.logs[name].append(barrier)
        kind = barrier.properties
        self.live(task, lifecycle.SnapshotTaken(barrier.checkpoint_id, kind.stops_job, kind.is_savepoint))
        statistics = TaskStatistics(operators_finished=after_finish)
        self.tell(Acknowledged(task.id, barrier.checkpoint_id, state, statistics))

    def live(self, task: Task, event: lifecycle.LifecycleEvent) -> None:
        for action in task.life.handle(event):
            match action:
                case lifecycle.FinishOperators():
                    self.live(task, lifecycle.OperatorsFinished())
                case lifecycle.PauseOperators() | lifecycle.ResumeOperators():
                    assert task.life.paused == isinstance(action, lifecycle.PauseOperators)
                case lifecycle.EmitEndOfData(drain):
                    self.emit_control(task, END_OF_DATA if drain else SUSPENDED)
                    if drain:
                        self.tell(EndOfDataReached(task.id))
                case lifecycle.CommitUpTo(checkpoint_id):
                    assert checkpoint_id is not None
                    for earlier in [i for i in task.pre_committed if i <= checkpoint_id]:
                        self.sinks[task.id] += task.pre_committed.pop(earlier)
                case lifecycle.CloseOperators():
                    assert not task.open_transaction
                    assert not any(task.pre_committed.values())
                case lifecycle.EmitEndOfPartition():
                    self.emit_control(task, END_OF_PARTITION)
                case lifecycle.TaskFinished():
                    self.tell(TaskStateChanged(task.id, TaskState.FINISHED))

    def emit_control(self, task: Task, element: str) -> None:
        for name in task.outputs:
            self.logs[name].append(element)

    def record(self, task: Task) -> None:
        task.open_transaction.append(task.emitted)
        for name in task.outputs:
            self.logs[name].append(task.emitted)
        task.emitted += 1

    def can_step(self, task: Task) -> list[str | None]:
        if task.life.state is LifecycleState.FINISHED or task.life.paused:
            return []
        readable: list[str | None] = [n for n in task.inputs if n not in task.blocked and self.logs[n]]
        source = not task.inputs and task.life.state is LifecycleState.RUNNING
        return [*readable, *([None] if source else [])]

    def step(self, task: Task, channel: str | None) -> None:
        if channel is None:
            if task.remaining and not self.draining:
                task.remaining -= 1
                self.record(task)
            else:
                self.live(task, lifecycle.EndOfDataReceived(True))
            return
        element = self.logs[channel].popleft()
        if isinstance(element, CheckpointBarrier):
            self.gate(task, BarrierReceived(channel, element))
        elif element == END_OF_DATA:
            task.at_end.add(channel)
            if len(task.at_end) == len(task.inputs):
                self.live(task, lifecycle.EndOfDataReceived(True))
        elif element == SUSPENDED:
            self.live(task, lifecycle.EndOfDataReceived(False))
        elif element == END_OF_PARTITION:
            self.gate(task, EndOfPartitionReceived(channel))
        else:
            assert task.life.state is LifecycleState.RUNNING, "a record after the end of the data"
            assert element == task.read[channel], "records are read once and in order"
            task.read[channel] += 1
            self.record(task)

    def take_mail(self, task: Task) -> None:
        mail = task.mailbox.popleft()
        if isinstance(mail, lifecycle.CheckpointNotice):
            self.live(task, mail)
        elif task.life.state is not LifecycleState.FINISHED:
            assert isinstance(mail, TriggerReceived | CancellationReceived)
            self.gate(task, mail)
        elif isinstance(mail, TriggerReceived):
            self.tell(TriggerFailed(task.id, mail.barrier.checkpoint_id))

    def run(self, crashes: int, asking: float = 0.0) -> None:
        """Until every task has finished, in the job's own time or by a stop that was asked for."""
        self.answer = None
        for _ in range(50_000):
            if all(task.life.state is LifecycleState.FINISHED for task in self.tasks.values()):
                if self.stop is not None:
                    self.outcome(AllTasksFinished())
                return
            if self.fails_over or (crashes and self.random.random() < 0.02):
                crashes -= not self.fails_over
                self.crash()
                continue
            if self.random.random() < asking:
                if self.random.random() < 0.5:
                    self.ask_for_savepoint()
                else:
                    self.ask_to_stop(drain=self.random.random() < 0.5)
            letters = [task for task in self.tasks.values() if task.mailbox]
            if letters and self.random.random() < 0.4:
                self.take_mail(self.random.choice(letters))
                continue
            choices = [(t, c) for t in self.tasks.values() for c in self.can_step(t)]
            if self.writing is not None and self.random.random() < 0.3:
                self.write()
            elif choices and self.random.random() < 0.9:
                self.step(*self.random.choice(choices))
            else:
                self.now += 0.5
                self.tell(Tick())
        raise AssertionError(f"not finished; pending {self.coordinator.pending_ids}")

    def expected(self, *, read: bool = False) -> dict[TaskId, int]:
        """How many records each task has to commit, of all that there are or of those that the sources have read."""
        count: dict[TaskId, int] = {}
        for task in self.all_tasks():
            producers = [producer for producer, consumer, _ in self.channels() if consumer == task]
            left = self.tasks[task].remaining if read and task in self.tasks else 0
            count[task] = sum(count[p] for p in producers) if producers else self.records - left
        return count


@pytest.mark.parametrize("seed", range(150))
def test_every_record_is_committed_exactly_once(seed: int) -> None:
    simulation = Simulation(seed)
    simulation.run(crashes=seed % 4)
    for task, expected in simulation.expected().items():
        assert simulation.sinks[task] == list(range(expected)), task


@pytest.mark.parametrize("seed", range(150, 170))
def test_without_periodic_checkpoints_in_between_one_checkpoint_ends_everything(seed: int) -> None:
    simulation = Simulation(seed)
    simulation.config = CheckpointConfig(interval=1e9)
    simulation.coordinator = CheckpointCoordinator(simulation.graph, simulation.config)
    simulation.start(frozenset(), {})
    simulation.run(crashes=0)
    assert simulation.completed == [1]


@pytest.mark.parametrize("seed", range(200, 400))
def test_savepoints_and_stops_lose_and_repeat_nothing(seed: int) -> None:
    simulation = Simulation(seed)
    for _ in range(100):
        simulation.run(crashes=seed % 3, asking=0.02)
        # What was read is committed everywhere, exactly once, and nothing else.
        assert simulation.sinks == {t: list(range(n)) for t, n in simulation.expected(read=True).items()}
        if simulation.drained or not isinstance(simulation.answer, AnswerDone):
            break
        simulation.resume()
    if not simulation.drained:
        assert simulation.expected(read=True) == simulation.expected()
