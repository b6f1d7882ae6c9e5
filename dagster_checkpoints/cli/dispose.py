"""`dispose`: delete a savepoint."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import click

from dagster_checkpoints.cli.exits import UsageProblem
from dagster_checkpoints.cli.locate import LOCATION_HELP, locate, opened_for
from dagster_checkpoints.cli.output import bytes_in_words, count_of, moment_in_words, write, write_json
from dagster_checkpoints.cli.status_view import next_start
from dagster_checkpoints.cli.storage_options import StorageOptions, storage_options
from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.state import CheckpointMetadata, StateError
from dagster_checkpoints.storage import CheckpointStorage, ObjectStore, StorageError, StorageUnavailable
from dagster_checkpoints.storage.locating import StoredCheckpoint
from dagster_checkpoints.storage.root import NoStorageError
from dagster_checkpoints.storage.verification import file_sizes


class StillNeeded(DagsterCheckpointsError):
    """A run needs the savepoint: the next run would restore it, or a run has claimed it."""


@click.command(epilog=LOCATION_HELP)
@click.argument("location")
@click.option("--force", is_flag=True, help="Delete it even if the next run would be restored from it.")
@click.option("--yes", "-y", is_flag=True, help="Delete without confirmation.")
@storage_options
def dispose(options: StorageOptions, location: str, force: bool, yes: bool) -> None:
    """Delete a savepoint for good. The pipeline itself deletes its checkpoints, as its retention says.

    Refused for the savepoint that the pipeline's next run would be restored from, and for one that a run has claimed. Of a
    savepoint in another directory, --storage says where its pipeline is.
    """
    if not location.strip():  # the variable of a script was not set: here it is not the newest one, as elsewhere
        raise UsageProblem(
            "expected the LOCATION of a savepoint, found an empty text; nothing was deleted. 'list' shows the savepoints"
        )
    with opened_for(options, location) as storage:
        stored = locate(storage, location)
        if stored.kind != "savepoint":
            raise UsageProblem(
                f"expected a savepoint, found the checkpoint {stored.url}. The pipeline itself deletes its checkpoints, as its "
                "retention says"
            )
        metadata = _read(stored)
        _check_unneeded(storage, stored, force)
        with _storage_of_pipeline(options, metadata) as other:
            if other is not None and other.url != storage.url:
                _check_unneeded(other, stored, force)
        directory = storage.open_savepoint(stored.location)
        summary = _summary(stored, metadata)
        if not yes:
            if options.as_json or not is_terminal():
                raise UsageProblem(f"{summary}: deleting it without confirmation needs --yes")
            click.confirm(f"{summary}. Delete it for good?", abort=True, err=True)
        directory.delete()
        if options.as_json:
            write_json({"disposed": stored.location, "url": directory.url})
        else:
            write(f"Deleted {directory.url}")


def is_terminal() -> bool:
    """Whether a person can answer a question: standard input is a terminal."""
    return sys.stdin.isatty()


def _read(stored: StoredCheckpoint) -> CheckpointMetadata | DagsterCheckpointsError:
    try:
        return stored.read()
    except StorageUnavailable:
        raise
    except (StateError, StorageError) as error:
        return error


@contextmanager
def _storage_of_pipeline(
    options: StorageOptions, metadata: CheckpointMetadata | DagsterCheckpointsError
) -> Iterator[CheckpointStorage | None]:
    """The storage of the pipeline that took a savepoint, which may be elsewhere; None if that is not known."""
    pipeline = options.pipeline or (metadata.pipeline if isinstance(metadata, CheckpointMetadata) else "")
    store: ObjectStore | None = None
    with suppress(NoStorageError):
        store = options.store()
    if store is None or not pipeline:
        yield None
        return
    with options.storage_of(store, pipeline) as storage:
        yield storage


def _check_unneeded(storage: CheckpointStorage, stored: StoredCheckpoint, force: bool) -> None:
    state = storage.read_state()
    if state is None:
        return
    if any(pointer.claimed and storage.url_of(pointer.location) == stored.url for pointer in state.retained):
        raise StillNeeded(
            f"expected a savepoint that belongs to the user, found that a run has claimed {stored.url}: the pipeline deletes "
            "it when it no longer needs it"
        )
    start = next_start(state)
    if start is not None and storage.url_of(start) == stored.url and not force:
        raise StillNeeded(
            f"expected a savepoint that no run needs, found that the next run of {storage.pipeline} would be restored "
            f"from {stored.url}. Let that run complete its first checkpoint, or use --force: the next run then fails unless its "
            "restore_from names another checkpoint"
        )


def _summary(stored: StoredCheckpoint, metadata: CheckpointMetadata | DagsterCheckpointsError) -> str:
    if not isinstance(metadata, CheckpointMetadata):
        return f"{stored.url} cannot be read ({metadata})"
    sizes = file_sizes(metadata)
    size = f"{count_of(len(sizes), 'file')}, {bytes_in_words(sum(sizes.values()))}"
    taken = moment_in_words(metadata.completed_at)
    return f"Savepoint {metadata.checkpoint_id} of {metadata.pipeline}, taken {taken} UTC, {size}, {stored.url}"
