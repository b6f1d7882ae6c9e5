"""What happens to a job, and what the job machine asks its driver to do: the two vocabularies of `job_machine`.

Values only. What the coordinator, the requests and the tasks say is in `coordination.events`, `job_requests` and `messages`;
none of it is renamed here. `restored state` and `error` are the driver's own values, which come back as they were.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass, field

from dagster_checkpoints.coordination import (
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointRequested,
    CheckpointTriggered,
    CompletedCheckpoint,
    CoordinatorEvent,
    DiscardCheckpoint,
    DiscardStates,
    JobStatus,
    MetadataOutcomeUnknown,
    MetadataWriteFailed,
    MetadataWritten,
    RequestCompleted,
    RequestFailed,
    Tick,
    WriteMetadata,
)
from dagster_checkpoints.execution.job_requests import AnswerRequest, RequestReceived, SourceInstance
from dagster_checkpoints.execution.messages import TaskMessage
from dagster_checkpoints.execution.pipeline_state import EndedBy, StopAskedBy
from dagster_checkpoints.pipeline import ExecutionGraph, TaskId

# Values


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt, or the job, has failed.

    Attributes:
        message: for people.
        repeats: another attempt would fail in the same way.
        error: the driver's own error; None if a rule of the job has failed it. Not compared.
    """

    message: str
    repeats: bool = False
    error: object = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The checkpoint or savepoint that an attempt starts from.

    Attributes:
        finished: the tasks that had finished when it was triggered.
        state: what the driver restores from it. Not compared.
    """

    checkpoint_id: int
    location: str
    finished: Set[TaskId] = frozenset()
    state: object = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class JobBeginning:
    """What a job begins with.

    Attributes:
        restored: None for a new start.
        next_checkpoint_id: the id of the first checkpoint.
        retained: the checkpoints that storage retains, the one restored among them.
        passed_over: later ones, of no use once the job has gone on from an earlier one.
        claims: the job makes the savepoint that it starts from its own.
    """

    restored: RestorePoint | None = None
    next_checkpoint_id: int = 1
    retained: tuple[CompletedCheckpoint, ...] = ()
    passed_over: tuple[CompletedCheckpoint, ...] = ()
    claims: bool = False


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a job has ended.

    Attributes:
        status: FINISHED, CANCELED or FAILED.
        message: why a FAILED job has failed, and why there is no other attempt.
        failure: what a FAILED job has failed with.
        given_up: the failure was one after which a job may restart; the message says why this one does not.
        ended_by: how a FINISHED job came to its end.
    """

    status: JobStatus
    message: str = ""
    failure: Failure | None = None
    given_up: bool = False
    ended_by: EndedBy = ""


# Events: results of actions


@dataclass(frozen=True, slots=True)
class StartChosen:
    """What the job starts from is known, and fits; nothing has been restored yet."""

    start: JobBeginning


@dataclass(frozen=True, slots=True)
class Deployed:
    """The tasks of an attempt are built and restored; none is started.

    Attributes:
        graph: the tasks of all attempts.
        finished: the tasks that had finished in what was restored.
        sources: all instances of all sources.
    """

    graph: ExecutionGraph
    finished: Set[TaskId] = frozenset()
    sources: tuple[SourceInstance, ...] = ()


@dataclass(frozen=True, slots=True)
class DeployFailed:
    """The attempt could not be built; nothing was started.

    Attributes:
        unusable: a state file of what was to be restored is corrupt or gone.
        may_pass: a stage could not be built, or storage did not answer: another attempt may go better.
    """

    failure: Failure
    unusable: bool = False
    may_pass: bool = False


@dataclass(frozen=True, slots=True)
class JobBegun:
    """Storage says that the job runs."""


@dataclass(frozen=True, slots=True)
class SavepointClaimed:
    """Storage says that the savepoint is the job's own."""


@dataclass(frozen=True, slots=True)
class OwnershipConfirmed:
    """Storage says that this run owns the pipeline, and which checkpoint is the newest.

    Attributes:
        newest: None before the first.
        epoch: the fencing epoch of the run that has completed it.
    """

    newest: CompletedCheckpoint | None = None
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class StorageSilent:
    """Storage has not answered; the lease still holds."""


@dataclass(frozen=True, slots=True)
class NewestRead:
    """The checkpoint that a restart begins from was read, and fits."""

    restored: RestorePoint


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The tasks could not be started."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class TasksStopped:
    """No task of the attempt runs any more."""


@dataclass(frozen=True, slots=True)
class JobEndRecorded:
    """Storage says that the job has ended.

    Attributes:
        dropped: the system's own checkpoints that storage retains no longer.
    """

    dropped: tuple[CompletedCheckpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class JobEndNotRecorded:
    """Storage does not say that the job has ended, or it is not known: all checkpoints are kept."""


@dataclass(frozen=True, slots=True)
class WorkEnded:
    """Nothing is being uploaded, written or deleted any more."""


# Events: from tasks, users and other threads


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """A task has failed."""

    task: TaskId
    failure: Failure


@dataclass(frozen=True, slots=True)
class TaskReport:
    """A task, or an upload of its state, reports something. Reports of earlier attempts are ignored.

    Attributes:
        attempt: the one that the task belongs to.
    """

    attempt: int
    event: CoordinatorEvent | TaskFailure


@dataclass(frozen=True, slots=True)
class FatalError:
    """The job cannot go on, and another attempt would not help: another run owns the pipeline, or storage refuses."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The job shall end as soon as possible; its checkpoints are kept."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Every source shall end, without a savepoint; after a stop that is under way, if the stop fails."""


@dataclass(frozen=True, slots=True)
class EndSourceRequested:
    """A source shall end, or one instance of it."""

    stage: str
    instance: str | None = None


JobEvent = (
    StartChosen
    | Deployed
    | DeployFailed
    | JobBegun
    | SavepointClaimed
    | OwnershipConfirmed
    | StorageSilent
    | NewestRead
    | StartFailed
    | TasksStopped
    | JobEndRecorded
    | JobEndNotRecorded
    | WorkEnded
    | TaskReport
    | FatalError
    | CancelRequested
    | DrainRequested
    | EndSourceRequested
    | RequestReceived
    | CheckpointRequested
    | MetadataWritten
    | MetadataWriteFailed
    | MetadataOutcomeUnknown
    | Tick
)

# Actions that are answered with an event


@dataclass(frozen=True, slots=True)
class ChooseOlderStart:
    """Choose another start: what was chosen cannot be read. Answered with StartChosen or FatalError."""

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
    | RequestFailed
)
