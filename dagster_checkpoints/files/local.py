"""The local object store: objects are files below a directory, with the guarantees of S3's conditional writes.

A write goes to a temporary file beside its target, is synced, and appears by ``link`` (create), ``rename``
(overwrite), or ``rename`` under an exclusive lock after comparing content (UpdateVersion). Temporary files that a
killed process has left are deleted by a listing, a day later. The directory may be on a file system that several machines
mount, if that file system honours ``flock``.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from dagster_checkpoints.errors import (
    AlreadyExists,
    InvalidKey,
    NotFound,
    OutcomeUnknown,
    Precondition,
    StorageUnavailable,
)
from dagster_checkpoints.files.durable import sync
from dagster_checkpoints.files.store import (
    RESERVED_PREFIX,
    ObjectInfo,
    ObjectStore,
    PutMode,
    UpdateVersion,
    probe,
    validate_key,
)
from dagster_checkpoints.files.urls import local_path

_CHUNK = 256 * 1024
"""Bytes of a read: larger pieces leave the processor's cache before they are hashed and written, and cost twice the time."""
_KERNEL_CHUNK = 1 << 30
_NO_KERNEL_COPY = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})
_UNFINISHED = f"{RESERVED_PREFIX}tmp-"
_ABANDONED_SECONDS = 24 * 3600.0
"""A temporary file to which nothing was written for so long was left by a process that was killed."""
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})


