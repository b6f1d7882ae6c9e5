"""The files below a FileSink's location: on a local or mounted file system, or in S3; `hdfs_files` has those in HDFS.

Names are relative to the location, with ``/``. Files are moved from hidden names to visible ones: by rename on a file system; in
S3 the server copies the object, then the hidden one is deleted. Must not know what the files are.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar
from uuid import uuid4

from dagster_checkpoints.errors import AlreadyExists, NotFound, Precondition, StorageError
from dagster_checkpoints.files.durable import make_directory, place_all, sync
from dagster_checkpoints.files.local import LocalStore
from dagster_checkpoints.files.opening import open_store
from dagster_checkpoints.files.store import ObjectStore, PutMode, UpdateVersion
from dagster_checkpoints.files.urls import is_hidden, url_scheme
from dagster_checkpoints.sinks.engine import LedgerChanged
from dagster_checkpoints.sinks.temporary_folder import temporary_folder
from dagster_checkpoints.sinks.unwritable import place_error
from dagster_checkpoints.systems.errors import InvalidSinkPath, SinkUnavailable

_PARALLEL_REQUESTS = 8
_MAKING = 100

T = TypeVar("T")
R = TypeVar("R")


class LedgerFile(Protocol):
    """A file that is replaced only if it has not changed since this object has read or replaced it."""

    @property
    def place(self) -> str:
        """The file's path or URL, for errors."""

    def read(self) -> bytes | None:
        """The file's bytes; None if there is no file."""

    def replace(self, data: bytes) -> None:
        """Create or replace the file, durably and in one step. Raises LedgerChanged."""


class TargetFiles(ABC):
    """The files below a location. All methods raise SinkUnavailable if the location does not answer."""

    @property
    @abstractmethod
    def place(self) -> str:
        """The location as users write it, for errors."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """A file's bytes; None if there is no such file."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Create or replace a file, durably and in one step."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Create a file, durably and in one step; False if it exists."""

    @abstractmethod
    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Name and size of each file whose name begins with ``prefix``, in the order of names."""

    def names(self, prefix: str) -> list[str]:
        """The names of the files that begin with ``prefix``."""
        return [name for name, _ in self.sizes(prefix)]

    @abstractmethod
    def folders(self, prefix: str) -> list[str]:
        """The names of the folders directly below ``prefix``, which ends with ``/``."""

    def check_folders(self) -> None:  # noqa: B027 - only a file system has links
        """Refuse folders directly below the location that a listing leaves out: links to other directories."""

    @abstractmethod
    def missing(self, names: Sequence[str]) -> list[str]:
        """Those of the names that no file has."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete files; one that does not exist is no error."""

    @abstractmethod
    def ledger_file(self, name: str) -> LedgerFile:
        """The file that holds an instance's ledger."""

    @abstractmethod
    def work_folder(self, name: str) -> AbstractContextManager[Path]:
        """A directory of this machine for files that are being written; deleted at the end.

        Args:
            name: the name of the folder for which the files are written.
        """

    @abstractmethod
    def place_all(self, sources: Mapping[str, Path]) -> None:
        """Create files, durably, by hard link where possible.

        Args:
            sources: file of this machine with the bytes, by the name of the file to create.
        """

    @abstractmethod
    def move(self, moves: Sequence[tuple[str, str, int]]) -> list[int]:
        """Move files to other names: on a file system one after the other, in S3 several at a time.

        Args:
            moves: present name, new name and size of each file.

        Returns:
            Positions of the moves whose file does not exist under its present name.
        """

    @abstractmethod
    def on_this_machine(self, name: str, scratch: Path) -> Path:
        """A file of this machine with the bytes of a file: itself, or a copy in the directory ``scratch``."""


