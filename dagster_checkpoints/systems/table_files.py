"""Files below a lake table's location: data files, and the sink's own small files.

A local or mounted directory is used directly, with hard links; other locations are the format's, through its library with the
table's credentials. Names are relative to the table's location, with ``/``. Must not know what the files are.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from dagster_checkpoints.files.durable import make_directory, place_all, sync

_CHUNK = 8 * 1024 * 1024
_PARALLEL_REQUESTS = 8


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
    def readable(self, name: str) -> Any:
        """A file for ``pyarrow.parquet``: its path, or an opened file that fetches only the parts that are read."""

    @abstractmethod
    def on_this_machine(self, name: str, scratch: Path) -> Path:
        """A file of this machine with the bytes of a file: itself, or a copy in the directory ``scratch``."""


class NoTableFiles(TableFiles):
    """The files of a table that does not exist: there are none, and none can be created."""

    def place_all(self, sources: Mapping[str, Path]) -> None:
        raise self._missing()

    def put(self, name: str, data: bytes) -> None:
        raise self._missing()

    def read(self, name: str) -> bytes | None:
        return None

    def sizes(self, folder: str) -> dict[str, int]:
        return {}

    def exists(self, name: str) -> bool:
        return False

    def delete(self, names: Iterable[str]) -> None:
        return

    def readable(self, name: str) -> Any:
        raise self._missing()

    def on_this_machine(self, name: str, scratch: Path) -> Path:
        raise self._missing()

    def _missing(self) -> FileNotFoundError:
        return FileNotFoundError("the table does not exist")


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

    def readable(self, name: str) -> Any:
        return self._root / name


class StoredTableFiles(TableFiles):
    """Files of a table in an object store.

    Args:
        root: the table's location in the store; empty if the store begins there.
    """

    def __init__(self, root: str = "") -> None:
        self._prefix = f"{root.rstrip('/')}/" if root else ""

    @property
    @abstractmethod
    def _store(self) -> Any:
        """The store: a ``pyarrow.fs.FileSystem``, or what a library has for one."""

    @abstractmethod
    def _below(self, folder: str) -> Sequence[Any]:
        """The ``pyarrow.fs.FileInfo`` of all that is in a folder and the folders in it; the folder need not exist."""

    def place_all(self, sources: Mapping[str, Path]) -> None:
        _ = self._store  # opened once, not by several threads
        with ThreadPoolExecutor(_PARALLEL_REQUESTS, thread_name_prefix="table-upload") as threads:
            list(threads.map(self._upload, sources, sources.values()))

    def _upload(self, name: str, source: Path) -> None:
        with source.open("rb") as file:
            self._write(name, iter(lambda: file.read(_CHUNK), b""))

    def put(self, name: str, data: bytes) -> None:
        self._write(name, [data])

    def _write(self, name: str, chunks: Iterable[bytes]) -> None:
        # The stream is not closed after an error: closing completes the upload, and the file would not be whole.
        stream = self._store.open_output_stream(self._prefix + name)
        for chunk in chunks:
            stream.write(chunk)
        stream.close()

    def read(self, name: str) -> bytes | None:
        return bytes(self._store.open_input_file(self._prefix + name).read()) if self.exists(name) else None

    def sizes(self, folder: str) -> dict[str, int]:
        from pyarrow.fs import FileType

        found = self._below(self._prefix + folder)
        return {info.path.removeprefix(self._prefix): info.size for info in found if info.type == FileType.File}

    def exists(self, name: str) -> bool:
        from pyarrow.fs import FileType

        return bool(self._store.get_file_info([self._prefix + name])[0].type == FileType.File)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            if self.exists(name):
                self._store.delete_file(self._prefix + name)

    def readable(self, name: str) -> Any:
        return self._store.open_input_file(self._prefix + name)

    def on_this_machine(self, name: str, scratch: Path) -> Path:
        copy = scratch / uuid4().hex
        stream = self._store.open_input_file(self._prefix + name)
        with copy.open("wb") as file:
            while chunk := stream.read(_CHUNK):
                file.write(chunk)
        return copy


class DeltaTableFiles(StoredTableFiles):
    """Files of a Delta table in an object store, through the client of the ``deltalake`` library.

    Not through ``pyarrow``'s file system: it hands the library's stream buffers, which that does not take.

    Args:
        url: the table's URL.
        storage_options: options of the ``deltalake`` library for the store.
    """

    def __init__(self, url: str, storage_options: Mapping[str, str]) -> None:
        super().__init__()
        self._url = url
        self._options = dict(storage_options)
        self._opened: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    @property
    def _store(self) -> Any:
        if self._opened is None:
            from deltalake._internal import DeltaFileSystemHandler

            self._opened = DeltaFileSystemHandler(self._url, self._options)
        return self._opened

    def _below(self, folder: str) -> Sequence[Any]:
        found: Sequence[Any] = self._store.get_file_info_selector(folder, allow_not_found=True, recursive=True)
        return found

    def readable(self, name: str) -> Any:
        from pyarrow import PythonFile

        return PythonFile(super().readable(name))


class IcebergTableFiles(StoredTableFiles):
    """Files of an Iceberg table in an object store, through the file system that ``pyiceberg`` opens.

    Args:
        system: the store, as a ``pyarrow.fs.FileSystem``.
        root: the table's location in it.
    """

    def __init__(self, system: Any, root: str) -> None:
        super().__init__(root)
        self._system = system

    @property
    def _store(self) -> Any:
        return self._system

    def _below(self, folder: str) -> Sequence[Any]:
        from pyarrow.fs import FileSelector

        found: Sequence[Any] = self._system.get_file_info(FileSelector(folder, allow_not_found=True, recursive=True))
        return found
