"""Where a run starts from: a new start, the newest checkpoint, or a checkpoint or savepoint that the user names.

It must not know Spark. Everything is checked before anything starts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from dagster_checkpoints.coordination import CheckpointProperties, CompletedCheckpoint
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.errors import NothingToRestoreError
from dagster_checkpoints.spark.snapshots.restored_state import Restored
from dagster_checkpoints.state import ClaimMode, StateError, decode, validate_restore
from dagster_checkpoints.storage import CheckpointPointer, CheckpointStorage, PipelineState, StorageError, StorageUnavailable

OVER = frozenset({"FINISHED", "NONE"})


class RestoreOptions(Protocol):
    """The part of the job's options that concerns the start."""

    @property
    def restore_from(self) -> str: ...
    @property
    def allow_non_restored_state(self) -> bool: ...
    @property
    def allow_older_checkpoint(self) -> bool: ...
    @property
    def claim_mode(self) -> ClaimMode: ...


def is_repeated_start(restore_from: str, earlier_runs: Collection[str], previous: PipelineState) -> bool:
    """Whether a run that this one repeats has already begun the job where the run configuration says.

    A retry has the configuration of the run that failed. To follow it again would throw away what that run has done: it means
    the latest checkpoint.

    Args:
        restore_from: Of the run configuration.
        earlier_runs: The runs that this one repeats.
        previous: What storage says of the pipeline.

    Raises:
        NothingToRestoreError: The job that was begun that way has come to its end.
    """
    job = previous.job
    if restore_from == "latest" or not job.begun_by or job.begun_by not in earlier_runs:
        return False
    if job.status in OVER and job.ended_by != "suspend":
        raise NothingToRestoreError(
            f"restore_from: {restore_from!r}. Run {job.begun_by}, which this run repeats, has begun job {job.job_id} there, and "
            f"that job is {job.status}: there is nothing to continue, and to begin there again would repeat its rows. To run the "
            "pipeline again, launch a new run instead of a retry or re-execution."
        )
    return True


@dataclass(frozen=True)
class StartPoint:
    """What a run begins with.

    Attributes:
        restored: None for a new start.
        resume: The run goes on with the job before, whose id it keeps.
        pointer: To what is restored.
        claimed: It is a savepoint that becomes the pipeline's own, to delete when it is subsumed.
        retained: The checkpoints of that job which are kept, and a claimed savepoint.
        passed_over: Later checkpoints of that job: no longer of use once the job has gone on from an earlier one.
        sweep: Every retained checkpoint could be read, so files that none of them names may be deleted.
    """

    restored: Restored | None
    resume: bool
    next_checkpoint_id: int
    pointer: CheckpointPointer | None = None
    claimed: bool = False
    retained: tuple[CompletedCheckpoint, ...] = ()
    passed_over: tuple[CompletedCheckpoint, ...] = ()
    sweep: bool = False


def choose_start(
    pipeline: Pipeline, storage: CheckpointStorage, options: RestoreOptions, unusable: Collection[str] = ()
) -> StartPoint:
    """Decide what an owned pipeline starts from.

    Args:
        unusable: Locations of checkpoints whose state files have turned out to be corrupt.

    Raises:
        NothingToRestoreError: The run names a checkpoint that storage does not have.
        StorageUnavailable: Storage does not answer; never a reason to try an older checkpoint.
        StateError, StorageError: The checkpoint is corrupt, of an unknown version, or does not fit the pipeline. Older
            retained ones are tried only with `allow_older_checkpoint`.
    """
    ownership = storage.ownership
    assert ownership is not None
    previous = ownership.previous
    retained = storage.list_checkpoints()
    readable = _read_retained(storage, retained)
    sweep = len(readable) == len(retained)
    candidates = _candidates(storage, options, retained, previous)
    if not candidates:
        return StartPoint(None, False, 1, sweep=sweep)
    failures: list[Exception] = []
    for location in (c for c in candidates if c not in unusable):
        try:
            restored = read_restored(pipeline, storage, location, options.allow_non_restored_state)
        except StorageUnavailable:
            raise
        except (StateError, StorageError) as error:
            failures.append(error)
            if not options.allow_older_checkpoint:
                break
            continue
        return _start_from(restored, storage, previous, readable, options, sweep)
    if not failures:
        raise NothingToRestoreError(f"None of the checkpoints in {storage.url} can be restored: {', '.join(candidates)}.")
    raise failures[0]


def _start_from(
    restored: Restored,
    storage: CheckpointStorage,
    previous: PipelineState,
    readable: Collection[str],
    options: RestoreOptions,
    sweep: bool,
) -> StartPoint:
    chosen, own_id = restored.plan.checkpoint_id, previous.job.job_id
    savepoint = restored.savepoint
    pointer = CheckpointPointer(
        checkpoint_id=chosen,
        location=restored.location,
        kind=restored.metadata.kind,
        epoch=restored.metadata.epoch,
        job_id=int(restored.metadata.job_id or 0),
        completed_at=datetime.fromtimestamp(restored.metadata.completed_at, UTC),
    )
    # What was copied here from elsewhere may carry the same number by chance.
    resume = pointer.job_id == own_id and (savepoint is None or savepoint.own)
    if savepoint is None and not resume:
        raise NothingToRestoreError(
            f"expected a checkpoint of the pipeline's latest job ({own_id}), found that {storage.url_of(restored.location)} is "
            f"of job {pointer.job_id}. The job that began after it has aborted what that one had not committed, and its own rows "
            "are in the sinks: going back would lose or repeat rows. Restore a savepoint of that job, which holds all that it "
            "needs, or a checkpoint of the latest one"
        )
    listed = next((p for p in storage.list_checkpoints() if p.location == restored.location), None)
    # Once claimed it stays so, when the job is resumed from it before its first checkpoint.
    claimed = savepoint is not None and (options.claim_mode is ClaimMode.CLAIM or (listed is not None and listed.claimed))
    kept: list[CompletedCheckpoint] = []
    later: list[CompletedCheckpoint] = []
    if resume:
        this_job = [p for p in storage.list_checkpoints() if p.job_id == own_id and p.location != restored.location]
        kept = [completed_checkpoint(p) for p in this_job if p.checkpoint_id <= chosen and p.location in readable]
        # A savepoint that is passed over stays the user's.
        later = [completed_checkpoint(p) for p in this_job if p.checkpoint_id > chosen and p.ours]
    # A claimed savepoint is like a checkpoint: ours to delete.
    kept.append(CompletedCheckpoint(chosen, restored.location) if claimed else completed_checkpoint(pointer))
    next_id = max(chosen, previous.highest_checkpoint_id if resume else 0) + 1
    return StartPoint(restored, resume, next_id, pointer, claimed, tuple(kept), tuple(later), sweep)