class StoreFiles(TargetFiles):
    """Files in an object store.

    Args:
        store: the store whose root is the location.
        sink: the kind of sink, for errors.
    """

    def __init__(self, store: ObjectStore, sink: str = "FileSink") -> None:
        self._store = store
        self._sink = sink

    def read(self, name: str) -> bytes | None:
        with available(self.place, self._sink):
            try:
                return self._store.get(name)
            except NotFound:
                return None

    def put(self, name: str, data: bytes) -> None:
        with available(self.place, self._sink):
            self._store.put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        with available(self.place, self._sink):
            try:
                self._store.put(name, data, "create")
            except AlreadyExists:
                return False
        return True

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        with available(self.place, self._sink):
            for info in self._store.list(prefix):
                yield info.key, info.size

    def folders(self, prefix: str) -> list[str]:
        with available(self.place, self._sink):
            return list(self._store.folders(prefix))

    def missing(self, names: Sequence[str]) -> list[str]:
        with available(self.place, self._sink):
            found = self._each(lambda name: self._store.head(name) is not None, names)
        return [name for name, exists in zip(names, found, strict=True) if not exists]

    def delete(self, names: Iterable[str]) -> None:
        with available(self.place, self._sink):
            self._store.delete(names)

    def ledger_file(self, name: str) -> LedgerFile:
        folder, _, file = name.rpartition("/")
        store = self._store.sibling(f"{self._store.url}/{folder}")
        assert store is not None  # the same kind of URL
        return StoredLedgerFile(store, file, self._sink)

    def _each(self, work: Callable[[T], R], values: Sequence[T]) -> list[R]:
        return [work(value) for value in values]


class StoredLedgerFile:
    """A :class:`LedgerFile` in a store.

    Args:
        store: the object store.
        name: the file's name.
        sink: the kind of sink, for errors.
    """

    def __init__(self, store: ObjectStore, name: str, sink: str) -> None:
        self._store = store
        self._name = name
        self._sink = sink
        self._etag: str | None = None
        self.place = f"{store.url}/{name}"

    def read(self) -> bytes | None:
        with available(self.place, self._sink):
            try:
                data, self._etag = self._store.get_with_etag(self._name)
            except NotFound:
                self._etag = None
                return None
        return data

    def replace(self, data: bytes) -> None:
        with available(self.place, self._sink):
            try:
                condition: PutMode = "create" if self._etag is None else UpdateVersion(self._etag)
                self._etag = self._store.put(self._name, data, condition)
            except (AlreadyExists, Precondition) as error:
                raise LedgerChanged from error


class LocalTargetFiles(StoreFiles):
    """Files on a local or mounted file system.

    Args:
        root: the location.
        sink: the kind of sink, for errors.
    """

    def __init__(self, root: Path, sink: str) -> None:
        super().__init__(LocalStore(root, on_link=self._refuse_link), sink)
        self._root = root

    @property
    def place(self) -> str:
        return str(self._root)

    def check_folders(self) -> None:
        with available(self._root, self._sink), suppress(FileNotFoundError), os.scandir(self._root) as entries:
            for entry in entries:
                if entry.is_symlink() and entry.is_dir():
                    self._refuse_link(entry.name)

    def _refuse_link(self, name: str) -> None:
        if is_hidden(name):
            return
        raise InvalidSinkPath(
            f"{self._sink}: expected the directories of partitions in {self._root}, found that {name} is a symbolic link to "
            f"{os.readlink(self._root / name)}: what is behind a link would not be found when the sink removes rows. Move that "
            "directory back in place of the link; or move the whole location, which may be a link or a mounted directory"
        )

    @contextmanager
    def work_folder(self, name: str) -> Iterator[Path]:
        # Below the location: files are then linked to their names, not copied to another file system.
        with available(self._root, self._sink):
            make_directory(self._root / name, self._root)
            folder = tempfile.TemporaryDirectory(prefix="writing-", dir=self._root / name, ignore_cleanup_errors=True)
        with folder as path:
            yield Path(path)

    def place_all(self, sources: Mapping[str, Path]) -> None:
        with available(self._root, self._sink):
            place_all(sources, self._root)

    def move(self, moves: Sequence[tuple[str, str, int]]) -> list[int]:
        missing, changed = [], set()
        with available(self._root, self._sink):
            for position, (present, new, _) in enumerate(moves):
                source, target = self._root / present, self._root / new
                if self._rename(source, target, known=target.parent in changed):
                    changed |= {source.parent, target.parent}
                else:
                    missing.append(position)
            for folder in changed:
                sync(folder)
        return missing

    def on_this_machine(self, name: str, scratch: Path) -> Path:
        return self._root / name

    def _rename(self, source: Path, target: Path, *, known: bool) -> bool:
        for _ in range(_MAKING):  # another instance may delete the directory while it is empty
            if not known:
                make_directory(target.parent, self._root)
                for folder in (target.parent, *target.parent.parents):
                    if folder == self._root:
                        break
                    if folder.is_symlink():
                        self._refuse_link(folder.relative_to(self._root).as_posix())
            try:
                os.rename(source, target)
            except FileNotFoundError:
                known = False
                if not source.exists():
                    return False
            else:
                return True
        raise OSError(f"another program deletes {target.parent} again and again")


