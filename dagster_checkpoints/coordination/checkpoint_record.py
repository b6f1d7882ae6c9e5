"""The record of one checkpoint: its course, and every instance's part in it.

Values only. Must not know: how they are collected, how they are displayed.

Source: Flink's AbstractCheckpointStats, TaskStateStats, SubtaskStateStats.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from math import ceil

import msgspec

from dagster_checkpoints.coordination.checkpoints import CheckpointProperties, TaskStatistics
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.pipeline import ExecutionGraph, TaskId, Vertex


class CheckpointStatus(Enum):
    """How far a checkpoint is."""

    IN_PROGRESS = "in progress"
    COMPLETED = "completed"
    FAILED = "failed"


class Acknowledgement(msgspec.Struct, frozen=True):
    """A task's acknowledgement of a checkpoint.

    Attributes:
        at: the coordinator's `now`, seconds.
        measured: the statistics that the task reported with it.
    """

    at: float
    measured: TaskStatistics


@dataclass(frozen=True, slots=True)
class Distribution:
    """How a quantity is distributed.

    Attributes:
        count, minimum, maximum, mean: over all values; 0 without any.
        sample: the latest values, sorted.
    """

    count: int = 0
    minimum: float = 0.0
    maximum: float = 0.0
    mean: float = 0.0
    sample: tuple[float, ...] = field(default=(), repr=False)

    def percentile(self, percent: float) -> float:
        """The smallest value of the sample that at least this percentage of its values does not exceed; 0 without any."""
        if not self.sample:
            return 0.0
        return self.sample[max(0, ceil(len(self.sample) * percent / 100) - 1)]


@dataclass(frozen=True, slots=True)
class InstanceStatistics:
    """One instance's part in a checkpoint.

    Attributes:
        index: index of the instance.
        acknowledged_after: seconds from the trigger to its acknowledgement; None before.
        measured: the statistics that it reported with the acknowledgement; None before.
        finished: whether it had finished before the checkpoint was triggered, and has no part in it.
    """

    index: int
    acknowledged_after: float | None = None
    measured: TaskStatistics | None = None
    finished: bool = False


@dataclass(frozen=True, slots=True)
class VertexStatistics:
    """The part of a vertex of the graph: of one stage, or of a chain of several.

    Attributes:
        name: name of the vertex.
        stages: the stages that its tasks run.
        instances: the parts of all its instances, by index.
    """

    name: str
    stages: tuple[str, ...]
    instances: tuple[InstanceStatistics, ...]

    @property
    def expected(self) -> int:
        """Number of instances that take part."""
        return sum(not instance.finished for instance in self.instances)

    @property
    def acknowledged(self) -> int:
        return sum(instance.measured is not None for instance in self.instances)

    @property
    def acknowledged_after(self) -> float | None:
        """Seconds from the trigger to the latest acknowledgement; None without any."""
        return max((i.acknowledged_after for i in self.instances if i.acknowledged_after is not None), default=None)

    @property
    def measured(self) -> TaskStatistics:
        """What the instances reported: the times of the slowest one, the bytes of all of them."""
        return TaskStatistics.of_all(instance.measured for instance in self.instances if instance.measured is not None)


class CheckpointRecord(msgspec.Struct, frozen=True):
    """The record of one checkpoint.

    Attributes:
        graph: the execution graph of the job.
        request_id: id of the request; None for a checkpoint of the interval or of the end of the data.
        triggered_at, ended_at: the coordinator's `now`, seconds; `ended_at` is None while it is in progress.
        expected: number of tasks that must acknowledge.
        finished: the tasks that had finished before.
        acknowledgements: by task, its acknowledgement; grows while the checkpoint is in progress.
        location: location of a completed checkpoint; None for others.
        reason, message: why a failed checkpoint has failed; None and "" for others.
    """

    graph: ExecutionGraph
    checkpoint_id: int
    properties: CheckpointProperties
    request_id: str | None
    triggered_at: float
    expected: int
    finished: Set[TaskId]
    acknowledgements: Mapping[TaskId, Acknowledgement]
    status: CheckpointStatus = CheckpointStatus.IN_PROGRESS
    ended_at: float | None = None
    location: str | None = None
    reason: FailureReason | None = None
    message: str = ""

    def __repr__(self) -> str:
        return f"<CheckpointRecord {self.checkpoint_id} {self.status.value}, {self.acknowledged} of {self.expected} acknowledged>"

    @property
    def duration(self) -> float | None:
        """Seconds from the trigger to the end; None while it is in progress."""
        return None if self.ended_at is None else self.ended_at - self.triggered_at

    @property
    def acknowledged(self) -> int:
        return len(self.acknowledgements)

    @property
    def waits_for(self) -> tuple[TaskId, ...]:
        """The tasks that must acknowledge, and have not, in topological order."""
        tasks = (TaskId(vertex.name, index) for vertex in self.graph.vertices for index in range(vertex.parallelism))
        return tuple(task for task in tasks if task not in self.finished and task not in self.acknowledgements)

    @property
    def measured(self) -> TaskStatistics:
        """What the tasks reported that have acknowledged: the times of the slowest one, the bytes of all of them."""
        return TaskStatistics.of_all(part.measured for part in self.acknowledgements.values())

    def vertices(self) -> tuple[VertexStatistics, ...]:
        """The parts of all vertices, in topological order."""
        return tuple(self._vertex(vertex) for vertex in self.graph.vertices)

    def stage(self, name: str) -> VertexStatistics:
        """The part of the vertex that runs this stage.

        Raises:
            KeyError: the graph has no such stage.
        """
        for vertex in self.graph.vertices:
            if name in vertex.stages:
                return self._vertex(vertex)
        raise KeyError(name)

    def _vertex(self, vertex: Vertex) -> VertexStatistics:
        instances = tuple(self._instance(TaskId(vertex.name, index)) for index in range(vertex.parallelism))
        return VertexStatistics(vertex.name, vertex.stages, instances)

    def _instance(self, task: TaskId) -> InstanceStatistics:
        part = self.acknowledgements.get(task)
        if part is None:
            return InstanceStatistics(task.index, finished=task in self.finished)
        return InstanceStatistics(task.index, part.at - self.triggered_at, part.measured)
