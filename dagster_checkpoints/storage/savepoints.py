"""A savepoint's directory: its metadata and, beside it, every state file that it names.

The directory is self-contained, so that it may be moved, copied and restored anywhere. Must not know what the bytes say, nor
which directories hold savepoints (:mod:`savepoint_places`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path

import msgspec

from dagster_checkpoints.errors import (
    CheckpointDiscarded,
    CorruptStateFile,
    MissingSavepoint,
    MissingStateFile,
    NotFound,
)
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
from dagster_checkpoints.files.store import ObjectInfo, ObjectStore
from dagster_checkpoints.storage.created_objects import metadata_performer
from dagster_checkpoints.storage.layout import INCOMPLETE, METADATA, STATE, sha256_in, validate_sha256
from dagster_checkpoints.storage.ownership import Ownership
from dagster_checkpoints.storage.shared_files import SharedFiles
from dagster_checkpoints.storage.state_files import (
    CopyTarget,
    F,
    HashedFile,
    StateFileLike,
    StateFileProblem,
    StateSource,
    StoredFile,
    as_source,
    copy_files,
    fetch_file,
    hash_file,
    put_file,
    run_all,
    state_file_problem,
)

_REMEDY = "Nothing was restored from it. Restore the object from a copy of the savepoint, or restore from another one"
_NAMED_IN_ERRORS = 5


# Created at import: two threads that decode a type for the first time at the same moment crash msgspec.
_INCOMPLETE = msgspec.json.Decoder(IncompleteMark)


class SavepointDirectory:
    """One savepoint's files. Thread-safe: tasks store their files at the same time.

    Created by :class:`~dagster_checkpoints.storage.checkpoints.CheckpointStorage`.

    Args:
        store: the object store that holds the directory.
        prefix: the directory's key, without a slash at its end; "" for the store's root.
        url: the directory's URL.
        location: the directory relative to the pipeline's directory if it is below that, else the URL again.
        shared: the pipeline's ``shared/``: the store copies files from it where it can, instead of a second upload.
        executor: threads for transfers.
        ownership: the ownership of the process that writes the savepoint; None to read or delete it only.
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
        ownership: Ownership | None = None,
    ) -> None:
        self.url = url
        """The directory's URL; ``open_savepoint`` accepts it."""
        self.location = location
        """Relative if the directory is below the pipeline's directory: it stays valid when that is moved."""
        self._store = store
        self._prefix = f"{prefix}/" if prefix else ""
        self._shared = shared
        self._executor = executor
        self._ownership = ownership
        self._lock = threading.Lock()
        self._transfers: dict[str, Future[None]] = {}
        self._deleted = False

    def __repr__(self) -> str:
        return f"SavepointDirectory({self.url!r})"

    @property
    def own(self) -> bool:
        """Whether the directory is below the pipeline's directory."""
        return self.location != self.url

    # -- writing

    def check(self) -> None:
        """Check that savepoints can be written to this store: write a small object and delete it.

        Raises:
            StorageUnavailable: names the URL and the cause: no such bucket, no permission, not a directory.
        """
        key = self._key(INCOMPLETE)
        self._store.put(key, self._mark_of_owner())
        self._store.delete([key])

    def upload_files(self, files: Mapping[str, Path | StateSource]) -> dict[str, StoredFile]:
        """Store files, in parallel. The store itself copies files that ``shared/`` holds, if it can.

        Args:
            files: local paths or other sources, by any name that the caller gives them; they must not change during the call.

        Returns:
            The stored files, by the same names; ``uploaded`` only for files whose bytes passed through this process.

        Raises:
            StateFileChanged: a file changed during the upload.
            CheckpointDiscarded: the savepoint was deleted during the upload.
            StorageUnavailable, OutcomeUnknown, FileNotFoundError: the savepoint cannot be completed; the call may be repeated.
        """
        if not files:
            return {}
        with self._lock:
            self._ensure_not_deleted()
            self._mark()  # at each call: a later owner may have swept the directory since the last one, with its mark
        stored = run_all(self._executor(), self._store_file, map(as_source, files.values()))
        return dict(zip(files, stored, strict=True))

    def write_metadata(self, data: bytes, files: Mapping[str, int]) -> str:
        """Complete the savepoint: check that storage holds every file, then create ``_metadata`` only if it is absent.

        Args:
            data: the metadata's bytes.
            files: the size in bytes of every file that the metadata names, by sha256.

        Returns:
            The savepoint's location.

        Raises:
            MissingStateFile, CorruptStateFile: a file is missing, or has another size; nothing was written.
            AlreadyExists: the directory holds other metadata.
            OwnershipLost: another run has taken the pipeline over; it may have swept the savepoint, so the savepoint does not
                count.
            StorageUnavailable, WriteConflict: nothing was written.
            OutcomeUnknown: it is unknown whether the metadata was written; delete nothing.
        """
        subject = "a savepoint never changes"
        create_metadata = metadata_performer(self._store, self._key(METADATA), data, subject)
        ownership = self._ownership if self.own else None

        def perform(request: object) -> object:
            match request:
                case CheckStateFiles():
                    self._check_files(files)
                case RenewLease():
                    return ownership is None or ownership.renew()
                case RemoveMark():
                    self._store.delete([self._key(INCOMPLETE)])
                case _:
                    create_metadata(request)
            return None

        drive(complete_savepoint(self.url, confirm=ownership is not None), perform)
        return self.location

    # -- reading

    def exists(self) -> bool:
        """Whether storage holds the metadata: the savepoint was completed, and is not being deleted."""
        return self.metadata_info() is not None

    def metadata_info(self) -> ObjectInfo | None:
        """Size and time of the metadata; None if there is none."""
        return self._store.head(self._key(METADATA))

    def read_metadata(self) -> bytes:
        """The bytes of the savepoint's ``_metadata``.

        Raises:
            MissingSavepoint: the directory holds no metadata.
        """
        try:
            return self._store.get(self._key(METADATA))
        except NotFound as error:
            raise self.missing() from error

    def missing(self, existing: Iterable[str] = ()) -> MissingSavepoint:
        """The error for a savepoint without metadata.

        Args:
            existing: other savepoints, which the error names.
        """
        incomplete = "some state files without it: it was never completed, or is being written, copied or deleted"
        found = incomplete if any(self._store.list(self._key(STATE))) else "none"
        names = ", ".join(existing) or "none"
        return MissingSavepoint(
            f"expected the metadata of a savepoint at {self.url}/{METADATA}, found {found}. Savepoints there: {names}. Name one "
            "of these, or a savepoint's directory by its URL or absolute path"
        )

    def fetch_state(self, files: Iterable[StateFileLike], destination: Path) -> None:
        """Fetch state files to ``destination/<file.path>``, in parallel, verifying size and sha256.

        Args:
            files: the state files, each with its relative path, sha256 and size.
            destination: a directory; created if it does not exist. A file appears in it verified and whole, or not at all.

        Raises:
            MissingStateFile, CorruptStateFile: name the file, its location, what was expected and found.
            InvalidKey: a file's path leads out of the destination.
        """

        def fetch(file: StateFileLike) -> None:
            fetch_file(self._store, self._state_key(file.sha256), file, destination, f"savepoint {self.url}", _REMEDY)

        run_all(self._executor(), fetch, files)

    def copy_state(self, files: Sequence[F], target: CopyTarget) -> list[F]:
        """As :meth:`CheckpointStorage.copy_state <dagster_checkpoints.storage.checkpoints.CheckpointStorage.copy_state>`."""
        subject = f"savepoint {self.url}"
        return copy_files(
            self._executor(), self._store, files, lambda file: self._state_key(file.sha256), target, subject, _REMEDY
        )

    def verify(self, files: Mapping[str, int]) -> list[StateFileProblem]:
        """Read every file and compare size and sha256.

        Args:
            files: the size in bytes of every file that the metadata names, by sha256.

        Returns:
            The files that differ, in the order of ``files``.

        Raises:
            StorageUnavailable: the files cannot be read.
        """

        def check(named: tuple[str, int]) -> StateFileProblem | None:
            sha256, size = named
            return state_file_problem(self._store, self._state_key(sha256), sha256, size)

        return [problem for problem in run_all(self._executor(), check, files.items()) if problem is not None]

    # -- deletion

    def delete(self) -> None:
        """Delete the savepoint, complete or not; other files in its directory stay. May be repeated.

        The metadata is deleted first: without metadata there is no savepoint. Uploads under way fail, and leave nothing.

        Raises:
            StorageError: the deletion is incomplete and may be repeated; in the pipeline's own ``savepoints/`` a later owner
                deletes the rest.
        """
        with self._lock:
            self._deleted = True
            self._transfers.clear()  # no transfer begins any more, and there may be very many files
        drive(delete_savepoint(self.own), self._perform_deletion)

    def _perform_deletion(self, request: object) -> None:
        match request:
            case MarkIncomplete():
                self._mark()
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
        """The pipeline and the epoch that write the savepoint; None if it is not being written, or if its mark cannot be read."""
        with suppress(NotFound, msgspec.DecodeError, UnicodeDecodeError):
            return _INCOMPLETE.decode(self._store.get(self._key(INCOMPLETE)))
        return None

    # -- transfer of one file

    def _store_file(self, source: StateSource) -> StoredFile:
        file = hash_file(self._shared.hashes, source)
        with self._lock:
            self._ensure_not_deleted()
            transfer = self._transfers.get(file.sha256)
            if transfer is None:
                own_transfer = self._transfers[file.sha256] = Future()
        if transfer is not None:
            transfer.result()  # another thread transfers the file, or has transferred it
            return StoredFile(file.sha256, file.size, uploaded=False)
        try:
            uploaded = self._transfer(file)
        except BaseException as error:
            with self._lock:
                self._transfers.pop(file.sha256, None)  # so that the transfer may be repeated
            own_transfer.set_exception(error)
            raise
        own_transfer.set_result(None)
        return StoredFile(file.sha256, file.size, uploaded)

    def _transfer(self, file: HashedFile) -> bool:
        key = self._state_key(file.sha256)
        copied = self._copy(file, key)
        if not copied:
            put_file(self._store, key, file)
        with self._lock:
            deleted = self._deleted
        if deleted:  # perhaps after the deletion had listed the files
            self._store.delete([key])
            raise self._discarded()
        return not copied

    def _copy(self, file: HashedFile, key: str) -> bool:
        with self._shared.lent(file.sha256) as source:
            if not source:
                return False
            try:
                return self._store.copy_from(self._shared.store, source, key, file.size)
            except NotFound:  # another process has deleted it
                return False

    # -- marks and checks

    def _mark(self) -> None:
        self._store.put(self._key(INCOMPLETE), self._mark_of_owner())

    def _mark_of_owner(self) -> bytes:
        epoch = self._ownership.epoch if self._ownership is not None else 0
        return msgspec.json.encode(IncompleteMark(pipeline=self._shared.pipeline, epoch=epoch))

    def _check_files(self, files: Mapping[str, int]) -> None:
        found = {sha256_in(info.key): info.size for info in self._store.list(self._key(STATE))} if files else {}
        missing = [sha256 for sha256 in files if sha256 not in found]
        if missing:
            some = ", ".join(missing[:_NAMED_IN_ERRORS])
            raise MissingStateFile(
                f"expected {len(files)} state files in {self.url}/{STATE}, found {len(missing)} missing: {some}. The savepoint "
                "is not complete, and no checkpoint names it"
            )
        for sha256, size in files.items():
            if found[sha256] != size:
                raise CorruptStateFile(
                    f"expected {size} bytes at {self._store.url}/{self._state_key(sha256)}, found {found[sha256]}. The savepoint "
                    "is not complete, and no checkpoint names it"
                )

    def _ensure_not_deleted(self) -> None:
        if self._deleted:
            raise self._discarded()

    def _discarded(self) -> CheckpointDiscarded:
        return CheckpointDiscarded(
            f"savepoint {self.url} was deleted while its files were being stored; the others are not stored"
        )

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _state_key(self, sha256: str) -> str:
        return self._key(f"{STATE}{validate_sha256(sha256)}")
