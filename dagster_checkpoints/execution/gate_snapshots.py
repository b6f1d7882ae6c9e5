"""The inputs' part of a snapshot: what an input gate puts into it, what it captures behind it, and what it remembers of barriers.

Parts of the input gate; they decide nothing about when a snapshot is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dagster_checkpoints.coordination import (
    MIN_WATERMARK_MS,
    ChannelCaptured,
    ChannelWatermark,
    SnapshotInputsComplete,
    StartSnapshot,
    TakeSnapshot,
    ValveState,
)
from dagster_checkpoints.execution.elements import BarrierMark, CancelMark, Element
from dagster_checkpoints.execution.input_channel import InputChannel
from dagster_checkpoints.execution.task_events import PinnedChannel, PinnedInputs, PinSnapshot
from dagster_checkpoints.state import ChannelSnapshot


@dataclass(frozen=True, slots=True)
class InputsCaptured:
    """The in-flight data of an unaligned snapshot is complete.

    Attributes:
        captured: by channel, what was read behind the snapshot and belongs to it.
    """

    checkpoint_id: int
    captured: dict[str, tuple[Element, ...]]


@dataclass(frozen=True, slots=True)
class PinDue:
    """`PinSnapshot`, and since when the snapshot's barriers were aligned, seconds."""

    pin: PinSnapshot
    since: float


@dataclass(frozen=True, slots=True)
class SnapshotDue:
    """Something that the barrier handler asks for, and that waits until the query has caught up.

    Attributes:
        since: when its alignment began, seconds.
    """

    action: TakeSnapshot | StartSnapshot | ChannelCaptured | SnapshotInputsComplete
    since: float

    @property
    def checkpoint_id(self) -> int:
        action = self.action
        return action.barrier.checkpoint_id if isinstance(action, TakeSnapshot | StartSnapshot) else action.checkpoint_id


class Captures:
    """Unaligned snapshots that were begun, and what was read behind them so far, by channel."""

    def __init__(self) -> None:
        self._captured: dict[int, dict[str, tuple[Element, ...]]] = {}

    def begin(self, checkpoint_id: int, channels: Iterable[InputChannel]) -> None:
        """From now on what is read on these channels is kept."""
        self._captured[checkpoint_id] = {}
        for channel in channels:
            channel.captured = []

    def end(self, checkpoint_id: int, channel: InputChannel) -> None:
        """The barrier of the channel is there: read, or announced behind elements that belong to the snapshot, too."""
        captured, channel.captured = channel.captured or [], None
        if channel.announced == checkpoint_id:
            captured = [*captured, *(e for e in channel.unread if not isinstance(e, BarrierMark | CancelMark))]
        if checkpoint_id in self._captured:
            self._captured[checkpoint_id][channel.name] = tuple(captured)

    def complete(self, checkpoint_id: int) -> InputsCaptured | None:
        """Everything that belongs to the snapshot; None if it was given up."""
        captured = self._captured.pop(checkpoint_id, None)
        return None if captured is None else InputsCaptured(checkpoint_id, captured)

    def give_up(self, checkpoint_id: int, channels: Iterable[InputChannel]) -> bool:
        """Forget a snapshot. False if none was begun, or it is complete."""
        if self._captured.pop(checkpoint_id, None) is None:
            return False
        for channel in channels:
            channel.captured = None
        return True


class BarrierMemory:
    """At-least-once: what was known when a channel's barrier came. What follows it on the channel comes again after a restore."""

    def __init__(self) -> None:
        self._before_end: set[int] = set()
        """Checkpoints of which a barrier has come in front of its channel's end of data."""
        self._at_barrier: dict[tuple[int, str], tuple[ChannelWatermark, int]] = {}
        """By checkpoint and channel: what was known of event time, and how much was held."""

    def remember(self, channel: InputChannel, checkpoint_id: int, valve: ValveState) -> None:
        """A barrier is next on a channel."""
        if channel.ended != "none" or channel.ended_in_scan:
            return
        self._before_end.add(checkpoint_id)
        if not channel.static:
            self._at_barrier[checkpoint_id, channel.name] = (valve.channels[channel.name], len(channel.held))

    def ended_behind(self, checkpoint_id: int) -> bool:
        """Whether an upstream task goes on after a restore of the checkpoint, that is: its end came behind its barrier."""
        return checkpoint_id in self._before_end

    def at_barrier(self, checkpoint_id: int, channel: str) -> tuple[ChannelWatermark, int] | None:
        """What was known of the channel's event time at its barrier, and how many elements were held; None if nothing else is
        known than now."""
        return self._at_barrier.get((checkpoint_id, channel))

    def forget(self, upto: int) -> None:
        """The snapshot of this checkpoint is taken, and subsumes those of earlier ones."""
        self._before_end = {i for i in self._before_end if i > upto}
        self._at_barrier = {key: known for key, known in self._at_barrier.items() if key[0] > upto}


def pinned_inputs(channels: Iterable[InputChannel], valve: ValveState, checkpoint_id: int, memory: BarrierMemory) -> PinnedInputs:
    """What a snapshot that is taken now holds of the inputs."""
    return PinnedInputs(
        tuple(_pinned(c, valve, memory.at_barrier(checkpoint_id, c.name)) for c in channels), _known(valve.watermark)
    )


def _pinned(channel: InputChannel, valve: ValveState, then: tuple[ChannelWatermark, int] | None) -> PinnedChannel:
    if channel.static:
        over = channel.ended_in_scan or channel.ended != "none"
        return PinnedChannel(ChannelSnapshot(channel.name, channel.scanned, ended="drain" if over else "none"))
    known, in_flight = valve.channels[channel.name], tuple(channel.held)
    if then is not None:
        known, in_flight = then[0], in_flight[: then[1]]  # what was held behind the barrier comes again
    snapshot = ChannelSnapshot(channel.name, channel.taken_in, _known(known.watermark), known.idle, known.ended)
    return PinnedChannel(snapshot, in_flight)


def _known(watermark: int) -> int | None:
    return None if watermark <= MIN_WATERMARK_MS else watermark
