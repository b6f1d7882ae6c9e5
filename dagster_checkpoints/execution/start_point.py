"""The start of a run: a new start, the newest checkpoint, or a checkpoint or savepoint that the user names.

As steps: the driver reads metadata and checks that it fits the pipeline. The decision is complete before any task starts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

import msgspec

from dagster_checkpoints.coordination.checkpoints import CheckpointProperties, CompletedCheckpoint
from dagster_checkpoints.errors import DagsterCheckpointsError, StorageError, StorageUnavailable
from dagster_checkpoints.execution.pipeline_state import CheckpointPointer, PipelineState
from dagster_checkpoints.execution.storage_steps import Steps
from dagster_checkpoints.execution.unlisted_checkpoints import UnlistedFiles
from dagster_checkpoints.state.claim import ClaimMode
from dagster_checkpoints.state.errors import StateError

R = TypeVar("R")
_NOT_RESUMABLE = frozenset({"FINISHED", "NONE"})


class NothingToRestoreError(DagsterCheckpointsError):
    """The run asks for a checkpoint that storage does not have."""

    repeats: ClassVar[bool] = True


class StartOptions(Protocol):
    """The options of a run that decide where it starts."""

    @property
    def restore_from(self) -> str:
        """``latest``, ``none``, an id, a name, a location or a URL."""

    @property
    def allow_older_checkpoint(self) -> bool:
        """Whether older retained checkpoints are tried if the chosen one cannot be restored."""

    @property
    def claim_mode(self) -> ClaimMode:
        """Who owns the savepoint that the run starts from, from then on."""


class RegisterFiles(msgspec.Struct, frozen=True):
    """Read the metadata of a retained checkpoint, and protect the files that it names from deletion.

    Answer: None.
    Errors: StateError, StorageError: it cannot be read.
    """

    location: str


class ReadRestorable(msgspec.Struct, frozen=True):
    """Read a checkpoint or savepoint, and check that the pipeline can be restored from it.

    Answer: a :class:`RestorableCheckpoint`.
    Errors: StateError, StorageError: it is corrupt, of an unknown version, missing, or does not fit the pipeline.
    """

    location: str


class ResolveName(msgspec.Struct, frozen=True):
    """Find the checkpoint or savepoint that a relative location, a URL or an absolute path names.

    Answer: a :class:`NamedPlace`.
    Errors: StorageError: it can be neither a checkpoint nor a savepoint, or the savepoint does not exist.
    """

    name: str


class ListSavepoints(msgspec.Struct, frozen=True):
    """List the complete savepoints in the pipeline's own directory.

    Answer: a sequence of :class:`NamedSavepoint`, newest first.
    """


class NamedPlace(msgspec.Struct, frozen=True):
    """The checkpoint or savepoint that a name in the run configuration stands for.

    Attributes:
        location: its location, in the form of ``state.json``.
        savepoint: whether it is a savepoint.
    """

    location: str
    savepoint: bool


class NamedSavepoint(msgspec.Struct, frozen=True):
    """A savepoint in the pipeline's own directory."""

    checkpoint_id: int
    location: str


class RestorableCheckpoint(msgspec.Struct, Generic[R], frozen=True):
    """A checkpoint or savepoint that fits the pipeline.

    Attributes:
        restored: the driver's value from which it restores.
        pointer: pointer to it, with the job that its metadata names.
        url: URL of its directory, for the text of errors.
        savepoint: whether it is a savepoint.
        own: whether it is in the pipeline's own directory.
    """

    restored: R
    pointer: CheckpointPointer
    url: str
    savepoint: bool
    own: bool


class StartPoint(msgspec.Struct, Generic[R], frozen=True):
    """The start of a run.

    Attributes:
        restored: the driver's value from which it restores; None for a new start.
        resume: whether the run continues the previous job, whose id it keeps.
        next_checkpoint_id: id of the first checkpoint that is triggered.
        pointer: pointer to the restored checkpoint; None for a new start. Its `claimed` says that it is a savepoint that belongs
            to the pipeline from then on: it is deleted when it is subsumed.
        retained: the checkpoints of that job which are kept, and a claimed savepoint.
        passed_over: checkpoints of no use once the job has completed one of its own: later ones of that job, and those of other
            jobs, from which no run may start.
        sweep: whether every retained checkpoint could be read, so that files that none of them names may be deleted.
    """

    restored: R | None
    resume: bool
    next_checkpoint_id: int
    pointer: CheckpointPointer | None = None
    retained: tuple[CompletedCheckpoint, ...] = ()
    passed_over: tuple[CompletedCheckpoint, ...] = ()
    sweep: bool = False


