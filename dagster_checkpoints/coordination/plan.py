"""The checkpoint plan: which tasks a checkpoint triggers, for which it waits, and which have finished.

Computed atomically from the latest known task states and then kept unchanged by the pending checkpoint.
Each task's state is one byte, so that a million instances cost a few scans of a few bytearrays and not a
million objects. Must not know: time, messages, storage.

Source: FLIP-147, "Triggering Checkpoints After Tasks Finished" and its Appendix 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

import msgspec

from dagster_checkpoints.coordination.errors import UnknownTask
from dagster_checkpoints.pipeline import EdgePattern, ExecutionGraph, TaskId, Vertex, pointwise_producers
from dagster_checkpoints.pipeline.errors import UnknownStageError


class TaskState(IntEnum):
    """The state of a task, as last reported to the coordinator."""

    CREATED = 0
    DEPLOYING = 1
    INITIALIZING = 2
    RUNNING = 3
    FINISHED = 4
    CANCELING = 5
    CANCELED = 6
    FAILED = 7


_STATES = tuple(TaskState)
"""By value."""
_RUNNING = TaskState.RUNNING.value
_FINISHED = TaskState.FINISHED.value
_MEMBER = 1
_RUNNING_MASK = bytes(_MEMBER if value == _RUNNING else 0 for value in range(256))
_FINISHED_MASK = bytes(_MEMBER if value == _FINISHED else 0 for value in range(256))
_UNFINISHED_MASK = bytes(0 if value == _FINISHED else _MEMBER for value in range(256))


class TaskSet(Set[TaskId]):
    """A read-only set of tasks: one byte per task of the graph, and no object per task.

    Behaves like any other set (``in``, ``len``, ``==`` with a ``frozenset``); iterates in topological order of
    the vertices and then by index.
    """

    __slots__ = ("_graph", "_length", "_masks")

    def __init__(self, graph: ExecutionGraph, masks: Sequence[bytes | bytearray]) -> None:
        self._graph = graph
        self._masks = tuple([bytes(mask) for mask in masks])
        self._length = b"".join(self._masks).count(_MEMBER)

    @classmethod
    def _from_iterable(cls, it: Iterable[TaskId]) -> Set[TaskId]:  # type: ignore[override]
        return frozenset(it)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[TaskId]:
        for vertex, mask in zip(self._graph.vertices, self._masks, strict=True):
            for index in _members(mask):
                yield TaskId(vertex.name, index)

    def __contains__(self, task: object) -> bool:
        if not (isinstance(task, tuple) and len(task) == 2):
            return False
        name, index = task
        try:
            mask = self._masks[self._graph.index_of(name)]
        except UnknownStageError:
            return False
        return 0 <= index < len(mask) and mask[index] == _MEMBER

    def __eq__(self, other: object) -> bool:
        return Set.__eq__(self, other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = list(map(str, islice(self, 8)))
        more = "" if len(self) <= len(shown) else f", … {len(self)} tasks"
        return f"TaskSet({', '.join(shown)}{more})"

    def restricted_to(self, masks: Sequence[bytes | bytearray]) -> TaskSet:
        """The members whose byte in `masks` (one per vertex of the graph) is 1 as well."""
        return TaskSet(
            self._graph,
            [_both(mine, other) for mine, other in zip(self._masks, masks, strict=True)],
        )

    def mask(self, vertex: int) -> bytes:
        """One byte per instance of the vertex at this position: 1 for a member."""
        return self._masks[vertex]


def _members(mask: bytes) -> Iterator[int]:
    position = mask.find(_MEMBER)
    while position >= 0:
        yield position
        position = mask.find(_MEMBER, position + 1)


def _both(left: bytes | bytearray, right: bytes | bytearray) -> bytes:
    # As two large numbers: the bitwise operation runs over whole words.
    return (int.from_bytes(left) & int.from_bytes(right)).to_bytes(len(left))


class TaskStateTable:
    """The latest known state of every task, one byte each, with the counts that every event reads."""

    def __init__(self, graph: ExecutionGraph, finished: Iterable[TaskId] = ()) -> None:
        self.graph = graph
        self.total = sum(vertex.parallelism for vertex in graph.vertices)
        self._vertex_of = {vertex.name: position for position, vertex in enumerate(graph.vertices)}
        self.reset(finished)

    def reset(self, finished: Iterable[TaskId] = ()) -> None:
        """Every task is CREATED again, except those finished."""
        self.rows = [bytearray(vertex.parallelism) for vertex in self.graph.vertices]
        self.running = 0
        self.finished = 0
        for task in finished:
            self.set(task, TaskState.FINISHED)

    def reset_vertices(self, vertices: Set[str], finished: Iterable[TaskId]) -> None:
        """The tasks of these vertices are CREATED again, except those finished; the others keep their states."""
        for name in vertices:
            row = self.rows[self._vertex_of[name]]
            self.running -= row.count(_RUNNING)
            self.finished -= row.count(_FINISHED)
            row[:] = bytes(len(row))
        for task in finished:
            if task.vertex in vertices:
                self.set(task, TaskState.FINISHED)

    def unfinished_of(self, vertices: Set[str]) -> Iterator[TaskId]:
        """The tasks of these vertices that have not finished."""
        for vertex, row in zip(self.graph.vertices, self.rows, strict=True):
            if vertex.name in vertices:
                yield from (TaskId(vertex.name, index) for index in _members(bytes(row.translate(_UNFINISHED_MASK))))

    def position(self, task: TaskId) -> tuple[int, int]:
        """The position of the task's vertex in the graph, and the task's index in it.

        Raises:
            UnknownTask: the graph has no such task.
        """
        vertex = self._vertex_of.get(task.vertex)
        if vertex is None or not 0 <= task.index < self.graph.vertices[vertex].parallelism:
            known = ", ".join(f"{v.name}[0..{v.parallelism - 1}]" for v in self.graph.vertices[:20])
            raise UnknownTask(
                f"Task {task.vertex}[{task.index}] is not in the execution graph, which has {known}. "
                "Send events only for tasks of the graph that the coordinator was made with."
            )
        return vertex, task.index

    def get(self, task: TaskId) -> TaskState:
        vertex, index = self.position(task)
        return _STATES[self.rows[vertex][index]]

    def set(self, task: TaskId, state: TaskState) -> TaskState:
        """Record the state of a task and return the one before."""
        vertex, index = self.position(task)
        row = self.rows[vertex]
        before = row[index]
        row[index] = state
        self.running += (state == _RUNNING) - (before == _RUNNING)
        self.finished += (state == _FINISHED) - (before == _FINISHED)
        return _STATES[before]

    def running_among(self, tasks: TaskSet) -> TaskSet:
        """Those of the tasks that run now."""
        if self.running == self.total:
            return tasks
        return tasks.restricted_to([row.translate(_RUNNING_MASK) for row in self.rows])

    @property
    def unfinished(self) -> int:
        return self.total - self.finished

    @property
    def all_unfinished_run(self) -> bool:
        """Whether there are unfinished tasks, and all of them run."""
        return 0 < self.running == self.total - self.finished


class NotAllRunning(NamedTuple):
    """No checkpoint can be triggered now: Flink's NOT_ALL_REQUIRED_TASKS_RUNNING, with the first task that is the cause."""

    task: TaskId
    state: TaskState

    @property
    def message(self) -> str:
        if self.state is TaskState.FINISHED:
            return (
                f"task {self.task} is FINISHED and checkpoints after tasks finish are switched off "
                "(checkpoints_after_tasks_finish)"
            )
        return f"task {self.task} is {self.state.name}, not RUNNING"


