"""Where a run starts from: a new start, the newest checkpoint, or one that the user names.

It must not know Spark. Everything is checked before anything starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dagster_checkpoints.coordination import CompletedCheckpoint
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.deployment import Restored
from dagster_checkpoints.spark.errors import NothingToRestoreError
from dagster_checkpoints.state import CheckpointMetadata, StateError, decode, validate_restore
from dagster_checkpoints.storage import CheckpointPointer, CheckpointStorage, StorageError

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
        sweep: Every retained checkpoint could be read, so files that none of them names may be deleted.
    """

    restored: Restored | None
    resume: bool
    next_checkpoint_id: int
    retained: tuple[CompletedCheckpoint, ...] = ()
    sweep: bool = False


def choose_start(pipeline: Pipeline, storage: CheckpointStorage, options: RestoreOptions) -> StartPoint:
    """Decide what an owned pipeline starts from.

    Raises:
        NothingToRestoreError: The run names a checkpoint that storage does not have.
        StateError, StorageError: The checkpoint is corrupt, of an unknown version, or does not fit the pipeline. Older
            retained ones are tried only with `allow_older_checkpoint`.
    """
    ownership = storage.ownership
    assert ownership is not None
    previous = ownership.previous
    retained = storage.list_checkpoints()
    metadata = _read_retained(storage, retained)
    goes_on = options.restore_from != "none" and (options.restore_from != "latest" or previous.job.status not in OVER)
    candidates = _candidates(storage, options, retained, previous.newest) if goes_on else []
    if not candidates:
        return StartPoint(None, False, 1, sweep=len(metadata) == len(retained))
    failures: list[Exception] = []
    for location in candidates:
        try:
            restored = _restore(pipeline, storage, location, options.allow_non_restored_state)
        except (StateError, StorageError) as error:
            failures.append(error)
            if not options.allow_older_checkpoint:
                break
            continue
        kept = tuple(
            CompletedCheckpoint(pointer.checkpoint_id, pointer.location)
            for pointer in retained
            if pointer.checkpoint_id <= restored.plan.checkpoint_id and pointer.location in metadata
        )
        next_id = max(restored.plan.next_checkpoint_id, previous.highest_checkpoint_id + 1)
        return StartPoint(restored, True, next_id, kept, sweep=len(metadata) == len(retained))
    raise failures[0]


def _candidates(
    storage: CheckpointStorage,
    options: RestoreOptions,
    retained: list[CheckpointPointer],
    newest: CheckpointPointer | None,
) -> list[str]:
    if options.restore_from == "latest":
        if newest is None:
            return []
        older = [p.location for p in retained if p.checkpoint_id < newest.checkpoint_id]
        return [newest.location, *older]
    wanted = options.restore_from.removeprefix("chk-")
    if wanted.isdigit():
        found = [p.location for p in retained if p.checkpoint_id == int(wanted)]
        if not found:
            there = ", ".join(str(p.checkpoint_id) for p in retained) or "none"
            raise NothingToRestoreError(
                f"restore_from: {options.restore_from!r} asks for a checkpoint that {storage.url} does not hold; retained: "
                f"{there}. Name one of these, or restore from 'latest' or 'none'."
            )
        return found
    return [storage.relative(options.restore_from)]


def _restore(pipeline: Pipeline, storage: CheckpointStorage, location: str, allow_non_restored_state: bool) -> Restored:
    metadata = decode(storage.read_metadata(location), storage.url_of(location))
    return Restored(metadata, validate_restore(pipeline, metadata, allow_non_restored_state), location)


def _read_retained(storage: CheckpointStorage, retained: list[CheckpointPointer]) -> dict[str, CheckpointMetadata]:
    """Register which files the retained checkpoints name, so that none of them is deleted while it is retained."""
    found = {}
    for pointer in retained:
        try:
            metadata = decode(storage.read_metadata(pointer.location), storage.url_of(pointer.location))
        except (StateError, StorageError):
            continue  # it stays where it is; whoever restores from it gets the error
        storage.register(pointer.location, metadata.files())
        found[pointer.location] = metadata
    return found
