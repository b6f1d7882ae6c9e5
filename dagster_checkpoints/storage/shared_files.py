"""The state files in ``shared/``, which checkpoints have in common: stored once by an owner, deleted when nobody names them.

An owner stores what is new under names with its epoch, and deletes nothing of later ones; why is said in :mod:`layout`. Joins the
registry of who names what with the store; must not know what a checkpoint is beyond its name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dagster_checkpoints.storage.base import ObjectStore
from dagster_checkpoints.storage.layout import Layout, SharedName
from dagster_checkpoints.storage.shared_state import SharedStateRegistry
from dagster_checkpoints.storage.state_files import HashCache, StoredFile, hash_file, put_file

_DELETE_BATCH = 500


class SharedFiles:
    """One pipeline's ``shared/``. Thread-safe.

    Args:
        store: the root.
        layout: of the pipeline.
        may_delete: raises unless this process may still delete; asked before each request.
        epoch: under which this process stores files.
    """

    def __init__(self, store: ObjectStore, layout: Layout, may_delete: Callable[[], None], epoch: Callable[[], int]) -> None:
        self.store = store
        self.registry = SharedStateRegistry()
        self.hashes = HashCache()
        self._layout = layout
        self._may_delete = may_delete
        self._epoch = epoch
        self._earlier: dict[str, SharedName] = {}

    def key(self, name: str) -> str:
        """Where a file lies."""
        return self._layout.shared_file(name)

    def known(self, names: Iterable[str]) -> None:
        """These files are there and whole, whoever stored them: their bytes are not stored under another name."""
        names = list(names)
        self._earlier.update({found.sha256: found for found in map(SharedName.parse, names) if found is not None})
        self.registry.known(names)

    def store_file(self, checkpoint: Hashable, path: Path) -> StoredFile:
        """Put one local file there unless its bytes are; first ``checkpoint`` names it."""
        file = hash_file(self.hashes, path)
        earlier = self._earlier.get(file.sha256)
        if earlier is not None and self.registry.lend(checkpoint, str(earlier)):
            return StoredFile(file.sha256, file.size, uploaded=False, stored_by=earlier.epoch)
        own = self._own_name(file.sha256)
        needed = self.registry.reserve(checkpoint, str(own))
        if needed:
            put_file(self.store, self.key(str(own)), file)
            self.registry.stored(checkpoint, str(own))
        return StoredFile(file.sha256, file.size, uploaded=needed, stored_by=own.epoch)

    @contextmanager
    def lent(self, sha256: str) -> Iterator[str]:
        """Keep a file while the block reads it. What nobody names after that is deleted.

        Yields:
            Its key; "" if no file with these bytes is there.
        """
        borrower = object()
        names = {str(name) for name in (self._earlier.get(sha256), self._own_name(sha256)) if name is not None}
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
        """``checkpoint`` is gone for good: delete what only it names. Returns the number of files."""
        with self.registry.discarding(checkpoint) as orphans:
            self._delete(orphans)
        return len(orphans)

    def sweep(self, keep: frozenset[str]) -> int:
        """Delete what neither ``keep`` nor a checkpoint names. Returns the number of files."""
        listed = (SharedName.parse(info.key.removeprefix(self._layout.shared)) for info in self.store.list(self._layout.shared))
        epoch = self._epoch()
        # What has another name is not ours. A later owner's we see only once we have lost the pipeline, perhaps unawares.
        found = frozenset(str(name) for name in listed if name is not None and name.epoch <= epoch)
        with self.registry.sweeping(found - keep) as orphans:
            self._delete(orphans)
        return len(orphans)

    def _own_name(self, sha256: str) -> SharedName:
        return SharedName(sha256, self._epoch())

    def _delete(self, names: frozenset[str]) -> None:
        keys = [self.key(name) for name in sorted(names)]
        for start in range(0, len(keys), _DELETE_BATCH):
            # Between this and the request another may become the owner; what that one relies on has none of these names.
            self._may_delete()
            self.store.delete(keys[start : start + _DELETE_BATCH])
