"""Exactly-once: one checkpoint at a time; a newer one aborts it.

    idle ── first barrier ──> aligning ── barrier or end on every channel ──> TakeSnapshot, idle
                                  │
                                  └─ overtakes ──> capturing ── barrier or end on every channel ──> idle

While aligning, a channel is blocked from its barrier on. While capturing, no channel is blocked: the snapshot was taken when
the barrier overtook, and the elements in front of the other channels' barriers are kept as in-flight data. The three
handlers differ only in when a barrier overtakes: never, after a timeout, at once. The barrier of a savepoint never does.

Source: FLIP-76; Flink's SingleCheckpointBarrierHandler and its states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dagster_checkpoints.coordination.barriers.events import (
    AbortAlignment,
    AlignmentTick,
    BarrierAction,
    BarrierAnnounced,
    BarrierEvent,
    BarrierReceived,
    BlockChannel,
    CancellationReceived,
    ChannelCaptured,
    EndOfPartitionReceived,
    InputChannels,
    SnapshotInputsComplete,
    StartSnapshot,
    TakeSnapshot,
    TriggerReceived,
    UnblockChannels,
)
from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier
from dagster_checkpoints.coordination.errors import UnexpectedEvent
from dagster_checkpoints.coordination.failures import FailureReason


@dataclass(slots=True)
class _Pending:
    """The checkpoint that is being aligned or captured."""

    barrier: CheckpointBarrier
    aligned: set[str] = field(default_factory=set)
    """Aligning: the open channels on which the barrier is next."""
    announced: set[str] = field(default_factory=set)
    """Aligning: those on which the gate has announced it."""
    in_flight: set[str] | None = None
    """Capturing: those on which neither it nor the end has been seen yet. None while aligning."""

    @property
    def checkpoint_id(self) -> int:
        return self.barrier.checkpoint_id


class _SingleCheckpointHandler:
    """One checkpoint at a time.

    Args:
        timeout: seconds from a barrier's creation until it overtakes; 0 for at once, None for never.
    """

    def __init__(self, channels: Iterable[str], ended: Iterable[str], timeout: float | None) -> None:
        self._channels = InputChannels(channels, ended)
        self._timeout = timeout
        self._last_id = 0
        """The newest checkpoint of which a barrier, an end or a cancellation was seen; older barriers are ignored."""
        self._aborted: set[int] = set()
        """Newer checkpoints that the coordinator has reported as aborted."""
        self._pending: _Pending | None = None

    @property
    def pending_id(self) -> int | None:
        """The checkpoint that is being aligned or captured."""
        return self._pending.checkpoint_id if self._pending is not None else None

    @property
    def blocked(self) -> tuple[str, ...]:
        """The channels that are blocked."""
        return self._channels.in_order(self._pending.aligned) if self._pending is not None else ()

    def next_deadline(self) -> float | None:
        """When an AlignmentTick is due, by the clock of the barriers' timestamps; None if never."""
        pending = self._pending
        if self._timeout is None or pending is None or pending.in_flight is not None or pending.barrier.properties.is_savepoint:
            return None
        return pending.barrier.timestamp + self._timeout

    def handle(self, event: BarrierEvent) -> list[BarrierAction]:
        """Take one event, return what the gate has to do, in this order.

        Raises:
            UnknownChannel: the event names a channel that the task does not have.
            UnexpectedEvent: it is none of a barrier handler's events.
        """
        take = _TAKES.get(type(event))
        if take is None:
            raise UnexpectedEvent(f"{event!r} is no event of a barrier handler. Feed it only what `BarrierEvent` lists.")
        return take(self, event)

    def _received(self, event: BarrierReceived) -> list[BarrierAction]:
        self._channels.check(event.channel)
        return self._barrier(event.barrier, received=event.channel)

    def _announced(self, event: BarrierAnnounced) -> list[BarrierAction]:
        self._channels.check(event.channel)
        return self._barrier(event.barrier, announced=event.channel) if self._may_overtake(event.barrier) else []

    def _triggered(self, event: TriggerReceived) -> list[BarrierAction]:
        return self._barrier(event.barrier)

    def _cancelled(self, event: CancellationReceived) -> list[BarrierAction]:
        if event.channel is None:
            return self._abort_notice(event.checkpoint_id)
        self._channels.check(event.channel)
        return self._cancel(event.checkpoint_id)

    def _ended(self, event: EndOfPartitionReceived) -> list[BarrierAction]:
        self._channels.check(event.channel)
        return self._end(event.channel)

    def _tick(self, event: AlignmentTick) -> list[BarrierAction]:
        deadline = self.next_deadline()
        return self._overtake() if deadline is not None and event.now >= deadline else []

    def _barrier(
        self, barrier: CheckpointBarrier, *, received: str | None = None, announced: str | None = None
    ) -> list[BarrierAction]:
        actions: list[BarrierAction] = []
        pending = self._pending
        if pending is None or barrier.checkpoint_id != pending.checkpoint_id:
            if barrier.checkpoint_id <= self._last_id:
                return []
            if barrier.checkpoint_id in self._aborted:
                return self._cancel(barrier.checkpoint_id)
            actions = self._advance_to(barrier.checkpoint_id)
            pending = self._pending = _Pending(barrier)
        if pending.in_flight is not None:
            return self._captured(pending, {received, announced})
        if announced is not None:
            pending.announced.add(announced)
        last = received if received in self._channels.open - pending.aligned else None
        if last is not None:
            pending.aligned.add(last)
        if self._may_overtake(barrier) and (barrier.properties.unaligned or self._timeout == 0):
            return actions + self._overtake(last)
        if pending.aligned == self._channels.open:
            return actions + self._take(pending, last)
        return actions if last is None else [*actions, BlockChannel(last)]

    def _end(self, channel: str) -> list[BarrierAction]:
        self._channels.open.discard(channel)
        pending = self._pending
        if pending is None:
            return []
        if pending.in_flight is not None:
            return self._captured(pending, {channel})
        # The channel has ended and does not wait any more; it must not be unblocked later.
        pending.aligned.discard(channel)
        return self._take(pending) if pending.aligned == self._channels.open else []

    def _take(self, pending: _Pending, last: str | None = None) -> list[BarrierAction]:
        self._pending = None
        return [TakeSnapshot(pending.barrier), *self._unblock(pending, last)]

    # Unaligned

    def _may_overtake(self, barrier: CheckpointBarrier) -> bool:
        return self._timeout is not None and not barrier.properties.is_savepoint

    def _overtake(self, last: str | None = None) -> list[BarrierAction]:
        pending = self._pending
        assert pending is not None and pending.in_flight is None
        in_flight = self._channels.open - pending.aligned
        actions: list[BarrierAction] = [StartSnapshot(pending.barrier.overtaking(), self._channels.in_order(in_flight))]
        actions += self._unblock(pending, last)
        pending.aligned.clear()
        pending.in_flight = in_flight
        return actions + self._captured(pending, pending.announced)

    def _captured(self, pending: _Pending, channels: set[str] | set[str | None]) -> list[BarrierAction]:
        """The barrier, or the end, has arrived on these channels."""
        assert pending.in_flight is not None
        captured = pending.in_flight & channels
        pending.in_flight -= captured
        actions: list[BarrierAction] = [ChannelCaptured(pending.checkpoint_id, c) for c in self._channels.in_order(captured)]
        if not pending.in_flight:
            self._pending = None
            actions.append(SnapshotInputsComplete(pending.checkpoint_id))
        return actions

    # Aborts

    def _abort_notice(self, checkpoint_id: int) -> list[BarrierAction]:
        if checkpoint_id > self._last_id:
            # A cancellation marker sent now would cancel, in the consumers, older checkpoints whose barriers are still to come.
            self._aborted.add(checkpoint_id)
        return self._cancel(checkpoint_id) if checkpoint_id == self.pending_id else []

    def _cancel(self, checkpoint_id: int) -> list[BarrierAction]:
        cancelled = FailureReason.CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER
        if checkpoint_id == self.pending_id:
            return self._abort(cancelled)
        if checkpoint_id <= self._last_id:
            return []
        return [*self._advance_to(checkpoint_id), AbortAlignment(checkpoint_id, cancelled)]

    def _advance_to(self, checkpoint_id: int) -> list[BarrierAction]:
        """Abort the pending checkpoint and ignore everything older from now on."""
        self._last_id = checkpoint_id
        self._aborted = {aborted for aborted in self._aborted if aborted > checkpoint_id}
        return self._abort(FailureReason.CHECKPOINT_DECLINED_SUBSUMED)

    def _abort(self, reason: FailureReason) -> list[BarrierAction]:
        pending, self._pending = self._pending, None
        return [] if pending is None else [AbortAlignment(pending.checkpoint_id, reason), *self._unblock(pending)]

    def _unblock(self, pending: _Pending, last: str | None = None) -> list[BarrierAction]:
        # The channel that brought the last barrier was never blocked.
        blocked = self._channels.in_order(pending.aligned - {last})
        return [UnblockChannels(blocked)] if blocked else []


