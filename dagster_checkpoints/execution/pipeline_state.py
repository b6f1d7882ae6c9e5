"""The content of ``state.json``: owner, lease, fencing epoch, newest completed checkpoint, state of the job.

Values only; the storage floor encodes them. Wall-clock times are in UTC, for people: they are never compared. A field that this
release does not know is refused: it is a damaged name, and the field of that name would silently have its default, such as no
newest checkpoint. A release that adds a field writes another version.

Two pipelines may have the same name; `Origin` says to which one a directory of the storage belongs. A pipeline changes: its
stages are renamed, its code location moves, Dagster's database is created again. So one difference does not prove that it is
another pipeline; the rule needs two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from dagster_checkpoints.execution.moments import Moment, WithMoments


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pipeline is defined, according to its latest run; fields that the run did not know are empty.

    Args:
        code_location: name of Dagster's code location.
        instance: id of the Dagster instance.
        assets: keys of the stages' assets, sorted.
    """

    code_location: str = ""
    instance: str = ""
    assets: tuple[str, ...] = ()

    def then(self, later: Origin) -> Origin:
        """The origin after a later run; fields that the later run did not know are kept."""
        return Origin(
            code_location=later.code_location or self.code_location,
            instance=later.instance or self.instance,
            assets=later.assets or self.assets,
        )


UNKNOWN_ORIGIN = Origin()


def is_same_pipeline(known: Origin, found: Origin) -> bool:
    """Whether two origins may be those of one pipeline.

    They are not if the pipelines come from different places (another code location, or another Dagster instance) **and** have
    fewer than half of their asset keys in common, counted from the smaller pipeline. So a pipeline that is renamed, restructured
    or given another key prefix in the same place remains the same, and so does one that is moved with its keys. Unknown fields
    count as equal, also unknown keys.
    """
    places = ((known.code_location, found.code_location), (known.instance, found.instance))
    if all(one == other or not one or not other for one, other in places):
        return True
    return 2 * len(set(known.assets) & set(found.assets)) >= min(len(known.assets), len(found.assets))


VERSION = 5
"""Version of the format that is written."""
JobState = Literal["NONE", "RUNNING", "FINISHED", "CANCELED", "FAILED", "SUSPENDED"]
"""The state of a job, final if it has ended; NONE: the pipeline was acquired, but no job was begun."""
EndedBy = Literal["", "end_of_data", "drain", "suspend"]
"""What brought a FINISHED job to its end; "" for others, and if version 1 of the format does not say it."""
StopAskedBy = Literal["", "request", "termination", "caught_up"]
"""What asked for a stop with savepoint: a control request, the termination of the run's own process, or a burst whose sources
have read what was there; "" if no stop ended the job, or if an earlier release wrote the file."""


