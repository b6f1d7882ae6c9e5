"""One pipeline's checkpoints in a store: state files, metadata, ownership, deletion.

The face of this floor for the runtime. It knows files by their sha256 and metadata as bytes; what the bytes
say is the state floor's affair.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from dagster_checkpoints.storage.acquisition import acquire, read_state
from dagster_checkpoints.storage.base import ObjectStore
from dagster_checkpoints.storage.errors import (
    AlreadyExists,
    InvalidKey,
    MissingCheckpoint,
    NotFound,
    OutcomeUnknown,
)
from dagster_checkpoints.storage.layout import METADATA, CheckpointKey, Layout
from dagster_checkpoints.storage.ownership import Ownership
from dagster_checkpoints.storage.pipeline_state import CheckpointPointer, Owner, PipelineState
from dagster_checkpoints.storage.shared_state import SharedStateRegistry
from dagster_checkpoints.storage.state_files import (
    HashCache,
    StateFileLike,
    StoredFile,
    fetch_file,
    run_all,
    store_file,
)
from dagster_checkpoints.storage.status import PipelineStatus, decode_status, encode_status

_CREATE_ATTEMPTS = 3


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
    ) -> None:
        self.store = store
        self.pipeline = pipeline
        self.layout = Layout(pipeline)
        self.shared_state = SharedStateRegistry()
        self.ownership: Ownership | None = None
        self._monotonic = monotonic
        self._sleep = sleep
        self._hashes = HashCache()
        self._parallel = parallel
        self._pool: ThreadPoolExecutor | None = None
        self._pool_lock = threading.Lock()

    @property
    def url(self) -> str:
        """The pipeline's directory, for people."""
        return f"{self.store.url}/{self.pipeline}"

    def url_of(self, location: str) -> str:
        """A checkpoint's URL, for people; :meth:`read_metadata` takes it as well."""
        return f"{self.url}/{location}"

    def check(self) -> None:
        """Fail now, clearly, if storage cannot be used. Raises StorageUnavailable or a subclass."""
        self.store.check()

    def acquire(self, owner: Owner, lease_seconds: float = 30.0, *, poll: float | None = None) -> Ownership:
        """Become the pipeline's owner; see :func:`dagster_checkpoints.storage.acquisition.acquire`."""
        self.ownership = acquire(
            self.store,
            self.layout,
            owner,
            lease_seconds,
            monotonic=self._monotonic,
            sleep=self._sleep,
            poll=poll,
        )
        return self.ownership

    def read_state(self) -> PipelineState | None:
        """What ``state.json`` says, for whoever does not own the pipeline; None if it never ran here."""
        found = read_state(self.store, self.layout)
        return found[0] if found else None

    def write_status(self, status: PipelineStatus) -> None:
        """Overwrite ``status.json``, for displays and sensors. Raises StorageUnavailable, OutcomeUnknown: no harm done."""
        self.store.put(self.layout.status, encode_status(status))

    def read_status(self) -> PipelineStatus | None:
        """What the newest run last said of itself; None if none ever did. Raises CorruptStatus."""
        try:
            return decode_status(self.store.get(self.layout.status), self.url_of("status.json"))
        except NotFound:
            return None

    # -- state files

    def known(self, hashes: Iterable[str]) -> None:
        """Files that are in storage and whole, as a verified fetch has shown: they are not uploaded again."""
        self.shared_state.known(hashes)

    def register(self, location: str, hashes: Iterable[str]) -> None:
        """A retained checkpoint of an earlier owner names these files: keep them while it is retained.

        That metadata names a file does not say that it is whole: until :meth:`known` vouches for it, it is uploaded again
        when it is needed. This owner's own checkpoints are registered by :meth:`upload_files`.
        """
        self.shared_state.register(self._checkpoint_key(location), hashes)

    def upload_files(self, checkpoint_id: int, paths: Mapping[str, Path] | Iterable[Path]) -> dict[str, StoredFile]:
        """Store local files under their sha256, in parallel; what storage has is skipped.

        Args:
            checkpoint_id: the pending checkpoint that names them from now on.
            paths: by any name, or plain paths (whose name is then the path itself).

        Returns:
            By name: sha256, size and whether it had to be uploaded.

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
            return store_file(self.store, self.layout, self.shared_state, self._hashes, checkpoint, path)

        return dict(zip(named, run_all(self._executor(), upload, named.values()), strict=True))

    def reference_files(self, checkpoint_id: int, hashes: Iterable[str]) -> None:
        """A pending checkpoint names files that storage has already, without their bytes."""
        self.shared_state.register(self._own_key(checkpoint_id), hashes)

    def fetch_state(self, files: Iterable[StateFileLike], destination: Path, *, checkpoint: str = "") -> None:
        """Fetch state files to ``destination/<file.path>``, in parallel, verifying size and sha256.

        Args:
            files: path (relative), sha256 and size of each.
            destination: a directory; created. A file appears in it verified and whole, or not at all.
            checkpoint: location, for the text of errors.

        Raises:
            MissingStateFile, CorruptStateFile: name the file, where it lies, what was expected and found.
            InvalidKey: a path that would leave the destination.
        """

        def fetch(file: StateFileLike) -> None:
            fetch_file(self.store, self.layout, file, destination, checkpoint or "the checkpoint")

        run_all(self._executor(), fetch, files)

    # -- metadata

    def write_metadata(self, checkpoint_id: int, epoch: int, data: bytes) -> str:
        """Write a checkpoint's ``_metadata``, created only if absent; the checkpoint is *not* complete by
        that.

        Returns:
            Its location, for :meth:`Ownership.complete`.

        Raises:
            AlreadyExists: other metadata is there: this owner wrote another checkpoint under this id.
            StorageUnavailable, WriteConflict: nothing was written.
            OutcomeUnknown: delete nothing.
        """
        location = self.layout.checkpoint(checkpoint_id, epoch)
        key = self.layout.at(location, METADATA)
        try:
            self._create(key, data)
        except AlreadyExists:
            if self.store.get(key) != data:
                raise AlreadyExists(
                    f"expected no metadata at {self.store.url}/{key}, found some of other content: "
                    f"checkpoint {checkpoint_id} of epoch {epoch} was written before, and a checkpoint never "
                    "changes"
                ) from None
        return location

    def _create(self, key: str, data: bytes) -> None:
        for attempt in range(_CREATE_ATTEMPTS):
            try:
                self.store.put(key, data, "create")
                return
            except OutcomeUnknown:
                # Once more: it lands now, or is found to be there and compared.
                if attempt == _CREATE_ATTEMPTS - 1:
                    raise

    def read_metadata(self, location: str) -> bytes:
        """The bytes of a checkpoint's ``_metadata``.

        Args:
            location: as in ``state.json``, or the checkpoint's URL below this storage, with or without
                ``/_metadata``.

        Raises:
            MissingCheckpoint: it is not there; names those that are.
        """
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
        """A location from a location or a URL below this storage."""
        relative = location.removesuffix(f"/{METADATA}").rstrip("/")
        if relative.startswith(f"{self.url}/"):
            relative = relative[len(self.url) + 1 :]
        if "://" in relative or relative.startswith("/"):
            raise InvalidKey(
                f"expected a checkpoint below {self.url}, such as {self.url}/{self.layout.checkpoint(42, 1)}, found {location!r}"
            )
        return relative

    # -- deletion

    def discard_states(self, checkpoint_id: int) -> int:
        """A pending checkpoint of this owner is aborted: delete what only it names. Returns the number of
        files.

        Never call it after OutcomeUnknown: the checkpoint may be complete.
        """
        return self._discard(self._own_key(checkpoint_id))

    def delete_checkpoint(self, location: str) -> int:
        """Delete a checkpoint's metadata, then the state files that only it names. Returns the number of
        files.

        Raises:
            StorageError: it is the newest checkpoint of a job that is not over.
            OwnershipLost: this run does not own the pipeline any more.
        """
        location = self.relative(location)
        if self.ownership is not None:
            self.ownership.ensure()
            self.ownership.forget(location)
        prefix = self.layout.at(location)
        self.store.delete([info.key for info in self.store.list(prefix)])
        return self._discard(self._checkpoint_key(location))

    def delete_unreferenced(self, referenced: Iterable[str] = ()) -> int:
        """Delete every shared file that is neither in ``referenced`` nor named by a checkpoint of this owner.

        For what crashed owners left behind; call it after :meth:`acquire`. Returns the number of files.

        Args:
            referenced: sha256 of all files that any metadata in storage names that is to stay usable.
        """
        keep = set(referenced)
        skip = len(self.layout.shared)
        found = {info.key[skip:] for info in self.store.list(self.layout.shared)} - keep
        with self.shared_state.sweeping(found) as orphans:
            self._delete_shared(orphans)
        return len(orphans)

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

    def _discard(self, checkpoint: CheckpointKey) -> int:
        with self.shared_state.discarding(checkpoint) as orphans:
            self._delete_shared(orphans)
        return len(orphans)

    def _delete_shared(self, hashes: frozenset[str]) -> None:
        keys: Sequence[str] = [self.layout.shared_file(hash_) for hash_ in sorted(hashes)]
        for start in range(0, len(keys), 500):
            # A later owner may have stored the same bytes anew: an old one must not delete them.
            if self.ownership is not None:
                self.ownership.ensure()
            self.store.delete(keys[start : start + 500])

    def _own_key(self, checkpoint_id: int) -> CheckpointKey:
        return CheckpointKey(checkpoint_id, self.ownership.epoch if self.ownership is not None else 0)

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
