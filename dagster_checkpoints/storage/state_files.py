"""Copies state files from their sources to a store, and from there to the local file system, one file or many in parallel.

A source is a local file, a file elsewhere that has to be copied here before it is read, or an object that the server of the
storage can copy. Knows paths, hashes and the store; of a checkpoint it knows only the name.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar
from uuid import uuid4

from dagster_checkpoints.errors import (
    CorruptStateFile,
    MissingStateFile,
    NotFound,
    Precondition,
    StateFileChanged,
    StorageUnavailable,
)
from dagster_checkpoints.files.store import RESERVED_PREFIX, ObjectStore, validate_key


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


_SMALL = 8 * 1024 * 1024
_FETCH_ATTEMPTS = 3
NO_OBJECT = "no object"
REMEDY = (
    "Nothing was restored from it. Restore the object from a backup or a replica, or say explicitly that the "
    "run may restore from an older retained checkpoint"
)
"""The remedy in the errors about a checkpoint's corrupt or missing state file."""

F = TypeVar("F", bound="StateFileLike")
T = TypeVar("T")
R = TypeVar("R")


class StateFileLike(Protocol):
    """The properties that this module needs of a file that metadata names."""

    @property
    def path(self) -> str:
        """Path of the file below the destination directory, with ``/`` between parts."""

    @property
    def sha256(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def name(self) -> str:
        """The file's name in ``shared/``; in a savepoint, its sha256."""


@dataclass(frozen=True)
class StoredFile:
    """A local file that is in storage now.

    Args:
        sha256: sha256 of the file's bytes, hexadecimal.
        size: the file's size in bytes.
        uploaded: False if storage held the file already.
        stored_by: the epoch in the file's name in ``shared/``; 0 in a savepoint, whose file names have no epoch.
    """

    sha256: str
    size: int
    uploaded: bool
    stored_by: int = 0


class HashCache:
    """Hashes of files that were read before, by identity: state files never change.

    Every snapshot names the same SST files again; without the cache each checkpoint would read all of them.
    """

    def __init__(self, entries: int = 100_000) -> None:
        self._entries = entries
        self._hashes: OrderedDict[Hashable, str] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, identity: FileIdentity) -> str | None:
        """The hash of the file with this identity, if it was read before."""
        with self._lock:
            if identity.key in self._hashes:
                self._hashes.move_to_end(identity.key)
            return self._hashes.get(identity.key)

    def put(self, identity: FileIdentity, sha256: str) -> None:
        """Store a hash; remove the least recently used one if the cache is full."""
        with self._lock:
            self._hashes[identity.key] = sha256
            if len(self._hashes) > self._entries:
                self._hashes.popitem(last=False)


@dataclass(frozen=True)
class HashedFile:
    """A file whose hash is known; the file must not change until it is stored.

    Args:
        source: where the file's bytes come from.
        identity: the file's identity when it was hashed.
        sha256: sha256 of the file's bytes.
        data: the file's bytes, if they were just read and the file is small (8 MiB at most).
    """

    source: StateSource
    identity: FileIdentity
    sha256: str
    data: bytes | None = None

    @property
    def size(self) -> int:
        return self.identity.size


def hash_file(cache: HashCache, source: StateSource) -> HashedFile:
    """A file's sha256; the file is read only if the cache does not hold its hash.

    Raises:
        StateFileChanged: the file changed while it was read.
        FileNotFoundError: the file does not exist.
    """
    identity = source.identity()
    sha256, data = cache.get(identity), None
    if sha256 is None:
        sha256 = source.sha256()
        if sha256 is None:
            with source.local() as path:
                sha256, data = _hash(path, identity.size)
        cache.put(identity, sha256)
    return HashedFile(source, identity, sha256, data)


def put_file(store: ObjectStore, key: str, file: HashedFile) -> None:
    """Write a hashed file's bytes under a key.

    Raises:
        StateFileChanged: the file has changed since it was hashed; the object has been deleted again.
    """
    if file.data is not None:
        store.put(key, file.data)
        return
    if _copied_by_server(store, key, file):
        return
    with file.source.local() as path:
        store.put_file(key, path)
    if file.source.identity() != file.identity:
        store.delete([key])
        raise _changed(file.source)


def _copied_by_server(store: ObjectStore, key: str, file: HashedFile) -> bool:
    """Let the store's server copy the file, if it can; the same errors as :func:`put_file`."""
    origin = file.source.stored()
    if origin is None:
        return False
    try:
        if not store.copy_from(origin.store, origin.key, key, file.size, etag=origin.etag, hashed=True):
            return False
    except NotFound:
        return False  # the source says why, when its bytes are read
    except Precondition as error:
        raise _changed(file.source) from error
    copy = store.head(key)
    if copy is None or copy.size != file.size or copy.sha256 not in (None, file.sha256):
        store.delete([key])
        raise _changed(file.source)
    return True


