"""What a checkpoint is: its kind and properties, its barrier, and its two lives, pending and completed.

Pending and completed are two types; a completed one never changes. Must not know: when to trigger, how to
store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType

from dagster_checkpoints.coordination.plan import CheckpointPlan
from dagster_checkpoints.pipeline import TaskId


class CheckpointKind(Enum):
    """Who owns the result: a checkpoint is the system's, a savepoint is the user's and never deleted by the
    system."""

    CHECKPOINT = "checkpoint"
    SAVEPOINT = "savepoint"


@dataclass(frozen=True, slots=True)
class CheckpointProperties:
    """What kind of checkpoint it is, as data.

    Attributes:
        kind: checkpoint or savepoint.
        periodic: asked for by the interval, not by a user or by the end of the data.
        forced: exempt from the maximum number of concurrent checkpoints. Of a savepoint the coordinator says it: it is,
            unless checkpoints are unaligned.
        unaligned: its barriers overtake records. The coordinator says it; savepoints are always aligned.
        stops_job: the savepoint of a stop-with-savepoint: it is committed, and joins the retained list.
        request_id: id of the request that a savepoint was asked for with, by which the runtime knows where it goes; "" for none.
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
        """The same as the settings make it."""
        forced = not unaligned_checkpoints if self.is_savepoint else self.forced
        return replace(self, forced=forced, unaligned=overtakes_at_once and not self.is_savepoint)

    @property
    def is_savepoint(self) -> bool:
        return self.kind is CheckpointKind.SAVEPOINT

    @property
    def commits(self) -> bool:
        """Whether its completion commits side effects and lets tasks end: not that of a savepoint of a job that
        runs on (FLIP-203)."""
        return not self.is_savepoint or self.stops_job


@dataclass(frozen=True, slots=True)
class CheckpointBarrier:
    """What travels between the records.

    Attributes:
        checkpoint_id: the checkpoint it belongs to.
        timestamp: the coordinator's `now` (seconds) at the moment of triggering.
        properties: the checkpoint's.
    """

    checkpoint_id: int
    timestamp: float
    properties: CheckpointProperties = CheckpointProperties()


@dataclass(frozen=True, slots=True)
class TaskStatistics:
    """What a task measured of its part in a checkpoint.

    Attributes:
        operators_finished: the snapshot was taken after finish(), so that its completion lets the task end.
        alignment_seconds: from the first barrier to the last.
        sync_seconds: how long records stood still.
        async_seconds: the upload.
        new_bytes: uploaded for this checkpoint.
        total_bytes: everything that the snapshot refers to.
        in_flight_bytes: of these, records that the barrier overtook or found in front of it.
    """

    operators_finished: bool = False
    alignment_seconds: float = 0.0
    sync_seconds: float = 0.0
    async_seconds: float = 0.0
    new_bytes: int = 0
    total_bytes: int = 0
    in_flight_bytes: int = 0

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
        )


class AcknowledgeAnswer(Enum):
    """What became of an acknowledgement."""

    SUCCESS = "success"
    DUPLICATE = "duplicate"
    """The task had already acknowledged, or the checkpoint has completed, or may have; nothing changes, nothing is thrown
    away."""
    UNKNOWN = "unknown"
    """No checkpoint of that id was ever triggered here, or the pending one does not wait for the task, which had finished
    before; the state is thrown away."""
    DISCARDED = "discarded"
    """The checkpoint is already disposed of; the late state is thrown away."""


@dataclass(frozen=True, slots=True)
class CompletedCheckpoint:
    """A checkpoint whose metadata is written and which the store names; immutable.

    Attributes:
        location: where the metadata lies, as the storage floor said.
        triggered_at, completed_at: the coordinator's `now`, seconds.
        finished: the tasks that had finished when it was triggered.
        fully_finished: the stages all of whose instances had.
        roots: the stages in which it started.
    """

    checkpoint_id: int
    location: str
    properties: CheckpointProperties = CheckpointProperties()
    triggered_at: float = 0.0
    completed_at: float = 0.0
    finished: Set[TaskId] = frozenset()
    fully_finished: frozenset[str] = frozenset()
    roots: tuple[str, ...] = ()
    statistics: Mapping[TaskId, TaskStatistics] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def is_savepoint(self) -> bool:
        return self.properties.is_savepoint

    @property
    def duration(self) -> float:
        """Seconds from trigger to completion."""
        return self.completed_at - self.triggered_at


@dataclass(frozen=True, slots=True)
class CheckpointSnapshot:
    """A checkpoint that every task has acknowledged: what its metadata is written from.

    Attributes:
        states: what each task acknowledged with; tasks that had finished before have none.
        request_id: who asked for it; None for the interval and for the end of the data.
    """

    checkpoint_id: int
    properties: CheckpointProperties
    plan: CheckpointPlan
    states: Mapping[TaskId, object]
    statistics: Mapping[TaskId, TaskStatistics]
    triggered_at: float
    request_id: str | None = None


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
        return CompletedCheckpoint(
            checkpoint_id=self.checkpoint_id,
            location=location,
            properties=self.properties,
            triggered_at=self.triggered_at,
            completed_at=now,
            finished=self.plan.finished,
            fully_finished=self.plan.fully_finished,
            roots=self.plan.roots,
            statistics=MappingProxyType(self.statistics),
        )
