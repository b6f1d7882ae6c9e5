"""What the job machine asks its driver to do: values only.

What the coordinator asks for itself is in `coordination.events`, and passed on as it is. `job_events` is what happens to a job.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from dagster_checkpoints.coordination import (
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointTriggered,
    CompletedCheckpoint,
    DiscardCheckpoint,
    DiscardStates,
    JobStatus,
    RequestCompleted,
    RequestNotCompleted,
    WriteMetadata,
)
from dagster_checkpoints.execution.job_events import Failure, RestorePoint
from dagster_checkpoints.execution.job_requests import AnswerRequest
from dagster_checkpoints.execution.messages import TaskMessage
from dagster_checkpoints.execution.pipeline_state import EndedBy, StopAskedBy
from dagster_checkpoints.pipeline import TaskId

# Actions that are answered with an event


class ChooseOlderStart(msgspec.Struct, frozen=True):
    """Choose another start: what was chosen cannot be read. Answered with BeginningChosen or FatalError."""

    failure: Failure


class Deploy(msgspec.Struct, frozen=True):
    """Build the tasks of an attempt, and restore them. Answered with Deployed, DeployFailed, FatalError or CancelRequested.

    Attributes:
        attempt: its number within the run, from 1.
        restored: None for a new start.
        ended_sources: (stage, instance) of the sources that were asked to end: they read what is there, and end.
    """

    attempt: int
    restored: RestorePoint | None
    ended_sources: frozenset[tuple[str, str]] = frozenset()


class BeginJob(msgspec.Struct, frozen=True):
    """Make storage say that the job runs. Answered with JobBegun or FatalError."""


class ClaimSavepoint(msgspec.Struct, frozen=True):
    """Make the savepoint that the job starts from its own. Answered with SavepointClaimed or FatalError."""


class ConfirmOwnership(msgspec.Struct, frozen=True):
    """Ask storage whether this run still owns the pipeline. Answered with OwnershipConfirmed, StorageSilent or FatalError."""


class ReadNewest(msgspec.Struct, frozen=True):
    """Read what a restart begins from. Answered with NewestRead, StorageSilent or FatalError."""

    checkpoint: CompletedCheckpoint


class StopTasks(msgspec.Struct, frozen=True):
    """Cancel the tasks that have not finished, and wait for all of them. Answered with TasksStopped."""


class EndJob(msgspec.Struct, frozen=True):
    """Make storage say that the job has ended. Answered with JobEndRecorded or JobEndNotRecorded.

    Attributes:
        keep_checkpoints: the configuration keeps the checkpoints of a finished job.
        ended_by: how the job came to its end.
        stop_asked_by: who asked for the stop that has ended it.
    """

    keep_checkpoints: bool
    ended_by: EndedBy
    stop_asked_by: StopAskedBy = ""


class FinishWork(msgspec.Struct, frozen=True):
    """Give up what is being uploaded, finish what is being written or deleted. Answered with WorkEnded."""


# Actions without an answer


class Sweep(msgspec.Struct, frozen=True):
    """Delete what killed runs have left behind."""


class StartTasks(msgspec.Struct, frozen=True):
    """Start the tasks that were deployed. If that fails: StartFailed, or FatalError."""


class SendToTasks(msgspec.Struct, frozen=True):
    """Put the message into the mailboxes of these tasks."""

    tasks: Collection[TaskId]
    message: TaskMessage


class ForgetSavepoints(msgspec.Struct, frozen=True):
    """A savepoint of the user's that is not at one of these locations is no longer what a restart may begin from; it stays
    where it is."""

    retained: frozenset[str]


class Release(msgspec.Struct, frozen=True):
    """Give the pipeline up; the last action.

    Attributes:
        status: how the job has ended; None if it had not begun.
    """

    status: JobStatus | None


# For reporting


class AttemptBegan(msgspec.Struct, frozen=True):
    """The tasks of an attempt are deployed, and are about to be started."""

    attempt: int
    restored: RestorePoint | None


class AttemptRestarting(msgspec.Struct, frozen=True):
    """The unfinished tasks start again from the latest checkpoint.

    Attributes:
        attempt: the number of the next attempt.
        delay: seconds until then, at least.
    """

    attempt: int
    delay: float
    failure: Failure


class TaskHasFinished(msgspec.Struct, frozen=True):
    """A task of the attempt is FINISHED."""

    task: TaskId


JobAction = (
    ChooseOlderStart
    | Deploy
    | BeginJob
    | ClaimSavepoint
    | ConfirmOwnership
    | ReadNewest
    | StopTasks
    | EndJob
    | FinishWork
    | Sweep
    | StartTasks
    | SendToTasks
    | ForgetSavepoints
    | Release
    | AnswerRequest
    | AttemptBegan
    | AttemptRestarting
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