def is_job_over(state: PipelineState) -> bool:
    """Whether the latest job has ended and cannot be resumed."""
    return state.job.status in _NOT_RESUMABLE and state.job.ended_by != "suspend"


def is_repeated_start(restore_from: str, earlier_runs: Collection[str], previous: PipelineState) -> bool:
    """Whether a run that this one repeats has already begun the job at the start that the run configuration names.

    A retry has the configuration of the run that failed. If it started there again, the progress of that run would be lost:
    it continues from the latest checkpoint.

    Args:
        restore_from: the option of the run configuration.
        earlier_runs: ids of the runs that this one repeats.
        previous: the state of the pipeline in storage.

    Raises:
        NothingToRestoreError: the job that was begun that way has ended.
    """
    job = previous.job
    if restore_from == "latest" or not job.begun_by or job.begun_by not in earlier_runs:
        return False
    if is_job_over(previous):
        raise NothingToRestoreError(
            f"restore_from: {restore_from!r}. Run {job.begun_by}, which this run repeats, has begun job {job.job_id} there, and "
            f"that job is {job.status}: it cannot be continued, and a second start from there would repeat its rows. To run the "
            "pipeline again, launch a new run instead of a retry or re-execution."
        )
    return True


def continues_by_itself(state: PipelineState) -> bool:
    """Whether a run that no person has launched continues the job: it has not ended, or a termination from outside has suspended
    it. A job that a request has suspended, or that had caught up, waits for the next run that is launched.
    """
    job = state.job
    return job.status != "FINISHED" or (job.ended_by == "suspend" and job.stop_asked_by == "termination")


def has_ended_before(retried_runs: Collection[str], previous: PipelineState) -> bool:
    """Whether a run that this one repeats by itself has brought the job to its end, or suspended it: nothing is left to do.

    That run may have died before it could report its end. A new start would write the rows of the job again, and a suspend on
    request is not undone.

    Args:
        retried_runs: ids of the runs that this one repeats, and no person has launched again.
        previous: the state of the pipeline in storage.
    """
    return previous.job.run_id in retried_runs and not continues_by_itself(previous)


def completed_checkpoint(pointer: CheckpointPointer) -> CompletedCheckpoint:
    """A checkpoint that `state.json` names, as a value for the coordinator."""
    # A savepoint of the user is never deleted; a claimed one is treated like a checkpoint.
    properties = CheckpointProperties() if pointer.ours else CheckpointProperties.for_savepoint(stops_job=True)
    return CompletedCheckpoint(pointer.checkpoint_id, pointer.location, properties)


def choose_start(
    previous: PipelineState,
    retained: Sequence[CheckpointPointer],
    options: StartOptions,
    url: str,
    unusable: Collection[str] = (),
    unlisted: UnlistedFiles = UnlistedFiles(),  # noqa: B008 - immutable
) -> Steps[StartPoint[R]]:
    """Choose the start of a run that owns its pipeline.

    Args:
        previous: the content of ``state.json`` that the owner has found.
        retained: the completed checkpoints that are kept, newest first.
        options: the options of the run.
        url: URL of the pipeline's directory, for the text of errors.
        unusable: locations of checkpoints whose state files are corrupt.
        unlisted: what storage holds, if ``state.json`` records no job: it was lost, and the run names its start.

    Raises:
        NothingToRestoreError: the run names a checkpoint that storage does not have, or one of an earlier job; or not the newest
            one, if ``state.json`` was lost.
        StorageUnavailable: storage does not answer; never a reason to try an older checkpoint.
        StateError, StorageError: the checkpoint is corrupt, of an unknown version, or does not fit the pipeline. Older
            retained ones are tried only with `allow_older_checkpoint`.
    """
    readable: set[str] = set()
    for pointer in retained:
        if (yield from _register(pointer)):
            readable.add(pointer.location)
    sweep = len(readable) == len(retained)
    candidates = yield from _candidates(previous, retained, options.restore_from, url, unlisted)
    if not candidates:
        return StartPoint(None, False, 1, passed_over=_of_other_jobs(retained, None), sweep=sweep)
    if candidates[0] in previous.dropped_savepoints:
        raise NothingToRestoreError(
            f"restore_from: {options.restore_from!r}. An earlier run of the pipeline has claimed this savepoint, and newer "
            "checkpoints have replaced it: it is deleted, or will be at any moment. Restore from 'latest', or from a savepoint "
            "that no run has claimed (claim_mode: no_claim leaves it to you)."
        )
    failures: list[Exception] = []
    for location in (c for c in candidates if c not in unusable):
        try:
            found: RestorableCheckpoint[R] = yield ReadRestorable(location)
        except StorageUnavailable:
            raise
        except (StateError, StorageError) as error:
            failures.append(error)
            if not options.allow_older_checkpoint:
                break
            continue
        if previous.records_nothing:
            return _start_without_record(found, options.claim_mode, url, unlisted, sweep)
        return _start_from(found, previous, retained, readable, options.claim_mode, sweep)
    if not failures:
        raise NothingToRestoreError(f"None of the checkpoints in {url} can be restored: {', '.join(candidates)}.")
    raise failures[0]