_TAKES: dict[type[object], Callable[[_SingleCheckpointHandler, Any], list[BarrierAction]]] = {
    BarrierReceived: _SingleCheckpointHandler._received,
    BarrierAnnounced: _SingleCheckpointHandler._announced,
    TriggerReceived: _SingleCheckpointHandler._triggered,
    CancellationReceived: _SingleCheckpointHandler._cancelled,
    EndOfPartitionReceived: _SingleCheckpointHandler._ended,
    AlignmentTick: _SingleCheckpointHandler._tick,
}


class AlignedBarrierHandler(_SingleCheckpointHandler):
    """A channel is blocked from its barrier on until every open channel has delivered its own.

    Args:
        channels: the task's input channels, those of static inputs included.
        ended: those that had ended when the task was restored.
    """

    def __init__(self, channels: Iterable[str], *, ended: Iterable[str] = ()) -> None:
        super().__init__(channels, ended, timeout=None)


class UnalignedBarrierHandler(_SingleCheckpointHandler):
    """The snapshot starts at the first barrier, received or announced; no channel is ever blocked, except for a
    savepoint, which is aligned.

    Args:
        channels: the task's input channels, those of static inputs included.
        ended: those that had ended when the task was restored.
    """

    def __init__(self, channels: Iterable[str], *, ended: Iterable[str] = ()) -> None:
        super().__init__(channels, ended, timeout=0.0)


class AlignedWithTimeoutBarrierHandler(_SingleCheckpointHandler):
    """Aligned until the timeout has passed, unaligned from then on; at once if an upstream task has already marked
    the barrier as unaligned. A savepoint stays aligned.

    The gate asks for `next_deadline()` after every event, and sends an AlignmentTick when it has passed.

    Args:
        channels: the task's input channels, those of static inputs included.
        timeout: seconds, counted from the barrier's creation; 0 is unaligned.
        ended: those that had ended when the task was restored.
    """

    def __init__(self, channels: Iterable[str], *, timeout: float, ended: Iterable[str] = ()) -> None:
        super().__init__(channels, ended, timeout)
