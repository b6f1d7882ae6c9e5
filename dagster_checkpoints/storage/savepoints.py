"""A savepoint's directory: its metadata and, beside it, every state file that it names.

Self-contained, so that it may be moved, copied and restored anywhere. Must not know what the bytes say, nor where savepoints
are kept (:mod:`savepoint_places`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dagster_checkpoints.execution.checkpoint_deletion import (
    DeleteSavepointFiles,
    DeleteSavepointMetadata,
    IncompleteMark,
    MarkIncomplete,
    RemoveMark,
    RemoveMarkIfEmpty,
    delete_savepoint,
)
from dagster_checkpoints.execution.checkpoint_writing import CheckStateFiles, RenewLease, complete_savepoint
from dagster_checkpoints.execution.storage_steps import drive
from dagster_checkpoints.storage.base import MetadataObject, ObjectInfo, ObjectStore
from dagster_checkpoints.storage.errors import (
    CheckpointDiscarded,
    CorruptStateFile,
    MissingSavepoint,
    MissingStateFile,
    NotFound,
)
from dagster_checkpoints.storage.layout import INCOMPLETE, METADATA, STATE, sha256_in, validate_sha256
from dagster_checkpoints.storage.ownership import Ownership
from dagster_checkpoints.storage.shared_files import SharedFiles
from dagster_checkpoints.storage.state_files import (
    LocalFile,
    StateFileLike,
    StoredFile,
    fetch_file,
    hash_file,
    put_file,
    read_through,
    run_all,
)

_REMEDY = "Nothing was restored from it. Restore the object from a copy of the savepoint, or restore from another one"
_NAMED_IN_ERRORS = 5


@dataclass(frozen=True)
class StateFileProblem:
    """A state file that is not what the metadata says.

    Args:
        sha256: which one.
        expected: for people.
        found: likewise.
        where: its URL.
    """

    sha256: str
    expected: str
    found: str
    where: str


# Made here: two threads that decode a type for the first time at the same moment crash msgspec.
_INCOMPLETE = msgspec.json.Decoder(IncompleteMark)


class SavepointDirectory:
    """One savepoint's files. Thread-safe: tasks store theirs at the same time.

    Made by :class:`~dagster_checkpoints.storage.checkpoints.CheckpointStorage`.

    Args:
        store: where it lies.
        prefix: its directory's key, without a slash at its end; "" for the store's root.
        url: of the directory.
        location: relative if it lies below the pipeline's directory, else the URL again.
        shared: the pipeline's ``shared/``, of which files are copied rather than sent again.
        executor: threads for transfers.
        pipeline: whose it is.
        ownership: of who writes it; None for those who only read or delete.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        *,
        url: str,
        location: str,
        shared: SharedFiles,
        executor: Callable[[], Executor],
        pipeline: str,
        ownership: Ownership | None = None,
    ) -> None:
        self.url = url
        """For people; ``open_savepoint`` takes it as well."""
        self.location = location
        """Relative if it lies below the pipeline's directory: it stays true when that is moved."""
        self._store = store
        self._prefix = f"{prefix}/" if prefix else ""
        self._shared = shared
        self._executor = executor
        self._pipeline = pipeline
        self._ownership = ownership
        self._lock = threading.Lock()
        self._transfers: dict[str, Future[None]] = {}
        self._marked = False
        self._deleted = False

    def __repr__(self) -> str:
        return f"SavepointDirectory({self.url!r})"

    @property
    def own(self) -> bool:
        """It lies below the pipeline's directory."""
        return self.location != self.url

    # -- writing

    def check(self) -> None:
        """Find out whether savepoints can be written here, by writing a little and deleting it again.

        Raises:
            StorageUnavailable: names the URL and the cause: no such bucket, no permission, not a directory.
        """
        key = self._key(INCOMPLETE)
        self._store.put(key, self._mark_of_owner())
        self._store.delete([key])

    def upload_files(self, paths: Mapping[str, Path]) -> dict[str, StoredFile]:
        """Store local files, in parallel. What ``shared/`` holds is copied there by the store itself, where it can.

        Args:
            paths: local files by whatever name the caller has for them; they must not change meanwhile.

        Returns:
            What was stored, by the same names; ``uploaded`` only for those whose bytes went through this process.

        Raises:
            StateFileChanged: a file changed meanwhile.
            CheckpointDiscarded: the savepoint was given up meanwhile.
            StorageUnavailable, OutcomeUnknown, FileNotFoundError: the savepoint cannot be completed, or may be tried again.
        """
        if not paths:
            return {}
        self._mark()
        return dict(zip(paths, run_all(self._executor(), self._store_file, paths.values()), strict=True))

    def write_metadata(self, data: bytes, files: Mapping[str, int]) -> str:
        """Complete the savepoint: its ``_metadata``, created only if absent, once every file is seen to be there.

        Args:
            data: the metadata's bytes.
            files: size by sha256 of every file that it names.

        Returns:
            Its location.

        Raises:
            MissingStateFile, CorruptStateFile: a file is not there, or has another size; nothing was written.
            AlreadyExists: other metadata is there.
            OwnershipLost: the pipeline was taken over meanwhile; the savepoint may have been swept, so it does not count.
            StorageUnavailable, WriteConflict: nothing was written.
            OutcomeUnknown: nobody knows; delete nothing.
        """
        subject = "a savepoint never changes"
        metadata = MetadataObject(self._store, self._key(METADATA), data, subject)
        ownership = self._ownership if self.own else None

        def perform(request: object) -> object:
            match request:
                case CheckStateFiles():
                    self._check_files(files)
                case RenewLease():
                    return ownership is None or ownership.renew()
                case RemoveMark():
                    with self._lock:
                        self._marked = False
                        self._store.delete([self._key(INCOMPLETE)])
                case _:
                    metadata.perform(request)
            return None

        drive(complete_savepoint(self.url, confirm=ownership is not None), perform)
        return self.location

    # -- reading

    def exists(self) -> bool:
        """Its metadata is there: it was completed, and is not being deleted."""
        return self.metadata_info() is not None

    def metadata_info(self) -> ObjectInfo | None:
        """Size and time of the metadata, or None."""
        return self._store.head(self._key(METADATA))

    def read_metadata(self) -> bytes:
        """The bytes of its ``_metadata``.

        Raises:
            MissingSavepoint: it is not there.
        """
        try:
            return self._store.get(self._key(METADATA))
        except NotFound as error:
            raise self.missing() from error

    def missing(self, there: Iterable[str] = ()) -> MissingSavepoint:
        """The error for a savepoint without metadata.

        Args:
            there: savepoints that are there instead.
        """
        rest = "some state files without it: it was never completed, or is being written, copied or deleted"
        found = rest if any(self._store.list(self._key(STATE))) else "none"
        names = ", ".join(there) or "none"
        return MissingSavepoint(
            f"expected the metadata of a savepoint at {self.url}/{METADATA}, found {found}. Savepoints there: {names}. Name one "
            "of these, or a savepoint's directory by its URL or absolute path"
        )

    def fetch_state(self, files: Iterable[StateFileLike], destination: Path) -> None:
        """Fetch state files to ``destination/<file.path>``, in parallel, verifying size and sha256.

        Args:
            files: path (relative), sha256 and size of each.
            destination: a directory; created. A file appears in it verified and whole, or not at all.

        Raises:
            MissingStateFile, CorruptStateFile: name the file, where it lies, what was expected and found.
            InvalidKey: a path that would leave the destination.
        """

        def fetch(file: StateFileLike) -> None:
            fetch_file(self._store, self._state_key(file.sha256), file, destination, f"savepoint {self.url}", _REMEDY)

        run_all(self._executor(), fetch, files)

    def verify(self, files: Mapping[str, int]) -> list[StateFileProblem]:
        """Read every file and compare size and sha256.

        Args:
            files: size by sha256 of every file that the metadata names.

        Returns:
            What is wrong, in the order of ``files``; nothing if all is well.

        Raises:
            StorageUnavailable: they cannot be read.
        """

        def check(named: tuple[str, int]) -> StateFileProblem | None:
            sha256, size = named
            key = self._state_key(sha256)
            try:
                found_size, found = read_through(self._store, key)
            except NotFound:
                return self._problem(sha256, f"{size} bytes", "no object")
            if (found_size, found) == (size, sha256):
                return None
            return self._problem(sha256, f"{size} bytes with this sha256", f"{found_size} bytes with sha256 {found}")

        return [problem for problem in run_all(self._executor(), check, files.items()) if problem is not None]

    # -- deletion

    def delete(self) -> None:
        """Delete the savepoint, complete or not; what others have put into its directory stays. May be repeated.

        Its metadata goes first: without it there is no savepoint. Uploads under way fail, and leave nothing.

        Raises:
            StorageError: it may be tried again; in the pipeline's own ``savepoints/`` a later owner sweeps up the rest.
        """
        with self._lock:
            self._deleted = True
        drive(delete_savepoint(self.own), self._perform_deletion)

    def _perform_deletion(self, request: object) -> None:
        match request:
            case MarkIncomplete():
                self._mark(force=True)
            case DeleteSavepointMetadata():
                self._store.delete([self._key(METADATA)])
            case DeleteSavepointFiles():
                self._store.delete(self._state_files())
            case RemoveMarkIfEmpty():
                if not self._state_files():
                    self._store.delete([self._key(INCOMPLETE)])
            case _:
                raise TypeError(f"expected a request for {self.url}, found {request!r}")

    def _state_files(self) -> list[str]:
        return [info.key for info in self._store.list(self._key(STATE)) if sha256_in(info.key)]

    def incomplete(self) -> IncompleteMark | None:
        """Whose it is while it is being written; None if it is not, or cannot be known."""
        with suppress(NotFound, msgspec.DecodeError, UnicodeDecodeError):
            return _INCOMPLETE.decode(self._store.get(self._key(INCOMPLETE)))
        return None

    # -- one file

    def _store_file(self, path: Path) -> StoredFile:
        file = hash_file(self._shared.hashes, path)
        with self._lock:
            self._ensure_wanted()
            transfer = self._transfers.get(file.sha256)
            if transfer is None:
                mine = self._transfers[file.sha256] = Future()
        if transfer is not None:
            transfer.result()  # by another thread, which is at it or was
            return StoredFile(file.sha256, file.size, uploaded=False)
        try:
            uploaded = self._transfer(file)
        except BaseException as error:
            with self._lock:
                del self._transfers[file.sha256]  # it may be tried again
            mine.set_exception(error)
            raise
        mine.set_result(None)
        return StoredFile(file.sha256, file.size, uploaded)

    def _transfer(self, file: LocalFile) -> bool:
        key = self._state_key(file.sha256)
        copied = self._copy(file, key)
        if not copied:
            put_file(self._store, key, file)
        with self._lock:
            deleted = self._deleted
        if deleted:  # perhaps after its files were listed
            self._store.delete([key])
            raise self._discarded()
        return not copied

    def _copy(self, file: LocalFile, key: str) -> bool:
        with self._shared.lent(file.sha256) as source:
            if not source:
                return False
            try:
                return self._store.copy_from(self._shared.store, source, key, file.size)
            except NotFound:  # somebody else has deleted it
                return False

    # -- the whole

    def _mark(self, *, force: bool = False) -> None:
        with self._lock:
            if not force:
                self._ensure_wanted()
            if not self._marked:
                self._store.put(self._key(INCOMPLETE), self._mark_of_owner())
                self._marked = True

    def _mark_of_owner(self) -> bytes:
        epoch = self._ownership.epoch if self._ownership is not None else 0
        return msgspec.json.encode(IncompleteMark(pipeline=self._pipeline, epoch=epoch))

    def _check_files(self, files: Mapping[str, int]) -> None:
        found = {sha256_in(info.key): info.size for info in self._store.list(self._key(STATE))} if files else {}
        missing = [sha256 for sha256 in files if sha256 not in found]
        if missing:
            some = ", ".join(missing[:_NAMED_IN_ERRORS])
            raise MissingStateFile(
                f"expected {len(files)} state files in {self.url}/{STATE}, found {len(missing)} missing: {some}. The savepoint "
                "is not complete; nothing names it"
            )
        for sha256, size in files.items():
            if found[sha256] != size:
                raise CorruptStateFile(
                    f"expected {size} bytes at {self._store.url}/{self._state_key(sha256)}, found {found[sha256]}. The savepoint "
                    "is not complete; nothing names it"
                )

    def _ensure_wanted(self) -> None:
        if self._deleted:
            raise self._discarded()

    def _discarded(self) -> CheckpointDiscarded:
        return CheckpointDiscarded(f"savepoint {self.url} was given up while its files were still being stored; the rest is not")

    def _problem(self, sha256: str, expected: str, found: str) -> StateFileProblem:
        return StateFileProblem(sha256, expected, found, f"{self._store.url}/{self._state_key(sha256)}")

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _state_key(self, sha256: str) -> str:
        return self._key(f"{STATE}{validate_sha256(sha256)}")
