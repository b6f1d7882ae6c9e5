"""State files between the local file system and a store, one at a time or many in parallel.

Knows paths, hashes and the store; must not know what a checkpoint is beyond its name.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Executor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar
from uuid import uuid4

from dagster_checkpoints.storage.base import RESERVED_PREFIX, ObjectStore, validate_key
from dagster_checkpoints.storage.errors import (
    CorruptStateFile,
    MissingStateFile,
    NotFound,
    StateFileChanged,
    StorageUnavailable,
)

_CHUNK = 1024 * 1024
_SMALL = 8 * 1024 * 1024
_FETCH_ATTEMPTS = 3
REMEDY = (
    "Nothing was restored from it. Restore the object from a backup or a replica, or say explicitly that the "
    "run may restore from an older retained checkpoint"
)
"""What to do about a state file of a checkpoint that is corrupt or gone."""

T = TypeVar("T")
R = TypeVar("R")


class StateFileLike(Protocol):
    """What is needed of a file that metadata names."""

    @property
    def path(self) -> str:
        """Where it goes, relative, ``/`` between parts."""

    @property
    def sha256(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def name(self) -> str:
        """What it is called in ``shared/``; a savepoint calls its files by their sha256."""


@dataclass(frozen=True)
class StoredFile:
    """A local file that is in storage now.

    Args:
        sha256: of its bytes, hexadecimal.
        size: bytes.
        uploaded: False if storage had it already.
        stored_by: epoch in its name in ``shared/``; 0 in a savepoint, whose names have none.
    """

    sha256: str
    size: int
    uploaded: bool
    stored_by: int = 0


class HashCache:
    """Hashes of files that were read before, by inode, size and time of change: state files never change.

    A snapshot links the same SST files again and again; without this each checkpoint would read all of them.
    """

    def __init__(self, entries: int = 100_000) -> None:
        self._entries = entries
        self._hashes: OrderedDict[tuple[int, ...], str] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, stat: os.stat_result) -> str | None:
        """The hash of the file with this ``stat``, if it was read before."""
        with self._lock:
            key = _identity(stat)
            if key in self._hashes:
                self._hashes.move_to_end(key)
            return self._hashes.get(key)

    def put(self, stat: os.stat_result, sha256: str) -> None:
        """Remember a hash; the least recently used one is forgotten when there are too many."""
        with self._lock:
            self._hashes[_identity(stat)] = sha256
            if len(self._hashes) > self._entries:
                self._hashes.popitem(last=False)


@dataclass(frozen=True)
class LocalFile:
    """A local file whose hash is known; it must stay as it is until it is stored.

    Args:
        path: where it is.
        stat: as it was when it was hashed.
        sha256: of its bytes.
        data: its bytes, if they were just read and are few.
    """

    path: Path
    stat: os.stat_result
    sha256: str
    data: bytes | None = None

    @property
    def size(self) -> int:
        return self.stat.st_size


def hash_file(cache: HashCache, path: Path) -> LocalFile:
    """Find out a file's sha256, by reading it only if it was never read before.

    Raises:
        StateFileChanged: it changed meanwhile.
        FileNotFoundError: it is not there.
    """
    stat = path.stat()
    sha256, data = cache.get(stat), None
    if sha256 is None:
        sha256, data = _hash(path, stat)
        cache.put(stat, sha256)
    return LocalFile(path, stat, sha256, data)


def put_file(store: ObjectStore, key: str, file: LocalFile) -> None:
    """Write a hashed file's bytes under a key.

    Raises:
        StateFileChanged: it has changed since it was hashed; nothing is left under the key.
    """
    if file.data is not None:
        store.put(key, file.data)
        return
    store.put_file(key, file.path)
    if _identity(file.path.stat()) != _identity(file.stat):
        store.delete([key])
        raise _changed(file.path)


def fetch_file(
    store: ObjectStore, key: str, file: StateFileLike, destination: Path, checkpoint: str, remedy: str = REMEDY
) -> None:
    """Fetch one state file; it appears verified and whole, or not at all.

    Args:
        store: where it is.
        key: of its bytes.
        file: what the metadata says of it.
        destination: it becomes ``destination/<file.path>``.
        checkpoint: that names it, for the text of errors.
        remedy: what to do if it is corrupt or gone, likewise.
    """
    where = f"{store.url}/{key}"
    target = destination / validate_key(file.path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{RESERVED_PREFIX}tmp-{uuid4().hex}")
    try:
        with temporary.open("wb") as opened:
            size, sha256 = read_through(store, key, opened)
        if (size, sha256) != (file.size, file.sha256):
            raise CorruptStateFile(
                f"{checkpoint}: state file {file.path} at {where} is corrupt: expected {file.size} bytes "
                f"with sha256 {file.sha256}, found {size} bytes with sha256 {sha256}. {remedy}"
            )
        os.replace(temporary, target)
    except NotFound as error:
        raise MissingStateFile(
            f"{checkpoint}: state file {file.path} is missing: expected {file.size} bytes at {where}, found no object. {remedy}"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def run_all(executor: Executor, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """``function`` of every item, in parallel and in order; the first failure cancels what has not begun."""
    futures = [executor.submit(function, item) for item in items]
    _, pending = wait(futures, return_when=FIRST_EXCEPTION)
    for future in pending:
        future.cancel()
    wait(futures)  # nothing of ours runs on after we return
    for future in futures:
        if not future.cancelled() and (error := future.exception()) is not None:
            raise error
    return [future.result() for future in futures]


def read_through(store: ObjectStore, key: str, target: BinaryIO | None = None) -> tuple[int, str]:
    """Read an object, once more if its bytes break off, and write them to ``target`` if there is one.

    Returns:
        Its size and sha256.

    Raises:
        NotFound, StorageUnavailable: it cannot be read.
    """
    for attempt in range(_FETCH_ATTEMPTS):
        digest, size = hashlib.sha256(), 0
        if target is not None:
            target.seek(0)
            target.truncate()
        try:
            for chunk in store.stream(key, _CHUNK):
                digest.update(chunk)
                size += len(chunk)
                if target is not None:
                    target.write(chunk)
            return size, digest.hexdigest()
        except StorageUnavailable:
            # An answer that broke off half-way; a store that is away for longer has been retried below.
            if attempt == _FETCH_ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def _hash(path: Path, stat: os.stat_result) -> tuple[str, bytes | None]:
    """The file's sha256, and its bytes if they are few: what is hashed is then what is uploaded."""
    if stat.st_size <= _SMALL:
        data = path.read_bytes()
        if len(data) != stat.st_size:
            raise _changed(path)
        return hashlib.sha256(data).hexdigest(), data
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), None


def _changed(path: Path) -> StateFileChanged:
    return StateFileChanged(
        f"expected {path} to stay as it is while a checkpoint uploads it, found it changed. Files of a "
        "snapshot must be links or copies that nobody writes to"
    )


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
