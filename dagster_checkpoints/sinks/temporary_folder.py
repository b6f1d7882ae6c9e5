"""Temporary directories of sinks, on the driver's machine. Those of a process that was killed are deleted by the next one."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

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


def _delete_abandoned(temporary: Path) -> None:
    for folder in temporary.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another process's, or deleted by it in this moment
            if time.time() - folder.stat().st_mtime < _NEW:
                continue
            with (folder / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