def _register(pointer: CheckpointPointer) -> Steps[bool]:
    """Protect the files of a retained checkpoint from deletion. Returns whether the checkpoint could be read."""
    if pointer.kind == "savepoint":  # its files are in its own directory
        return True
    try:
        yield RegisterFiles(pointer.location)
    except StorageUnavailable:
        raise  # otherwise its files would be deleted as unused
    except (StateError, StorageError):
        return False  # it stays in storage; a restore from it raises the error
    return True


def _candidates(
    previous: PipelineState, retained: Sequence[CheckpointPointer], restore_from: str, url: str, unlisted: UnlistedFiles
) -> Steps[list[str]]:
    """Locations to try, best first; none for a new start."""
    if restore_from == "none":
        return []
    if restore_from == "latest":
        newest = previous.newest
        return [] if newest is None or is_job_over(previous) else [newest.location, *_older(retained, newest)]
    wanted = restore_from.removeprefix("chk-")
    if wanted.isdigit():
        if without_record := unlisted.checkpoints_with_id(int(wanted)):
            return without_record[:1]
        return (yield from _by_id(retained, restore_from, int(wanted), url))
    place: NamedPlace = yield ResolveName(_in_its_directory(restore_from))
    if place.savepoint:
        return [place.location]
    return [place.location, *(older for p in retained if p.location == place.location for older in _older(retained, p))]


def _in_its_directory(name: str) -> str:
    """The location for a name without a directory; other names are returned unchanged."""
    if "/" in name:
        return name
    return f"savepoints/{name}" if name.startswith("savepoint-") else f"checkpoints/{name}"


def _by_id(retained: Sequence[CheckpointPointer], asked: str, wanted: int, url: str) -> Steps[list[str]]:
    found = [p for p in retained if p.checkpoint_id == wanted]
    if found:
        return [found[0].location, *_older(retained, found[0])]
    savepoints: Sequence[NamedSavepoint] = yield ListSavepoints()
    named = [savepoint.location for savepoint in savepoints if savepoint.checkpoint_id == wanted]
    if len(named) == 1:
        return named
    if named:
        raise NothingToRestoreError(
            f"restore_from: {asked!r} fits several savepoints: {', '.join(named)}. Name one of them by its location."
        )
    checkpoints = ", ".join(str(p.checkpoint_id) for p in retained) or "none"
    known = ", ".join(savepoint.location for savepoint in savepoints) or "none"
    raise NothingToRestoreError(
        f"restore_from: {asked!r} asks for a checkpoint that {url} does not hold. Retained checkpoints: {checkpoints}; "
        f"savepoints: {known}. Name one of these, or restore from 'latest' or 'none'."
    )


def _older(retained: Sequence[CheckpointPointer], than: CheckpointPointer) -> list[str]:
    """The older checkpoints of the same job: the rows of another job are in the sinks under that job's name."""
    return [p.location for p in retained if p.job_id == than.job_id and p.checkpoint_id < than.checkpoint_id]


