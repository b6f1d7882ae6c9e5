"""One pipeline's checkpoints in a store: state files, metadata, ownership, deletion.

The face of this floor for the runtime. It knows files by their name in ``shared/`` and metadata as bytes; what the bytes
say is the state floor's affair.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from dagster_checkpoints.execution.checkpoint_deletion import (
    DeleteMetadata,
    DeleteSavepoint,
    DiscardFiles,
    ForgetCheckpoint,
    FoundMetadata,
    IsRegistered,
    ListMetadata,
    SweepFiles,
    SweepMetadata,
    SweepSavepoints,
    delete_checkpoint,
    sweep,
    sweep_metadata,
)
from dagster_checkpoints.execution.checkpoint_writing import write_metadata
from dagster_checkpoints.execution.pipeline_state import CheckpointPointer, Owner, PipelineState
from dagster_checkpoints.execution.storage_steps import drive
from dagster_checkpoints.storage.acquisition import acquire, read_state
from dagster_checkpoints.storage.base import MetadataObject, ObjectStore
from dagster_checkpoints.storage.errors import InvalidKey, MissingCheckpoint, NotFound, OwnershipLost
from dagster_checkpoints.storage.layout import METADATA, CheckpointKey, Layout
from dagster_checkpoints.storage.opening import open_store
from dagster_checkpoints.storage.ownership import Ownership
from dagster_checkpoints.storage.savepoint_places import SavepointPlaces, StoredSavepoint
from dagster_checkpoints.storage.savepoints import SavepointDirectory
from dagster_checkpoints.storage.shared_files import SharedFiles
from dagster_checkpoints.storage.shared_state import SharedStateRegistry
from dagster_checkpoints.storage.state_files import StateFileLike, StoredFile, fetch_file, run_all


@dataclass(frozen=True)
class StoredMetadata:
    """A ``_metadata`` found in storage, of a completed checkpoint or not."""

    checkpoint_id: int
    epoch: int
    location: str


class CheckpointStorage:
    """Where the checkpoints of one pipeline live. Thread-safe.

    Args:
        store: the root.
        pipeline: its name.
        parallel: files transferred at the same time.
        monotonic: clock for leases, seconds.
        sleep: waits while another owner's lease is watched.
        open_elsewhere: the store at a URL of another kind than ``store``'s, for savepoints there.

    Raises:
        InvalidKey: the pipeline's name cannot name a directory.
    """

    def __init__(
        self,
        store: ObjectStore,
        pipeline: str,
        *,
        parallel: int = 8,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        open_elsewhere: Callable[[str], ObjectStore] = open_store,
    ) -> None:
        self.store = store
        self.pipeline = pipeline
        self.layout = Layout(pipeline)
        self.ownership: Ownership | None = None
        self._monotonic = monotonic
        self._sleep = sleep
        self._shared = SharedFiles(store, self.layout, self._ensure_owner, self._epoch)
        self._savepoints = SavepointPlaces(store, self.layout, self._shared, self._executor, open_elsewhere)
        self._parallel = parallel
        self._pool: ThreadPoolExecutor | None = None
        self._pool_lock = threading.Lock()

    @property
    def url(self) -> str:
        """The pipeline's directory, for people."""
        return f"{self.store.url}/{self.pipeline}"

    def url_of(self, location: str) -> str:
        """A checkpoint's or savepoint's URL, for people; :meth:`read_metadata` takes it as well."""
        return location if "://" in location else f"{self.url}/{location}"

    @property
    def shared_state(self) -> SharedStateRegistry:
        """Who names which file in ``shared/``."""
        return self._shared.registry

    def check(self) -> None:
        """Fail now, clearly, if storage cannot be used. Raises StorageUnavailable or a subclass."""
        self.store.check()

    def acquire(
        self,
        owner: Owner,
        lease_seconds: float = 30.0,
        *,
        poll: float | None = None,
        on_watch: Callable[[PipelineState, float], None] | None = None,
    ) -> Ownership:
        """Become the pipeline's owner; see :func:`dagster_checkpoints.storage.acquisition.acquire`."""
        self.ownership = acquire(
            self.store,
            self.layout,
            owner,
            lease_seconds,
            monotonic=self._monotonic,
            sleep=self._sleep,
            poll=poll,
            on_watch=on_watch,
        )
        return self.ownership

    def read_state(self) -> PipelineState | None:
        """What ``state.json`` says, for whoever does not own the pipeline; None if it never ran here."""
        return read_state(self.store, self.layout)

    # -- state files

    def known(self, location: str, names: Iterable[str]) -> None:
        """Files of a checkpoint that are in storage and whole, as a verified fetch has shown.

        They keep these names, and are not uploaded again; unless ``state.json`` did not list the checkpoint when this owner
        acquired the pipeline. Such a one may have been given up: an earlier owner, suspended since, may yet delete its files.
        """
        if self._was_listed(location):
            self._shared.known(names)

    def register(self, location: str, names: Iterable[str]) -> None:
        """A retained checkpoint of an earlier owner names these files: keep them while it is retained.

        That metadata names a file does not say that it is whole: until :meth:`known` vouches for it, it is uploaded again
        when it is needed. This owner's own checkpoints are registered by :meth:`upload_files`. A savepoint names no file here.
        """
        if not self.is_savepoint(location):
            self.shared_state.register(self._checkpoint_key(location), names)

    def upload_files(self, checkpoint_id: int, paths: Mapping[str, Path] | Iterable[Path]) -> dict[str, StoredFile]:
        """Store local files under this owner's epoch, in parallel; what it has stored or knows already is skipped.

        Args:
            checkpoint_id: the pending checkpoint that names them from now on.
            paths: by any name, or plain paths (whose name is then the path itself).

        Returns:
            By name: sha256, size, whether it had to be uploaded, and the epoch that metadata has to say.

        Raises:
            StorageUnavailable: and others of the store; files uploaded until then stay registered for the
                checkpoint.
            StateFileChanged: a file changed meanwhile.
            CheckpointDiscarded: the checkpoint was discarded meanwhile.
            FileNotFoundError: a local file vanished.
        """
        named = paths if isinstance(paths, Mapping) else {str(path): path for path in paths}
        checkpoint = self._own_key(checkpoint_id)

        def upload(path: Path) -> StoredFile:
            return self._shared.store_file(checkpoint, path)

        return dict(zip(named, run_all(self._executor(), upload, named.values()), strict=True))

    def fetch_state(self, files: Iterable[StateFileLike], destination: Path, *, checkpoint: str = "") -> None:
        """Fetch state files to ``destination/<file.path>``, in parallel, verifying size and sha256.

        Args:
            files: path (relative), sha256, size and name of each.
            destination: a directory; created. A file appears in it verified and whole, or not at all.
            checkpoint: location, for the text of errors.

        Raises:
            MissingStateFile, CorruptStateFile: name the file, where it lies, what was expected and found.
            InvalidKey: a path that would leave the destination.
        """

        def fetch(file: StateFileLike) -> None:
            fetch_file(self.store, self._shared.key(file.name), file, destination, checkpoint or "the checkpoint")

        run_all(self._executor(), fetch, files)

    # -- metadata

    def write_metadata(self, checkpoint_id: int, epoch: int, data: bytes) -> str:
        """Write a checkpoint's ``_metadata``, created only if absent; the checkpoint is *not* complete by that.

        Returns:
            Its location, for :meth:`Ownership.complete`.

        Raises:
            AlreadyExists: other metadata is there: this owner wrote another checkpoint under this id.
            StorageUnavailable, WriteConflict: nothing was written.
            OutcomeUnknown: delete nothing.
        """
        location = self.layout.checkpoint(checkpoint_id, epoch)
        subject = f"checkpoint {checkpoint_id} of epoch {epoch} was written before, and a checkpoint never changes"
        metadata = MetadataObject(self.store, self.layout.at(location, METADATA), data, subject)
        drive(write_metadata(), metadata.perform)
        return location

    def read_metadata(self, location: str) -> bytes:
        """The bytes of a checkpoint's or savepoint's ``_metadata``.

        Args:
            location: as in ``state.json``, or a URL or absolute path, with or without ``/_metadata``.

        Raises:
            MissingCheckpoint, MissingSavepoint: it is not there; names those that are.
            InvalidKey: it can be neither's.
        """
        if self.is_savepoint(location):
            return self.open_savepoint(location).read_metadata()
        location = self.relative(location)
        try:
            return self.store.get(self.layout.at(location, METADATA))
        except NotFound as error:
            there = ", ".join(found.location for found in self.stored_metadata()) or "none"
            raise MissingCheckpoint(
                f"expected the metadata of a checkpoint at {self.url_of(location)}/{METADATA}, found none. "
                f"Checkpoints there: {there}. Restore from one of these, or start anew"
            ) from error

    def list_checkpoints(self) -> list[CheckpointPointer]:
        """The completed checkpoints that are kept, newest first."""
        if self.ownership is not None:
            return list(self.ownership.retained)
        state = self.read_state()
        return list(state.retained) if state else []

    def stored_metadata(self) -> list[StoredMetadata]:
        """Every ``_metadata`` in storage, newest first, whether its checkpoint was ever completed or not."""
        found = []
        for info in self.store.list(self.layout.checkpoints):
            location, _, name = info.key.removeprefix(f"{self.pipeline}/").rpartition("/")
            key = self.layout.parse_checkpoint(location)
            if name == METADATA and key is not None:
                found.append(StoredMetadata(key.checkpoint_id, key.epoch, location))
        return sorted(found, key=lambda one: (one.epoch, one.checkpoint_id), reverse=True)

    def relative(self, location: str) -> str:
        """A location relative to the pipeline's directory, from a location, or a URL or absolute path below it."""
        relative = self._savepoints.relative(location)
        if relative is None:
            raise InvalidKey(
                f"expected a checkpoint below {self.url}, such as {self.url}/{self.layout.checkpoint(42, 1)}, found "
                f"{location!r}. A checkpoint names state files of its own storage: to restore elsewhere, take a savepoint"
            )
        return relative

    # -- savepoints

    def savepoint_directory(self, checkpoint_id: int, name: str, target: str = "") -> SavepointDirectory:
        """A directory for a new savepoint, ``savepoint-<id>-<name>-<token>``; nothing is written yet.

        Args:
            checkpoint_id: its id; :meth:`Ownership.reserve` it before its metadata is written.
            name: for people; may be "".
            target: the directory (``s3://…``, ``file://…`` or an absolute path) that it lies in; "" for the pipeline's own.

        Raises:
            InvalidRequest: the name cannot be part of a directory's.
            InvalidStorageUrl: the target is no such directory. Whether it can be written: ``SavepointDirectory.check()``.
        """
        return self._savepoints.new(checkpoint_id, name, target, self.ownership)

    def open_savepoint(self, location: str) -> SavepointDirectory:
        """A savepoint that is there.

        Args:
            location: such as ``savepoints/savepoint-43-nightly-0a1b2c``; or a URL or absolute path anywhere, with or without
                ``/_metadata``.

        Raises:
            MissingSavepoint: it is not there; names those that are.
            InvalidKey, InvalidStorageUrl: it cannot be one.
        """
        return self._savepoints.open(location)

    def is_savepoint(self, location: str) -> bool:
        """Whether a location is a savepoint's rather than a checkpoint's; looks at the name alone."""
        return self._savepoints.is_savepoint(location)

    def list_savepoints(self) -> list[StoredSavepoint]:
        """The complete savepoints in the pipeline's own ``savepoints/``, newest first."""
        return self._savepoints.listed()

    # -- deletion

    def discard_states(self, checkpoint_id: int) -> int:
        """A pending checkpoint of this owner is aborted: delete what only it names. Returns the number of files.

        Never call it after OutcomeUnknown: the checkpoint may be complete.
        """
        return self._shared.discard(self._own_key(checkpoint_id))

    def delete_checkpoint(self, location: str) -> int:
        """Delete a checkpoint's metadata, then the state files that only it names; or a claimed savepoint.

        Returns:
            The number of files deleted from ``shared/``.

        Raises:
            OwnershipLost: this run does not own the pipeline any more.
        """
        savepoint = self._savepoints.at(location) if self.is_savepoint(location) else None
        location = savepoint.location if savepoint is not None else self.relative(location)

        def perform(request: object) -> object:
            match request:
                case ForgetCheckpoint():
                    if self.ownership is not None:
                        self.ownership.forget(location)
                case DeleteSavepoint() if savepoint is not None:
                    savepoint.delete()
                case DeleteMetadata():
                    self._delete_metadata(location)
                case DiscardFiles():
                    return self._shared.discard(self._checkpoint_key(location))
                case _:
                    raise TypeError(f"expected a request of the deletion of {location}, found {request!r}")
            return None

        return drive(delete_checkpoint(location, savepoint is not None), perform)

    def sweep(self, *, files: bool) -> None:
        """Delete what killed owners have left behind; for the owner, once what it restores is registered.

        Args:
            files: every retained checkpoint could be read, so files that none of them names may be deleted.
        """

        def perform(request: SweepSavepoints | SweepMetadata | SweepFiles) -> int:
            match request:
                case SweepSavepoints():
                    return self.sweep_savepoints()
                case SweepMetadata():
                    return self.sweep_metadata()
                case SweepFiles():
                    return self.delete_unreferenced()

        drive(sweep(files), perform)

    def delete_unreferenced(self, referenced: Iterable[str] = ()) -> int:
        """Delete every shared file that is neither in ``referenced`` nor named by a checkpoint of this owner.

        For what crashed owners left behind; call it after :meth:`acquire`. What a later owner has stored stays. Returns the
        number of files.

        It must not be called while a retained checkpoint's metadata cannot be read: the files that it names would count as
        nobody's. So one unreadable checkpoint keeps all the garbage, until it is deleted or mended.

        Args:
            referenced: names of all files that any metadata in storage names that is to stay usable.
        """
        return self._shared.sweep(frozenset(referenced))

    def sweep_metadata(self) -> int:
        """Delete the metadata of checkpoints that earlier owners wrote but never completed. Returns their number.

        For the owner, after :meth:`acquire` and after what is restored was registered. The state files that only they named go
        with :meth:`delete_unreferenced`.
        """

        def perform(request: object) -> object:
            match request:
                case ListMetadata():
                    return [FoundMetadata(found.location, found.epoch) for found in self.stored_metadata()]
                case IsRegistered(location):
                    return self._checkpoint_key(location) in self.shared_state.checkpoints()
                case DeleteMetadata(location):
                    self._delete_metadata(location)
                case _:
                    raise TypeError(f"expected a request of the sweep of metadata, found {request!r}")
            return None

        return drive(sweep_metadata(self._owner().steps), perform)

    def sweep_savepoints(self) -> int:
        """Delete what earlier owners began to write in ``savepoints/`` and never completed. Returns their number.

        For the owner, at any time after :meth:`acquire`: its own are left alone, as is what anybody else puts there. What a
        killed run began to write elsewhere, where no owner is responsible, stays; its ``_incomplete`` says what it is.
        """
        return self._savepoints.sweep(self._owner())

    def close(self) -> None:
        """End the transfer threads. Does not release the ownership."""
        with self._pool_lock:
            if self._pool is not None:
                self._pool.shutdown(wait=True, cancel_futures=True)
                self._pool = None

    def __enter__(self) -> CheckpointStorage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _owner(self) -> Ownership:
        if self.ownership is None:
            raise OwnershipLost(f"expected to own pipeline {self.pipeline!r} in {self.store.url} first: acquire() it")
        return self.ownership

    def _ensure_owner(self) -> None:
        if self.ownership is not None:
            self.ownership.ensure()

    def _epoch(self) -> int:
        return self.ownership.epoch if self.ownership is not None else 0

    def _delete_metadata(self, location: str) -> None:
        self.store.delete([info.key for info in self.store.list(self.layout.at(location))])

    def _was_listed(self, location: str) -> bool:
        """Whether a checkpoint was completed by this owner, or already when it became that."""
        owner = self._owner()
        key = self.layout.parse_checkpoint(location)
        return owner.steps.vouches_for(location, 0 if key is None else key.epoch)

    def _own_key(self, checkpoint_id: int) -> CheckpointKey:
        return CheckpointKey(checkpoint_id, self._epoch())

    def _checkpoint_key(self, location: str) -> CheckpointKey:
        key = self.layout.parse_checkpoint(location)
        if key is None:
            raise InvalidKey(f"expected a location such as {self.layout.checkpoint(42, 1)}, found {location!r}")
        return key

    def _executor(self) -> ThreadPoolExecutor:
        with self._pool_lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._parallel, thread_name_prefix=f"storage-{self.pipeline}")
            return self._pool
