"""The events of `job_machine`, and the values in them and in its actions (`job_actions`).

Values only. The values of the coordinator, of requests and of messages to tasks are in `coordination.events`, `job_requests` and
`task_events`. Restored state and errors are the driver's own values, which the machine returns unchanged.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

import msgspec

from dagster_checkpoints.coordination.checkpoints import CompletedCheckpoint
from dagster_checkpoints.coordination.events import (
    CheckpointRequested,
    EventOfTask,
    MetadataOutcomeUnknown,
    MetadataWriteFailed,
    MetadataWritten,
    Tick,
)
from dagster_checkpoints.coordination.retention import JobStatus
from dagster_checkpoints.execution.job_requests import RequestReceived, SourceInstance
from dagster_checkpoints.execution.pipeline_state import EndedBy
from dagster_checkpoints.execution.split_events import EnumeratorStart, SplitRequest, SplitsDiscovered
from dagster_checkpoints.execution.task_events import SourceEnded, SourcesRead
from dagster_checkpoints.pipeline import ExecutionGraph, TaskId

# Values


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt, or the job, has failed.

    Attributes:
        message: the failure, for people.
        repeats: whether another attempt would fail in the same way.
        error: the driver's own error; None if a rule of the job has failed it. Not compared.
    """

    message: str
    repeats: bool = False
    error: object = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The checkpoint or savepoint that an attempt starts from.

    Attributes:
        checkpoint_id: id of the checkpoint or savepoint.
        location: its location.
        finished: the tasks that had finished when it was triggered.
        ending: (stage, instance) of the sources that requests had ended.
        state: the state that the driver restores. Not compared.
    """

    checkpoint_id: int
    location: str
    finished: Set[TaskId] = frozenset()
    ending: frozenset[tuple[str, str]] = frozenset()
    state: object = field(default=None, compare=False)


class JobBeginning(msgspec.Struct, frozen=True):
    """The beginning of a job: where it starts from, and the checkpoints in storage.

    Attributes:
        restored: the checkpoint or savepoint that it starts from; None for a new start.
        next_checkpoint_id: id of the first checkpoint.
        retained: the checkpoints that storage retains, with the restored one.
        passed_over: checkpoints of no use after the first one of the job: later ones than that it started from, and those of
            other jobs.
    """

    restored: RestorePoint | None = None
    next_checkpoint_id: int = 1
    retained: tuple[CompletedCheckpoint, ...] = ()
    passed_over: tuple[CompletedCheckpoint, ...] = ()


class JobOutcome(msgspec.Struct, frozen=True):
    """How a job has ended.

    Attributes:
        status: FINISHED, CANCELED or FAILED.
        message: why a FAILED job has failed, and why it is not restarted.
        failure: the failure of a FAILED job; None for others.
        given_up: whether the job may restart after such a failure; the message says why it did not.
        ended_by: what brought a FINISHED job to its end.
    """

    status: JobStatus
    message: str = ""
    failure: Failure | None = None
    given_up: bool = False
    ended_by: EndedBy = ""


# Events: results of actions


class BeginningChosen(msgspec.Struct, frozen=True):
    """The start of the job is chosen, and fits the pipeline; nothing has been restored yet."""

    start: JobBeginning


class Deployed(msgspec.Struct, frozen=True):
    """The tasks of an attempt are built and restored; none is started.

    Attributes:
        graph: the tasks of all attempts.
        finished: the tasks that had finished in the restored checkpoint; of a part of the job, only its own count.
        sources: all instances of all sources.
        enumerators: the enumerators of split sources.
    """

    graph: ExecutionGraph
    finished: Set[TaskId] = frozenset()
    sources: tuple[SourceInstance, ...] = ()
    enumerators: tuple[EnumeratorStart, ...] = ()


class DeployFailed(msgspec.Struct, frozen=True):
    """The attempt could not be built; nothing was started.

    Attributes:
        failure: why.
        unusable: whether a state file of the checkpoint is corrupt or missing.
        may_pass: whether another attempt may succeed: a stage could not be built, or storage did not answer.
    """

    failure: Failure
    unusable: bool = False
    may_pass: bool = False


class JobBegun(msgspec.Struct, frozen=True):
    """It is recorded in storage that the job runs."""


class OwnershipConfirmed(msgspec.Struct, frozen=True):
    """Storage says that this run owns the pipeline, and which checkpoint is the newest.

    Attributes:
        newest: the newest checkpoint; None before the first.
        epoch: fencing epoch of the run that has completed it.
    """

    newest: CompletedCheckpoint | None = None
    epoch: int = 0


class StorageSilent(msgspec.Struct, frozen=True):
    """Storage has not answered; the lease still holds."""


class NewestRead(msgspec.Struct, frozen=True):
    """The checkpoint that a restart begins from was read, and fits the pipeline."""

    restored: RestorePoint


class StartFailed(msgspec.Struct, frozen=True):
    """The tasks could not be started."""

    failure: Failure


class TasksStopped(msgspec.Struct, frozen=True):
    """No task of the attempt runs any more."""


class JobEndRecorded(msgspec.Struct, frozen=True):
    """It is recorded in storage that the job has ended.

    Attributes:
        dropped: the system's own checkpoints that storage retains no longer.
    """

    dropped: tuple[CompletedCheckpoint, ...] = ()


class JobEndNotRecorded(msgspec.Struct, frozen=True):
    """It is not recorded in storage that the job has ended, or that is not known: all checkpoints are kept."""


class WorkEnded(msgspec.Struct, frozen=True):
    """All uploads, writes and deletions have ended."""


# Events: from tasks, users and other threads


class TaskFailure(msgspec.Struct, frozen=True):
    """A task has failed."""

    task: TaskId
    failure: Failure


class TaskReport(msgspec.Struct, frozen=True):
    """A task, an upload of its state, or a discovery of splits reports something. Reports of earlier attempts are ignored.

    Attributes:
        attempt: number of the attempt that the task belongs to.
    """

    attempt: int
    event: EventOfTask | TaskFailure | SplitRequest | SplitsDiscovered | SourcesRead | SourceEnded


class FatalError(msgspec.Struct, frozen=True):
    """The job cannot continue, also not after a restart: another run owns the pipeline, or storage refuses."""

    failure: Failure


class CancelRequested(msgspec.Struct, frozen=True):
    """The job is to end as soon as possible; its checkpoints are kept."""


class DrainRequested(msgspec.Struct, frozen=True):
    """Every source is to end, without a savepoint, when bounded ones have been read to their end; if a stop is under way, only
    after the stop has failed."""


class EndSourceRequested(msgspec.Struct, frozen=True):
    """A source is to end, or one of its instances."""

    stage: str
    instance: str | None = None


JobMachineEvent = (
    BeginningChosen
    | Deployed
    | DeployFailed
    | JobBegun
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