def _of_other_jobs(retained: Sequence[CheckpointPointer], job_id: int | None) -> tuple[CompletedCheckpoint, ...]:
    """The checkpoints of other jobs than the one that goes on, or of all for a new one; without savepoints of the user."""
    return tuple(completed_checkpoint(p) for p in retained if p.job_id != job_id and p.ours)


def _start_without_record(
    found: RestorableCheckpoint[R], claim_mode: ClaimMode, url: str, unlisted: UnlistedFiles, sweep: bool
) -> StartPoint[R]:
    """The start of the first job that `state.json` records, from a checkpoint or savepoint of a job that it does not know.

    Sinks take no rows back for a job that is not recorded. So of what is in the pipeline's own directory only the newest may be
    restored: no checkpoint after it has committed rows.
    """
    pointer = found.pointer
    if found.own and (later := unlisted.later_than(pointer.location)):
        raise NothingToRestoreError(
            f"expected the newest checkpoint or savepoint in {url}, found that {found.url} is older than {', '.join(later)}. The "
            "state.json that recorded their job was lost, so the rows that later ones have committed cannot be taken back, and "
            f"this one would write them again. Restore {later[0]!r}, or 'none' to begin again from the start. To restore an "
            "older savepoint for separate tables of the sinks, copy its directory out of the pipeline's, and name the copy by "
            "its URL or path. Savepoints that you have put there and do not want to restore: move them elsewhere"
        )
    pointer = msgspec.structs.replace(pointer, claimed=found.savepoint and claim_mode is ClaimMode.CLAIM)
    return StartPoint(found.restored, False, pointer.checkpoint_id + 1, pointer, (completed_checkpoint(pointer),), (), sweep)


def _start_from(
    found: RestorableCheckpoint[R],
    previous: PipelineState,
    retained: Sequence[CheckpointPointer],
    readable: Collection[str],
    claim_mode: ClaimMode,
    sweep: bool,
) -> StartPoint[R]:
    pointer, own_job = found.pointer, previous.job.job_id
    chosen = pointer.checkpoint_id
    known = next((p for p in previous.restorable_checkpoints if p.location == pointer.location), None)
    if known is not None and not found.savepoint:
        # A job that began from a checkpoint whose state.json was lost has made it its own; the metadata names the lost job.
        pointer = msgspec.structs.replace(pointer, job_id=known.job_id)
    # A savepoint that was copied from another storage may name the same job number by chance; not the one that `state.json` names
    # since this job has stopped with it, wherever it is. A claim lists others, too.
    stopped_with = any(p.location == pointer.location and p.job_id == own_job and not p.claimed for p in retained)
    resume = pointer.job_id == own_job and (found.own or stopped_with)
    if not found.savepoint and not resume:
        raise NothingToRestoreError(
            f"expected a checkpoint of the pipeline's latest job ({own_job}), found that {found.url} is of job "
            f"{pointer.job_id}. The later job has aborted the transactions that the earlier one had not committed, and its own "
            "rows are in the sinks: a restore of the earlier one would lose or repeat rows. Restore a savepoint of the "
            "earlier job, which is self-contained, or a checkpoint of the latest one"
        )
    # A claimed savepoint stays claimed if the job is resumed from it before its first checkpoint. That of a burst is no user's.
    of_burst = resume and found.own and previous.job.stop_asked_by == "caught_up" and pointer.location == previous.job.savepoint
    claimed = found.savepoint and (claim_mode is ClaimMode.CLAIM or of_burst or (known is not None and known.claimed))
    pointer = msgspec.structs.replace(pointer, claimed=claimed)
    kept: list[CompletedCheckpoint] = []
    others = [p for p in retained if p.location != pointer.location]
    passed_over = list(_of_other_jobs(others, own_job if resume else None))
    if resume:
        this_job = [p for p in others if p.job_id == own_job]
        kept = [completed_checkpoint(p) for p in this_job if p.checkpoint_id <= chosen and p.location in readable]
        # A savepoint that is passed over stays the user's.
        passed_over += [completed_checkpoint(p) for p in this_job if p.checkpoint_id > chosen and p.ours]
    kept.append(completed_checkpoint(pointer))
    next_id = max(chosen, previous.highest_checkpoint_id if resume else 0) + 1
    return StartPoint(found.restored, resume, next_id, pointer, tuple(kept), tuple(passed_over), sweep)
