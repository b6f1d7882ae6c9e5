"""Where a run starts from: a new start, the newest checkpoint, or one that the user names.

It must not know Spark. Everything is checked before anything starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from dagster_checkpoints.coordination import CompletedCheckpoint
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.deployment import Restored
from dagster_checkpoints.spark.errors import NothingToRestoreError
from dagster_checkpoints.state import CheckpointMetadata, StateError, decode, validate_restore
from dagster_checkpoints.storage import CheckpointPointer, CheckpointStorage, StorageError, StorageUnavailable

OVER = frozenset({"FINISHED", "NONE"})


class RestoreOptions(Protocol):
    """The part of the job's options that concerns the start."""

    @property
    def restore_from(self) -> str: ...
    @property
    def allow_non_restored_state(self) -> bool: ...
    @property
    def allow_older_checkpoint(self) -> bool: ...


@dataclass(frozen=True)
class StartPoint:
    """What a run begins with.

    Attributes:
        restored: None for a new start.
        resume: The run goes on with the job before, whose id it keeps.
        retained: The checkpoints of that job which are kept.
        passed_over: Later checkpoints of that job: no longer of use once the job has gone on from an earlier one.
        sweep: Every retained checkpoint could be read, so files that none of them names may be deleted.
    """

    restored: Restored | None
    resume: bool
    next_checkpoint_id: int
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
    metadata = _read_retained(storage, retained)
    goes_on = options.restore_from != "none" and (options.restore_from != "latest" or previous.job.status not in OVER)
    sweep = len(metadata) == len(retained)
    candidates = _candidates(storage, options, retained, previous.newest) if goes_on else []
    if not candidates:
        return StartPoint(None, False, 1, sweep=sweep)
    failures: list[Exception] = []
    for location in (c for c in candidates if c not in unusable):
        try:
            restored = _restore(pipeline, storage, location, options.allow_non_restored_state)
        except StorageUnavailable:
            raise
        except (StateError, StorageError) as error:
            failures.append(error)
            if not options.allow_older_checkpoint:
                break
            continue
        this_job = [p for p in retained if p.job_id == previous.job.job_id]
        chosen = restored.plan.checkpoint_id
        kept = [p for p in this_job if p.checkpoint_id <= chosen and p.location in metadata]
        later = [p for p in this_job if p.checkpoint_id > chosen]
        next_id = max([chosen, *(p.checkpoint_id for p in later)]) + 1
        return StartPoint(restored, True, next_id, _completed(kept), _completed(later), sweep)
    if not failures:
        raise NothingToRestoreError(f"None of the checkpoints in {storage.url} can be restored: {', '.join(candidates)}.")
    raise failures[0]


def has_later(storage: CheckpointStorage, checkpoint_id: int) -> bool:
    """Whether the job has completed later checkpoints: what sinks committed with them has to be taken back."""
    ownership = storage.ownership
    assert ownership is not None
    return any(p.checkpoint_id > checkpoint_id for p in ownership.retained if p.job_id == ownership.job_id)


def _completed(pointers: Iterable[CheckpointPointer]) -> tuple[CompletedCheckpoint, ...]:
    return tuple(CompletedCheckpoint(pointer.checkpoint_id, pointer.location) for pointer in pointers)


def _candidates(
    storage: CheckpointStorage,
    options: RestoreOptions,
    retained: list[CheckpointPointer],
    newest: CheckpointPointer | None,
) -> list[str]:
    if options.restore_from == "latest":
        if newest is None:
            return []
        return [newest.location, *_older(retained, newest)]
    wanted = options.restore_from.removeprefix("chk-")
    if wanted.isdigit():
        found = [p for p in retained if p.checkpoint_id == int(wanted)]
        if not found:
            there = ", ".join(str(p.checkpoint_id) for p in retained) or "none"
            raise NothingToRestoreError(
                f"restore_from: {options.restore_from!r} asks for a checkpoint that {storage.url} does not hold; retained: "
                f"{there}. Name one of these, or restore from 'latest' or 'none'."
            )
        return [found[0].location, *_older(retained, found[0])]
    location = storage.relative(options.restore_from)
    return [location, *(older for p in retained if p.location == location for older in _older(retained, p))]


def _older(retained: list[CheckpointPointer], than: CheckpointPointer) -> list[str]:
    """Those of the same job: another job's rows are in the sinks under its own name."""
    return [p.location for p in retained if p.job_id == than.job_id and p.checkpoint_id < than.checkpoint_id]


def _restore(pipeline: Pipeline, storage: CheckpointStorage, location: str, allow_non_restored_state: bool) -> Restored:
    metadata = decode(storage.read_metadata(location), storage.url_of(location))
    if storage.layout.parse_checkpoint(location) is not None:
        storage.register(location, metadata.files())  # also one that is not retained must not be swept away now
    return Restored(metadata, validate_restore(pipeline, metadata, allow_non_restored_state), location)


def _read_retained(storage: CheckpointStorage, retained: list[CheckpointPointer]) -> dict[str, CheckpointMetadata]:
    """Register which files the retained checkpoints name, so that none of them is deleted while it is retained."""
    found = {}
    for pointer in retained:
        try:
            metadata = decode(storage.read_metadata(pointer.location), storage.url_of(pointer.location))
        except StorageUnavailable:
            raise  # its files would count as nobody's
        except (StateError, StorageError):
            continue  # it stays where it is; whoever restores from it gets the error
        storage.register(pointer.location, metadata.files())
        found[pointer.location] = metadata
    return found
