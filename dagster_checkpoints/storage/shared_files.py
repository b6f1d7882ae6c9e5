"""The state files in ``shared/``, which checkpoints have in common: stored once, deleted when nobody names them.

Joins the registry of who names what with the store; must not know what a checkpoint is beyond its name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dagster_checkpoints.storage.base import ObjectStore
from dagster_checkpoints.storage.layout import Layout, sha256_in
from dagster_checkpoints.storage.shared_state import SharedStateRegistry
from dagster_checkpoints.storage.state_files import HashCache, StoredFile, hash_file, put_file

_DELETE_BATCH = 500


class SharedFiles:
    """One pipeline's ``shared/``. Thread-safe.

    Args:
        store: the root.
        layout: of the pipeline.
        may_delete: raises unless this process may still delete; asked before each request.
    """

    def __init__(self, store: ObjectStore, layout: Layout, may_delete: Callable[[], None]) -> None:
        self.store = store
        self.registry = SharedStateRegistry()
        self.hashes = HashCache()
        self._layout = layout
        self._may_delete = may_delete

    def key(self, sha256: str) -> str:
        """Where a file lies."""
        return self._layout.shared_file(sha256)

    def store_file(self, checkpoint: Hashable, path: Path) -> StoredFile:
        """Put one local file under its sha256 unless it is there; first ``checkpoint`` names it."""
        file = hash_file(self.hashes, path)
        if not self.registry.reserve(checkpoint, file.sha256):
            return StoredFile(file.sha256, file.size, uploaded=False)
        put_file(self.store, self.key(file.sha256), file)
        self.registry.stored(checkpoint, file.sha256)
        return StoredFile(file.sha256, file.size, uploaded=True)

    @contextmanager
    def lent(self, sha256: str) -> Iterator[bool]:
        """Keep a file while the block reads it; False if it is not there. What nobody names after that is deleted."""
        borrower = object()
        if not self.registry.lend(borrower, sha256):
            yield False
            return
        try:
            yield True
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
        found = {sha256_in(info.key) for info in self.store.list(self._layout.shared)}
        # What has another name is not ours.
        with self.registry.sweeping(frozenset(sha256 for sha256 in found if sha256) - keep) as orphans:
            self._delete(orphans)
        return len(orphans)

    def _delete(self, hashes: frozenset[str]) -> None:
        keys = [self.key(sha256) for sha256 in sorted(hashes)]
        for start in range(0, len(keys), _DELETE_BATCH):
            # A later owner may have stored the same bytes anew: an old one must not delete them.
            self._may_delete()
            self.store.delete(keys[start : start + _DELETE_BATCH])
