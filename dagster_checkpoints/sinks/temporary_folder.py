"""Temporary directories of sinks, on the driver's machine. Those of a process that was killed are deleted by the next one.

And copies of batches' files that a sink keeps in one until it has committed them, for savepoints; links where possible.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from dagster_checkpoints.files.durable import link_or_copy

_PREFIX = "dagster-checkpoints-transactions-"
_LOCK = "lock"
_NEW = 60.0  # seconds: a directory may not be locked yet


class TemporaryFolder:
    """A temporary directory that exists until :meth:`close`.

    Attributes:
        path: the directory.
    """

    def __init__(self) -> None:
        _delete_abandoned(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock: IO[str] = (self.path / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Delete the directory."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A :class:`TemporaryFolder` that exists inside the block."""
    folder = TemporaryFolder()
    try:
        yield folder.path
    finally:
        folder.close()


class TransactionCopies:
    """The copies of one sink's instance, in a temporary directory that exists until :meth:`close`."""

    def __init__(self) -> None:
        self._folder = TemporaryFolder()

    @property
    def path(self) -> Path:
        """The directory."""
        return self._folder.path

    def keep(self, token: str, batch_id: int, files: Iterable[Path]) -> None:
        """Keep the files of a batch; they replace those kept for this batch before.

        Args:
            token: the transaction's name, which can name a directory.
            batch_id: id of the micro-batch.
            files: the batch's files, in order.
        """
        folder = self._folder.path / token
        folder.mkdir(exist_ok=True)
        for stale in folder.glob(f"batch-{batch_id:09d}-*"):
            stale.unlink()
        for number, file in enumerate(files):
            link_or_copy(file, folder / f"batch-{batch_id:09d}-{number:05d}.parquet")

    def files(self, token: str) -> dict[str, Path]:
        """The files of a transaction by name, in the order of the batches; none if none are kept."""
        folder = self._folder.path / token
        return {file.name: file for file in sorted(folder.iterdir())} if folder.exists() else {}

    def drop(self, token: str) -> None:
        shutil.rmtree(self._folder.path / token, ignore_errors=True)

    def close(self) -> None:
        self._folder.close()


def _delete_abandoned(temporary: Path) -> None:
    for folder in temporary.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another process's, or deleted by it in this moment
            if time.time() - folder.stat().st_mtime < _NEW:
                continue
            with (folder / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
