"""What a job waits for: its phases, and the results that each of them takes.

Must not know: what follows from a result (`job_machine`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import NoReturn

from dagster_checkpoints.coordination.errors import UnexpectedEvent
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.execution.job_events import JobMachineEvent


class JobPhase(Enum):
    """What a job waits for."""

    CHOOSING = auto()
    """The choice of the start."""
    DEPLOYING = auto()
    """The tasks of an attempt."""
    BEGINNING = auto()
    """The record in storage that the job runs."""
    CONFIRMING = auto()
    """The confirmation that this run still owns the pipeline: the tasks are deployed and not started."""
    RUNNING = auto()
    """The end of the data, or a failure: the tasks run."""
    STOPPING = auto()
    """The end of the tasks."""
    RESTARTING = auto()
    """The delay of the strategy, and the outcome of the checkpoint that is being finalized."""
    READING = auto()
    """The newest checkpoint in storage, from which the restart begins."""
    ENDING = auto()
    """The record in storage that the job has ended."""
    CLOSING = auto()
    """The end of uploads, writes and deletions."""
    OVER = auto()
    """Nothing: the pipeline is released."""

    @property
    def ended(self) -> bool:
        """Whether the outcome of the job is decided."""
        return self in _ENDED


_ENDED = frozenset({JobPhase.ENDING, JobPhase.CLOSING, JobPhase.OVER})
_TAKEN_IN: Mapping[type[object], tuple[JobPhase, ...]] = {
    on.BeginningChosen: (JobPhase.CHOOSING,),
    on.Deployed: (JobPhase.DEPLOYING,),
    on.DeployFailed: (JobPhase.DEPLOYING,),
    on.JobBegun: (JobPhase.BEGINNING,),
    on.OwnershipConfirmed: (JobPhase.CONFIRMING, JobPhase.READING),
    on.StorageSilent: (JobPhase.CONFIRMING, JobPhase.READING),
    on.NewestRead: (JobPhase.READING,),
    on.StartFailed: (JobPhase.RUNNING,),
    on.TasksStopped: (JobPhase.STOPPING,),
    on.JobEndRecorded: (JobPhase.ENDING,),
    on.JobEndNotRecorded: (JobPhase.ENDING,),
    on.WorkEnded: (JobPhase.CLOSING,),
}
"""By result of an action, the phases in which the job waits for it."""


def check_awaited(event: JobMachineEvent, phase: JobPhase) -> None:
    """Check that a job in this phase waits for this result.

    Raises:
        UnexpectedEvent: it does not.
    """
    if phase not in _TAKEN_IN[type(event)]:
        refuse(event, phase)


def refuse(event: JobMachineEvent, phase: JobPhase) -> NoReturn:
    """Raise UnexpectedEvent: a job in this phase cannot take the event."""
    raise UnexpectedEvent(
        f"A job that is {phase.name} cannot take {event!r}: the driver hands in the result of an action that was not "
        "asked for, or what needs tasks before the first attempt is deployed."
    )
