"""Locates the checkpoint or savepoint that a user names: by its number, `latest`, a location, a URL or a path."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dagster_checkpoints.cli.exits import NothingThere, UsageProblem
from dagster_checkpoints.cli.storage_options import StorageOptions
from dagster_checkpoints.state import CheckpointMetadata, StateFile, decode
from dagster_checkpoints.storage import CheckpointPointer, CheckpointStorage

LOCATION_HELP = (
    "LOCATION is a checkpoint's or savepoint's number, 'latest' (the latest job's newest checkpoint, or the savepoint that it "
    "was stopped with), its location as 'list' shows it, a URL, or a path."
)
_IN_STORAGE = re.compile(r"(?P<root>.+)/(?P<pipeline>[^/]+)/(checkpoints/chk-\d+-\d+|savepoints/[^/]+)(/_metadata)?/?")
_ELSEWHERE = "elsewhere"


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint or savepoint in storage.

    Attributes:
        storage: the open storage that holds it.
        location: its location, as the storage floor takes it.
    """

    storage: CheckpointStorage
    kind: Literal["checkpoint", "savepoint"]
    location: str

    @property
    def url(self) -> str:
        """Its URL, for people."""
        return self.location if "://" in self.location else self.storage.url_of(self.location)

    def read(self) -> CheckpointMetadata:
        """Its metadata. Raises MissingCheckpoint, CorruptMetadata, UnknownMetadataVersion."""
        return decode(self.storage.read_metadata(self.location), self.url)

    def fetch(self, files: Iterable[StateFile], destination: Path) -> None:
        """Fetch some of its files into a directory, and verify them."""
        if self.kind == "savepoint":
            self.storage.open_savepoint(self.location).fetch_state(files, destination)
        else:
            self.storage.fetch_state(files, destination)


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
    absolute = _absolute(named)
    if absolute is None:
        with options.open() as storage:
            yield storage
        return
    match = _IN_STORAGE.fullmatch(absolute)
    root, pipeline = (match["root"], match["pipeline"]) if match else (absolute.rstrip("/").rpartition("/")[0], _ELSEWHERE)
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
    location = _absolute(named) or named
    if storage.is_savepoint(location):
        return StoredCheckpoint(storage, "savepoint", storage.open_savepoint(location).location)
    return StoredCheckpoint(storage, "checkpoint", storage.relative(location))


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


def _absolute(named: str) -> str | None:
    """The URL or the absolute path that the user has named; None for anything else."""
    if "://" in named:
        return named
    if named.startswith(("/", "~", "./", "../")):
        return os.path.abspath(os.path.expanduser(named))
    return None
