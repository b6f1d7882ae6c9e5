"""One pipeline's checkpoints in a store: state files, metadata, ownership, savepoints, deletion.

The runtime uses this layer through this module. It knows files by their name in ``shared/`` and metadata as bytes; the state
layer decodes them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from dagster_checkpoints.errors import InvalidKey, OwnershipLost
from dagster_checkpoints.execution.pipeline_state import CheckpointPointer, Owner, PipelineState
from dagster_checkpoints.execution.storage_steps import StatePlace
from dagster_checkpoints.execution.unlisted_checkpoints import describe_unlisted
from dagster_checkpoints.files.opening import open_store
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.files.urls import url_below
from dagster_checkpoints.storage.acquisition import acquire, read_state, unlisted_files
from dagster_checkpoints.storage.checkpoint_deletion import CheckpointDeletion
from dagster_checkpoints.storage.checkpoint_metadata import MetadataFiles
from dagster_checkpoints.storage.layout import CheckpointKey, Layout
from dagster_checkpoints.storage.ownership import Ownership
from dagster_checkpoints.storage.savepoint_places import SavepointPlaces, StoredSavepoint
from dagster_checkpoints.storage.savepoints import SavepointDirectory
from dagster_checkpoints.storage.shared_files import SharedFiles, SharedStateRegistry
from dagster_checkpoints.storage.state_files import (
    CopyTarget,
    F,
    StateFileLike,
    StateSource,
    StoredFile,
    as_source,
    copy_files,
    fetch_file,
    run_all,
)


class CheckpointStorage:
    """The storage of one pipeline's checkpoints. Thread-safe.

    Args:
        store: the object store that holds the pipeline's directory.
        pipeline: the pipeline's name.
        parallel: the number of files transferred at the same time.
        monotonic: the clock for leases, seconds.
        sleep: waits while another owner's lease is watched.
        open_elsewhere: opens the store at a URL of another kind than ``store``'s, for savepoints stored there.

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
        self._metadata = MetadataFiles(store, self.layout)
        self._deletion = CheckpointDeletion(self._metadata, self._shared, self._savepoints)
        self._parallel = parallel
        self._pool: ThreadPoolExecutor | None = None
        self._pool_lock = threading.Lock()

    @property
    def url(self) -> str:
        """The URL of the pipeline's directory, for messages to users."""
        return f"{self.store.url}/{self.pipeline}"

    def url_of(self, location: str) -> str:
        """A checkpoint's or savepoint's URL, for messages to users; :meth:`read_metadata` accepts it as well."""
        return location if "://" in location else url_below(self.url, location)

    @property
    def shared_state(self) -> SharedStateRegistry:
        """Which checkpoints name which file in ``shared/``."""
        return self._shared.registry

    def check(self) -> None:
        """Check that storage can be used. Raises StorageUnavailable or a subclass."""
        self.store.check()

    def acquire(
        self,
        owner: Owner,
        lease_seconds: float = 30.0,
        *,
        poll: float | None = None,
        start_named: bool = False,
        on_watch: Callable[[PipelineState, float], None] | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> Ownership:
        """Become the pipeline's owner; see :func:`dagster_checkpoints.storage.acquisition.acquire`.

        Args:
            sleep: waits while another owner's lease is watched; what it raises ends the watch. Default: that of the storage.
        """
        self.ownership = acquire(
            self.store,
            self.layout,
            owner,
            lease_seconds,
            monotonic=self._monotonic,
            sleep=sleep or self._sleep,
            poll=poll,
            start_named=start_named,
            on_watch=on_watch,
        )
        return self.ownership

    def read_state(self) -> PipelineState | None:
        """The content of ``state.json``, for processes that do not own the pipeline; None if it never ran with this storage."""
        return read_state(self.store, self.layout)

    def describe_unlisted(self, state: PipelineState | None) -> str:
        """The checkpoints and savepoints that the next run refuses to ignore, and its ways on; "" if there are none.

        Args:
            state: the content of ``state.json``; storage is listed only if it records no job.
        """
        if state is not None and not state.records_nothing:
            return ""
        found = unlisted_files(self.store, self.layout)
        place = StatePlace(self.pipeline, self.store.url, f"{self.store.url}/{self.layout.state}")
        return describe_unlisted(found, place, exists=state is not None) if found.checkpoints else ""

    # -- state files

    def known(self, location: str, names: Iterable[str]) -> None:
        """Record files of a checkpoint that are in storage and whole, as a verified fetch has shown.

        They keep these names, and are not uploaded again; unless ``state.json`` did not list the checkpoint when this owner
        acquired the pipeline. Such a checkpoint may have been given up: an earlier owner, suspended since, may still delete its
        files.
        """
        if self._was_listed(location):
            self._shared.known(names)

    def register(self, location: str, names: Iterable[str]) -> None:
        """Keep the files that a retained checkpoint of an earlier owner names, while it is retained.

        That metadata names a file does not prove that the file is whole: until :meth:`known` records it, it is uploaded again
        when it is needed. This owner's checkpoints are registered by :meth:`upload_files`. A savepoint names no file in
        ``shared/``.
        """
        if not self.is_savepoint(location):
            self.shared_state.register(self._metadata.key(location), names)

    def upload_files(self, checkpoint_id: int, files: Mapping[str, Path | StateSource] | Iterable[Path]) -> dict[str, StoredFile]:
        """Store files under this owner's epoch, in parallel; files that it has stored or knows already are skipped.

        Args:
            checkpoint_id: the pending checkpoint that names the files from now on.
            files: local paths or other sources by any name, or plain paths (the name is then the path).

        Returns:
            By name: sha256, size, whether the file had to be uploaded, and the epoch to write into the metadata.

        Raises:
            StorageUnavailable: or another error of the store; files uploaded until then stay registered for the
                checkpoint.
            StateFileChanged: a file changed during the upload.
            CheckpointDiscarded: the checkpoint was discarded during the upload.
            FileNotFoundError: a local file was deleted.
        """
        named = files if isinstance(files, Mapping) else {str(path): path for path in files}
        sources = {name: as_source(file) for name, file in named.items()}
        checkpoint = self._own_key(checkpoint_id)
        # Most files are those of the checkpoint before. To look them up takes less time than to hand them to other threads.
        known = {name: self._shared.stored(checkpoint, source) for name, source in sources.items()}
        to_store = [name for name, stored in known.items() if stored is None]

        def upload(name: str) -> StoredFile:
            return self._shared.store_file(checkpoint, sources[name])

        stored = dict(zip(to_store, run_all(self._executor(), upload, to_store), strict=True))
        return {name: found if found is not None else stored[name] for name, found in known.items()}

    def fetch_state(self, files: Iterable[StateFileLike], destination: Path, *, checkpoint: str = "") -> None:
        """Fetch state files to ``destination/<file.path>``, in parallel, verifying size and sha256.

        Args:
            files: the state files, each with its relative path, sha256, size and name.
            destination: a directory; created if it does not exist. A file appears in it verified and whole, or not at all.
            checkpoint: the checkpoint's location, for the text of errors.

        Raises:
            MissingStateFile, CorruptStateFile: name the file, its location, what was expected and found.
            InvalidKey: a file's path leads out of the destination.
        """

        def fetch(file: StateFileLike) -> None:
            fetch_file(self.store, self._shared.key(file.name), file, destination, checkpoint or "the checkpoint")

        run_all(self._executor(), fetch, files)

    def copy_state(self, files: Sequence[F], target: CopyTarget, *, checkpoint: str) -> list[F]:
        """Let the server copy state files; see :func:`~dagster_checkpoints.storage.state_files.copy_files`.

        Returns:
            The files that the server does not copy: :meth:`fetch_state` fetches them.
        """
        return copy_files(self._executor(), self.store, files, lambda file: self._shared.key(file.name), target, checkpoint)

    # -- metadata

    def write_metadata(self, checkpoint_id: int, epoch: int, data: bytes) -> str:
        """Create a checkpoint's ``_metadata`` only if it is absent; this does *not* complete the checkpoint.

        Returns:
            The checkpoint's location, for :meth:`Ownership.complete`.

        Raises:
            AlreadyExists: storage holds other metadata of this name: this owner wrote another checkpoint under this id.
            StorageUnavailable, WriteConflict: nothing was written.
            OutcomeUnknown: it may have been written; delete nothing.
        """
        return self._metadata.write(checkpoint_id, epoch, data)

    def read_metadata(self, location: str) -> bytes:
        """The bytes of a checkpoint's or savepoint's ``_metadata``.

        Args:
            location: the checkpoint's or savepoint's, as in ``state.json``, or a URL or absolute path; with or without
                ``/_metadata``.

        Raises:
            MissingCheckpoint, MissingSavepoint: there is none at the location; names those in storage.
            InvalidKey: the location can be neither a checkpoint's nor a savepoint's.
        """
        if self.is_savepoint(location):
            return self.open_savepoint(location).read_metadata()
        return self._metadata.read(self.relative(location))

    def list_checkpoints(self) -> list[CheckpointPointer]:
        """The retained checkpoints, newest first."""
        if self.ownership is not None:
            return list(self.ownership.retained)
        state = self.read_state()
        return list(state.retained) if state else []

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
            checkpoint_id: the savepoint's id; :meth:`Ownership.reserve` it before the metadata is written.
            name: the name that a user gave it, or "".
            target: the parent directory (``s3://…``, ``file://…`` or an absolute path); "" for the pipeline's own.

        Raises:
            InvalidRequest: the name cannot be part of a directory's name.
            InvalidStorageUrl: the target is not such a directory. ``SavepointDirectory.check()`` says whether it can be written.
        """
        return self._savepoints.new(checkpoint_id, name, target, self.ownership)

    def open_savepoint(self, location: str) -> SavepointDirectory:
        """An existing savepoint.

        Args:
            location: the savepoint's, such as ``savepoints/savepoint-43-nightly-0a1b2c``; or any URL or absolute path; with or
                without ``/_metadata``.

        Raises:
            MissingSavepoint: there is none at the location; names those in storage.
            InvalidKey, InvalidStorageUrl: the location cannot be a savepoint's.
        """
        return self._savepoints.open(location)

    def is_savepoint(self, location: str) -> bool:
        """Whether a location is a savepoint's and not a checkpoint's, judged by its name alone."""
        return self._savepoints.is_savepoint(location)

    def list_savepoints(self) -> list[StoredSavepoint]:
        """The complete savepoints in the pipeline's own ``savepoints/``, newest first."""
        return self._savepoints.listed()

    # -- deletion

    def discard_metadata(self, checkpoint_id: int) -> None:
        """Delete the metadata of a checkpoint of this owner that was not completed, if it was written.

        Never call it after OutcomeUnknown: the checkpoint may be complete.
        """
        self._metadata.delete(self.layout.checkpoint(checkpoint_id, self._epoch()))

    def discard_states(self, checkpoint_id: int) -> int:
        """Delete the files that only an aborted checkpoint of this owner names. Returns the number of files.

        Never call it after OutcomeUnknown: the checkpoint may be complete.
        """
        return self._shared.discard(self._own_key(checkpoint_id))

    def delete_checkpoint(self, location: str) -> int:
        """Delete a checkpoint's metadata, then the state files that only this checkpoint names; or a claimed savepoint.

        Returns:
            The number of files deleted from ``shared/``.

        Raises:
            OwnershipLost: this run does not own the pipeline any more.
        """
        savepoint = self._savepoints.at(location) if self.is_savepoint(location) else None
        location = savepoint.location if savepoint is not None else self.relative(location)
        return self._deletion.delete(location, savepoint, self.ownership)

    def sweep(self, *, files: bool) -> None:
        """Delete what killed owners have left behind; for the owner, after it has registered what it restores.

        That is: what earlier owners began to write in ``savepoints/`` and never completed, the metadata of checkpoints that they
        never completed, and files in ``shared/`` that no checkpoint names. What users put into ``savepoints/`` and what a later
        owner has stored stay. What a killed run began to write in another directory, which no owner sweeps, stays as well; its
        ``_incomplete`` file describes it.

        Args:
            files: whether every retained checkpoint could be read, so that files that none of them names may be deleted. The
                files that an unreadable one names would count as named by none: it keeps all of them, until it is deleted or
                repaired.

        Raises:
            OwnershipLost: this run does not own the pipeline any more, or never did.
        """
        self._deletion.sweep(self._owner(), files=files)

    def find_lost_files(self) -> frozenset[str]:
        """The state files that another program has deleted from ``shared/``; a checkpoint that needs them stores them again.

        It costs one LIST for each 1,000 files.

        Raises:
            StorageUnavailable: storage cannot be reached.
        """
        return self._shared.find_lost()

    def close(self) -> None:
        """Stop the transfer threads; does not release the ownership."""
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

    def _was_listed(self, location: str) -> bool:
        """Whether this owner completed the checkpoint, or ``state.json`` listed it when this owner acquired the pipeline."""
        owner = self._owner()
        key = self.layout.parse_checkpoint(location)
        return owner.steps.vouches_for(location, 0 if key is None else key.epoch)

    def _own_key(self, checkpoint_id: int) -> CheckpointKey:
        return CheckpointKey(checkpoint_id, self._epoch())

    def _executor(self) -> ThreadPoolExecutor:
        with self._pool_lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._parallel, thread_name_prefix=f"storage-{self.pipeline}")
            return self._pool
