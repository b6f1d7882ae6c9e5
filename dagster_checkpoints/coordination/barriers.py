"""When a task takes its snapshot: the barriers on its input channels.

One handler per task; the gate in front of the task's channels feeds it events in the order in which they are
read and performs its actions in the order given. Static inputs are no channels here: they block no barrier.
Must not know: records, channels' storage, snapshots.

Source: FLIP-147, "Make CheckpointBarrierHandler Support EndOfPartition"; Flink's
SingleCheckpointBarrierHandler and CheckpointBarrierTracker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier
from dagster_checkpoints.coordination.errors import UnknownChannel
from dagster_checkpoints.coordination.failures import FailureReason


@dataclass(frozen=True, slots=True)
class BarrierReceived:
    """A barrier is next on a channel."""

    channel: str
    barrier: CheckpointBarrier


@dataclass(frozen=True, slots=True)
class CancellationReceived:
    """A cancellation marker is next on a channel, or the coordinator's notice of an abort has come."""

    channel: str | None
    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class EndOfPartitionReceived:
    """Nothing follows on this channel: it counts as the barrier of every pending and every later
    checkpoint."""

    channel: str


@dataclass(frozen=True, slots=True)
class TriggerReceived:
    """The coordinator triggers this task as a root: all its upstream tasks have finished, or it has none.

    Channels whose EndOfPartition has not been read yet are waited for; nothing else can be left on them.
    """

    barrier: CheckpointBarrier


BarrierEvent = BarrierReceived | CancellationReceived | EndOfPartitionReceived | TriggerReceived


@dataclass(frozen=True, slots=True)
class BlockChannel:
    """Read nothing more from the channel until it is unblocked."""

    channel: str