class StoredTargetFiles(StoreFiles):
    """Files in S3.

    Args:
        url: the location.
        options: options of the client, see :func:`dagster_checkpoints.files.s3.create_client`.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        super().__init__(open_store(url, **options))

    @property
    def place(self) -> str:
        return self._store.url

    def work_folder(self, name: str) -> AbstractContextManager[Path]:
        return temporary_folder()

    def place_all(self, sources: Mapping[str, Path]) -> None:
        with available(self.place):
            self._each(lambda pair: self._store.put_file(*pair), list(sources.items()))

    def move(self, moves: Sequence[tuple[str, str, int]]) -> list[int]:
        with available(self.place):
            copied = self._each(lambda move: self._copy(*move), moves)
            self._store.delete(present for (present, _, _), done in zip(moves, copied, strict=True) if done)
        return [position for position, done in enumerate(copied) if not done]

    def on_this_machine(self, name: str, scratch: Path) -> Path:
        copy = scratch / uuid4().hex
        with available(self.place), copy.open("wb") as file:
            for chunk in self._store.stream(name):
                file.write(chunk)
        return copy

    def _copy(self, present: str, new: str, size: int) -> bool:
        try:
            if self._store.copy_from(self._store, present, new, size):
                return True
        except NotFound:
            return False
        raise SinkUnavailable(
            f"expected that the server copies {self.place}/{present} to {self.place}/{new}, found that it refuses to copy. "
            "FileSink uploads files under hidden names and copies them when a checkpoint completes: allow s3:GetObject and "
            "s3:PutObject below the location"
        )

    def _each(self, work: Callable[[T], R], values: Sequence[T]) -> list[R]:
        return in_parallel(work, values)


def in_parallel(work: Callable[[T], R], values: Sequence[T]) -> list[R]:
    """Send several requests at a time to a server; the results are in the order of the values."""
    if len(values) < 2:
        return [work(value) for value in values]
    with ThreadPoolExecutor(_PARALLEL_REQUESTS, thread_name_prefix="file-sink") as threads:
        return list(threads.map(work, values))


@contextmanager
def available(location: str | Path, sink: str = "FileSink") -> Iterator[None]:
    """Raise InvalidSinkPath or SinkUnavailable for the errors of storage, and for those of the file system.

    Args:
        location: a directory, or the URL of another place.
        sink: the kind of sink, for errors.
    """
    try:
        yield
    except (StorageError, OSError) as error:
        place = location if url_scheme(str(location)) else Path(location)
        known = place_error(error, sink, place)
        if known is None and isinstance(error, OSError) and not isinstance(place, Path):
            raise  # of a copy on this machine
        raise known or SinkUnavailable(f"{sink}: cannot write to {place}: {error}. Another attempt may succeed") from error
