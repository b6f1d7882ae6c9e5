"""What happens to a job: the events of `job_machine`, and the values in them and in its actions (`job_actions`).

Values only. What the coordinator, the requests and the tasks say is in `coordination.events`, `job_requests` and `messages`;
none of it is renamed here. Restored state and errors are the driver's own values, which come back as they were.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

import msgspec

from dagster_checkpoints.coordination import (
    CheckpointRequested,
    CompletedCheckpoint,
    CoordinatorEvent,
    JobStatus,
    MetadataOutcomeUnknown,
    MetadataWriteFailed,
    MetadataWritten,
    Tick,
)
from dagster_checkpoints.execution.job_requests import RequestReceived, SourceInstance
from dagster_checkpoints.execution.pipeline_state import EndedBy
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


class JobBeginning(msgspec.Struct, frozen=True):
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


class JobOutcome(msgspec.Struct, frozen=True):
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


class BeginningChosen(msgspec.Struct, frozen=True):
    """What the job starts from is known, and fits; nothing has been restored yet."""

    start: JobBeginning


class Deployed(msgspec.Struct, frozen=True):
    """The tasks of an attempt are built and restored; none is started.

    Attributes:
        graph: the tasks of all attempts.
        finished: the tasks that had finished in what was restored.
        sources: all instances of all sources.
    """

    graph: ExecutionGraph
    finished: Set[TaskId] = frozenset()
    sources: tuple[SourceInstance, ...] = ()


class DeployFailed(msgspec.Struct, frozen=True):
    """The attempt could not be built; nothing was started.

    Attributes:
        unusable: a state file of what was to be restored is corrupt or gone.
        may_pass: a stage could not be built, or storage did not answer: another attempt may go better.
    """

    failure: Failure
    unusable: bool = False
    may_pass: bool = False


class JobBegun(msgspec.Struct, frozen=True):
    """Storage says that the job runs."""


class SavepointClaimed(msgspec.Struct, frozen=True):
    """Storage says that the savepoint is the job's own."""


class OwnershipConfirmed(msgspec.Struct, frozen=True):
    """Storage says that this run owns the pipeline, and which checkpoint is the newest.

    Attributes:
        newest: None before the first.
        epoch: the fencing epoch of the run that has completed it.
    """

    newest: CompletedCheckpoint | None = None
    epoch: int = 0


class StorageSilent(msgspec.Struct, frozen=True):
    """Storage has not answered; the lease still holds."""


class NewestRead(msgspec.Struct, frozen=True):
    """The checkpoint that a restart begins from was read, and fits."""

    restored: RestorePoint


class StartFailed(msgspec.Struct, frozen=True):
    """The tasks could not be started."""

    failure: Failure


class TasksStopped(msgspec.Struct, frozen=True):
    """No task of the attempt runs any more."""


class JobEndRecorded(msgspec.Struct, frozen=True):
    """Storage says that the job has ended.

    Attributes:
        dropped: the system's own checkpoints that storage retains no longer.
    """

    dropped: tuple[CompletedCheckpoint, ...] = ()


class JobEndNotRecorded(msgspec.Struct, frozen=True):
    """Storage does not say that the job has ended, or it is not known: all checkpoints are kept."""


class WorkEnded(msgspec.Struct, frozen=True):
    """Nothing is being uploaded, written or deleted any more."""


# Events: from tasks, users and other threads


class TaskFailure(msgspec.Struct, frozen=True):
    """A task has failed."""

    task: TaskId
    failure: Failure


class TaskReport(msgspec.Struct, frozen=True):
    """A task, or an upload of its state, reports something. Reports of earlier attempts are ignored.

    Attributes:
        attempt: the one that the task belongs to.
    """

    attempt: int
    event: CoordinatorEvent | TaskFailure


class FatalError(msgspec.Struct, frozen=True):
    """The job cannot go on, and another attempt would not help: another run owns the pipeline, or storage refuses."""

    failure: Failure


class CancelRequested(msgspec.Struct, frozen=True):
    """The job shall end as soon as possible; its checkpoints are kept."""


class DrainRequested(msgspec.Struct, frozen=True):
    """Every source shall end, without a savepoint; after a stop that is under way, if the stop fails."""


class EndSourceRequested(msgspec.Struct, frozen=True):
    """A source shall end, or one instance of it."""

    stage: str
    instance: str | None = None


JobMachineEvent = (
    BeginningChosen
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
