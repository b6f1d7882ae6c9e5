"""The coordinator's events, and the actions that it asks the runtime to perform.

Values only. Must not know: the coordinator's rules, how an action is performed.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

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


class TaskStateChanged(msgspec.Struct, frozen=True):
    """A task has reported a new state."""

    task: TaskId
    state: TaskState


class EndOfDataReached(msgspec.Struct, frozen=True):
    """A task has finished its operators and sent EndOfData to its consumers; never sent before OperatorsFinished."""

    task: TaskId


class BacklogChanged(msgspec.Struct, frozen=True):
    """A source's task begins or ends to process a backlog, during which latency does not matter (FLIP-309)."""

    task: TaskId
    backlog: bool


class DrainBegan(msgspec.Struct, frozen=True):
    """Every source was asked to end: no periodic checkpoint is triggered any more, and all tasks end with the final one."""


class Tick(msgspec.Struct, frozen=True):
    """Time has passed: due at `next_deadline()`, harmless at any other time."""


class CheckpointRequested(msgspec.Struct, frozen=True):
    """A checkpoint or savepoint is requested; answered by RequestCompleted or RequestNotCompleted, exactly once."""

    request_id: str
    properties: CheckpointProperties = _USER_CHECKPOINT


class StopRequested(msgspec.Struct, frozen=True):
    """A stop with savepoint is requested; answered by RequestCompleted or RequestNotCompleted, exactly once.

    Other checkpoints are suspended from now on. Suspend: the savepoint is triggered at once, or as soon as nothing
    is being finalized and no task is just finishing; if it fails, other checkpoints are triggered again. Drain: the
    runtime has asked every source to end, and the savepoint takes the place of the final checkpoint; if it fails,
    nothing is triggered until TasksRestarting, because a drained job cannot continue.

    Attributes:
        drain: whether all data is flushed, because the job is not meant to be resumed.
        properties: the properties of a savepoint that stops the job.
    """

    request_id: str
    drain: bool = False
    properties: CheckpointProperties = _STOPPING_SAVEPOINT


class RequestWithdrawn(msgspec.Struct, frozen=True):
    """The requester does not wait any longer: a checkpoint whose metadata is not being written yet is aborted
    (CHECKPOINT_EXPIRED)."""

    request_id: str
    message: str


class Acknowledged(msgspec.Struct, frozen=True):
    """A task has taken and uploaded its snapshot. The coordinator passes `state` on in WriteMetadata, and does not read it."""

    task: TaskId
    checkpoint_id: int
    state: object = None
    statistics: TaskStatistics = _NOTHING_MEASURED


class Declined(msgspec.Struct, frozen=True):
    """A task could not take its snapshot."""

    task: TaskId
    checkpoint_id: int
    reason: FailureReason = FailureReason.CHECKPOINT_DECLINED
    message: str = ""


class MetadataWritten(msgspec.Struct, frozen=True):
    """The metadata is written and the store names it: the checkpoint is complete."""

    checkpoint_id: int
    location: str


class MetadataWriteFailed(msgspec.Struct, frozen=True):
    """The checkpoint is certainly not in the store; its states may be deleted."""

    checkpoint_id: int
    message: str = ""
    reason: FailureReason = FailureReason.FINALIZE_CHECKPOINT_FAILURE


class MetadataOutcomeUnknown(msgspec.Struct, frozen=True):
    """It is not known whether the checkpoint is in the store: it counts as failed, and nothing is deleted.

    The next restart must ask the store, not this coordinator, which checkpoint is the newest.
    """

    checkpoint_id: int
    message: str = ""


class RegionFailed(msgspec.Struct, frozen=True):
    """The tasks of a region were stopped, because one of them has failed; TasksRestarting follows. The other tasks go on.

    A pending checkpoint is aborted (JOB_FAILOVER_REGION), also one that every task of the region has acknowledged: the region
    goes back to the checkpoint before, and discards the transactions that the pending one holds. A suspend fails.

    Attributes:
        vertices: the vertices of the region.
        task: the task that has failed; None if the region could not be started.
    """

    vertices: Set[str]
    task: TaskId | None = None