@dataclass(frozen=True, slots=True)
class UnblockChannels:
    """Go on reading these channels."""

    channels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Take the snapshot and forward the barrier to every output."""

    barrier: CheckpointBarrier


@dataclass(frozen=True, slots=True)
class AbortAlignment:
    """This checkpoint will not happen in this task: tell the coordinator, forward a cancellation marker."""

    checkpoint_id: int
    reason: FailureReason


BarrierAction = BlockChannel | UnblockChannels | TakeSnapshot | AbortAlignment


class BarrierHandler(Protocol):
    """What the two modes have in common."""

    def handle(self, event: BarrierEvent) -> list[BarrierAction]: ...


class _Channels:
    """The channels of a task in the order given, and which are still open."""

    def __init__(self, channels: Iterable[str], ended: Iterable[str]) -> None:
        self.all = tuple(channels)
        self.open = set(self.all) - set(ended)

    def check(self, channel: str) -> None:
        if channel not in self.all:
            raise UnknownChannel(
                f"Channel {channel!r} is not an input of this task, which has "
                f"{', '.join(self.all) or 'no inputs'}. Feed a handler only the channels it was made with."
            )


class AlignedBarrierHandler:
    """Exactly-once: a channel stands still from its barrier on until every open channel has delivered its
    own.

    Args:
        channels: the task's streaming input channels.
        ended: those that had ended when the task was restored.
    """

    def __init__(self, channels: Iterable[str], *, ended: Iterable[str] = ()) -> None:
        self._channels = _Channels(channels, ended)
        self._last_id = 0
        """The newest checkpoint that was seen in any way; older barriers are leftovers."""
        self._pending: CheckpointBarrier | None = None
        self._aligned: set[str] = set()

    @property
    def pending_id(self) -> int | None:
        """The checkpoint that is being aligned."""
        return self._pending.checkpoint_id if self._pending is not None else None

    @property
    def blocked(self) -> tuple[str, ...]:
        """The channels that stand still."""
        return tuple(channel for channel in self._channels.all if channel in self._aligned)

    def handle(self, event: BarrierEvent) -> list[BarrierAction]:
        """Take one event, return what the gate has to do, in this order.

        Raises:
            UnknownChannel: the event names a channel that the task does not have.
        """
        match event:
            case BarrierReceived(channel, barrier):
                self._channels.check(channel)
                return self._barrier(channel, barrier)
            case TriggerReceived(barrier):
                return self._barrier(None, barrier)
            case CancellationReceived(channel, checkpoint_id):
                return self._cancel(checkpoint_id)
            case EndOfPartitionReceived(channel):
                self._channels.check(channel)
                self._channels.open.discard(channel)
                if channel in self._aligned:
                    # It has ended instead of waiting; it must not be unblocked later.
                    self._aligned.discard(channel)
                return self._complete_if_aligned()

    def _barrier(self, channel: str | None, barrier: CheckpointBarrier) -> list[BarrierAction]:
        checkpoint_id = barrier.checkpoint_id
        actions: list[BarrierAction] = []
        if self._pending is None or checkpoint_id != self._pending.checkpoint_id:
            if checkpoint_id <= self._last_id:
                return []
            if self._pending is not None:
                actions += self._abort(self._pending.checkpoint_id, FailureReason.CHECKPOINT_DECLINED_SUBSUMED)
            self._pending = barrier
            self._last_id = checkpoint_id
        if channel is not None and channel in self._channels.open and channel not in self._aligned:
            self._aligned.add(channel)
            if self._aligned != self._channels.open:
                actions.append(BlockChannel(channel))
        return actions + self._complete_if_aligned(last=channel)

    def _complete_if_aligned(self, last: str | None = None) -> list[BarrierAction]:
        if self._pending is None or self._aligned != self._channels.open:
            return []
        barrier, self._pending = self._pending, None
        # The channel that brought the last barrier was never blocked.
        blocked = tuple(channel for channel in self.blocked if channel != last)
        self._aligned.clear()
        return [TakeSnapshot(barrier), *([UnblockChannels(blocked)] if blocked else [])]

    def _cancel(self, checkpoint_id: int) -> list[BarrierAction]:
        if self._pending is None:
            if checkpoint_id <= self._last_id:
                return []
            self._last_id = checkpoint_id
            return [AbortAlignment(checkpoint_id, FailureReason.CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER)]
        current = self._pending.checkpoint_id
        if checkpoint_id < current:
            return []
        actions: list[BarrierAction] = []
        if checkpoint_id > current:
            actions += self._abort(current, FailureReason.CHECKPOINT_DECLINED_SUBSUMED)
            self._last_id = checkpoint_id
        return [
            *actions,
            *self._abort(checkpoint_id, FailureReason.CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER),
        ]

    def _abort(self, checkpoint_id: int, reason: FailureReason) -> list[BarrierAction]:
        blocked = self.blocked
        self._pending = None
        self._aligned.clear()
        return [AbortAlignment(checkpoint_id, reason), *([UnblockChannels(blocked)] if blocked else [])]


class TrackingBarrierHandler:
    """At-least-once: nothing is ever blocked; a checkpoint is complete when every open channel has brought
    its barrier.

    Args:
        channels: the task's streaming input channels.
        ended: those that had ended when the task was restored.
    """

    def __init__(self, channels: Iterable[str], *, ended: Iterable[str] = ()) -> None:
        self._channels = _Channels(channels, ended)
        self._last_id = 0
        self._pending: dict[int, tuple[CheckpointBarrier, set[str]]] = {}

    def handle(self, event: BarrierEvent) -> list[BarrierAction]:
        """Take one event, return what the gate has to do, in this order.

        Raises:
            UnknownChannel: the event names a channel that the task does not have.
        """
        match event:
            case BarrierReceived(channel, barrier):
                self._channels.check(channel)
                return self._barrier(channel, barrier)
            case TriggerReceived(barrier):
                return self._barrier(None, barrier)
            case CancellationReceived(_, checkpoint_id):
                known = self._pending.pop(checkpoint_id, None) is not None
                if not known and checkpoint_id <= self._last_id:
                    return []
                self._last_id = max(self._last_id, checkpoint_id)
                return [AbortAlignment(checkpoint_id, FailureReason.CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER)]
            case EndOfPartitionReceived(channel):
                self._channels.check(channel)
                self._channels.open.discard(channel)
                return self._complete()

    def _barrier(self, channel: str | None, barrier: CheckpointBarrier) -> list[BarrierAction]:
        checkpoint_id = barrier.checkpoint_id
        if checkpoint_id > self._last_id:
            self._last_id = checkpoint_id
            self._pending[checkpoint_id] = (barrier, set())
        if checkpoint_id in self._pending and channel is not None:
            self._pending[checkpoint_id][1].add(channel)
        return self._complete()

    def _complete(self) -> list[BarrierAction]:
        """Complete the newest checkpoint that has all its barriers; older ones are subsumed by it."""
        complete = [i for i, (_, seen) in self._pending.items() if self._channels.open <= seen]
        if not complete:
            return []
        newest = max(complete)
        barrier, _ = self._pending[newest]
        subsumed = sorted(i for i in self._pending if i < newest)
        self._pending = {i: pending for i, pending in self._pending.items() if i > newest}
        return [
            *(AbortAlignment(i, FailureReason.CHECKPOINT_DECLINED_SUBSUMED) for i in subsumed),
            TakeSnapshot(barrier),
        ]
