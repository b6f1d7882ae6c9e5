"""The values of a checkpoint: its kind and properties, its barrier, and the two types pending and completed.

A completed checkpoint never changes. Must not know: when a checkpoint is triggered, how it is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from enum import Enum
from types import MappingProxyType

import msgspec

from dagster_checkpoints.coordination.plan import CheckpointPlan
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state.metadata import EnumeratorState


class CheckpointKind(Enum):
    """Who owns the result: a checkpoint belongs to the system; a savepoint belongs to the user, and the system never deletes
    it."""

    CHECKPOINT = "checkpoint"
    SAVEPOINT = "savepoint"


_SAVEPOINT = CheckpointKind.SAVEPOINT  # read at every event, and a look-up in an enumeration is slow


class CheckpointProperties(msgspec.Struct, frozen=True):
    """The kind of a checkpoint, as data.

    Attributes:
        kind: checkpoint or savepoint.
        periodic: whether the interval asks for it, and not a user or the end of the data.
        forced: whether it is exempt from the maximum number of concurrent checkpoints. The coordinator sets it for savepoints:
            they are, unless checkpoints are unaligned.
        unaligned: whether its barriers overtake records. The coordinator sets it; savepoints are always aligned.
        stops_job: whether it is the savepoint of a stop: it is committed, and retained like a checkpoint.
        request_id: id of the request for a savepoint, by which the runtime finds its target location; "" without a request.
    """

    kind: CheckpointKind = CheckpointKind.CHECKPOINT
    periodic: bool = False
    forced: bool = False
    unaligned: bool = False
    stops_job: bool = False
    request_id: str = ""

    @staticmethod
    def for_periodic() -> CheckpointProperties:
        return CheckpointProperties(periodic=True)

    @staticmethod
    def for_savepoint(*, stops_job: bool = False, request_id: str = "") -> CheckpointProperties:
        return CheckpointProperties(kind=CheckpointKind.SAVEPOINT, forced=True, stops_job=stops_job, request_id=request_id)

    def under(self, *, unaligned_checkpoints: bool, overtakes_at_once: bool) -> CheckpointProperties:
        """The same properties under these settings of the job."""
        forced = not unaligned_checkpoints if self.is_savepoint else self.forced
        unaligned = overtakes_at_once and not self.is_savepoint
        if forced == self.forced and unaligned == self.unaligned:
            return self
        return msgspec.structs.replace(self, forced=forced, unaligned=unaligned)

    @property
    def is_savepoint(self) -> bool:
        return self.kind is _SAVEPOINT

    @property
    def commits(self) -> bool:
        """Whether its completion commits sinks and lets tasks end: not that of a savepoint after which the job continues
        (FLIP-203)."""
        return not self.is_savepoint or self.stops_job


class CheckpointBarrier(msgspec.Struct, frozen=True):
    """The marker of a checkpoint between the records of a channel.

    Attributes:
        checkpoint_id: the checkpoint that it belongs to.
        timestamp: the coordinator's `now` (seconds) at the moment of triggering.
        properties: the properties of the checkpoint.
    """

    checkpoint_id: int
    timestamp: float
    properties: CheckpointProperties = CheckpointProperties()

    def overtaking(self) -> CheckpointBarrier:
        """The same barrier, marked as unaligned: every task behind overtakes at once, too."""
        properties = msgspec.structs.replace(self.properties, unaligned=True)
        return msgspec.structs.replace(self, properties=properties)


class TaskStatistics(msgspec.Struct, frozen=True):
    """What a task measured of its part in a checkpoint.

    Attributes:
        operators_finished: whether the snapshot was taken after finish(), so that the checkpoint's completion lets the task end.
        alignment_seconds: time from the first barrier to the last.
        sync_seconds: time in which no record was processed.
        async_seconds: duration of the upload.
        new_bytes: bytes uploaded for this checkpoint.
        total_bytes: bytes of everything that the snapshot refers to.
        in_flight_bytes: of these, bytes of records that the barrier overtook or that were in front of it.
        ended_sources: the fused sources that have ended in the task: their stages have finished with the checkpoint.
    """

    operators_finished: bool = False
    alignment_seconds: float = 0.0
    sync_seconds: float = 0.0
    async_seconds: float = 0.0
    new_bytes: int = 0
    total_bytes: int = 0
    in_flight_bytes: int = 0
    ended_sources: tuple[str, ...] = ()

    @staticmethod
    def of_all(parts: Iterable[TaskStatistics]) -> TaskStatistics:
        """The statistics of several tasks together: the times of the slowest task, the bytes of all of them."""
        parts = tuple(parts)
        return TaskStatistics(
            operators_finished=bool(parts) and all(part.operators_finished for part in parts),
            alignment_seconds=max((part.alignment_seconds for part in parts), default=0.0),
            sync_seconds=max((part.sync_seconds for part in parts), default=0.0),
            async_seconds=max((part.async_seconds for part in parts), default=0.0),
            new_bytes=sum(part.new_bytes for part in parts),
            total_bytes=sum(part.total_bytes for part in parts),
            in_flight_bytes=sum(part.in_flight_bytes for part in parts),
            ended_sources=tuple(source for part in parts for source in part.ended_sources),
        )


class AcknowledgeAnswer(Enum):
    """The coordinator's answer to an acknowledgement."""

    SUCCESS = "success"
    DUPLICATE = "duplicate"
    """The task had already acknowledged, or the checkpoint has completed, or may have; nothing changes, nothing is
    deleted."""
    UNKNOWN = "unknown"
    """This coordinator never triggered a checkpoint of that id, or the pending one does not wait for the task, which had
    finished before; the state is deleted."""
    DISCARDED = "discarded"
    """The checkpoint is already discarded; the late state is deleted."""


class CompletedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint whose metadata is written and which the store names; immutable.

    Attributes:
        location: location of its metadata, as the storage floor reported it.
        triggered_at, completed_at: the coordinator's `now`, seconds.
        finished: the tasks that had finished when it was triggered.
        fully_finished: the stages all of whose instances had finished; also the fused sources that it records as ended.
        roots: the stages in which it started.
        statistics: by task, what it measured of its part; empty for a checkpoint of an earlier run.
    """

    checkpoint_id: int
    location: str
    properties: CheckpointProperties = CheckpointProperties()
    triggered_at: float = 0.0
    completed_at: float = 0.0
    finished: Set[TaskId] = frozenset()
    fully_finished: frozenset[str] = frozenset()
    roots: tuple[str, ...] = ()
    statistics: Mapping[TaskId, TaskStatistics] = msgspec.field(default_factory=lambda: MappingProxyType({}))

    @property
    def is_savepoint(self) -> bool:
        return self.properties.is_savepoint

    @property
    def duration(self) -> float:
        """Seconds from trigger to completion."""
        return self.completed_at - self.triggered_at


class CheckpointSnapshot(msgspec.Struct, frozen=True):
    """A checkpoint that every task has acknowledged: the content of its metadata.

    Attributes:
        states: by task, the state of its acknowledgement; tasks that had finished before have none.
        request_id: id of the request; None for a checkpoint of the interval or of the end of the data.
        enumerators: by split source, its enumerator when the checkpoint was triggered.
        ending: (stage, instance) of the sources that requests have ended.
    """

    checkpoint_id: int
    properties: CheckpointProperties
    plan: CheckpointPlan
    states: Mapping[TaskId, object]
    statistics: Mapping[TaskId, TaskStatistics]
    triggered_at: float
    request_id: str | None = None
    enumerators: Mapping[str, EnumeratorState] = {}
    ending: frozenset[tuple[str, str]] = frozenset()


class PendingCheckpoint:
    """A triggered checkpoint that collects acknowledgements. Finished tasks count as acknowledged at once."""

    def __init__(
        self,
        checkpoint_id: int,
        properties: CheckpointProperties,
        plan: CheckpointPlan,
        triggered_at: float,
        request_id: str | None = None,
    ) -> None:
        self.checkpoint_id = checkpoint_id
        self.properties = properties
        self.plan = plan
        self.triggered_at = triggered_at
        self.request_id = request_id
        self.states: dict[TaskId, object] = {}
        self.statistics: dict[TaskId, TaskStatistics] = {}

    @property
    def barrier(self) -> CheckpointBarrier:
        return CheckpointBarrier(self.checkpoint_id, self.triggered_at, self.properties)

    @property
    def fully_acknowledged(self) -> bool:
        return len(self.states) == len(self.plan.wait)

    def waits_for(self, task: TaskId) -> bool:
        return task in self.plan.wait and task not in self.states

    def acknowledge(self, task: TaskId, state: object, statistics: TaskStatistics) -> AcknowledgeAnswer:
        if task in self.states:
            return AcknowledgeAnswer.DUPLICATE
        if task not in self.plan.wait:
            return AcknowledgeAnswer.UNKNOWN
        self.states[task] = state
        self.statistics[task] = statistics
        return AcknowledgeAnswer.SUCCESS

    def snapshot(self) -> CheckpointSnapshot:
        return CheckpointSnapshot(
            checkpoint_id=self.checkpoint_id,
            properties=self.properties,
            plan=self.plan,
            states=MappingProxyType(self.states),
            statistics=MappingProxyType(self.statistics),
            triggered_at=self.triggered_at,
            request_id=self.request_id,
        )

    def complete(self, location: str, now: float) -> CompletedCheckpoint:
        ended = TaskStatistics.of_all(self.statistics.values()).ended_sources
        return CompletedCheckpoint(
            checkpoint_id=self.checkpoint_id,
            location=location,
            properties=self.properties,
            triggered_at=self.triggered_at,
            completed_at=now,
            finished=self.plan.finished,
            fully_finished=self.plan.fully_finished.union(ended),
            roots=self.plan.roots_without(ended),
            statistics=MappingProxyType(self.statistics),
        )
