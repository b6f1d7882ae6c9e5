"""Locates the checkpoint or savepoint that a user names: by its number, `latest`, a location, a URL or a path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dagster_checkpoints.cli.exits import NothingThere, UsageProblem
from dagster_checkpoints.cli.storage_options import StorageOptions
from dagster_checkpoints.storage import CheckpointPointer, CheckpointStorage
from dagster_checkpoints.storage.locating import StoredCheckpoint, absolute_location, storage_of, stored_at

LOCATION_HELP = (
    "LOCATION is a checkpoint's or savepoint's number, 'latest' (the latest job's newest checkpoint, or the savepoint that it "
    "was stopped with), its location as 'list' shows it, a URL, or a path."
)


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
    named = (named or "latest").strip()
    if named in ("latest", "newest"):
        return _newest(storage)
    number = named.removeprefix("chk-").removeprefix("savepoint-")
    if number.isdigit():
        return _numbered(storage, int(number))
    return stored_at(storage, absolute_location(named) or named)


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
    choice = f". Its savepoints, newest first: {', '.join(savepoints)}; name one of them" if savepoints else ""
    raise NothingThere(
        f"expected a completed checkpoint of pipeline {storage.pipeline!r} in {storage.url}, found that {reason}{choice}"
    )


def _numbered(storage: CheckpointStorage, number: int) -> StoredCheckpoint:
    checkpoints, savepoints = storage.list_checkpoints(), storage.list_savepoints()
    for pointer in checkpoints:
        if pointer.checkpoint_id == number:
            return from_pointer(storage, pointer)
    matching = [savepoint.location for savepoint in savepoints if savepoint.checkpoint_id == number]
    if len(matching) > 1:
        raise UsageProblem(f"several savepoints have the number {number}: {', '.join(matching)}. Name one by its location")
    if matching:
        return StoredCheckpoint(storage, "savepoint", matching[0])
    numbers = sorted(
        {*(pointer.checkpoint_id for pointer in checkpoints), *(savepoint.checkpoint_id for savepoint in savepoints)}
    )
    raise NothingThere(
        f"expected a checkpoint or savepoint {number} in {storage.url}, found none. Its numbers: "
        f"{', '.join(map(str, numbers)) or 'none'}; name a savepoint outside of this directory by its URL or path"
    )