def fetch_file(
    store: ObjectStore, key: str, file: StateFileLike, destination: Path, checkpoint: str, remedy: str = REMEDY
) -> None:
    """Fetch one state file; it appears verified and complete, or not at all.

    Args:
        store: the object store that holds the file.
        key: the file's key in the store.
        file: the metadata's entry for the file.
        destination: the directory in which the file ``destination/<file.path>`` is created.
        checkpoint: name of the checkpoint that names the file, for the text of errors.
        remedy: what to do if the file is corrupt or missing, for the text of errors.
    """
    where = f"{store.url}/{key}"
    target = destination / validate_key(file.path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{RESERVED_PREFIX}tmp-{uuid4().hex}")
    try:
        with temporary.open("wb") as opened:
            size, sha256 = read_through(store, key, opened)
        if (size, sha256) != (file.size, file.sha256):
            raise _corrupt(checkpoint, file, where, size, sha256, remedy)
        os.replace(temporary, target)
    except NotFound as error:
        raise _missing(checkpoint, file, where, remedy) from error
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class CopyTarget:
    """A directory in a store that receives copies which the server makes.

    Args:
        store: the store.
        folder: the directory's key, without a slash at its end.
        hash_of: returns the sha256 of an object in ``store``; called if the server does not know it.
    """

    store: ObjectStore
    folder: str
    hash_of: Callable[[str], str]


def copy_files(
    executor: Executor,
    store: ObjectStore,
    files: Sequence[F],
    key_of: Callable[[F], str],
    target: CopyTarget,
    checkpoint: str,
    remedy: str = REMEDY,
) -> list[F]:
    """Let the server copy state files to ``<target.folder>/<file.path>``, in parallel, verifying size and sha256.

    Args:
        executor: the threads that send the requests.
        store: the object store that holds the files.
        files: the metadata's entries for the files.
        key_of: returns a file's key in ``store``.
        target: the directory that receives the copies.
        checkpoint: name of the checkpoint that names the files, for the text of errors.
        remedy: what to do if a file is corrupt or missing, for the text of errors.

    Returns:
        The files that the server cannot, or may not, copy.

    Raises:
        MissingStateFile, CorruptStateFile: name the file, its location, what was expected and found.
    """

    def copy(file: F) -> bool:
        source, key = key_of(file), f"{target.folder}/{validate_key(file.path)}"
        where = f"{store.url}/{source}"
        try:
            if not target.store.copy_from(store, source, key, file.size, hashed=True):
                return False
        except NotFound as error:
            raise _missing(checkpoint, file, where, remedy) from error
        found = target.store.head(key)
        size = found.size if found is not None else 0
        sha256 = (found is not None and found.sha256) or target.hash_of(key)
        if (size, sha256) != (file.size, file.sha256):
            target.store.delete([key])
            raise _corrupt(checkpoint, file, where, size, sha256, remedy)
        return True

    copied = run_all(executor, copy, files)
    return [file for file, done in zip(files, copied, strict=True) if not done]


def run_all(executor: Executor, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """The results of ``function`` for all items, computed in parallel, in the items' order; the first failure cancels the calls
    that have not begun.
    """
    futures = [executor.submit(function, item) for item in items]
    _, pending = wait(futures, return_when=FIRST_EXCEPTION)
    for future in pending:
        future.cancel()
    wait(futures)  # no call is still running when this function returns
    for future in futures:
        if not future.cancelled() and (error := future.exception()) is not None:
            raise error
    return [future.result() for future in futures]


def read_through(store: ObjectStore, key: str, target: BinaryIO | None = None) -> tuple[int, str]:
    """Read an object, and write its bytes to ``target`` if that is given; read again if the bytes break off.

    Returns:
        The object's size in bytes, and its sha256.

    Raises:
        NotFound, StorageUnavailable: the object cannot be read.
    """
    for attempt in range(_FETCH_ATTEMPTS):
        digest, size = hashlib.sha256(), 0
        if target is not None:
            target.seek(0)
            target.truncate()
        try:
            for chunk in store.stream(key):
                digest.update(chunk)
                size += len(chunk)
                if target is not None:
                    target.write(chunk)
            return size, digest.hexdigest()
        except StorageUnavailable:
            # The answer broke off before its end; the store itself has already retried requests without an answer.
            if attempt == _FETCH_ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class StateFileProblem:
    """A state file that differs from what the metadata says.

    Args:
        sha256: the file's sha256 in the metadata.
        expected: what the metadata says, as text for users.
        found: what storage holds, as text for users.
        where: the file's URL.
    """

    sha256: str
    expected: str
    found: str
    where: str


def state_file_problem(store: ObjectStore, key: str, sha256: str, size: int) -> StateFileProblem | None:
    """Read a state file, and compare it with its sha256 and size; None if it is as it was written. Raises as the object store."""
    where = f"{store.url}/{key}"
    try:
        found_size, found = read_through(store, key)
    except NotFound:
        return StateFileProblem(sha256, f"{size} bytes", NO_OBJECT, where)
    if (found_size, found) == (size, sha256):
        return None
    return StateFileProblem(sha256, f"{size} bytes with this sha256", f"{found_size} bytes with sha256 {found}", where)


def _hash(path: Path, size: int) -> tuple[str, bytes | None]:
    """The file's sha256, and its bytes if the file is small: then exactly the hashed bytes are uploaded."""
    if size <= _SMALL:
        data = path.read_bytes()
        if len(data) != size:
            raise _changed(path)
        return hashlib.sha256(data).hexdigest(), data
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), None


def _corrupt(checkpoint: str, file: StateFileLike, where: str, size: int, sha256: str, remedy: str) -> CorruptStateFile:
    return CorruptStateFile(
        f"{checkpoint}: state file {file.path} at {where} is corrupt: expected {file.size} bytes "
        f"with sha256 {file.sha256}, found {size} bytes with sha256 {sha256}. {remedy}"
    )


def _missing(checkpoint: str, file: StateFileLike, where: str, remedy: str) -> MissingStateFile:
    return MissingStateFile(
        f"{checkpoint}: state file {file.path} is missing: expected {file.size} bytes at {where}, found no object. {remedy}"
    )


def _changed(file: Path | StateSource) -> StateFileChanged:
    return StateFileChanged(
        f"expected {file} not to change while a checkpoint uploads it, found it changed. Files of a "
        "snapshot must be links or copies that no program writes to"
    )
