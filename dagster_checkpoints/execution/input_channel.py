"""One input channel as its consumer sees it: a part of the input gate.

Positions count the elements of a channel from the first one of the job. Up to `scanned` the gate has looked for barriers and
ends, up to `taken_in` it has taken watermarks in, up to `open_to` the query may read, up to `consumed` it has read.

When its tasks are restored, a channel begins with first elements, and with what its consumer's gate knows of it. No run on Spark
reaches `overtaken`: there all elements of a channel wait at its consumer. Must not know: how a driver stores records, and which
channels there are (`pipeline.channels`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from dagster_checkpoints.coordination.errors import UnknownChannel
from dagster_checkpoints.coordination.watermarks import MIN_WATERMARK_MS, ChannelWatermark
from dagster_checkpoints.execution.elements import Element, EndOfData, EndOfPartition
from dagster_checkpoints.state.metadata import ChannelSnapshot


class GateChannel(msgspec.Struct, frozen=True):
    """An input channel at the beginning of an attempt.

    Attributes:
        static: whether it belongs to a static input.
        position: position of its first element.
        restored: its event time and its end in the restored checkpoint; None without one.
    """

    name: str
    static: bool = False
    position: int = 0
    restored: ChannelWatermark | None = None


class InputChannel:
    """The state of one input channel.

    Attributes:
        open_to: the position behind the last records that were taken in. Marks alone are no reason for a micro-batch.
        ended: how it has ended, as far as it was taken in: none, drain or suspend.
        ended_in_scan: whether the end of a drain was scanned.
        held: elements that are scanned and in flight if a snapshot is taken now, each with the position behind it; without
            barriers. While a static input is not ready they are not taken in. Then they are those that the query has not
            consumed, kept only where barriers may overtake; the first of these is records.
        unopened: with a limit of the rows of a micro-batch: the elements, each with the position behind it, that were held until
            the query was built, and that are not opened to it yet.
        held_to: the position behind the last records of `held`, while a static input is not ready.
        captured: elements read since an unaligned snapshot began, in front of its barrier; None if no capture is under way.
        announced: id of the checkpoint whose barrier was announced and is not read yet; None without one.
        unread: the elements in front of that barrier.
    """

    __slots__ = (
        "announced", "blocked", "captured", "consumed", "ended", "ended_in_scan", "held", "held_to", "name", "open_to", "scanned",
        "static", "taken_in", "unopened", "unread",
    )  # fmt: skip

    def __init__(self, start: GateChannel) -> None:
        self.name = start.name
        self.static = start.static
        self.scanned = self.taken_in = self.open_to = self.consumed = start.position
        self.ended: str = "none" if start.restored is None else start.restored.ended
        self.ended_in_scan = False
        self.blocked = False
        self.held: deque[tuple[int, Element]] = deque()
        self.unopened: deque[tuple[int, Element]] = deque()
        self.held_to = start.position
        self.captured: list[Element] | None = None
        self.announced: int | None = None
        self.unread: deque[Element] = deque()


class InputChannelTable(dict[str, InputChannel]):
    """By name, the input channels of a task."""

    def __missing__(self, name: str) -> InputChannel:
        known = ", ".join(self) or "no inputs"
        raise UnknownChannel(f"Channel {name!r} is not an input of this task, which has {known}.")


def first_elements(in_flight: Iterable[Element], producer_finished: bool, overtaken: Iterable[Element] = ()) -> list[Element]:
    """The elements that a restored channel begins with, in order.

    Args:
        in_flight: the elements that the consumer's snapshot holds: those in front of the barrier that it had not processed.
        producer_finished: whether the producer had finished in the checkpoint. It does not run again, so its end is sent for it;
            its data was drained.
        overtaken: the elements that the producer's snapshot holds, because an unaligned barrier overtook them on its output. The
            consumer had not received them.
    """
    ends = (EndOfData(drain=True), EndOfPartition()) if producer_finished else ()
    return [*in_flight, *overtaken, *ends]


def gate_channel(name: str, static: bool, position: int, saved: ChannelSnapshot | None) -> GateChannel:
    """What the consumer's gate knows of a channel at the beginning of an attempt.

    Args:
        name: name of the channel.
        static: whether it belongs to a static input.
        position: position of its first element.
        saved: the channel in the restored checkpoint; None without one, and if the checkpoint does not hold the channel.
    """
    if saved is None:
        return GateChannel(name, static, position)
    watermark = MIN_WATERMARK_MS if saved.watermark is None else saved.watermark
    ended = "drain" if saved.ended == "partition" else saved.ended
    return GateChannel(name, static, position, ChannelWatermark(watermark, saved.idle, ended, saved.behind))
