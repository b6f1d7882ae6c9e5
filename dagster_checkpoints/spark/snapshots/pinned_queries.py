"""A query's checkpoint directory, pinned at one committed batch until it is stored: linked, or held as references.

On a file system of this machine the files are linked. Elsewhere they are references, which stay valid as long as Spark retains
the batch's files (`spark.sql.streaming.minBatchesToRetain`); the few small files of the query's logs are copied at once.

While a query has no new batch, its checkpoints share what the first of them pinned: to link the files of a hundred idle queries
again each time, and to delete the links, would cost more than all else that they do.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dagster_checkpoints.spark.channels.channel_log import SegmentFiles
from dagster_checkpoints.spark.errors import SnapshotError
from dagster_checkpoints.spark.files.hadoop_path import FileStatus, HadoopPath
from dagster_checkpoints.spark.files.server_copies import is_large_enough
from dagster_checkpoints.spark.files.work_path import WorkPath
from dagster_checkpoints.spark.snapshots.query_files import (
    check_read_files,
    check_state_partitions,
    is_immutable,
    is_left_out,
    is_of_later_batch,
    log_files,
    names_in_zip,
    needed_files,
)
from dagster_checkpoints.spark.snapshots.query_snapshots import pin, prune
from dagster_checkpoints.storage.state_files import FileIdentity, LocalSource, StateSource, StoredObject


class PinnedQuery(Protocol):
    """The files of a query as of one batch."""

    def files(self) -> Mapping[str, StateSource]:
        """The files that a restore needs, by their path below the checkpoint directory.

        Raises:
            SnapshotError: A file that is needed is missing.
        """


def pin_query(checkpoint: WorkPath, batch_id: int, folder: Path, *, operators: int = 0, committed: bool = True) -> PinnedQuery:
    """Pin a query's checkpoint directory; the query is between two batches.

    Args:
        checkpoint: The query's checkpoint location.
        batch_id: A committed batch, and the newest one.
        folder: A directory of this machine that does not exist yet, for links and copies.
        operators: The number of stateful operators that the query is known to have.
        committed: False for a batch that has run, and that the query has not committed: the caller writes the entry in `folder`.
    """
    if isinstance(checkpoint, Path):
        pin(checkpoint, batch_id, folder, committed=committed)
        return LinkedQuery(folder, batch_id, operators)
    assert isinstance(checkpoint, HadoopPath)
    for name in log_files(batch_id, committed=committed):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).copy_to(target)
    versions = _below(checkpoint, batch_id)
    # A version that was listed above may name SSTs that are newer than the listing.
    later = _below(checkpoint, batch_id) if any(path.endswith(".zip") for path in versions) else versions
    found = {**{path: status for path, status in later.items() if is_immutable(path)}, **versions}
    return ReferencedQuery(checkpoint, batch_id, folder, found, operators)


def _below(checkpoint: HadoopPath, batch_id: int) -> dict[str, FileStatus]:
    """The files of sources and state, relative to the checkpoint directory, without those of later batches."""
    start = len(f"{checkpoint}/")
    found = {}
    for name in ("sources", "state"):
        for status in (checkpoint / name).files_below():
            path = str(status.path)[start:]
            if not is_left_out(status.path.name) and not is_of_later_batch(path, batch_id):
                found[path] = status
    return found


class QueryPins:
    """The newest pinned batch of one query, and those before it that are still being stored.

    Args:
        checkpoint: The query's checkpoint location.
        folder: A directory of this machine that only this object uses.
    """

    def __init__(self, checkpoint: WorkPath, folder: Path) -> None:
        self._checkpoint = checkpoint
        self._folder = folder
        self._numbers = itertools.count()
        self._newest: SharedPin | None = None

    def pin(self, batch_id: int, operators: int = 0) -> SharedPin:
        """Pin the query, which is between two batches, unless the batch is pinned already. The caller releases the result.

        Args:
            batch_id: The newest committed batch.
            operators: The number of stateful operators that the query is known to have.
        """
        newest = self._newest
        if newest is not None and newest.batch_id == batch_id and newest.hold():
            return newest
        self._newest = None
        if newest is not None:
            newest.release()
        folder = self._folder / f"{batch_id}-{next(self._numbers)}"
        try:
            query = pin_query(self._checkpoint, batch_id, folder, operators=operators)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._newest = made = SharedPin(batch_id, folder, query)
        made.hold()  # for the checkpoints that follow
        return made


class SharedPin:
    """A pinned batch that several checkpoints store, each at its time; thread-safe. The last one to release it deletes its files.

    Args:
        batch_id: The batch.
        folder: The directory of its links and copies.
        query: The pinned files; who makes the object holds it.
    """

    def __init__(self, batch_id: int, folder: Path, query: PinnedQuery) -> None:
        self.batch_id = batch_id
        self._folder = folder
        self._query = query
        self._files: Mapping[str, StateSource] | None = None
        self._lock = threading.Lock()
        self._holders = 1
        self._failed = False

    def hold(self) -> bool:
        """Keep the files for one more checkpoint; False if they could not be stored before: then they are to be pinned again."""
        with self._lock:
            self._holders += not self._failed
            return not self._failed

    def release(self, *, failed: bool = False) -> None:
        """A checkpoint is done with the files.

        Args:
            failed: Whether they could not be stored.
        """
        with self._lock:
            self._holders -= 1
            self._failed |= failed
            unused = not self._holders
        if unused:
            shutil.rmtree(self._folder, ignore_errors=True)

    def files(self) -> Mapping[str, StateSource]:
        """As :meth:`PinnedQuery.files`."""
        if self._files is None:
            self._files = self._query.files()
        return self._files


@dataclass(frozen=True)
class LinkedQuery:
    """Links to the files, in a directory of their own.

    Attributes:
        folder: The directory.
        batch_id: The batch.
        operators: The number of stateful operators that the query is known to have.
    """

    folder: Path
    batch_id: int
    operators: int

    def files(self) -> Mapping[str, StateSource]:
        return {file.as_posix(): LocalSource(self.folder / file) for file in prune(self.folder, self.batch_id, self.operators)}


@dataclass(frozen=True)
class ReferencedQuery:
    """References to the files on another file system, and copies of the query's logs.

    Attributes:
        checkpoint: The query's checkpoint location.
        batch_id: The batch.
        folder: The directory of the copies.
        found: The files by their path below the checkpoint location.
        operators: The number of stateful operators that the query is known to have.
    """

    checkpoint: HadoopPath
    batch_id: int
    folder: Path
    found: Mapping[str, FileStatus]
    operators: int = 0

    def files(self) -> Mapping[str, StateSource]:
        sources = {path: RemoteSource(status, self.folder / path) for path, status in self.found.items()}

        def names(archive: str) -> set[str]:
            with sources[archive].local() as copied:
                return names_in_zip(copied)

        def read(path: str) -> bytes:
            with sources[path].local() as copied:
                return copied.read_bytes()

        logs = log_files(self.batch_id)
        offsets = (self.folder / f"offsets/{self.batch_id}").read_text(encoding="utf-8")
        check_read_files(self.found, offsets, str(self.checkpoint))
        check_state_partitions(self.found, offsets, read, str(self.checkpoint), self.operators)
        needed = needed_files([*logs, *sources], self.batch_id, names, str(self.checkpoint))
        return {path: sources[path] if path in sources else LocalSource(self.folder / path) for path in needed}


@dataclass(frozen=True)
class RemoteSource:
    """A file on another file system. It is copied to this machine when its bytes are needed, and only once.

    Where the server of the storage copies it, the bytes are not needed here. Their hash comes from the server if the file was
    written with one (`fs.s3a.create.checksum.algorithm` = SHA256); else the JVM reads them.

    Args:
        status: The file, as it was listed.
        copy: Where the copy is made; the owner of that directory deletes it.
    """

    status: FileStatus
    copy: Path
    _lock: threading.Lock = field(default_factory=threading.Lock, compare=False)

    def identity(self) -> FileIdentity:
        status = self.status
        return FileIdentity((str(status.path), status.size, status.modified_ms, status.etag), status.size)

    def stored(self) -> StoredObject | None:
        bucket, path = self.status.path.system.bucket, self.status.path
        if bucket is None or not is_large_enough(self.status.size):
            return None
        return StoredObject(bucket, path.object_key, self.status.etag)

    def sha256(self) -> str | None:
        stored = self.stored()
        if stored is None:
            return None
        found = stored.store.head(stored.key)
        if found is not None and found.sha256 is not None:
            return found.sha256
        try:
            return self.status.path.sha256()
        except FileNotFoundError as error:
            raise self._deleted(error) from error

    @contextmanager
    def local(self) -> Iterator[Path]:
        with self._lock:
            if not self.copy.exists():
                self._copy()
        yield self.copy

    def _copy(self) -> None:
        self.copy.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.copy.with_name(f".{self.copy.name}.unfinished")
        try:
            self.status.path.copy_to(unfinished)
        except FileNotFoundError as error:
            raise self._deleted(error) from error
        unfinished.rename(self.copy)

    def _deleted(self, error: FileNotFoundError) -> SnapshotError:
        return SnapshotError(
            f"expected {self.status.path} to exist until it is stored, found that it was deleted: {error}. Spark deletes "
            "files of batches that are further back than spark.sql.streaming.minBatchesToRetain: raise it if checkpoints "
            "take longer than that many batches. The checkpoint is declined; the next one tries again."
        )

    def __str__(self) -> str:
        return str(self.status.path)


def sources_of(segments: Iterable[SegmentFiles], folder: Path) -> dict[str, StateSource]:
    """The files of segments as sources, by their paths; what has to be copied is copied to `folder`."""
    sources: dict[str, StateSource] = {}
    for segment in segments:
        for file, size in zip(segment.files, segment.sizes, strict=True):
            if isinstance(file, Path):
                sources[str(file)] = LocalSource(file)
            else:
                assert isinstance(file, HadoopPath)
                # A segment's name is never used again, so its time of writing tells nothing.
                sources[str(file)] = RemoteSource(FileStatus(file, size, 0), folder / f"{len(sources):06d}")
    return sources
