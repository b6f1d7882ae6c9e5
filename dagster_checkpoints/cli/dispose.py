"""`dispose`: delete a savepoint."""

from __future__ import annotations

import sys

import click

from dagster_checkpoints.cli.exits import UsageProblem
from dagster_checkpoints.cli.locate import WHAT, Found, find, opened_for
from dagster_checkpoints.cli.output import bytes_in_words, count_of, moment_in_words, write, write_json
from dagster_checkpoints.cli.status_view import next_start
from dagster_checkpoints.cli.storage_options import Where, storage_options
from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.plugin.verification import file_sizes
from dagster_checkpoints.state import StateError
from dagster_checkpoints.storage import StorageError, StorageUnavailable


class StillNeeded(DagsterCheckpointsError):
    """The savepoint is what a run would be restored from."""


@click.command(epilog=WHAT)
@click.argument("location")
@click.option("--force", is_flag=True, help="Even if the next run would be restored from it.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@storage_options
def dispose(where: Where, location: str, force: bool, yes: bool) -> None:
    """Delete a savepoint for good. Checkpoints are deleted by the pipeline itself, as its retention says.

    Refused for the savepoint that the pipeline's next run would be restored from, and for one that a run has claimed.
    """
    with opened_for(where, location) as storage:
        found = find(storage, location)
        if found.kind != "savepoint":
            raise UsageProblem(
                f"expected a savepoint, found the checkpoint {found.url}. Checkpoints are deleted by the pipeline itself, as its "
                "retention says"
            )
        _check_unneeded(found, force)
        directory = storage.open_savepoint(found.location)
        about = _about(found)
        if not yes:
            if where.as_json or not is_terminal():
                raise UsageProblem(f"{about}: to delete it without being asked, say --yes")
            click.confirm(f"{about}. Delete it for good?", abort=True, err=True)
        directory.delete()
        if where.as_json:
            write_json({"disposed": found.location, "url": directory.url})
        else:
            write(f"Deleted {directory.url}")


def is_terminal() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin.isatty()


def _check_unneeded(found: Found, force: bool) -> None:
    state = found.storage.read_state()
    if state is None:
        return
    named = next((pointer for pointer in state.retained if pointer.location == found.location), None)
    if named is not None and named.claimed:
        raise StillNeeded(
            f"expected a savepoint of the user's own, found that a run has claimed {found.url}: the pipeline deletes it when it "
            "needs it no longer"
        )
    if next_start(state) == found.location and not force:
        raise StillNeeded(
            f"expected a savepoint that no run needs, found that the next run of {found.storage.pipeline} would be restored from "
            f"{found.url}. Let it run until its first checkpoint, or say --force: the next run then fails unless it is told "
            "what to restore from"
        )


def _about(found: Found) -> str:
    try:
        metadata = found.read()
    except StorageUnavailable:
        raise
    except (StateError, StorageError) as error:
        return f"{found.url} cannot be read ({error})"
    sizes = file_sizes(metadata)
    size = f"{count_of(len(sizes), 'file')}, {bytes_in_words(sum(sizes.values()))}"
    taken = moment_in_words(metadata.completed_at)
    return f"Savepoint {metadata.checkpoint_id} of {metadata.pipeline}, taken {taken} UTC, {size}, {found.url}"
