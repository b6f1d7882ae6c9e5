"""What happens to the coordinator, and what it asks the runtime to do: the two vocabularies of the job's
side.

Values only. Must not know: the coordinator's rules, how an action is performed.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from dagster_checkpoints.coordination.checkpoints import (
    AcknowledgeAnswer,
    CheckpointBarrier,
    CheckpointProperties,
    CheckpointSnapshot,
    CompletedCheckpoint,
    TaskStatistics,
)
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.lifecycle import CheckpointNotice
from dagster_checkpoints.coordination.plan import TaskState
from dagster_checkpoints.coordination.retention import JobStatus
from dagster_checkpoints.pipeline import TaskId

_USER_CHECKPOINT = CheckpointProperties()
_STOPPING_SAVEPOINT = CheckpointProperties.for_savepoint(stops_job=True)
_NOTHING_MEASURED = TaskStatistics()

# Events


@dataclass(frozen=True, slots=True)
class TaskStateChanged:
    """A task has reported a new state."""

    task: TaskId
    state: TaskState


@dataclass(frozen=True, slots=True)
class EndOfDataReached:
    """A task has finished its operators and sent EndOfData on; sent after OperatorsFinished, never before."""

    task: TaskId


@dataclass(frozen=True, slots=True)
class BacklogChanged:
    """A source's task begins or ends to work off a backlog: latency does not matter meanwhile (FLIP-309).

    No run on Spark reaches it yet: no source tells of a backlog.
    """

    task: TaskId
    backlog: bool


@dataclass(frozen=True, slots=True)
class DrainBegan:
    """Every source was told to end: periodic checkpoints stop until the final one, with which all tasks end."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: due at `next_deadline()`, harmless at any other time."""


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """Somebody asks for a checkpoint or savepoint; answered by RequestCompleted or RequestNotCompleted, exactly
    once."""

    request_id: str
    properties: CheckpointProperties = _USER_CHECKPOINT


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody asks to stop the job with a savepoint; answered by RequestCompleted or RequestNotCompleted, exactly once.

    Other checkpoints are suspended from now on. Suspend: the savepoint is triggered at once, or as soon as nothing
    is being finalized and no task is just finishing; if it fails, checkpoints go on. Drain: the runtime has told
    every source to end, and the savepoint takes the place of the final checkpoint; if it fails, nothing is
    triggered until TasksRestarting, because a drained job cannot go on.

    Attributes:
        drain: flush everything, the job is not meant to be resumed.
        properties: those of a savepoint that stops the job.
    """

    request_id: str
    drain: bool = False
    properties: CheckpointProperties = _STOPPING_SAVEPOINT


@dataclass(frozen=True, slots=True)
class RequestWithdrawn:
    """Who asked does not wait any longer: what has not begun to be written is given up (CHECKPOINT_EXPIRED)."""

    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A task has taken and uploaded its snapshot. `state` is opaque here and comes back in WriteMetadata."""

    task: TaskId
    checkpoint_id: int
    state: object = None
    statistics: TaskStatistics = _NOTHING_MEASURED


@dataclass(frozen=True, slots=True)
class Declined:
    """A task could not take its snapshot."""

    task: TaskId
    checkpoint_id: int
    reason: FailureReason = FailureReason.CHECKPOINT_DECLINED
    message: str = ""


@dataclass(frozen=True, slots=True)
class TriggerFailed:
    """A root could not be triggered, because it has just finished or is gone."""

    task: TaskId
    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class MetadataWritten:
    """The metadata is written and the store names it: the checkpoint is complete."""

    checkpoint_id: int
    location: str


@dataclass(frozen=True, slots=True)
class MetadataWriteFailed:
    """The checkpoint certainly is not in the store; its states may be deleted."""

    checkpoint_id: int
    message: str = ""
    reason: FailureReason = FailureReason.FINALIZE_CHECKPOINT_FAILURE


