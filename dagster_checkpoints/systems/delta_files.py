"""Files of a Delta table in an object store, through the client of the ``deltalake`` library with the table's credentials.

Must not know what the files are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

from dagster_checkpoints.systems.table_files import TableFiles

_CHUNK = 8 * 1024 * 1024
_PARALLEL_REQUESTS = 8


class StoredTableFiles(TableFiles):
    """Files of a table in an object store.

    Args:
        url: the table's URL.
        storage_options: options of the ``deltalake`` library for the store.
    """

    def __init__(self, url: str, storage_options: Mapping[str, str]) -> None:
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

    def place_all(self, sources: Mapping[str, Path]) -> None:
        _ = self._store
        with ThreadPoolExecutor(_PARALLEL_REQUESTS, thread_name_prefix="delta-upload") as threads:
            list(threads.map(self._upload, sources, sources.values()))

    def _upload(self, name: str, source: Path) -> None:
        with source.open("rb") as file:
            self._write(name, iter(lambda: file.read(_CHUNK), b""))

    def put(self, name: str, data: bytes) -> None:
        self._write(name, [data])

    def _write(self, name: str, chunks: Iterable[bytes]) -> None:
        # Not through pyarrow's file system: it hands the library's stream buffers, which that does not take.
        stream = self._store.open_output_stream(name)
        for chunk in chunks:
            stream.write(chunk)
        stream.close()  # completes the upload; the file does not exist before

    def read(self, name: str) -> bytes | None:
        if not self.exists(name):
            return None
        return bytes(self._store.open_input_file(name).read())

    def sizes(self, folder: str) -> dict[str, int]:
        from pyarrow.fs import FileType

        found = self._store.get_file_info_selector(folder, allow_not_found=True, recursive=True)
        return {info.path: info.size for info in found if info.type == FileType.File}

    def exists(self, name: str) -> bool:
        from pyarrow.fs import FileType

        return bool(self._store.get_file_info([name])[0].type == FileType.File)

    def readable(self, name: str) -> Any:
        """An opened file for ``pyarrow.parquet``, which fetches only the parts that are read."""
        from pyarrow import PythonFile

        return PythonFile(self._store.open_input_file(name))

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            if self.exists(name):
                self._store.delete_file(name)

    def on_this_machine(self, name: str, scratch: Path) -> Path:
        copy = scratch / uuid4().hex
        stream = self._store.open_input_file(name)
        with copy.open("wb") as file:
            while chunk := stream.read(_CHUNK):
                file.write(chunk)
        return copy
