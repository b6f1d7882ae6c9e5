"""The events of a barrier handler, which the task's gate sends, and the actions that it asks the gate to perform. Values only.

On Spark `BarrierAnnounced` comes where micro-batches are limited (`max_rows_per_trigger`): other tasks read each element as
soon as it has arrived.

`InputChannels` knows which channels of a task can still deliver a barrier.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier
from dagster_checkpoints.coordination.errors import UnknownChannel
from dagster_checkpoints.coordination.failures import FailureReason

# Events


class BarrierReceived(msgspec.Struct, frozen=True):
    """A barrier is next on a channel: everything in front of it has been read."""

    channel: str
    barrier: CheckpointBarrier


class BarrierAnnounced(msgspec.Struct, frozen=True):
    """A barrier has arrived on a channel, behind records that have not been read yet.

    Where barriers may overtake records, the gate announces the first barrier of each channel that was neither received,
    nor reported as captured, and whose checkpoint was not aborted. Blocked channels are not searched. An announced barrier
    is still received when it is next. In the other modes an announcement has no effect.
    """

    channel: str
    barrier: CheckpointBarrier


class CancellationReceived(msgspec.Struct, frozen=True):
    """A cancellation marker is next on a channel, or the coordinator's notice of an abort has come (no channel).

    A marker keeps the order of the barriers: an older barrier that has not arrived on this channel never will. A notice does
    not: it concerns its own checkpoint only, and if that has not been seen yet, its barrier is ignored when it comes.
    """

    channel: str | None
    checkpoint_id: int


class EndOfPartitionReceived(msgspec.Struct, frozen=True):
    """The channel has ended: this counts as its barrier of every pending and every later checkpoint."""

    channel: str


class TriggerReceived(msgspec.Struct, frozen=True):
    """The coordinator triggers this task as a root: all its upstream tasks have finished, or it has none.

    The handler still waits for the EndOfPartition of channels on which it has not been read: no barrier can come on them.
    """

    barrier: CheckpointBarrier


class AlignmentTick(msgspec.Struct, frozen=True):
    """Time has passed: due at the handler's `next_deadline()`, harmless at any other time.

    Attributes:
        now: seconds, by the clock of the barriers' timestamps.
    """

    now: float


BarrierEvent = (
    BarrierReceived | BarrierAnnounced | CancellationReceived | EndOfPartitionReceived | TriggerReceived | AlignmentTick
)

# Actions


class BlockChannel(msgspec.Struct, frozen=True):
    """Read nothing more from the channel until it is unblocked."""

    channel: str


class UnblockChannels(msgspec.Struct, frozen=True):
    """Read these channels again."""

    channels: tuple[str, ...]


class TakeSnapshot(msgspec.Struct, frozen=True):
    """Take the snapshot and forward the barrier to every output."""

    barrier: CheckpointBarrier


class StartSnapshot(msgspec.Struct, frozen=True):
    """The barrier overtakes: take the snapshot now, and forward the barrier in front of everything that waits on the
    outputs; the records that it overtakes there are in-flight data too.

    On each channel of `in_flight`, the elements that have not been read yet and are in front of the channel's own barrier
    (or of its end) belong to the checkpoint; they are read and processed as always, and kept until ChannelCaptured.

    Attributes:
        barrier: the barrier, marked as unaligned from now on.
        in_flight: the channels with in-flight data, in order; on all others the barrier is next, or they have ended.
    """

    barrier: CheckpointBarrier
    in_flight: tuple[str, ...]


class ChannelCaptured(msgspec.Struct, frozen=True):
    """The barrier of a channel in flight, or its end, has arrived: the elements in front of it are all that belongs to the
    checkpoint."""

    checkpoint_id: int
    channel: str


class SnapshotInputsComplete(msgspec.Struct, frozen=True):
    """No channel is in flight any more: the snapshot can be acknowledged."""

    checkpoint_id: int


class AbortAlignment(msgspec.Struct, frozen=True):
    """The task takes no part in this checkpoint: report it to the coordinator, forward a cancellation marker, delete the
    captured elements."""

    checkpoint_id: int
    reason: FailureReason


BarrierAction = (
    BlockChannel | UnblockChannels | TakeSnapshot | StartSnapshot | ChannelCaptured | SnapshotInputsComplete | AbortAlignment
)


class BarrierHandler(Protocol):
    """The interface of the barrier handlers of all modes."""

    def handle(self, event: BarrierEvent) -> list[BarrierAction]: ...

    def next_deadline(self) -> float | None:
        """When an AlignmentTick is due, by the clock of the barriers' timestamps; None if never."""
        ...


class InputChannels:
    """The channels of a task in the order given.

    Attributes:
        all: every channel, in order.
        open: those that have not ended.
    """

    def __init__(self, channels: Iterable[str], ended: Iterable[str]) -> None:
        self.all = tuple(channels)
        self._known = frozenset(self.all)
        self.open = set(self.all) - set(ended)

    def check(self, channel: str) -> None:
        """Check that the task has this channel.

        Raises:
            UnknownChannel: it has not.
        """
        if channel not in self._known:
            raise UnknownChannel(
                f"Channel {channel!r} is not an input of this task, which has "
                f"{', '.join(self.all) or 'no inputs'}. Feed a handler only the channels it was made with."
            )

    def in_order(self, channels: set[str]) -> tuple[str, ...]:
        return tuple(channel for channel in self.all if channel in channels)
