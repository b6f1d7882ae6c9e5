"""Channels of a checkpoint, and several of them as one: its records and its event time.

The watermark of several channels is the least of theirs, as in a task that reads them. So no record becomes late that was not.
Must not know: storage, Spark, which channels become one.

Source: PROTOCOL section 4 and 8.5; Flink's DemultiplexingRecordDeserializer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from dagster_checkpoints.pipeline import ChannelId
from dagster_checkpoints.state.metadata import ChainMetadata, ChannelElement, ChannelSnapshot, EndOfData, Segment, WatermarkAt


@dataclass(frozen=True)
class OldChannel:
    """A channel of the checkpoint.

    Attributes:
        sender: index of the instance that sent.
        reader: index of the instance that read.
        saved: what the snapshot of the latter holds of the channel.
    """

    sender: int
    reader: int
    saved: ChannelSnapshot

    @property
    def carries_records(self) -> bool:
        """Whether records are in flight."""
        return any(isinstance(element, Segment) for element in self.saved.in_flight)

    @property
    def watermark(self) -> float | None:
        """The watermark in front of the elements in flight, epoch ms; None before the first, infinite behind the end."""
        return math.inf if self.saved.ended in ("drain", "partition") else self.saved.watermark

    @cached_property
    def last_watermark(self) -> float | None:
        """The watermark behind the elements in flight."""
        found = self.watermark
        for element in self.saved.in_flight:
            found = _advanced(found, element)
        return found


def old_channels(chain: ChainMetadata) -> dict[str, list[OldChannel]]:
    """By the uid of the stage that sends, the channels of a recorded chain, ordered by sender and reader."""
    found: dict[str, list[OldChannel]] = {}
    for task in chain.tasks.values():
        for saved in task.channels:
            name = ChannelId.parse(saved.channel)
            found.setdefault(name.producer, []).append(OldChannel(name.producer_index, name.consumer_index, saved))
    return {uid: sorted(channels, key=lambda c: (c.sender, c.reader)) for uid, channels in found.items()}


@dataclass(frozen=True, slots=True)
class MergedEventTime:
    """The event time of old channels together.

    Attributes:
        watermark: the least in front of their elements in flight, epoch ms, of those that have not ended; None if one of these
            has none, or all have ended.
        last_watermark: the least behind these elements, infinite behind the end; None if one has none.
        idle: whether all that have not ended are idle; False if all have.
        behind: whether all that have not ended are left out of the minimum, and not all of them are idle.
    """

    watermark: float | None = None
    last_watermark: float | None = math.inf
    idle: bool = False
    behind: bool = False

    @classmethod
    def of(cls, channels: Sequence[OldChannel]) -> MergedEventTime:
        last = least_time(channel.last_watermark for channel in channels)
        going_on = [channel for channel in channels if channel.saved.ended == "none"]
        if not going_on:
            return cls(None, last)
        idle = all(channel.saved.idle for channel in going_on)
        left_out = all(channel.saved.idle or channel.saved.behind for channel in going_on)
        return cls(least_time(c.watermark for c in going_on), last, idle, left_out and not idle)


def one_after_the_other(
    channels: Sequence[tuple[float | None, Iterable[ChannelElement]]], watermark: float | None, limit: float | None
) -> Iterator[ChannelElement]:
    """The records of several channels as those of one, whose watermark is the least of theirs; without the marks of their ends.

    Args:
        channels: by channel, its watermark in front of its elements, epoch ms, and the elements.
        watermark: the watermark of the one channel so far; None before the first.
        limit: the latest watermark that the one channel may have; None for none at all.
    """
    times = [before for before, _ in channels]
    for number, element in _numbered(channels):
        if isinstance(element, Segment):
            yield element
            continue
        if element is not None:
            times[number] = _advanced(times[number], element)
        reached = milliseconds(least_time((limit, *times)))
        if reached is not None and (watermark is None or reached > watermark):
            watermark = reached
            yield WatermarkAt(reached)


def _numbered(channels: Sequence[tuple[float | None, Iterable[ChannelElement]]]) -> Iterator[tuple[int, ChannelElement | None]]:
    """The elements with the numbers of their channels; before them None, where the watermark may advance at once."""
    yield 0, None
    for number, (_, elements) in enumerate(channels):
        for element in elements:
            yield number, element


def _advanced(watermark: float | None, mark: ChannelElement) -> float | None:
    """The watermark of a channel behind a mark; infinite behind the end of the data."""
    if isinstance(mark, WatermarkAt):
        return mark.ms if watermark is None else max(watermark, mark.ms)
    return math.inf if isinstance(mark, EndOfData) and mark.drain else watermark


def least_time(watermarks: Iterable[float | None]) -> float | None:
    """The earliest of several watermarks, of which at least one is given; None if one of them is None."""
    known = list(watermarks)
    return None if None in known else min(ms for ms in known if ms is not None)


def least_watermark(watermarks: Iterable[int | None]) -> int | None:
    """The watermark that every instance of a rescaled job begins with: the earliest of the old instances of its stage.

    Args:
        watermarks: by old instance that had not ended, its watermark, epoch ms; None before the first.

    Returns:
        None if an old instance had none, or there was no such instance: any row may still come.
    """
    known = list(watermarks)
    return None if None in known else min((ms for ms in known if ms is not None), default=None)


def milliseconds(watermark: float | None) -> int | None:
    return None if watermark is None or watermark == math.inf else int(watermark)
