"""Event time at a task's inputs and outputs: the watermark of all channels together, and the one that it sends.

On its outputs a watermark never goes back. Must not know: barriers, snapshots, queries.

Source: PROTOCOL section 5; Flink's StatusWatermarkValve.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from dagster_checkpoints.coordination.watermarks import (
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    ChannelWatermark,
    ValveState,
    WatermarkValve,
)
from dagster_checkpoints.execution.elements import Element, EndOfData, Mark, WatermarkAt, WatermarkStatus
from dagster_checkpoints.execution.input_channel import InputChannel
from dagster_checkpoints.execution.task_events import Forward, QueryBuilt, WatermarkReached


class OutputEventTime:
    """The marks of event time on a task's outputs.

    Args:
        lateness_ms: the lateness that the last stage declares for its rows, milliseconds.
        watermark: the last watermark that was sent before the restored checkpoint, epoch ms; None before the first.
        idle: whether the consumers know the task as idle; None in a restored task, which says it again.
    """

    __slots__ = ("_idle", "_lateness_ms", "watermark")

    def __init__(self, lateness_ms: int = 0, watermark: int | None = None, idle: bool | None = False) -> None:
        self._lateness_ms = lateness_ms
        self._idle = idle
        self.watermark = watermark
        """The last watermark that was sent, epoch ms; None before the first."""

    @property
    def idle(self) -> bool:
        """Whether the consumers were last sent that the task is idle."""
        return self._idle is True

    def handle(self, event: WatermarkReached | WatermarkAt | WatermarkStatus) -> list[Mark]:
        """Take one event, return the marks to append to every output.

        Args:
            event: `WatermarkReached` of a running task; MAX_WATERMARK in it is not sent, because `finish` may still return rows.
                `WatermarkAt` after those rows. `WatermarkStatus` of a source, or of the inputs.
        """
        if isinstance(event, WatermarkReached):
            return [] if event.ms >= MAX_WATERMARK_MS else self._advance(event.ms - self._lateness_ms)
        if isinstance(event, WatermarkAt):
            return self._advance(event.ms)
        if event.idle == self._idle:
            return []
        self._idle = event.idle
        return [event]

    def _advance(self, ms: int) -> list[Mark]:
        if self.watermark is not None and ms <= self.watermark:
            return []
        self.watermark = ms
        return [WatermarkAt(ms)]


class WatermarkQueue:
    """Watermarks that wait until the query has consumed the records in front of them.

    Attributes:
        released: the newest watermark that does not wait any more, epoch ms; None before the first.
    """

    __slots__ = ("_streams", "_waiting", "released")

    def __init__(self, streams: Sequence[InputChannel]) -> None:
        self._streams = tuple(streams)
        self._waiting: deque[tuple[tuple[tuple[InputChannel, int], ...], int]] = deque()
        self.released: int | None = None

    @property
    def waits(self) -> bool:
        """Whether a watermark waits."""
        return bool(self._waiting)

    def add(self, ms: int) -> None:
        """Add a watermark behind everything that is open now; it is later than those before it."""
        self._waiting.append((tuple((channel, channel.open_to) for channel in self._streams), ms))

    def release(self) -> bool:
        """Release the watermarks whose records are consumed; returns whether `released` has changed."""
        waiting = len(self._waiting)
        while self._waiting and all(channel.consumed >= position for channel, position in self._waiting[0][0]):
            self.released = self._waiting.popleft()[1]
        return len(self._waiting) < waiting


class GateWatermarks:
    """The event time of the stream channels of one gate.

    Args:
        streams: the stream channels.
        restored: by stream channel, its event time in the restored checkpoint.
        watermark: the watermark of all channels together in the restored checkpoint, epoch ms; None without one.

    Attributes:
        moved: whether the watermark has changed since the last `let_through`.
    """

    def __init__(self, streams: Sequence[InputChannel], restored: Mapping[str, ChannelWatermark], watermark: int | None) -> None:
        self._valve = _valve(streams, restored, watermark)
        self.moved = False
        self._pending_watermarks = WatermarkQueue(streams)
        """Watermarks that are forwarded to the consumers without the query, after its output of the records in front of them."""
        self._idle: bool | None = None if restored else False
        """Whether the consumers were last sent that the task is idle; None in a restored task, which says it again."""

    @property
    def watermark(self) -> int:
        """The watermark of all channels together, epoch ms; MIN_WATERMARK_MS before there is one."""
        return self._valve.watermark

    @property
    def has_news(self) -> bool:
        """Whether marks wait to be sent between two micro-batches."""
        return self._pending_watermarks.waits or self._valve.is_idle != self._idle

    def snapshot(self) -> ValveState:
        """The state for a checkpoint."""
        return self._valve.snapshot()

    def take_in(self, channel: InputChannel, mark: Mark) -> None:
        """Take in a watermark, a status or the end of the data of a channel; marks after the end are ignored."""
        if channel.ended != "none":
            return
        if _advance(self._valve, channel.name, mark) is not None:
            self.moved = True
        if type(mark) is EndOfData:
            channel.ended = "drain" if mark.drain else "suspend"

    def let_through(self, query: QueryBuilt) -> int | None:
        """The watermark that the query gets with the next OpenTo, epoch ms; None before the first."""
        watermark, moved = self._valve.watermark, self.moved
        self.moved = False
        if watermark <= MIN_WATERMARK_MS:
            return None
        if moved and not query.takes_watermark and watermark < MAX_WATERMARK_MS:
            self._pending_watermarks.add(watermark)
        return watermark

    def between_batches(self, *, caught_up: bool) -> Iterator[WatermarkReached | Forward]:
        """The marks to send between two micro-batches.

        Args:
            caught_up: whether the query has consumed everything that the gate has opened to.
        """
        if self._pending_watermarks.release():
            assert self._pending_watermarks.released is not None
            yield WatermarkReached(self._pending_watermarks.released)
        idle = self._valve.is_idle
        if idle != self._idle and (not idle or caught_up):
            self._idle = idle
            yield Forward(WatermarkStatus(idle))


class ConsumedEventTime:
    """Event time behind what the query has consumed, which an unaligned snapshot holds: the other marks are in flight.

    Args:
        streams: the stream channels.
        restored: by stream channel, its event time in the restored checkpoint.
        watermark: the watermark of all channels together in the restored checkpoint, epoch ms; None without one.
    """

    def __init__(self, streams: Sequence[InputChannel], restored: Mapping[str, ChannelWatermark], watermark: int | None) -> None:
        self._valve = _valve(streams, restored, watermark)

    def snapshot(self) -> ValveState:
        """The state for a checkpoint."""
        return self._valve.snapshot()

    def consume(self, channel: InputChannel) -> None:
        """The query has consumed the channel up to `InputChannel.consumed`: also the marks up to the next records."""
        held = channel.held
        while held and (held[0][0] <= channel.consumed or isinstance(held[0][1], Mark)):
            self._pass(channel, held.popleft()[1])

    def take_in(self, channel: InputChannel, mark: Mark) -> None:
        """Take in a mark that the gate has taken in: at once if the query has consumed everything in front of it."""
        if channel.held:
            channel.held.append((channel.scanned, mark))
        else:
            self._pass(channel, mark)

    def _pass(self, channel: InputChannel, element: Element) -> None:
        if isinstance(element, Mark) and self._valve.ended(channel.name) == "none":
            _advance(self._valve, channel.name, element)


def _valve(streams: Sequence[InputChannel], restored: Mapping[str, ChannelWatermark], watermark: int | None) -> WatermarkValve:
    valve = WatermarkValve(channel.name for channel in streams)
    valve.restore(ValveState(MIN_WATERMARK_MS if watermark is None else watermark, restored))
    return valve


def _advance(valve: WatermarkValve, channel: str, mark: Mark) -> int | None:
    """Take in a mark of a channel that has not ended. Returns the new watermark of all channels together if it moved."""
    if type(mark) is WatermarkAt:
        return valve.advance(channel, mark.ms)
    if type(mark) is WatermarkStatus:
        return (valve.idle if mark.idle else valve.active)(channel)
    return valve.end(channel, mark.drain) if type(mark) is EndOfData else None
