"""The state files in ``shared/``, common to several checkpoints: stored once by an owner, deleted when no checkpoint names them.

Performs the steps of :mod:`dagster_checkpoints.execution.shared_files` and of the deletion of files. Must not know what a
checkpoint is beyond its name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager

from dagster_checkpoints.execution.checkpoint_deletion import DeleteFiles, DeleteUnnamed, ListFiles, delete_files, sweep_files
from dagster_checkpoints.execution.shared_files import PutFile, SharedName, SharedNames, name_stored, store_file
from dagster_checkpoints.execution.storage_steps import drive
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.storage.layout import Layout
from dagster_checkpoints.storage.shared_state import SharedStateRegistry
from dagster_checkpoints.storage.state_files import HashCache, StoredFile, hash_file, put_file
from dagster_checkpoints.storage.state_sources import StateSource


class SharedFiles:
    """One pipeline's ``shared/``. Thread-safe.

    Args:
        store: the object store that holds the pipeline.
        layout: the names of the pipeline's files.
        may_delete: raises unless this process may still delete; called before each request.
        epoch: returns the epoch under which this process stores files.
    """

    def __init__(self, store: ObjectStore, layout: Layout, may_delete: Callable[[], None], epoch: Callable[[], int]) -> None:
        self.store = store
        self.registry = SharedStateRegistry()
        self.hashes = HashCache()
        self._layout = layout
        self._may_delete = may_delete
        self._epoch = epoch
        self._names = SharedNames(epoch)

    @property
    def pipeline(self) -> str:
        """The pipeline's name."""
        return self._layout.pipeline

    def key(self, name: str) -> str:
        """A file's key in the store."""
        return self._layout.shared_file(name)

    def known(self, names: Iterable[str]) -> None:
        """Record files that are stored and whole, by any owner: their bytes are not stored again under another name."""
        names = list(names)
        self._names.known(found for found in map(SharedName.parse, names) if found is not None)
        self.registry.known(names)

    def stored(self, checkpoint: Hashable, source: StateSource) -> StoredFile | None:
        """Record that ``checkpoint`` names one file, if that was read before and its bytes are stored; None if not."""
        identity = source.identity()
        sha256 = self.hashes.get(identity)
        name = None if sha256 is None else name_stored(self._names, self.registry, checkpoint, sha256)
        return None if name is None else StoredFile(name.sha256, identity.size, uploaded=False, stored_by=name.epoch)

    def store_file(self, checkpoint: Hashable, source: StateSource) -> StoredFile:
        """Store one file unless its bytes are stored already; before that, record that ``checkpoint`` names it."""
        file = hash_file(self.hashes, source)

        def perform(request: PutFile) -> None:
            put_file(self.store, self.key(request.name), file)

        stored = drive(store_file(self._names, self.registry, checkpoint, file.sha256), perform)
        return StoredFile(file.sha256, file.size, stored.uploaded, stored_by=stored.name.epoch)

    @contextmanager
    def lent(self, sha256: str) -> Iterator[str]:
        """Keep a file while the block reads it; after that it is deleted if no checkpoint names it.

        Yields:
            The file's key; "" if no file with these bytes is stored.
        """
        borrower = object()
        names = {str(name) for name in (self._names.earlier(sha256), self._names.own(sha256)) if name is not None}
        name = next((name for name in sorted(names) if self.registry.lend(borrower, name)), "")
        if not name:
            yield ""
            return
        try:
            yield self.key(name)
        finally:
            with self.registry.returning(borrower) as orphans:
                self._delete(orphans)

    def discard(self, checkpoint: Hashable) -> int:
        """Delete the files that only this checkpoint names; it never names files again. Returns the number of files."""
        with self.registry.discarding(checkpoint) as orphans:
            self._delete(orphans)
        return len(orphans)

    def find_lost(self) -> frozenset[str]:
        """The files that another program has deleted since they were stored; a checkpoint that needs them stores them again."""
        expected = self.registry.names_stored()
        return self.registry.lost(
            expected - {info.key.removeprefix(self._layout.shared) for info in self.store.list(self._layout.shared)}
        )

    def sweep(self) -> int:
        """Delete the files that no checkpoint names. Returns the number of files."""

        def perform(request: ListFiles | DeleteUnnamed) -> object:
            if isinstance(request, ListFiles):
                keys = (info.key.removeprefix(self._layout.shared) for info in self.store.list(self._layout.shared))
                return [name for name in map(SharedName.parse, keys) if name is not None]  # other names are not state files
            with self.registry.sweeping(request.names) as orphans:
                self._delete(orphans)
            return len(orphans)

        return drive(sweep_files(self._epoch()), perform)

    def _delete(self, names: frozenset[str]) -> None:
        def perform(request: DeleteFiles) -> None:
            self.store.delete([self.key(name) for name in request.names])

        drive(delete_files(names, self._may_delete), perform)