class TasksRestarting(msgspec.Struct, frozen=True):
    """Tasks are stopped and start again from the latest completed checkpoint.

    Attributes:
        finished: the tasks that had finished in the restored checkpoint.
        restored: the restored checkpoint, needed only if the coordinator may not know it: after a
            MetadataOutcomeUnknown the store may name a checkpoint that was never reported as written.
        vertices: the vertices whose tasks start again, while the others go on; None for all.
    """

    finished: Set[TaskId] = frozenset()
    restored: CompletedCheckpoint | None = None
    vertices: Set[str] | None = None


class Shutdown(msgspec.Struct, frozen=True):
    """The job has ended. Nothing is triggered any more."""

    status: JobStatus


EventOfTask = TaskStateChanged | EndOfDataReached | BacklogChanged | Acknowledged | Declined
"""The events that tasks cause; each names its task."""
CoordinatorEvent = (
    EventOfTask
    | DrainBegan
    | Tick
    | CheckpointRequested
    | StopRequested
    | RequestWithdrawn
    | MetadataWritten
    | MetadataWriteFailed
    | MetadataOutcomeUnknown
    | RegionFailed
    | TasksRestarting
    | Shutdown
)

# Actions


class CheckpointTriggered(msgspec.Struct, frozen=True):
    """For reporting: a checkpoint was given its id; its TriggerTask actions follow.

    Attributes:
        request_id: id of the request; None for a checkpoint of the interval or of the end of the data.
        waiting: number of tasks that must acknowledge.
        finished: the tasks that had finished before.
    """

    checkpoint_id: int
    properties: CheckpointProperties
    request_id: str | None
    waiting: int
    finished: Set[TaskId] = frozenset()


class TriggerTask(msgspec.Struct, frozen=True):
    """Start the checkpoint in this root."""

    task: TaskId
    barrier: CheckpointBarrier


class AcknowledgeAnswered(msgspec.Struct, frozen=True):
    """The answer to an acknowledgement; a DiscardStates or DiscardLateState follows for a late state."""

    task: TaskId
    checkpoint_id: int
    answer: AcknowledgeAnswer


class WriteMetadata(msgspec.Struct, frozen=True):
    """Write the metadata and make the store name it; answer with one of the three Metadata… events."""

    checkpoint: CheckpointSnapshot


class NotifyTasks(msgspec.Struct, frozen=True):
    """Send these tasks the outcome of a checkpoint."""

    tasks: Set[TaskId]
    notice: CheckpointNotice


class DiscardStates(msgspec.Struct, frozen=True):
    """Delete the private part of these states, and everything else that this checkpoint has stored: it is neither pending nor
    completed. Files that a retained or pending checkpoint names stay."""

    checkpoint_id: int
    states: Mapping[TaskId, object]


class DiscardLateState(msgspec.Struct, frozen=True):
    """Delete this one state: its task does not belong to the checkpoint, which stays pending. A runtime that accounts for states
    by checkpoint, and not by task, may keep it until the checkpoint itself is discarded."""

    task: TaskId
    checkpoint_id: int
    state: object


class DiscardCheckpoint(msgspec.Struct, frozen=True):
    """Delete a checkpoint that is no longer retained."""

    checkpoint: CompletedCheckpoint


class FailJob(msgspec.Struct, frozen=True):
    """Fail the job: too many consecutive checkpoints have failed."""

    reason: FailureReason
    message: str


class RequestCompleted(msgspec.Struct, frozen=True):
    """Answer to CheckpointRequested or StopRequested."""

    request_id: str
    checkpoint: CompletedCheckpoint


class RequestNotCompleted(msgspec.Struct, frozen=True):
    """Answer to CheckpointRequested or StopRequested."""

    request_id: str
    reason: FailureReason
    message: str


class CheckpointFailed(msgspec.Struct, frozen=True):
    """For reporting: a checkpoint has failed.

    Attributes:
        checkpoint_id: None if it failed before it was given an id.
    """

    checkpoint_id: int | None
    reason: FailureReason
    message: str


class CheckpointCompleted(msgspec.Struct, frozen=True):
    """For reporting: a checkpoint has completed."""

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
