"""Iceberg's metadata files on a local or mounted file system, written so that they survive a power cut.

A catalog must not name a metadata file before the file is on disk. ``pyiceberg`` imports this module by its name, which the
properties of a catalog say (``py-io-impl``); other locations than local ones are the library's.
"""

from __future__ import annotations

import os
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

from dagster_checkpoints.files.durable import sync


class DurableFileIO(PyArrowFileIO):
    """The library's access to files through ``pyarrow``, with durable files on local file systems."""

    def new_output(self, location: str) -> PyArrowFile:
        scheme, host, path = self.parse_location(location, self.properties)
        if scheme != "file":
            return super().new_output(location)
        return DurableFile(location, path, self.fs_by_scheme(scheme, host))


class DurableFile(PyArrowFile):
    """A file on a local file system, durable when it is closed."""

    def create(self, overwrite: bool = False) -> Any:
        path = Path(self._path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return BufferedWriter(_SyncedFile(path, "w" if overwrite else "x"))


class _SyncedFile(FileIO):
    def close(self) -> None:
        if not self.closed:
            os.fsync(self.fileno())
            sync(Path(os.fsdecode(self.name)).parent)
        super().close()
