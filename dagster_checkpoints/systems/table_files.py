"""Files below a lake table's location: data files, and the sink's own small files.

A local or mounted directory is used directly, with hard links; other locations are the format's, through its library with the
table's credentials. Names are relative to the table's location, with ``/``. Must not know what the files are.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from dagster_checkpoints.files.durable import make_directory, place_all, sync


class TableFiles(ABC):
    """The files below a table's location. All methods raise OSError if the location does not answer."""

    @abstractmethod
    def place_all(self, sources: Mapping[str, Path]) -> None:
        """Create files, durably, by hard link where possible.

        Args:
            sources: file of this machine with the bytes, by the name of the file to create, which must not exist yet.
        """

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Create or replace a file, durably and in one step."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """A file's bytes; None if there is no such file."""

    @abstractmethod
    def sizes(self, folder: str) -> dict[str, int]:
        """The size of each file in a folder and the folders in it, by name; empty if there is no such folder."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is a file of this name."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete files; one that does not exist is no error."""

    @abstractmethod
    def on_this_machine(self, name: str, scratch: Path) -> Path:
        """A file of this machine with the bytes of a file: itself, or a copy in the directory ``scratch``."""


class LocalTableFiles(TableFiles):
    """Files of a table on a local or mounted file system.

    Args:
        root: the table's directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def place_all(self, sources: Mapping[str, Path]) -> None:
        place_all(sources, self._root)

    def put(self, name: str, data: bytes) -> None:
        target = self._root / name
        make_directory(target.parent, self._root)
        temporary = target.with_name(f".{target.name}-{uuid4().hex}")
        temporary.write_bytes(data)
        sync(temporary)
        os.replace(temporary, target)
        sync(target.parent)

    def read(self, name: str) -> bytes | None:
        try:
            return (self._root / name).read_bytes()
        except FileNotFoundError:
            return None

    def sizes(self, folder: str) -> dict[str, int]:
        found = {}
        for directory, _, names in os.walk(self._root / folder):
            for name in names:
                file = Path(directory, name)
                with suppress(FileNotFoundError):  # another process has deleted it
                    if not name.startswith("."):
                        found[file.relative_to(self._root).as_posix()] = file.stat().st_size
        return found

    def exists(self, name: str) -> bool:
        return (self._root / name).exists()

    def delete(self, names: Iterable[str]) -> None:
        parents = set()
        for name in names:
            (self._root / name).unlink(missing_ok=True)
            parents.add((self._root / name).parent)
        for parent in parents:
            with suppress(OSError):  # not empty, or deleted already
                parent.rmdir()

    def on_this_machine(self, name: str, scratch: Path) -> Path:
        return self._root / name
