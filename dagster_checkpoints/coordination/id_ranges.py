"""A growing set of checkpoint ids in bounded memory: consecutive ids are one range.

Must not know: what the ids stand for.
"""

from __future__ import annotations

from bisect import bisect_right

_MOST_RANGES = 1000


class IdRanges:
    """The ids that were added; an added id is never forgotten.

    If there are more ranges than `most`, the oldest gap between two ranges is closed: its ids count as added from then on.
    So it must do no harm to the caller if an old id that was not added counts as added.

    Args:
        most: maximum number of ranges, at least 1.
    """

    def __init__(self, most: int = _MOST_RANGES) -> None:
        self._most = most
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def __contains__(self, checkpoint_id: int) -> bool:
        at = bisect_right(self._firsts, checkpoint_id) - 1
        return at >= 0 and checkpoint_id <= self._lasts[at]

    def __len__(self) -> int:
        """The number of ranges."""
        return len(self._firsts)

    def add(self, checkpoint_id: int) -> None:
        """Add an id; the ids of a job are mostly added in order."""
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