class LocalStore:
    """An :class:`~dagster_checkpoints.files.store.ObjectStore` in a directory.

    Conditional writes are atomic among themselves; an unconditional overwrite takes no lock. Unlike in S3,
    one key cannot be the beginning of another key's path (``a`` and ``a/b``).

    Args:
        root: the directory; created by the first write.
        lock_timeout: seconds to wait for another conditional write to finish, default 30; such writes take milliseconds.
        on_link: called by a listing with the key of each symbolic link to a directory, whose files the listing leaves out.
    """

    def __init__(self, root: Path | str, *, lock_timeout: float = 30.0, on_link: Callable[[str], object] | None = None) -> None:
        self.root = Path(os.path.abspath(root))
        self._lock_timeout = lock_timeout
        self._on_link = on_link

    @property
    def url(self) -> str:
        return self.root.as_uri()

    @property
    def poll_seconds(self) -> float:
        return 0.02

    def change_mark(self, prefix: str) -> str | None:
        try:
            with self._errors("inspect", prefix):
                folder = os.stat(os.path.join(self.root, prefix))
                return f"{folder.st_ino} {folder.st_mtime_ns}"
        except NotFound:
            return "none"

    def __repr__(self) -> str:
        return f"LocalStore({str(self.root)!r})"

    def check(self) -> None:
        with self._errors("use", ""):
            self.root.mkdir(parents=True, exist_ok=True)
        probe(self)

    def get(self, key: str) -> bytes:
        return b"".join(self.stream(key))

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        data = self.get(key)
        return data, _etag(data)

    def stream(self, key: str, chunk_size: int = _CHUNK) -> Iterator[bytes]:
        path = self._path(key)
        with self._errors("read", key), path.open("rb", buffering=0) as file:
            while chunk := file.read(chunk_size):
                yield chunk

    def put(self, key: str, data: bytes, mode: PutMode = "overwrite") -> str:
        self._write(key, lambda target: target.write(data), mode)
        return _etag(data)

    def put_file(self, key: str, path: Path) -> None:
        with path.open("rb", buffering=0) as file:
            self._write(key, lambda target: _copy(file, target), "overwrite")

    def copy_from(
        self, source: ObjectStore, source_key: str, key: str, size: int | None = None, *, etag: str = "", hashed: bool = False
    ) -> bool:
        if not isinstance(source, LocalStore):
            return False
        with source._errors("read", source_key):
            file = source._path(source_key).open("rb", buffering=0)
        with file:
            self._write(key, lambda target: _copy(file, target), "overwrite", cached=False)
        return True

    def sibling(self, url: str) -> ObjectStore | None:
        path = local_path(url)
        return LocalStore(path, lock_timeout=self._lock_timeout) if path is not None else None

    def head(self, key: str) -> ObjectInfo | None:
        try:
            with self._errors("inspect", key):
                return _info(key, os.stat(self._path(key)))
        except NotFound:
            return None

    def folders(self, prefix: str = "") -> Iterator[str]:
        start = self._path(prefix.rstrip("/")) if prefix else self.root
        with self._errors("list", prefix):
            try:
                entries = list(os.scandir(start))
            except FileNotFoundError:
                return iter(())
            except NotADirectoryError:
                if start == self.root:  # the user has named a file: to find nothing in it would not say so
                    raise
                return iter(())
            return iter(sorted(e.name for e in entries if e.is_dir() and not e.name.startswith(RESERVED_PREFIX)))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        start = self._path(folder) if folder else self.root
        objects: list[ObjectInfo] = []
        with self._errors("list", prefix):
            for directory, folders, names in os.walk(start, onerror=_raise_unless_gone):
                relative = Path(directory).relative_to(self.root)
                if self._on_link is not None:
                    for folder in folders:
                        if os.path.islink(os.path.join(directory, folder)):
                            self._on_link((relative / folder).as_posix())
                for name in names:
                    key = (relative / name).as_posix()
                    if name.startswith(_UNFINISHED):
                        _delete_abandoned(os.path.join(directory, name))
                    if name.startswith(RESERVED_PREFIX) or not key.startswith(prefix):
                        continue
                    with suppress(FileNotFoundError):  # deleted during the walk
                        objects.append(_info(key, os.stat(os.path.join(directory, name))))
        return iter(sorted(objects, key=lambda info: info.key))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            with self._errors("delete", key):
                path.unlink(missing_ok=True)
                self._remove_empty_parents(path)

    def _remove_empty_parents(self, path: Path) -> None:
        for parent in path.parents:
            if parent == self.root:
                return
            try:
                parent.rmdir()
            except OSError:
                return

    def _path(self, key: str) -> Path:
        path = self.root / validate_key(key)
        # A symbolic link below the root must not lead out of it.
        if path.parent != self.root and not Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(self.root)):
            raise InvalidKey(
                f"expected {key!r} to stay below {self.url}, found that a link leads out of it. Move what is behind the link "
                "to its place; or move the whole directory, which may be a link itself"
            )
        return path

    def _write(self, key: str, fill: Callable[[BinaryIO], object], mode: PutMode, *, cached: bool = True) -> None:
        path = self._path(key)
        with self._errors("write", key):
            temporary = self._temporary(path, fill, cached)
        try:
            with self._errors("write", key):
                if mode == "overwrite":
                    os.replace(temporary, path)
                elif mode == "create":
                    self._create(temporary, path, key)
                elif isinstance(mode, UpdateVersion):
                    with self._lock():
                        self._compare(path, key, mode.etag)
                        os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        try:
            sync(path.parent)
        except OSError as error:
            raise OutcomeUnknown(f"wrote {self.url}/{key}, but the directory could not be synced to disk: {error}") from error

    def _temporary(self, path: Path, fill: Callable[[BinaryIO], object], cached: bool) -> Path:
        temporary = path.with_name(f"{_UNFINISHED}{uuid4().hex}")
        file = _open_new(temporary)
        try:
            with file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
                if not cached:
                    _drop_from_page_cache(file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _create(self, temporary: Path, path: Path, key: str) -> None:
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise AlreadyExists(f"expected no object at {self.url}/{key}, found one") from None
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            with self._lock():
                if path.exists():
                    raise AlreadyExists(f"expected no object at {self.url}/{key}, found one") from None
                os.replace(temporary, path)

    def _compare(self, path: Path, key: str, expected: str) -> None:
        try:
            found = _etag(path.read_bytes())
        except FileNotFoundError:
            found = "no object"
        if found != expected:
            raise Precondition(f"expected {self.url}/{key} unchanged at version {expected}, found {found}")

    @contextmanager
    def _lock(self) -> Iterator[None]:
        deadline = time.monotonic() + self._lock_timeout
        # Each call opens the file again, so that flock also excludes threads of one process.
        with (self.root / f"{RESERVED_PREFIX}lock").open("ab") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise StorageUnavailable(
                            f"expected the lock {file.name} within {self._lock_timeout:g} s, found it held; "
                            "is another process stopped in the middle of a write?"
                        ) from None
                    time.sleep(0.002)
            yield

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        where = f"{self.url}/{key}" if key else self.url
        try:
            yield
        except (FileNotFoundError, IsADirectoryError) as error:
            found = "a directory: move it away" if isinstance(error, IsADirectoryError) else "none"
            raise NotFound(f"expected an object at {where}, found {found}") from error
        except OSError as error:
            raise StorageUnavailable(
                f"cannot {verb} {where}: {error}. Check that the directory exists, is mounted, writable and not full"
            ) from error


def _copy(source: FileIO, target: BinaryIO) -> None:
    """Copy a file's bytes within the kernel if the kernel can do it; file systems with shared blocks then share them."""
    try:
        while os.copy_file_range(source.fileno(), target.fileno(), _KERNEL_CHUNK):
            pass
    except (AttributeError, OSError) as error:
        if getattr(error, "errno", errno.ENOSYS) not in _NO_KERNEL_COPY:
            raise
        shutil.copyfileobj(source, target, _CHUNK)  # copies the bytes that the kernel has not copied


def _drop_from_page_cache(file: BinaryIO) -> None:
    """Free the memory of a file that is synced and will not be read again soon.

    Otherwise the file would displace pages that are being read. And if the kernel needs fresh memory for each copy, instead of
    using the same memory again, a virtual machine may spend ten times the processor time of the copying on that.
    """
    with suppress(AttributeError, OSError):  # only an advice: some systems do not support it
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _delete_abandoned(path: str) -> None:
    """Delete a temporary file that a killed process has left: no listing shows it, so nothing else would ever delete it.

    If its process goes on after all, the write fails, as it does on an error of the file system.
    """
    with suppress(OSError):  # deleted by another process, or the directory may only be read
        if time.time() - os.stat(path).st_mtime > _ABANDONED_SECONDS:
            os.unlink(path)


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _info(key: str, stat: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, stat.st_size, datetime.fromtimestamp(stat.st_mtime, UTC))


def _open_new(path: Path) -> BinaryIO:
    """Open a new file for writing, although another thread may delete its directory, while it is empty, at the same time."""
    for _ in range(100):
        with suppress(FileNotFoundError):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except FileExistsError:  # the directory existed and has been deleted again; or the path is a file
                if path.parent.is_file():
                    raise
                continue
            return path.open("xb")
    broken = next((folder for folder in path.parents if folder.is_symlink() and not folder.exists()), None)
    if broken is not None:
        raise OSError(errno.EIO, f"{broken} is a link to a place that does not exist", str(path))
    raise OSError(errno.EIO, "its directory cannot be made, or another program deletes it again and again", str(path))


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
