"""The files in ``history/``: a run appends to its newest one, any process reads them.

A *segment* is one file. The owner rewrites its newest segment while that grows, and begins another when it is full, so that a
write costs at most a megabyte however long the history is. Only the newest segments are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from dagster_checkpoints.control.history import Entries, decode_segment, encode_segment
from dagster_checkpoints.errors import CorruptHistory, NotFound
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.layout import HistoryKey

FULL_CHECKPOINTS = 200
"""Number of checkpoints with which a segment is full."""
FULL_BYTES = 1_000_000
"""Size with which a segment is full."""
KEPT_SEGMENTS = 50
"""Number of full segments that are kept: of 10,000 checkpoints."""
_REMEMBERED = 5
"""Number of full segments that the owner keeps in memory for the page that it writes."""


def read_history(storage: CheckpointStorage) -> tuple[Entries, tuple[str, ...]]:
    """The pipeline's history, and a text for each segment that cannot be read.

    Raises:
        StorageUnavailable: the storage cannot be reached.
    """
    parts, problems = [], []
    for segment in _stored(storage):
        try:
            parts.append(_read(storage, segment))
        except CorruptHistory as error:
            problems.append(str(error))
        except NotFound:  # the running owner has deleted it meanwhile
            continue
    return Entries.joined(parts).distinct(), tuple(problems)


class HistorySegments:
    """The owner's side: appends entries. For one thread.

    Args:
        storage: storage of the pipeline, which this process owns.
        epoch: epoch of the owner; the names of all segments that it writes contain it.
    """

    def __init__(self, storage: CheckpointStorage, epoch: int) -> None:
        self._storage = storage
        self._epoch = epoch
        self._number = 1
        self._begun = False
        self._growing = Entries()
        self._full: deque[Entries] = deque(maxlen=_REMEMBERED)
        self._stored: list[HistoryKey] = []
        """All full segments in storage, oldest first."""
        self._replaced: list[HistoryKey] = []
        """Segments of earlier owners whose entries are in the growing one."""
        self.problems: tuple[str, ...] = ()
        """A text for each segment of earlier owners that this owner could not read."""

    def append(self, entries: Entries) -> None:
        """Write entries. If that fails, the next call writes them too.

        Raises:
            StorageUnavailable, OutcomeUnknown: the entries may not be stored.
        """
        self._growing = Entries.joined((self._growing, entries))
        self._begin()
        data = encode_segment(self._growing)
        layout, key = self._storage.layout, HistoryKey(self._epoch, self._number)
        self._storage.store.put(layout.history_segment(key), data)
        if len(data) >= FULL_BYTES or len(self._growing.checkpoints) >= FULL_CHECKPOINTS:
            self._full.append(self._growing)
            self._stored.append(key)
            self._growing, self._number = Entries(), self._number + 1
        expired = self._stored[:-KEPT_SEGMENTS]
        if expired or self._replaced:
            self._storage.store.delete(layout.history_segment(each) for each in (*expired, *self._replaced))
            self._stored, self._replaced = self._stored[len(expired) :], []

    def latest(self) -> Entries:
        """The newest entries, of this owner and of those before it: the latest 1,000 checkpoints and up to 200 more."""
        return Entries.joined((*self._full, self._growing)).distinct()

    def _begin(self) -> None:
        """Continue the history of earlier owners: their last segment, unless it is full, becomes a part of the first one here."""
        if self._begun:
            return
        found = [key for key in _stored(self._storage) if key.epoch < self._epoch]
        read: list[tuple[HistoryKey, Entries]] = []
        problems = []
        for key in found[-_REMEMBERED:]:
            try:
                read.append((key, _read(self._storage, key)))
            except CorruptHistory as error:
                problems.append(str(error))
            except NotFound:
                found.remove(key)
        if read and len(read[-1][1].checkpoints) < FULL_CHECKPOINTS:
            key, entries = read.pop()
            found.remove(key)
            self._replaced = [key]
            self._growing = Entries.joined((entries, self._growing))
        self._full.extend(entries for _, entries in read)
        self._stored, self.problems, self._begun = found, tuple(problems), True


def _stored(storage: CheckpointStorage) -> list[HistoryKey]:
    """All segments in storage, oldest first."""
    keys: Iterable[HistoryKey | None] = (
        storage.layout.parse_history(found.key) for found in storage.store.list(storage.layout.history)
    )
    return sorted(key for key in keys if key is not None)


def _read(storage: CheckpointStorage, key: HistoryKey) -> Entries:
    name = storage.layout.history_segment(key)
    return decode_segment(storage.store.get(name), f"{storage.store.url}/{name}")
