"""What ``state.json`` says: owner, lease, fencing epoch, newest completed checkpoint, how the job goes.

Values only; the storage floor encodes them. Wall-clock times are in UTC, for people: they are never compared.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec

from dagster_checkpoints.execution.origin import UNKNOWN_ORIGIN, Origin

VERSION = 3
"""Of the format that is written."""
JobState = Literal["NONE", "RUNNING", "FINISHED", "CANCELED", "FAILED", "SUSPENDED"]
"""How the job is or ended; NONE: an owner came, but no job was begun."""
EndedBy = Literal["", "end_of_data", "drain", "suspend"]
"""What brought a FINISHED job to its end; "" for others, and where version 1 did not say."""
StopAskedBy = Literal["", "request", "termination"]
"""What asked for a stop with savepoint: a control request, or the termination of the run's own process; "" where no stop ended
the job, and where an earlier release wrote the file."""


class Owner(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who runs the pipeline.

    The last three tell this process from every other one of its machine; empty where the system does not say them, and where a
    release wrote it that did not ask.

    Args:
        run_id: Dagster's, or whatever a person would look for.
        host: machine name.
        pid: process id on it.
        boot_id: of the machine; another one after each boot.
        namespaces: within which the process id and the next number have a meaning.
        started: when the process has started, in ticks of the machine's own clock.
    """

    run_id: str
    host: str
    pid: int
    boot_id: str = ""
    namespaces: str = ""
    started: int = 0


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The owner's promise to renew within ``seconds``, or to be silent for ever."""

    owner: Owner
    seconds: float
    acquired_at: datetime
    renewed_at: datetime
    renewals: int = 0


class CheckpointPointer(msgspec.Struct, frozen=True, kw_only=True):
    """A completed checkpoint and where it lies.

    Args:
        checkpoint_id: its id within the job.
        location: relative to the pipeline's directory, such as ``checkpoints/chk-42-3``; the URL of a savepoint elsewhere.
        kind: checkpoint or savepoint.
        epoch: of the owner that completed it.
        job_id: of the job that it belongs to.
        completed_at: wall clock of the owner; for display.
        claimed: a savepoint that the pipeline was given, to delete when it is no longer retained.
    """

    checkpoint_id: int
    location: str
    kind: str
    epoch: int
    job_id: int
    completed_at: datetime
    claimed: bool = False

    @property
    def ours(self) -> bool:
        """The system may delete it: every checkpoint, but only claimed savepoints."""
        return self.claimed or self.kind != "savepoint"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The pipeline's latest job: one new start with all its resumptions.

    Args:
        job_id: counts new starts.
        status: how it goes, or how it ended.
        started_at: wall clock.
        ended_at: wall clock; None while it runs, or when its process died.
        ended_by: what brought it to its end, if it is FINISHED.
        savepoint: location of the savepoint that it was stopped with, or "".
        stop_asked_by: what asked for that stop.
        run_id: the run that ran it last; "" where an earlier release wrote the file.
        begun_by: the run that last chose where the job begins: at a new start, or at a checkpoint that its configuration names. A
            run that goes on from the newest checkpoint leaves it as it is.
    """

    job_id: int = 0
    status: JobState = "NONE"
    started_at: datetime | None = None
    ended_at: datetime | None = None
    ended_by: EndedBy = ""
    savepoint: str = ""
    stop_asked_by: StopAskedBy = ""
    run_id: str = ""
    begun_by: str = ""


class PipelineState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``state.json``.

    Args:
        pipeline: its name.
        epoch: grows with every acquisition; what an owner writes carries it.
        token: differs in every version of the file, so that a write whose answer was lost is recognised.
        lease: None when nobody owns the pipeline.
        job: the latest.
        newest: what a restart resumes from: a checkpoint, the savepoint of a stop, or one that the job was started from; None
            when the latest job has none.
        retained: completed checkpoints that are kept, newest first, ``newest`` included; of savepoints only that of a stop,
            and claimed ones.
        highest_checkpoint_id: of all that were ever completed, or reserved for a savepoint, whatever their job.
        history: made up when the file was: job numbers begin anew with every file, and sinks tell them apart by it.
        origin: where the pipeline is defined, as the run that ran it last knew it.
        version: of this format.
    """

    pipeline: str
    epoch: int
    token: str
    lease: Lease | None = None
    job: Job = Job()
    newest: CheckpointPointer | None = None
    retained: tuple[CheckpointPointer, ...] = ()
    highest_checkpoint_id: int = 0
    history: str = ""
    origin: Origin = UNKNOWN_ORIGIN
    version: int = VERSION

    @property
    def restorable_checkpoints(self) -> tuple[CheckpointPointer, ...]:
        """Everything that a restore may begin from: what is retained, and the newest, which may be among it."""
        return self.retained if self.newest is None else (*self.retained, self.newest)


def describe_owner(state: PipelineState) -> str:
    """Who owns the pipeline, for the text of errors."""
    lease = state.lease
    if lease is None:
        return "owned by nobody"
    return (
        f"owned by run {lease.owner.run_id} on host {lease.owner.host} (process {lease.owner.pid}) since "
        f"{lease.acquired_at:%Y-%m-%d %H:%M:%S} UTC, last renewed {lease.renewed_at:%Y-%m-%d %H:%M:%S} UTC"
    )


def describe_end(state: PipelineState | None) -> str:
    """How the latest run ended, for the text of errors, seen from outside."""
    if state is None or state.job.status == "NONE":
        return "It has never run here"
    job = state.job
    newest = f"; newest checkpoint: {state.newest.location}" if state.newest is not None else "; no checkpoint to resume from"
    if job.status == "RUNNING":
        return f"Its latest job ({job.job_id}) did not end by itself: its process is gone{newest}"
    at = f" at {job.ended_at:%Y-%m-%d %H:%M:%S} UTC" if job.ended_at is not None else ""
    by = f" by {job.ended_by.replace('_', ' ')}" if job.ended_by else ""
    if job.savepoint:
        newest = f"; savepoint: {job.savepoint}"
    return f"Its latest job ({job.job_id}) ended {job.status}{by}{at}{newest}"
