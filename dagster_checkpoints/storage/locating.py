"""A checkpoint or savepoint in storage, and which storage a URL of one leads to. Must not know what users call them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dagster_checkpoints.files.opening import open_store
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.state.metadata import CheckpointMetadata, StateFile
from dagster_checkpoints.state.metadata_file import decode
from dagster_checkpoints.storage.checkpoints import CheckpointStorage

_IN_STORAGE = re.compile(
    r"(?P<root>.*[^/])/(?P<pipeline>[A-Za-z0-9][A-Za-z0-9_.\-]*)/(checkpoints/chk-\d+-\d+|savepoints/[^/]+)(/_metadata)?/?"
)
"""A root is more than `s3://` or `file://`, and a pipeline has a name that `Layout` takes: users keep savepoints in directories
called `savepoints`, too, such as `s3://bucket/savepoints`."""
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
            self.storage.fetch_state(files, destination, checkpoint=self.location)


def absolute_location(named: str) -> str | None:
    """The URL or the absolute path that a user has named; None for anything else."""
    if "://" in named:
        return named
    if named.startswith(("/", "~", "./", "../")):
        return os.path.abspath(os.path.expanduser(named))
    return None


def storage_of(location: str) -> tuple[str, str]:
    """The root of the storage, and the pipeline's name, of a checkpoint or savepoint.

    Args:
        location: its URL or absolute path. A savepoint that lies outside of a pipeline's directory has a name of its own.
    """
    match = _IN_STORAGE.fullmatch(location)
    return (match["root"], match["pipeline"]) if match else (location.rstrip("/").rpartition("/")[0], _ELSEWHERE)


def stored_at(storage: CheckpointStorage, location: str) -> StoredCheckpoint:
    """The checkpoint or savepoint at a location of an open storage."""
    if storage.is_savepoint(location):
        return StoredCheckpoint(storage, "savepoint", storage.open_savepoint(location).location)
    return StoredCheckpoint(storage, "checkpoint", storage.relative(location))


@contextmanager
def opened_at(location: str, open_at: Callable[[str], ObjectStore] = open_store) -> Iterator[StoredCheckpoint]:
    """Open the storage of a checkpoint or savepoint.

    Args:
        location: its URL or path.
        open_at: opens the store at a URL.

    Raises:
        InvalidStorageUrl: another kind of URL.
        MissingSavepoint: there is no such savepoint.
    """
    found = absolute_location(location) or os.path.abspath(location)
    root, pipeline = storage_of(found)
    with CheckpointStorage(open_at(root), pipeline, open_elsewhere=open_at) as storage:
        yield stored_at(storage, found)
