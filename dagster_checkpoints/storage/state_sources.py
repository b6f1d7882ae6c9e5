"""Where the bytes of a state file come from: a local file, a file elsewhere that has to be copied here before it is read, or an
object that the server of the storage can copy.

Must not know checkpoints.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dagster_checkpoints.files.store import ObjectStore


@dataclass(frozen=True)
class FileIdentity:
    """What tells one version of a file from any other without reading it.

    Args:
        key: differs for any other file, and for this file after a change; never compared with those of other processes.
        size: the file's size in bytes.
    """

    key: Hashable
    size: int


@dataclass(frozen=True)
class StoredObject:
    """An object that holds the bytes of a file.

    Args:
        store: the store that holds the object.
        key: the object's key.
        etag: the version that has these bytes; "" if the object never changes.
    """

    store: ObjectStore
    key: str
    etag: str = ""


class StateSource(Protocol):
    """A file that a checkpoint stores; it must not change until it is stored."""

    def identity(self) -> FileIdentity:
        """The file's identity now.

        Raises:
            FileNotFoundError: the file does not exist.
        """

    def local(self) -> AbstractContextManager[Path]:
        """A file on this machine with the same bytes, as long as the context lasts.

        Raises:
            FileNotFoundError: the file does not exist.
        """

    def sha256(self) -> str | None:
        """The sha256 of the bytes, hexadecimal, if it can be had without reading them in this process; else None."""

    def stored(self) -> StoredObject | None:
        """The object from which the storage's server may copy the bytes; None if they have to be read here."""


@dataclass(frozen=True)
class LocalSource:
    """A file on this machine.

    Args:
        path: the file's path.
    """

    path: Path

    def identity(self) -> FileIdentity:
        stat = self.path.stat()
        return FileIdentity((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns), stat.st_size)

    def local(self) -> AbstractContextManager[Path]:
        return nullcontext(self.path)

    def sha256(self) -> str | None:
        return None

    def stored(self) -> StoredObject | None:
        return None

    def __str__(self) -> str:
        return str(self.path)


def as_source(file: Path | StateSource) -> StateSource:
    """The source of a file that a caller names by its local path, or by a source of its own."""
    return LocalSource(file) if isinstance(file, Path) else file
