"""References to shared state files: a file is deleted when, and only when, no checkpoint names it.

Knows names of files and checkpoints; must not know storage, nor what a name means. Thread-safe. It prevents this race: while a
file is being deleted because the last checkpoint that named it is deleted, a new checkpoint may need the same bytes with the
same name. The new checkpoint waits until the file is deleted, and uploads it again.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager

from dagster_checkpoints.errors import CheckpointDiscarded

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
