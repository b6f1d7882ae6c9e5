"""The actions of the job machine, which its driver performs: values only.

The coordinator's own actions are in `coordination.events`, and are passed on unchanged. The events are in `job_events`.
"""

from __future__ import annotations

from collections.abc import Collection, Set

import msgspec

from dagster_checkpoints.coordination.checkpoints import CompletedCheckpoint
from dagster_checkpoints.coordination.events import (
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointTriggered,
    DiscardCheckpoint,
    DiscardStates,
    RequestCompleted,
    RequestNotCompleted,
    WriteMetadata,
)
from dagster_checkpoints.coordination.retention import JobStatus
from dagster_checkpoints.execution.job_events import Failure, RestorePoint
from dagster_checkpoints.execution.job_requests import AnswerRequest
from dagster_checkpoints.execution.pipeline_state import EndedBy, StopAskedBy
from dagster_checkpoints.execution.task_events import TaskMessage
from dagster_checkpoints.pipeline import TaskId

# Actions that are answered with an event


class ChooseOlderStart(msgspec.Struct, frozen=True):
    """Choose another start: the chosen checkpoint cannot be read. Answered with BeginningChosen or FatalError."""

    failure: Failure


class Deploy(msgspec.Struct, frozen=True):
    """Build the tasks of an attempt, and restore them. Answered with Deployed, DeployFailed, FatalError or CancelRequested.

    Attributes:
        attempt: number of the attempt within the run, from 1.
        restored: the checkpoint or savepoint that it starts from; None for a new start.
        ended_sources: (stage, instance) of the sources that were asked to end: they read the input that is available, and end.
        vertices: the vertices whose tasks are built, while the tasks of the others go on; None for all.
    """

    attempt: int
    restored: RestorePoint | None
    ended_sources: frozenset[tuple[str, str]] = frozenset()
    vertices: Set[str] | None = None


class BeginJob(msgspec.Struct, frozen=True):
    """Record in storage that the job runs. Answered with JobBegun or FatalError."""


class ConfirmOwnership(msgspec.Struct, frozen=True):
    """Ask storage whether this run still owns the pipeline. Answered with OwnershipConfirmed, StorageSilent or FatalError."""


class ReadNewest(msgspec.Struct, frozen=True):
    """Read the checkpoint that a restart begins from. Answered with NewestRead, StorageSilent or FatalError."""

    checkpoint: CompletedCheckpoint


class StopTasks(msgspec.Struct, frozen=True):
    """Cancel the tasks that have not finished, and wait for all of them. Answered with TasksStopped.

    Attributes:
        vertices: the vertices whose tasks are stopped; None for all.
    """

    vertices: Set[str] | None = None


class EndJob(msgspec.Struct, frozen=True):
    """Record in storage that the job has ended. Answered with JobEndRecorded or JobEndNotRecorded.

    Attributes:
        keep_checkpoints: whether the configuration keeps the checkpoints of a finished job.
        ended_by: what brought the job to its end.
        stop_asked_by: what asked for the stop that has ended it; "" without a stop.
    """

    keep_checkpoints: bool
    ended_by: EndedBy
    stop_asked_by: StopAskedBy = ""


class FinishWork(msgspec.Struct, frozen=True):
    """Cancel uploads, and finish writes and deletions. Answered with WorkEnded."""


# Actions without an answer


class Sweep(msgspec.Struct, frozen=True):
    """Delete files that killed runs have left in storage."""


class StartTasks(msgspec.Struct, frozen=True):
    """Start the tasks that were deployed. If that fails: StartFailed, or FatalError.

    Attributes:
        vertices: the vertices whose tasks are started; None for all.
    """

    vertices: Set[str] | None = None


class DiscoverSplits(msgspec.Struct, frozen=True):
    """Find the splits that a source has now. Answered with reports of `SplitsDiscovered`, or of a task's failure.

    Attributes:
        attempt: number of the attempt, which the reports carry.
        stage: the source.
    """

    attempt: int
    stage: str


class SendToTasks(msgspec.Struct, frozen=True):
    """Put the message into the mailboxes of these tasks."""

    tasks: Collection[TaskId]
    message: TaskMessage


class ForgetSavepoints(msgspec.Struct, frozen=True):
    """No restart may begin any more from a savepoint of the user that is not at one of these locations; its files stay."""

    retained: frozenset[str]


class Release(msgspec.Struct, frozen=True):
    """Release the pipeline; the last action.

    Attributes:
        status: how the job has ended; None if it had not begun.
    """

    status: JobStatus | None


# For reporting


class AttemptBegan(msgspec.Struct, frozen=True):
    """The tasks of an attempt are deployed, and are about to be started.

    Attributes:
        attempt: number of the attempt within the run, from 1.
        restored: the checkpoint or savepoint that it starts from; None for a new start.
        vertices: the vertices whose tasks it has; None for all.
    """

    attempt: int
    restored: RestorePoint | None
    vertices: Set[str] | None = None


class AttemptRestarting(msgspec.Struct, frozen=True):
    """The unfinished tasks start again from the latest checkpoint.

    Attributes:
        attempt: number of the next attempt.
        delay: minimum number of seconds until then.
        failure: why the attempt before it has failed.
        vertices: the vertices whose tasks start again, while the tasks of the others go on; None for all.
    """

    attempt: int
    delay: float
    failure: Failure
    vertices: Set[str] | None = None


class SourcesCut(msgspec.Struct, frozen=True):
    """Say that a drain ends these instances of bounded sources before they have been read to their end."""

    sources: tuple[str, ...]


class TaskHasFinished(msgspec.Struct, frozen=True):
    """A task of the attempt is FINISHED."""

    task: TaskId


JobAction = (
    ChooseOlderStart
    | Deploy
    | BeginJob
    | ConfirmOwnership
    | ReadNewest
    | StopTasks
    | EndJob
    | FinishWork
    | Sweep
    | StartTasks
    | DiscoverSplits
    | SendToTasks
    | ForgetSavepoints
    | Release
    | AnswerRequest
    | AttemptBegan
    | AttemptRestarting
    | SourcesCut
    | TaskHasFinished
    | WriteMetadata
    | DiscardStates
    | DiscardCheckpoint
    | CheckpointTriggered
    | CheckpointCompleted
    | CheckpointFailed
    | RequestCompleted
    | RequestNotCompleted
)
