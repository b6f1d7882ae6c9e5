"""What the job machine asks its driver to do: values only.

What the coordinator asks for itself is in `coordination.events`, and passed on as it is. `job_events` is what happens to a job.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class ChooseOlderStart:
    """Choose another start: what was chosen cannot be read. Answered with BeginningChosen or FatalError."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Deploy:
    """Build the tasks of an attempt, and restore them. Answered with Deployed, DeployFailed, FatalError or CancelRequested.

    Attributes:
        attempt: its number within the run, from 1.
        restored: None for a new start.
        ended_sources: (stage, instance) of the sources that were asked to end: they read what is there, and end.
    """

    attempt: int
    restored: RestorePoint | None
    ended_sources: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class BeginJob:
    """Make storage say that the job runs. Answered with JobBegun or FatalError."""


@dataclass(frozen=True, slots=True)
class ClaimSavepoint:
    """Make the savepoint that the job starts from its own. Answered with SavepointClaimed or FatalError."""


@dataclass(frozen=True, slots=True)
class ConfirmOwnership:
    """Ask storage whether this run still owns the pipeline. Answered with OwnershipConfirmed, StorageSilent or FatalError."""


@dataclass(frozen=True, slots=True)
class ReadNewest:
    """Read what a restart begins from. Answered with NewestRead, StorageSilent or FatalError."""

    checkpoint: CompletedCheckpoint


@dataclass(frozen=True, slots=True)
class StopTasks:
    """Cancel the tasks that have not finished, and wait for all of them. Answered with TasksStopped."""


@dataclass(frozen=True, slots=True)
class EndJob:
    """Make storage say that the job has ended. Answered with JobEndRecorded or JobEndNotRecorded.

    Attributes:
        keep_checkpoints: the configuration keeps the checkpoints of a finished job.
        ended_by: how the job came to its end.
        stop_asked_by: who asked for the stop that has ended it.
    """

    keep_checkpoints: bool
    ended_by: EndedBy
    stop_asked_by: StopAskedBy = ""


@dataclass(frozen=True, slots=True)
class FinishWork:
    """Give up what is being uploaded, finish what is being written or deleted. Answered with WorkEnded."""


# Actions without an answer


@dataclass(frozen=True, slots=True)
class Sweep:
    """Delete what killed runs have left behind."""


@dataclass(frozen=True, slots=True)
class StartTasks:
    """Start the tasks that were deployed. If that fails: StartFailed, or FatalError."""


@dataclass(frozen=True, slots=True)
class SendToTasks:
    """Put the message into the mailboxes of these tasks."""

    tasks: Collection[TaskId]
    message: TaskMessage


@dataclass(frozen=True, slots=True)
class ForgetSavepoints:
    """A savepoint of the user's that is not at one of these locations is no longer what a restart may begin from; it stays
    where it is."""

    retained: frozenset[str]


@dataclass(frozen=True, slots=True)
class Release:
    """Give the pipeline up; the last action.

    Attributes:
        status: how the job has ended; None if it had not begun.
    """

    status: JobStatus | None


# For reporting


@dataclass(frozen=True, slots=True)
class AttemptBegan:
    """The tasks of an attempt are deployed, and are about to be started."""

    attempt: int
    restored: RestorePoint | None


@dataclass(frozen=True, slots=True)
class AttemptRestarting:
    """The unfinished tasks start again from the latest checkpoint.

    Attributes:
        attempt: the number of the next attempt.
        delay: seconds until then, at least.
    """

    attempt: int
    delay: float
    failure: Failure


@dataclass(frozen=True, slots=True)
class TaskHasFinished:
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