@dataclass(frozen=True, slots=True)
class MetadataOutcomeUnknown:
    """Nobody knows whether the checkpoint is in the store: it counts as failed here, and nothing is deleted.

    A restart that follows must ask the store which checkpoint is the newest, not this coordinator.
    """

    checkpoint_id: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class TasksRestarting:
    """All tasks are stopped and start again from the latest completed checkpoint.

    Attributes:
        finished: the tasks that the checkpoint restored from records as finished.
        restored: that checkpoint, needed only where the coordinator may not know it: after a
            MetadataOutcomeUnknown the store may name one that was never reported as written.
    """

    finished: Set[TaskId] = frozenset()
    restored: CompletedCheckpoint | None = None


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The job has ended. Nothing is triggered any more."""

    status: JobStatus


CoordinatorEvent = (
    TaskStateChanged
    | EndOfDataReached
    | BacklogChanged
    | DrainBegan
    | Tick
    | CheckpointRequested
    | StopRequested
    | RequestWithdrawn
    | Acknowledged
    | Declined
    | TriggerFailed
    | MetadataWritten
    | MetadataWriteFailed
    | MetadataOutcomeUnknown
    | TasksRestarting
    | Shutdown
)

# Actions


@dataclass(frozen=True, slots=True)
class CheckpointTriggered:
    """For reporting: a checkpoint has got its id; its TriggerTask actions follow.

    Attributes:
        request_id: who asked for it; None for the interval and for the end of the data.
        waiting: how many tasks must acknowledge.
        finished: the tasks that had finished before.
    """

    checkpoint_id: int
    properties: CheckpointProperties
    request_id: str | None
    waiting: int
    finished: Set[TaskId] = frozenset()


@dataclass(frozen=True, slots=True)
class TriggerTask:
    """Start the checkpoint in this root."""

    task: TaskId
    barrier: CheckpointBarrier


@dataclass(frozen=True, slots=True)
class AcknowledgeAnswered:
    """What became of the acknowledgement that was handled; a late state follows as DiscardStates or DiscardLateState."""

    task: TaskId
    checkpoint_id: int
    answer: AcknowledgeAnswer


@dataclass(frozen=True, slots=True)
class WriteMetadata:
    """Write the metadata and make the store name it; answer with one of the three Metadata… events."""

    checkpoint: CheckpointSnapshot


@dataclass(frozen=True, slots=True)
class NotifyTasks:
    """Send these tasks the outcome of a checkpoint."""

    tasks: Set[TaskId]
    notice: CheckpointNotice


@dataclass(frozen=True, slots=True)
class DiscardStates:
    """Throw away the private part of these states, and whatever else this checkpoint has left: it is neither pending nor
    completed. Files that a retained or pending checkpoint names stay."""

    checkpoint_id: int
    states: Mapping[TaskId, object]


@dataclass(frozen=True, slots=True)
class DiscardLateState:
    """Throw away this one state: its task does not belong to the checkpoint, which goes on. A runtime that keeps account by
    checkpoint, and not by task, may leave it until the checkpoint itself is discarded."""

    task: TaskId
    checkpoint_id: int
    state: object


@dataclass(frozen=True, slots=True)
class DiscardCheckpoint:
    """Delete a checkpoint that is no longer retained."""

    checkpoint: CompletedCheckpoint


@dataclass(frozen=True, slots=True)
class FailJob:
    """Too many checkpoints in a row have failed."""

    reason: FailureReason
    message: str


@dataclass(frozen=True, slots=True)
class RequestCompleted:
    """Answer to CheckpointRequested or StopRequested."""

    request_id: str
    checkpoint: CompletedCheckpoint


@dataclass(frozen=True, slots=True)
class RequestNotCompleted:
    """Answer to CheckpointRequested or StopRequested."""

    request_id: str
    reason: FailureReason
    message: str


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """For reporting.

    Attributes:
        checkpoint_id: None when it failed before it had one.
    """

    checkpoint_id: int | None
    reason: FailureReason
    message: str


@dataclass(frozen=True, slots=True)
class CheckpointCompleted:
    """For reporting."""

    checkpoint: CompletedCheckpoint


CoordinatorAction = (
    CheckpointTriggered
    | TriggerTask
    | AcknowledgeAnswered
    | WriteMetadata
    | NotifyTasks
    | DiscardStates
    | DiscardLateState
    | DiscardCheckpoint
    | FailJob
    | RequestCompleted
    | RequestNotCompleted
    | CheckpointFailed
    | CheckpointCompleted
)