class CheckpointPlan(msgspec.Struct, frozen=True, eq=False):
    """The tasks of a job as one checkpoint sees them; never changes.

    Attributes:
        graph: the graph it was computed over.
        trigger: the roots: running tasks none of whose predecessors runs.
        wait: every task that has not finished: these must acknowledge.
        finished: every task that has finished.
        fully_finished: the stages all of whose instances have finished.
    """

    graph: ExecutionGraph
    trigger: TaskSet
    wait: TaskSet
    finished: TaskSet
    fully_finished: frozenset[str]

    @property
    def commit(self) -> TaskSet:
        """The tasks that are notified when the checkpoint has completed: those that took part in it."""
        return self.wait

    @property
    def roots(self) -> tuple[str, ...]:
        """The stages in which the checkpoint starts: the first stage of every vertex that has a task to trigger, or its fused
        sources."""
        return self.roots_without(())

    def roots_without(self, ended: Collection[str]) -> tuple[str, ...]:
        """The stages in which the checkpoint starts, if these fused sources have ended while their tasks run."""
        triggered = (v for position, v in enumerate(self.graph.vertices) if _MEMBER in self.trigger.mask(position))
        return tuple(name for vertex in triggered for name in _heads(vertex, ended))


def compute_plan(states: TaskStateTable, *, after_tasks_finish: bool = True) -> CheckpointPlan | NotAllRunning:
    """Compute the plan of a checkpoint triggered now; linear in instances and edges.

    Args:
        states: the latest known state of every task.
        after_tasks_finish: whether a checkpoint may be taken once a task has finished.

    Returns:
        The plan, or the first task that prevents one.
    """
    obstacle = _first_obstacle(states, after_tasks_finish)
    if obstacle is not None:
        return obstacle
    graph = states.graph
    rows = states.rows
    unfinished = [row.translate(_UNFINISHED_MASK) for row in rows]
    trigger = [bytearray(mask) for mask in unfinished]
    finished_counts = [row.count(_FINISHED) for row in rows]
    for edge in graph.edges:
        source, target = edge.source, edge.target
        if finished_counts[source] == len(rows[source]):
            continue
        if edge.pattern is EdgePattern.ALL_TO_ALL or finished_counts[source] == 0:
            # The same for every consumer: each of them reads an instance that still runs.
            trigger[target] = bytearray(len(rows[target]))
        else:
            _clear_fed_pointwise(trigger[target], rows[source])
    return CheckpointPlan(
        graph=graph,
        trigger=TaskSet(graph, trigger),
        wait=TaskSet(graph, unfinished),
        finished=TaskSet(graph, [row.translate(_FINISHED_MASK) for row in rows]),
        fully_finished=frozenset(
            stage
            for position, vertex in enumerate(graph.vertices)
            if finished_counts[position] == vertex.parallelism
            for stage in vertex.stages
        ),
    )


def _heads(vertex: Vertex, ended: Collection[str]) -> tuple[str, ...]:
    """The fused sources that have not ended; without any, the first stage behind them."""
    unended = tuple(name for name in vertex.stages[: vertex.fused] if name not in ended)
    return unended or (vertex.stages[vertex.fused],)


def _first_obstacle(states: TaskStateTable, after_tasks_finish: bool) -> NotAllRunning | None:
    if states.running + states.finished == states.total and (after_tasks_finish or not states.finished):
        return None
    return next(
        NotAllRunning(TaskId(vertex.name, index), TaskState(value))
        for vertex, row in zip(states.graph.vertices, states.rows, strict=True)
        for index, value in enumerate(row)
        if value != _RUNNING and (value != _FINISHED or not after_tasks_finish)
    )


def _clear_fed_pointwise(trigger: bytearray, source: bytearray) -> None:
    """Remove from `trigger` the consumers of a POINTWISE edge one of whose producers has not finished."""
    for index in list(_members(bytes(trigger))):
        producers = pointwise_producers(len(source), len(trigger), index)
        if source.count(_FINISHED, producers.start, producers.stop) != len(producers):
            trigger[index] = 0
