"""The state files in ``shared/``, common to several checkpoints: stored once by an owner, deleted when no checkpoint names them.

Performs the steps of :mod:`dagster_checkpoints.execution.shared_files` and of the deletion of files. The references to the files
are kept in a registry, which is thread-safe and prevents this race: while a file is being deleted because the last checkpoint
that named it is deleted, a new checkpoint may need the same bytes with the same name. The new checkpoint waits until the file is
deleted, and uploads it again. Must not know what a checkpoint is beyond its name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager

from dagster_checkpoints.errors import CheckpointDiscarded
from dagster_checkpoints.execution.checkpoint_deletion import DeleteFiles, DeleteUnnamed, ListFiles, delete_files, sweep_files
from dagster_checkpoints.execution.shared_files import PutFile, SharedName, SharedNames, name_stored, store_file
from dagster_checkpoints.execution.storage_steps import drive
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.storage.layout import Layout
from dagster_checkpoints.storage.state_files import HashCache, StateSource, StoredFile, hash_file, put_file

_MOST_DISCARDED = 10_000
"""Number of discarded checkpoints that are remembered: no upload is so late that more checkpoints have ended meanwhile."""


class SharedStateRegistry:
    """References of checkpoints, retained or pending, to shared files (Flink's SharedStateRegistry)."""

    def __init__(self) -> None:
        self._names: dict[Hashable, set[str]] = {}
        self._count: dict[str, int] = {}
        self._stored: set[str] = set()
        self._deleting: set[str] = set()
        self._discarded: dict[Hashable, None] = {}
        """The checkpoints that were discarded last: late uploads are refused."""
        self._changed = threading.Condition()

    def known(self, names: Iterable[str]) -> None:
        """Record files that are in storage already: they need not be uploaded again."""
        with self._changed:
            self._stored.update(name for name in names if name not in self._deleting)

    def register(self, checkpoint: Hashable, names: Iterable[str]) -> None:
        """Record that ``checkpoint`` names these files too; a checkpoint without files is recorded as well.

        Raises:
            CheckpointDiscarded: the checkpoint has been aborted or deleted.
        """
        with self._changed:
            self._named_by(checkpoint)
            for name in names:
                self._name(checkpoint, name)

    def reserve(self, checkpoint: Hashable, name: str) -> bool:
        """Record that ``checkpoint`` names one file, before the file is uploaded. Blocks while the file is being deleted.

        Returns:
            True if the file must be uploaded, False if storage holds it.

        Raises:
            CheckpointDiscarded: ``checkpoint`` has been aborted or deleted.
        """
        with self._changed:
            self._changed.wait_for(lambda: name not in self._deleting)
            self._name(checkpoint, name)
            return name not in self._stored

    def stored(self, checkpoint: Hashable, name: str) -> None:
        """Record that the file's upload for ``checkpoint`` has succeeded.

        Does nothing if the checkpoint was aborted or deleted during the upload: the file may have been deleted, too.
        """
        with self._changed:
            if name in self._names.get(checkpoint, ()):
                self._stored.add(name)

    @contextmanager
    def discarding(self, checkpoint: Hashable) -> Iterator[frozenset[str]]:
        """Remove ``checkpoint`` for ever; inside the block the caller may delete the files that no checkpoint names any more."""
        with self._changed:
            self._discarded[checkpoint] = None
            if len(self._discarded) > _MOST_DISCARDED:
                del self._discarded[next(iter(self._discarded))]
            orphans = self._drop(checkpoint) - self._deleting
            self._deleting |= orphans
        try:
            yield orphans
        finally:
            self._deleted(orphans)

    def lend(self, borrower: Hashable, name: str) -> bool:
        """Keep a file from deletion while a reader needs it, until :meth:`returning`; or name it for a checkpoint.

        Returns:
            False if storage does not hold the file, or if the file is being deleted.

        Raises:
            CheckpointDiscarded: the borrower is a checkpoint that has been aborted or deleted.
        """
        with self._changed:
            if name not in self._stored or name in self._deleting:
                return False
            self._name(borrower, name)
            return True

    @contextmanager
    def returning(self, borrower: Hashable) -> Iterator[frozenset[str]]:
        """Give back the borrower's files; inside the block the caller may delete those that no checkpoint names."""
        with self._changed:
            orphans = self._drop(borrower) - self._deleting
            self._deleting |= orphans
        try:
            yield orphans
        finally:
            self._deleted(orphans)

    @contextmanager
    def sweeping(self, found: Iterable[str]) -> Iterator[frozenset[str]]:
        """The files among ``found`` that no checkpoint names: inside the block the caller may delete them."""
        with self._changed:
            orphans = frozenset(found) - self._count.keys() - self._deleting
            self._stored -= orphans
            self._deleting |= orphans
        try:
            yield orphans
        finally:
            self._deleted(orphans)

    def names_stored(self) -> frozenset[str]:
        """Every file that storage holds, as far as this process knows."""
        with self._changed:
            return frozenset(self._stored)

    def lost(self, names: Iterable[str]) -> frozenset[str]:
        """Record that another program has deleted files: they must be uploaded again.

        Returns:
            Those that were taken for stored.
        """
        with self._changed:
            found = frozenset(names) & self._stored
            self._stored -= found
            return found

    def referenced(self) -> frozenset[str]:
        """Every file that some checkpoint names."""
        with self._changed:
            return frozenset(self._count)

    def checkpoints(self) -> frozenset[Hashable]:
        """Every checkpoint that names files."""
        with self._changed:
            return frozenset(self._names)

    def _name(self, checkpoint: Hashable, name: str) -> None:
        names = self._named_by(checkpoint)
        if name not in names:
            names.add(name)
            self._count[name] = self._count.get(name, 0) + 1

    def _named_by(self, checkpoint: Hashable) -> set[str]:
        if checkpoint in self._discarded:
            raise CheckpointDiscarded(
                f"{checkpoint} was aborted or deleted while its files were still being uploaded; its other files are not uploaded"
            )
        return self._names.setdefault(checkpoint, set())

    def _drop(self, checkpoint: Hashable) -> frozenset[str]:
        orphans = set()
        for name in self._names.pop(checkpoint, ()):
            self._count[name] -= 1
            if not self._count[name]:
                del self._count[name]
                orphans.add(name)
        # Also if the caller does not delete them: from now on they do not count as stored.
        self._stored -= orphans
        return frozenset(orphans)

    def _deleted(self, orphans: frozenset[str]) -> None:
        with self._changed:
            self._deleting -= orphans
            self._changed.notify_all()


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
