"""Locates the checkpoint or savepoint that a user names: by its number or name, `latest`, a location, a URL or a path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dagster_checkpoints.cli.exits import NothingThere, UsageProblem
from dagster_checkpoints.cli.storage_options import StorageOptions
from dagster_checkpoints.execution.pipeline_state import CheckpointPointer
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.layout import Layout
from dagster_checkpoints.storage.locating import StoredCheckpoint, absolute_location, storage_of, stored_at

LOCATION_HELP = (
    "LOCATION is a checkpoint's or savepoint's number, 'latest' (the latest job's newest checkpoint, or the savepoint that it "
    "was stopped with), a savepoint's name, its location as 'list' shows it, a URL, or a path."
)
_NAMED_IN_ERRORS = 20


@contextmanager
def located(options: StorageOptions, named: str | None) -> Iterator[StoredCheckpoint]:
    """The checkpoint or savepoint that the user has named; the newest one if the user has named none.

    Raises:
        NothingThere: it does not exist; the text names those that do.
    """
    with opened_for(options, named or "") as storage:
        yield locate(storage, named)


@contextmanager
def opened_for(options: StorageOptions, named: str) -> Iterator[CheckpointStorage]:
    """The storage that holds the named checkpoint: the one that a URL or path names, otherwise that of the options."""
    absolute = absolute_location(named)
    if absolute is None:
        with options.open() as storage:
            yield storage
        return
    root, pipeline = storage_of(absolute)
    with options.storage_of(options.store(root), options.pipeline or pipeline) as storage:
        yield storage


def locate(storage: CheckpointStorage, named: str | None) -> StoredCheckpoint:
    """As :func:`located`, in a storage that is open already."""
    named = (named or "").strip() or "latest"
    if named in ("latest", "newest"):
        return _newest(storage)
    absolute = absolute_location(named)
    if absolute is None and "/" not in named:
        return _listed(storage, named)
    return stored_at(storage, absolute or named)


def from_pointer(storage: CheckpointStorage, pointer: CheckpointPointer) -> StoredCheckpoint:
    """The checkpoint or savepoint that an entry of `state.json` names."""
    return StoredCheckpoint(storage, "savepoint" if pointer.kind == "savepoint" else "checkpoint", pointer.location)


def _newest(storage: CheckpointStorage) -> StoredCheckpoint:
    """The newest checkpoint of the latest job or, once the job has ended for good, the savepoint that it was stopped with."""
    state = storage.read_state()
    if state is not None and state.newest is not None:
        return from_pointer(storage, state.newest)
    if state is not None and state.job.savepoint:
        return StoredCheckpoint(storage, "savepoint", storage.open_savepoint(state.job.savepoint).location)
    if problem := storage.describe_unlisted(state):
        raise NothingThere(problem)
    reason = "the pipeline never ran in this storage" if state is None else "its latest job has none"
    savepoints = [savepoint.location for savepoint in storage.list_savepoints()]
    choice = f". Its savepoints, newest first: {_enumerated(savepoints)}; name one of them" if savepoints else ""
    raise NothingThere(
        f"expected a completed checkpoint of pipeline {storage.pipeline!r} in {storage.url}, found that {reason}{choice}"
    )


def _listed(storage: CheckpointStorage, named: str) -> StoredCheckpoint:
    """The one that has this number, or else this name: a number may be a savepoint's name as well.

    `chk-42` is no savepoint and `savepoint-42` no checkpoint of this number: each job counts from 1 again.
    """
    number = named.removeprefix("chk-").removeprefix("savepoint-")
    other = "savepoint" if named.startswith("chk-") else "checkpoint" if named.startswith("savepoint-") else ""
    retained = [(pointer.checkpoint_id, from_pointer(storage, pointer)) for pointer in storage.list_checkpoints()]
    savepoints = [
        (each.checkpoint_id, StoredCheckpoint(storage, "savepoint", each.location)) for each in storage.list_savepoints()
    ]
    everything = {found.location: found for _, found in (*retained, *savepoints)}
    matching = (
        [found for checkpoint_id, found in retained if number == str(checkpoint_id) and found.kind != other][:1]
        or [found for checkpoint_id, found in savepoints if number == str(checkpoint_id) and found.kind != other]
        or [found for location, found in everything.items() if named in _names(location)]
    )
    if len(matching) == 1:
        return matching[0]
    if matching:
        locations = ", ".join(found.location for found in matching)
        raise UsageProblem(
            f"expected one savepoint {named!r} in {storage.url}, found several: {locations}. Name one by its location"
        )
    known = {
        kind: [location for location, found in everything.items() if found.kind == kind] for kind in ("checkpoint", "savepoint")
    }
    there = ". ".join(f"Its {kind}s, newest first: {_enumerated(locations)}" for kind, locations in known.items())
    raise NothingThere(
        f"expected a checkpoint or savepoint {named!r} in {storage.url}, found none. {there}. "
        "Name a savepoint outside of this directory by its URL or path"
    )


def _names(location: str) -> tuple[str, ...]:
    """The name of the directory, and the name that a user gave a savepoint."""
    folder = location.rstrip("/").rpartition("/")[2]
    parsed = Layout.parse_savepoint(folder)
    return (folder, parsed[1]) if parsed is not None else (folder,)


def _enumerated(locations: list[str]) -> str:
    more = f" and {len(locations) - _NAMED_IN_ERRORS} more" if len(locations) > _NAMED_IN_ERRORS else ""
    return ", ".join(locations[:_NAMED_IN_ERRORS]) + more or "none"
