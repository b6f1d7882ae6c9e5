"""What a channel begins with when its tasks are restored: its first elements, and what its consumer's gate knows of it.

No run on Spark reaches `overtaken`: there all elements of a channel wait at its consumer. Must not know: how a driver stores
records, and which channels there are (`pipeline.channels`).
"""

from __future__ import annotations

from collections.abc import Iterable

from dagster_checkpoints.coordination.watermarks import MIN_WATERMARK_MS, ChannelWatermark
from dagster_checkpoints.execution.elements import Element, EndOfData, EndOfPartition
from dagster_checkpoints.execution.input_channel import GateChannel
from dagster_checkpoints.state.metadata import ChannelSnapshot


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
