"""The most rows that one micro-batch takes from the channels of a gate; all channels share it fairly.

A part of the input gate. A micro-batch reads what is open to the query and not consumed yet. So a records element is opened
only if its rows fit beside those that are open; the first one always fits. No element is divided, and marks take no room.

Elements that do not fit wait, and the rows of those that began to wait earlier are reserved: a channel with large elements gets
its turn. Otherwise the channel with the fewest open rows is next.

Must not know: barriers, event time, what records are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from dagster_checkpoints.execution.elements import Element, Mark
from dagster_checkpoints.execution.input_channel import InputChannel


class BatchLimit:
    """The rows that are open to the query of a gate, and the channels whose next records do not fit.

    Args:
        streams: the stream channels.
        max_rows: the most rows that a micro-batch takes, from 1; one element with more rows is a micro-batch of its own.
    """

    def __init__(self, streams: Iterable[InputChannel], max_rows: int) -> None:
        self._max_rows = max_rows
        self._rows_at: dict[str, dict[int, int]] = {channel.name: {} for channel in streams}
        """By channel and position behind an element: the rows of elements that are scanned and not consumed."""
        self._open = dict.fromkeys(self._rows_at, 0)
        """By channel, the rows that are open and not consumed."""
        self._waiting: dict[str, int] = {}
        """By channel, the rows of its next element, which does not fit; in the order in which they began to wait."""

    def waits(self, channel: InputChannel) -> bool:
        """Whether the next records of a channel are known, and do not fit yet."""
        rows = self._waiting.get(channel.name)
        return rows is not None and not self._has_room(channel.name, rows)

    def admit(self, channel: InputChannel, rows: int) -> bool:
        """Whether the next records of a channel may be opened now; if not, they wait."""
        if self._has_room(channel.name, rows):
            self._waiting.pop(channel.name, None)
            return True
        self._waiting.setdefault(channel.name, rows)
        return False

    def scanned(self, channel: InputChannel, position: int, rows: int) -> None:
        """Records were scanned: `rows` is their number, `position` the one behind them."""
        self._rows_at[channel.name][position] = rows

    def rows_at(self, channel: InputChannel, position: int) -> int:
        """The rows of the records in front of a position that are not consumed."""
        return self._rows_at[channel.name][position]

    def opened(self, channel: InputChannel, position: int) -> None:
        """The records in front of this position are open to the query."""
        self._open[channel.name] += self._rows_at[channel.name][position]

    def consumed(self, channel: InputChannel) -> None:
        """The query has consumed the channel up to `InputChannel.consumed`."""
        rows_at = self._rows_at[channel.name]
        for position in [p for p in rows_at if p <= channel.consumed]:
            self._open[channel.name] -= rows_at.pop(position)

    def next_of(self, channels: Iterable[InputChannel]) -> InputChannel:
        """The channel whose turn it is: the one that waits longest, else the first one with the fewest open rows."""
        waiting = list(self._waiting)
        return min(
            channels,
            key=lambda c: (waiting.index(c.name) if c.name in self._waiting else len(waiting), self._open[c.name]),
        )

    def in_turn(
        self, queues: dict[InputChannel, deque[tuple[Element, int]]], *, only_fitting: bool
    ) -> Iterator[tuple[InputChannel, Element]]:
        """The elements of several channels in fair order, each about to be scanned; those of a channel end where it is blocked.

        Args:
            queues: by channel, its elements from `InputChannel.scanned` on, and the rows of each.
            only_fitting: whether records come only as far as they fit; a channel's elements end at those that do not.
        """
        while queues:
            channel = self.next_of(queues)
            queue = queues[channel]
            if not queue or channel.blocked or channel.unopened:
                del queues[channel]
                continue
            element, rows = queue[0]
            if not isinstance(element, Mark):
                rows = max(rows, 1)
                if only_fitting and not self.admit(channel, rows):
                    del queues[channel]
                    continue
                self.scanned(channel, channel.scanned + 1, rows)
            queue.popleft()
            yield channel, element

    def _has_room(self, name: str, rows: int) -> bool:
        taken = sum(self._open.values())
        for other, waits in self._waiting.items():
            if other == name:
                break
            taken += waits
        return taken == 0 or taken + rows <= self._max_rows
