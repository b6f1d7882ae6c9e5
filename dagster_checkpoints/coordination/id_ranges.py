"""A growing set of checkpoint ids in bounded memory: consecutive ids are one range.

Must not know: what the ids stand for.
"""

from __future__ import annotations

from bisect import bisect_right

_MOST_RANGES = 1000


class IdRanges:
    """Ids that were added. Never forgets one.

    Ids between them may come to count as added as well, once there are more gaps than `most`: the oldest gap is then closed.
    So the caller must lose nothing by believing that an old id was added.

    Args:
        most: ranges that are told apart, at least 1.
    """

    def __init__(self, most: int = _MOST_RANGES) -> None:
        self._most = most
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def __contains__(self, checkpoint_id: int) -> bool:
        at = bisect_right(self._firsts, checkpoint_id) - 1
        return at >= 0 and checkpoint_id <= self._lasts[at]

    def __len__(self) -> int:
        """How many ranges there are."""
        return len(self._firsts)

    def add(self, checkpoint_id: int) -> None:
        """Add an id; those of a job mostly come in order."""
        if checkpoint_id in self:
            return
        at = bisect_right(self._firsts, checkpoint_id)
        follows = at > 0 and self._lasts[at - 1] == checkpoint_id - 1
        precedes = at < len(self._firsts) and self._firsts[at] == checkpoint_id + 1
        if follows and precedes:
            self._lasts[at - 1] = self._lasts[at]
            del self._firsts[at], self._lasts[at]
        elif follows:
            self._lasts[at - 1] = checkpoint_id
        elif precedes:
            self._firsts[at] = checkpoint_id
        else:
            self._firsts.insert(at, checkpoint_id)
            self._lasts.insert(at, checkpoint_id)
            if len(self._firsts) > self._most:
                del self._firsts[1], self._lasts[0]
