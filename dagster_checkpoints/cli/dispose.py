"""`dispose`: delete a savepoint."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import click

from dagster_checkpoints.cli.exits import UsageProblem
from dagster_checkpoints.cli.locate import LOCATION_HELP, locate, opened_for
from dagster_checkpoints.cli.output import bytes_in_words, count_of, moment_in_words, with_outcome, write, write_json
from dagster_checkpoints.cli.status_view import next_start
from dagster_checkpoints.cli.storage_options import StorageOptions, pipelines, storage_options
from dagster_checkpoints.errors import DagsterCheckpointsError, StorageError, StorageUnavailable
from dagster_checkpoints.files.urls import local_path
from dagster_checkpoints.state.errors import StateError
from dagster_checkpoints.state.metadata import CheckpointMetadata
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
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

    Refused for the savepoint that the next run of a pipeline would be restored from, and for one that a run has claimed. Of a
    savepoint in another directory, --storage says where the pipelines are.
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
        _check_unneeded(options, storage, stored, force)
        directory = storage.open_savepoint(stored.location)
        summary = _summary(stored, metadata)
        if not yes:
            if options.as_json or not is_terminal():
                raise UsageProblem(f"{summary}: deleting it without confirmation needs --yes")
            click.confirm(f"{summary}. Delete it for good?", abort=True, err=True)
            _check_unneeded(options, storage, stored, force)  # a run may have begun from it before the answer
        directory.delete()
        with with_outcome(deleted := f"Deleted {directory.url}"):
            if options.as_json:
                write_json({"disposed": stored.location, "url": directory.url})
            else:
                write(deleted)


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


def _check_unneeded(options: StorageOptions, storage: CheckpointStorage, stored: StoredCheckpoint, force: bool) -> None:
    """Refuse a savepoint that a pipeline needs: one of the storage that holds it, or of the storage that the options name.

    A pipeline may start from another one's savepoint, and claim it.
    """
    stores = [storage.store] if storage.read_state() is not None else []
    with suppress(NoStorageError):
        stores.append(options.store())
    for store in {store.url: store for store in stores}.values():
        for name in pipelines(store):
            with options.storage_of(store, name) as other:
                _check_unneeded_by(other, stored, force)


def _check_unneeded_by(storage: CheckpointStorage, stored: StoredCheckpoint, force: bool) -> None:
    state = storage.read_state()
    if state is None:
        return
    if any(pointer.claimed and _is_at(storage, pointer.location, stored) for pointer in state.retained):
        raise StillNeeded(
            f"expected a savepoint that belongs to the user, found that a run has claimed {stored.url}: the pipeline "
            f"{storage.pipeline} deletes it when it no longer needs it"
        )
    start = next_start(state)
    if start is not None and _is_at(storage, start, stored) and not force:
        raise StillNeeded(
            f"expected a savepoint that no run needs, found that the next run of {storage.pipeline} would be restored "
            f"from {stored.url}. Let that run complete its first checkpoint, or use --force: the next run then fails unless its "
            "restore_from names another checkpoint"
        )


def _is_at(storage: CheckpointStorage, location: str, stored: StoredCheckpoint) -> bool:
    """Whether a location names the directory of a savepoint, also by another path, through a link."""
    url = storage.url_of(location)
    paths = [path for path in (local_path(url), local_path(stored.url)) if path is not None]
    return url == stored.url or (len(paths) == 2 and os.path.realpath(paths[0]) == os.path.realpath(paths[1]))


def _summary(stored: StoredCheckpoint, metadata: CheckpointMetadata | DagsterCheckpointsError) -> str:
    if not isinstance(metadata, CheckpointMetadata):
        return f"{stored.url} cannot be read ({metadata})"
    sizes = file_sizes(metadata)
    size = f"{count_of(len(sizes), 'file')}, {bytes_in_words(sum(sizes.values()))}"
    taken = moment_in_words(metadata.completed_at)
    return f"Savepoint {metadata.checkpoint_id} of {metadata.pipeline}, taken {taken} UTC, {size}, {stored.url}"
