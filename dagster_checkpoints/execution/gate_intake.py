"""What the query of a gate may read: takes in the records and marks that the gate has scanned, and opens the gate to the query.

A part of the input gate, which decides what is scanned. While there is no query, elements are held. Only elements that were held
for want of a query are scanned and not opened: they are opened one by one, before anything else is read on their channel.

A micro-batch may have a limit of rows, which all channels share fairly. It reads what is open to the query and not consumed yet.
So a records element is opened only if its rows fit beside those that are open; the first one always fits, and what does not fit
is not scanned. No element is divided, and marks take no room. Elements that do not fit wait, and the rows of those that began to
wait earlier are reserved: a channel with large elements gets its turn. Otherwise the channel with the fewest open rows is next.

Must not know: barriers, snapshots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dagster_checkpoints.coordination.watermarks import ChannelWatermark
from dagster_checkpoints.execution.elements import Element, Mark
from dagster_checkpoints.execution.event_time import ConsumedEventTime, GateWatermarks
from dagster_checkpoints.execution.input_channel import InputChannel
from dagster_checkpoints.execution.task_events import OpenTo, QueryBuilt


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


class GateIntake:
    """The stream channels of one gate, as far as the query may read them.

    Args:
        streams: the stream channels.
        restored: by stream channel, its event time in the restored checkpoint.
        watermark: the watermark of all channels together in the restored checkpoint, epoch ms; None without one.
        overtaking: whether barriers may overtake elements that the query has not consumed.
        max_rows: the most rows that a micro-batch takes from all channels together; None for no limit.

    Attributes:
        watermarks: the event time of what was taken in.
        behind: event time behind what the query has consumed; None if no barrier ever overtakes.
        limit: the limit of a micro-batch; None without one.
        open: whether the query is built, and takes in the elements that are scanned.
        closed: whether the task's data has ended: from then on the gate only scans for barriers.
    """

    def __init__(
        self,
        streams: Sequence[InputChannel],
        restored: Mapping[str, ChannelWatermark],
        watermark: int | None,
        *,
        overtaking: bool,
        max_rows: int | None,
    ) -> None:
        self._streams = streams
        self.watermarks = GateWatermarks(streams, restored, watermark)
        self.behind = ConsumedEventTime(streams, restored, watermark) if overtaking else None
        self.limit = None if max_rows is None else BatchLimit(streams, max_rows)
        self.open = False
        self.closed = False
        self._built = QueryBuilt()
        self._opened = False
        """Whether the query may read further than the last OpenTo said."""

    @property
    def streaming(self) -> bool:
        """Whether the query that was built has streams."""
        return self._built.streaming

    @property
    def caught_up(self) -> bool:
        """Whether the query has consumed everything that was scanned for it."""
        return not [c for c in self._streams if c.consumed < c.open_to or c.unopened]

    def reads(self, channel: InputChannel) -> bool:
        """Whether the next element of a channel may be scanned, as far as the limit allows it."""
        return self.limit is None or not (channel.unopened or (self.open and self.limit.waits(channel)))

    def built(self, event: QueryBuilt) -> None:
        """The query is built: it gets what is held."""
        self._built = event
        self.open = True
        for channel in self._streams:
            channel.taken_in = channel.scanned
            if self.limit is None:
                for _, element in channel.held:
                    if isinstance(element, Mark):
                        self.watermarks.take_in(channel, element)
                channel.open_to = channel.held_to
            else:
                channel.unopened.extend(channel.held)
            if self.behind is None:
                channel.held.clear()
            else:
                self.behind.consume(channel)
        if event.streaming:
            self.watermarks.moved = True  # every query gets the watermark of the restored checkpoint

    def close(self) -> None:
        """The data has ended, or the query does not run any more."""
        self.closed, self.open = True, False
        for channel in self._streams:
            channel.unopened.clear()

    def consumed(self, channel: InputChannel) -> None:
        """The query has consumed the channel up to `InputChannel.consumed`."""
        if self.limit is not None and not channel.static:
            self.limit.consumed(channel)
        if self.behind is not None and self.open:
            self.behind.consume(channel)

    def records(self, channel: InputChannel, records: Element) -> None:
        """Take in the records that end at `InputChannel.scanned`."""
        if self.open:
            channel.open_to = channel.scanned
            self._opened = True
            if self.limit is not None:
                self.limit.opened(channel, channel.scanned)
            if self.behind is not None:
                channel.held.append((channel.scanned, records))
        elif not self.closed:
            channel.held.append((channel.scanned, records))
            channel.held_to = channel.scanned

    def mark(self, channel: InputChannel, mark: Mark) -> None:
        """Take in a watermark, a status or the end of the data."""
        if self.open:
            self.watermarks.take_in(channel, mark)
            if self.behind is not None:
                self.behind.take_in(channel, mark)
        elif not self.closed:
            channel.held.append((channel.scanned, mark))

    def hold_end(self, channel: InputChannel, mark: Mark) -> None:
        """The end of a channel was scanned."""
        if not (self.open or self.closed):
            channel.held.append((channel.scanned, mark))

    def let_through(self) -> OpenTo | None:
        """What the query may read now; None if that has not changed, or if it has no streams."""
        if self.limit is not None:
            self._open_held(self.limit)
        if not (self._opened or self.watermarks.moved):
            return None
        watermark = self.watermarks.let_through(self._built)
        self._opened = False
        return OpenTo({c.name: c.open_to for c in self._streams}, watermark) if self._built.streaming else None

    def _open_held(self, limit: BatchLimit) -> None:
        """Open what was held for want of a query, in fair order, as far as it fits."""
        left = [channel for channel in self._streams if channel.unopened]
        while left:
            channel = limit.next_of(left)
            position, element = channel.unopened[0]
            if isinstance(element, Mark):
                self.watermarks.take_in(channel, element)
            elif limit.admit(channel, limit.rows_at(channel, position)):
                channel.open_to = position
                self._opened = True
                limit.opened(channel, position)
            else:
                left.remove(channel)
                continue
            channel.unopened.popleft()
            if not channel.unopened:
                left.remove(channel)
