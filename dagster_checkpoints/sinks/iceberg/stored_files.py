"""Files below an Iceberg table's location that is not a local directory, and those of a table that does not exist.

Through the file system of ``pyarrow`` that ``pyiceberg`` opens with the table's credentials. Must not know what the files are.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

from dagster_checkpoints.systems.table_files import TableFiles

_CHUNK = 8 * 1024 * 1024
_PARALLEL_REQUESTS = 8


class NoTableFiles(TableFiles):
    """The files of a table that does not exist: there are none, and none can be created."""

    def place_all(self, sources: Mapping[str, Path]) -> None:
        raise FileNotFoundError("the table does not exist")

    def put(self, name: str, data: bytes) -> None:
        raise FileNotFoundError("the table does not exist")

    def read(self, name: str) -> bytes | None:
        return None

    def sizes(self, folder: str) -> dict[str, int]:
        return {}

    def exists(self, name: str) -> bool:
        return False

    def delete(self, names: Iterable[str]) -> None:
        return

    def on_this_machine(self, name: str, scratch: Path) -> Path:
        raise FileNotFoundError("the table does not exist")


class ObjectStoreFiles(TableFiles):
    """Files of a table in an object store.

    Args:
        system: the store, as a ``pyarrow.fs.FileSystem``.
        root: the table's location in it.
    """

    def __init__(self, system: Any, root: str) -> None:
        self._system = system
        self._root = root.rstrip("/")

    def place_all(self, sources: Mapping[str, Path]) -> None:
        with ThreadPoolExecutor(_PARALLEL_REQUESTS, thread_name_prefix="iceberg-upload") as threads:
            list(threads.map(self._upload, sources, sources.values()))

    def _upload(self, name: str, source: Path) -> None:
        # The stream is not closed after an error: closing completes the upload, and the file would not be whole.
        with source.open("rb") as file:
            stream = self._system.open_output_stream(self._path(name))
            shutil.copyfileobj(file, stream, _CHUNK)
            stream.close()

    def put(self, name: str, data: bytes) -> None:
        stream = self._system.open_output_stream(self._path(name))
        stream.write(data)
        stream.close()

    def read(self, name: str) -> bytes | None:
        if not self.exists(name):
            return None
        with self._system.open_input_stream(self._path(name)) as stream:
            return bytes(stream.read())

    def sizes(self, folder: str) -> dict[str, int]:
        from pyarrow.fs import FileSelector, FileType

        selector = FileSelector(self._path(folder), allow_not_found=True, recursive=True)
        return {
            info.path[len(self._root) + 1 :]: info.size
            for info in self._system.get_file_info(selector)
            if info.type == FileType.File
        }

    def exists(self, name: str) -> bool:
        from pyarrow.fs import FileType

        return bool(self._system.get_file_info(self._path(name)).type == FileType.File)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            if self.exists(name):
                self._system.delete_file(self._path(name))

    def on_this_machine(self, name: str, scratch: Path) -> Path:
        copy = scratch / uuid4().hex
        with self._system.open_input_stream(self._path(name)) as stream, copy.open("wb") as file:
            shutil.copyfileobj(stream, file, _CHUNK)
        return copy

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
