"""What the query of a gate may read: takes in the records and marks that the gate has scanned, and opens the gate to the query.

A part of the input gate, which decides what is scanned. While there is no query, elements are held. With a limit of the rows of a
micro-batch, records are opened only as far as they fit (`batch_limit`); what does not fit is not scanned. Only elements that were
held for want of a query are scanned and not opened: they are opened one by one, before anything else is read on their channel.

Must not know: barriers, snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagster_checkpoints.coordination.watermarks import ChannelWatermark
from dagster_checkpoints.execution.batch_limit import BatchLimit
from dagster_checkpoints.execution.elements import Element, Mark
from dagster_checkpoints.execution.gate_watermarks import ConsumedEventTime, GateWatermarks
from dagster_checkpoints.execution.input_channel import InputChannel
from dagster_checkpoints.execution.task_events import OpenTo, QueryBuilt


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