class Owner(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The process that runs the pipeline.

    The last three fields distinguish it from every other process of its machine; they are empty if the system does not provide
    them, or if an earlier release wrote the file.

    Args:
        run_id: id of the Dagster run, or another id by which a person finds the run.
        host: name of the machine.
        pid: process id on that machine.
        boot_id: id of the machine's boot; each boot has another one.
        namespaces: the namespaces in which `pid` and `started` are valid.
        started: when the process started, in ticks of the machine's own clock.
    """

    run_id: str
    host: str
    pid: int
    boot_id: str = ""
    namespaces: str = ""
    started: int = 0


class Lease(WithMoments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The owner's right to act: it renews the lease within ``seconds``, or stops acting."""

    owner: Owner
    seconds: float
    acquired_at: Moment
    renewed_at: Moment
    renewals: int = 0


class CheckpointPointer(WithMoments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A completed checkpoint and its location.

    Args:
        checkpoint_id: its id within the job.
        location: relative to the pipeline's directory, such as ``checkpoints/chk-42-3``; the URL of a savepoint elsewhere.
        kind: checkpoint or savepoint.
        epoch: fencing epoch of the owner that completed it.
        job_id: id of the job that it belongs to.
        completed_at: wall-clock time of the owner; for display.
        claimed: whether it is a savepoint that the pipeline has claimed: it is deleted when it is no longer retained.
    """

    checkpoint_id: int
    location: str
    kind: Annotated[str, msgspec.Meta(pattern="^(checkpoint|savepoint)$")]
    epoch: int
    job_id: int
    completed_at: Moment
    claimed: bool = False

    @property
    def ours(self) -> bool:
        """Whether the system may delete it: every checkpoint, but only claimed savepoints."""
        return self.claimed or self.kind != "savepoint"


class Job(WithMoments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pipeline's latest job: one new start with all its resumptions.

    Args:
        job_id: number of the job; each new start adds one.
        status: its state, final if it has ended.
        started_at: wall-clock time of its start.
        ended_at: wall-clock time of its end; None while it runs, or if its process died.
        ended_by: what brought it to its end, if it is FINISHED.
        savepoint: location of the savepoint that it was stopped with; "" without one.
        stop_asked_by: what asked for that stop.
        run_id: id of the run that ran it last; "" if an earlier release wrote the file.
        begun_by: id of the run that last chose where the job begins: a new start, or a checkpoint that its configuration names. A
            run that continues from the newest checkpoint does not change it.
        most_instances: by the uid of a stage, the largest number of instances that it has had in the job, if above 1: the sinks
            of those that are gone may have to take rows back, also where the checkpoints that named them are deleted.
    """

    job_id: int = 0
    status: JobState = "NONE"
    started_at: Moment | None = None
    ended_at: Moment | None = None
    ended_by: EndedBy = ""
    savepoint: str = ""
    stop_asked_by: StopAskedBy = ""
    run_id: str = ""
    begun_by: str = ""
    most_instances: Mapping[str, int] = {}


class PipelineState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of ``state.json``.

    Args:
        pipeline: name of the pipeline.
        epoch: fencing epoch of the owner, larger after every acquisition; files that an owner writes carry it.
        token: random, different in every version of the file, so that a write whose answer was lost is recognised.
        lease: lease of the owner; None without one.
        job: the latest job.
        newest: the checkpoint that a restart begins from: a checkpoint, the savepoint of a stop, or the savepoint that the job
            was started from; None if the latest job has none.
        retained: completed checkpoints that are kept, newest first, ``newest`` included; of the savepoints only that of a stop,
            and claimed ones.
        dropped_savepoints: locations of the claimed savepoints that are no longer retained, newest first, at most
            `state_changes.KEPT_DROPPED_SAVEPOINTS`: an owner deletes each of them sooner or later, so no run may start from one.
        highest_checkpoint_id: highest id that was ever completed, or reserved, in all jobs: for a savepoint, or for the first
            checkpoint of a run that has gone back to an earlier one.
        history: random id, created with the file: job numbers start again with every new file, and sinks distinguish them by it.
        origin: where the pipeline is defined, according to the run that ran it last.
        version: version of this format.
    """

    pipeline: str
    epoch: int
    token: str
    lease: Lease | None = None
    job: Job = Job()
    newest: CheckpointPointer | None = None
    retained: tuple[CheckpointPointer, ...] = ()
    dropped_savepoints: tuple[str, ...] = ()
    highest_checkpoint_id: int = 0
    history: str = ""
    origin: Origin = UNKNOWN_ORIGIN
    version: int = VERSION

    @property
    def restorable_checkpoints(self) -> tuple[CheckpointPointer, ...]:
        """The checkpoints that a restore may begin from: the retained ones, and the newest one, which may be among them."""
        return self.retained if self.newest is None else (*self.retained, self.newest)

    @property
    def records_nothing(self) -> bool:
        """Whether it names neither a job nor a checkpoint: no run has begun a job under this file."""
        return self.job.status == "NONE" and not self.restorable_checkpoints


def describe_owner(state: PipelineState) -> str:
    """The owner of the pipeline, for the text of errors."""
    lease = state.lease
    if lease is None:
        return "not owned by any run"
    return (
        f"owned by run {lease.owner.run_id} on host {lease.owner.host} (process {lease.owner.pid}) since "
        f"{lease.acquired_at:%Y-%m-%d %H:%M:%S} UTC, last renewed {lease.renewed_at:%Y-%m-%d %H:%M:%S} UTC"
    )


def describe_end(state: PipelineState | None) -> str:
    """The end of the latest job as `state.json` shows it, for the text of errors."""
    if state is None:
        return "It has never run here, or its state.json was lost"
    if state.job.status == "NONE":
        return "It has never run here"
    job = state.job
    newest = f"; newest checkpoint: {state.newest.location}" if state.newest is not None else "; no checkpoint to resume from"
    if job.status == "RUNNING":
        return f"Its latest job ({job.job_id}) did not end by itself: its process has died{newest}"
    at = f" at {job.ended_at:%Y-%m-%d %H:%M:%S} UTC" if job.ended_at is not None else ""
    by = f" by {job.ended_by.replace('_', ' ')}" if job.ended_by else ""
    if job.savepoint:
        newest = f"; savepoint: {job.savepoint}"
    return f"Its latest job ({job.job_id}) ended {job.status}{by}{at}{newest}"
