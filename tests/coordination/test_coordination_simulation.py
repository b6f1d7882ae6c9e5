"""The whole protocol without an engine: random pipelines, random schedules, crashes; every record once.

A miniature runtime drives the real coordinator, barrier handlers and life cycles. A record is a number; a
task forwards every record it reads to each of its outputs, and pre-commits it in its sink. What must come out
is known: so many records as there are ways from a source to the task. One seed reproduces a run.
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
    BarrierEvent,
    BarrierReceived,
    BlockChannel,
    CancellationReceived,
    CheckpointBarrier,
    CheckpointCompleted,
    CheckpointConfig,
    CheckpointCoordinator,
    CheckpointFailed,
    CheckpointSnapshot,
    CoordinatorEvent,
    Declined,
    EndOfDataReached,
    EndOfPartitionReceived,
    FailJob,
    JobRestarting,
    LifecycleState,
    MetadataWritten,
    NotifyAborted,
    NotifyComplete,
    TakeSnapshot,
    TaskLifecycle,
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

END_OF_DATA, END_OF_PARTITION = "end of data", "end of partition"
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
                    if task_id in self.tasks and self.tasks[task_id].life.state is not LifecycleState.FINISHED:
                        self.gate(self.tasks[task_id], TriggerReceived(barrier))
                    else:
                        self.tell(TriggerFailed(task_id, barrier.checkpoint_id))
                case WriteMetadata(checkpoint):
                    assert self.writing is None
                    self.writing = checkpoint
                case CheckpointCompleted(checkpoint):
                    self.completed.append(checkpoint.checkpoint_id)
                case NotifyComplete(tasks, checkpoint_id):
                    for task_id in list(tasks):
                        self.live(self.tasks[task_id], lifecycle.CheckpointCompleted(checkpoint_id))
                case NotifyAborted(tasks, checkpoint_id):
                    for task_id in list(tasks):
                        task = self.tasks[task_id]
                        self.gate(task, CancellationReceived(None, checkpoint_id))
                        self.live(task, lifecycle.CheckpointAborted(checkpoint_id))
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
        self.check_consistent(frozenset(checkpoint.plan.finished), states)
        self.latest = checkpoint.checkpoint_id
        self.store[self.latest] = (frozenset(checkpoint.plan.finished), states)
        self.tell(MetadataWritten(self.latest, "x"))

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
        finished, states = self.store[self.latest] if self.latest is not None else (frozenset(), {})
        self.tasks = {}
        self.tell(JobRestarting(finished))
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
        self.live(task, lifecycle.SnapshotTaken(barrier.checkpoint_id))
        statistics = TaskStatistics(operators_finished=after_finish)
        self.tell(Acknowledged(task.id, barrier.checkpoint_id, state, statistics))

    def live(self, task: Task, event: lifecycle.LifecycleEvent) -> None:
        for action in task.life.handle(event):
            match action:
                case lifecycle.FinishOperators():
                    self.live(task, lifecycle.OperatorsFinished())
                case lifecycle.EmitEndOfData():
                    self.emit_control(task, END_OF_DATA)
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
        if task.life.state is LifecycleState.FINISHED:
            return []
        readable: list[str | None] = [n for n in task.inputs if n not in task.blocked and self.logs[n]]
        source = not task.inputs and task.life.state is LifecycleState.RUNNING
        return [*readable, *([None] if source else [])]

    def step(self, task: Task, channel: str | None) -> None:
        if channel is None:
            if task.remaining:
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
        elif element == END_OF_PARTITION:
            self.gate(task, EndOfPartitionReceived(channel))
        else:
            assert task.life.state is LifecycleState.RUNNING, "a record after the end of the data"
            assert element == task.read[channel], "records are read once and in order"
            task.read[channel] += 1
            self.record(task)

    def run(self, crashes: int) -> None:
        for _ in range(50_000):
            if all(task.life.state is LifecycleState.FINISHED for task in self.tasks.values()):
                return
            if crashes and self.random.random() < 0.02:
                crashes -= 1
                self.crash()
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

    def expected(self) -> dict[TaskId, int]:
        count: dict[TaskId, int] = {}
        for task in self.all_tasks():
            producers = [producer for producer, consumer, _ in self.channels() if consumer == task]
            count[task] = sum(count[p] for p in producers) if producers else self.records
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
