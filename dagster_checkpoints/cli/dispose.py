"""`dispose`: delete a savepoint."""

from __future__ import annotations

import sys

import click

from dagster_checkpoints.cli.exits import UsageProblem
from dagster_checkpoints.cli.locate import LOCATION_HELP, locate, opened_for
from dagster_checkpoints.cli.output import bytes_in_words, count_of, moment_in_words, write, write_json
from dagster_checkpoints.cli.status_view import next_start
from dagster_checkpoints.cli.storage_options import StorageOptions, storage_options
from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.state import StateError
from dagster_checkpoints.storage import StorageError, StorageUnavailable
from dagster_checkpoints.storage.locating import StoredCheckpoint
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

    Refused for the savepoint that the pipeline's next run would be restored from, and for one that a run has claimed.
    """
    with opened_for(options, location) as storage:
        stored = locate(storage, location)
        if stored.kind != "savepoint":
            raise UsageProblem(
                f"expected a savepoint, found the checkpoint {stored.url}. The pipeline itself deletes its checkpoints, as its "
                "retention says"
            )
        _check_unneeded(stored, force)
        directory = storage.open_savepoint(stored.location)
        summary = _summary(stored)
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


def _check_unneeded(stored: StoredCheckpoint, force: bool) -> None:
    state = stored.storage.read_state()
    if state is None:
        return
    named = next((pointer for pointer in state.retained if pointer.location == stored.location), None)
    if named is not None and named.claimed:
        raise StillNeeded(
            f"expected a savepoint that belongs to the user, found that a run has claimed {stored.url}: the pipeline deletes "
            "it when it no longer needs it"
        )
    if next_start(state) == stored.location and not force:
        raise StillNeeded(
            f"expected a savepoint that no run needs, found that the next run of {stored.storage.pipeline} would be restored "
            f"from {stored.url}. Let that run complete its first checkpoint, or use --force: the next run then fails unless its "
            "restore_from names another checkpoint"
        )


def _summary(stored: StoredCheckpoint) -> str:
    try:
        metadata = stored.read()
    except StorageUnavailable:
        raise
    except (StateError, StorageError) as error:
        return f"{stored.url} cannot be read ({error})"
    sizes = file_sizes(metadata)
    size = f"{count_of(len(sizes), 'file')}, {bytes_in_words(sum(sizes.values()))}"
    taken = moment_in_words(metadata.completed_at)
    return f"Savepoint {metadata.checkpoint_id} of {metadata.pipeline}, taken {taken} UTC, {size}, {stored.url}"