def has_later(storage: CheckpointStorage, checkpoint_id: int) -> bool:
    """Whether later checkpoints were completed: what sinks committed with them has to be taken back."""
    ownership = storage.ownership
    assert ownership is not None
    return ownership.highest_checkpoint_id > checkpoint_id


def completed_checkpoint(pointer: CheckpointPointer) -> CompletedCheckpoint:
    """What the coordinator is to know of a checkpoint that `state.json` names."""
    # A savepoint that is the user's is never deleted; one that was claimed is like a checkpoint.
    properties = CheckpointProperties() if pointer.ours else CheckpointProperties.for_savepoint(stops_job=True)
    return CompletedCheckpoint(pointer.checkpoint_id, pointer.location, properties)


def _candidates(
    storage: CheckpointStorage, options: RestoreOptions, retained: list[CheckpointPointer], previous: PipelineState
) -> list[str]:
    """Locations to try, best first; none for a new start."""
    if options.restore_from == "none":
        return []
    if options.restore_from == "latest":
        newest = previous.newest
        suspended = previous.job.ended_by == "suspend"
        if newest is None or (previous.job.status in OVER and not suspended):
            return []
        return [newest.location, *_older(retained, newest)]
    wanted = options.restore_from.removeprefix("chk-")
    if wanted.isdigit():
        return _by_id(storage, options.restore_from, int(wanted), retained)
    named = _in_its_directory(options.restore_from)
    if storage.is_savepoint(named):
        return [storage.open_savepoint(named).location]
    location = storage.relative(named)
    return [location, *(older for p in retained if p.location == location for older in _older(retained, p))]


def _in_its_directory(name: str) -> str:
    """A location from a name without a directory; anything else as it is."""
    if "/" in name:
        return name
    return f"savepoints/{name}" if name.startswith("savepoint-") else f"checkpoints/{name}"


def _by_id(storage: CheckpointStorage, asked: str, wanted: int, retained: list[CheckpointPointer]) -> list[str]:
    found = [p for p in retained if p.checkpoint_id == wanted]
    if found:
        return [found[0].location, *_older(retained, found[0])]
    savepoints = storage.list_savepoints()
    named = [savepoint.location for savepoint in savepoints if savepoint.checkpoint_id == wanted]
    if len(named) == 1:
        return named
    if named:
        raise NothingToRestoreError(
            f"restore_from: {asked!r} fits several savepoints: {', '.join(named)}. Name one of them by its location."
        )
    checkpoints = ", ".join(str(p.checkpoint_id) for p in retained) or "none"
    there = ", ".join(savepoint.location for savepoint in savepoints) or "none"
    raise NothingToRestoreError(
        f"restore_from: {asked!r} asks for a checkpoint that {storage.url} does not hold. Retained checkpoints: {checkpoints}; "
        f"savepoints: {there}. Name one of these, or restore from 'latest' or 'none'."
    )


def _older(retained: list[CheckpointPointer], than: CheckpointPointer) -> list[str]:
    """Those of the same job: another job's rows are in the sinks under its own name."""
    return [p.location for p in retained if p.job_id == than.job_id and p.checkpoint_id < than.checkpoint_id]


def read_restored(pipeline: Pipeline, storage: CheckpointStorage, location: str, allow_non_restored_state: bool) -> Restored:
    """Read a checkpoint or savepoint and check that the pipeline can be restored from it.

    Raises:
        StateError, StorageError: It is corrupt, of an unknown version, gone, or does not fit.
    """
    savepoint = storage.open_savepoint(location) if storage.is_savepoint(location) else None
    if savepoint is not None:
        metadata = decode(savepoint.read_metadata(), f"{savepoint.url}/_metadata")
    else:
        metadata = decode(storage.read_metadata(location), f"{storage.url_of(location)}/_metadata")
        if storage.layout.parse_checkpoint(location) is not None:
            storage.register(location, metadata.files())  # also one that is not retained must not be swept away now
    return Restored(metadata, validate_restore(pipeline, metadata, allow_non_restored_state), location, savepoint)


def _read_retained(storage: CheckpointStorage, retained: list[CheckpointPointer]) -> set[str]:
    """Register which files the retained checkpoints name, so that none of them is deleted while it is retained.

    Returns:
        The locations of those that could be read.
    """
    readable = set()
    for pointer in retained:
        if pointer.kind != "savepoint":  # whose files are its own
            try:
                metadata = decode(storage.read_metadata(pointer.location), storage.url_of(pointer.location))
            except StorageUnavailable:
                raise  # its files would count as nobody's
            except (StateError, StorageError):
                continue  # it stays where it is; whoever restores from it gets the error
            storage.register(pointer.location, metadata.files())
        readable.add(pointer.location)
    return readable
