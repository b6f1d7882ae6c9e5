"""At-least-once: no channel is ever blocked, several checkpoints are pending at a time.

Source: Flink's CheckpointBarrierTracker. It differs in two points: a cancellation concerns its own checkpoint only,
not older ones that can still complete; and the first barrier of an older checkpoint may arrive after that of a newer one.
"""

from __future__ import annotations

from collections.abc import Iterable

from dagster_checkpoints.coordination.barriers.events import (
    AbortAlignment,
    AlignmentTick,
    BarrierAction,
    BarrierAnnounced,
    BarrierEvent,
    BarrierReceived,
    CancellationReceived,
    EndOfPartitionReceived,
    InputChannels,
    TakeSnapshot,
    TriggerReceived,
)
from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier
from dagster_checkpoints.coordination.errors import UnexpectedEvent
from dagster_checkpoints.coordination.failures import FailureReason

MOST_TRACKED = 50
"""Maximum number of pending checkpoints of a task, if the job does not allow more at a time: the oldest is declined."""


class TrackingBarrierHandler:
    """A checkpoint is complete when every channel has delivered its barrier, or has ended in front of it.

    The barriers of a channel come in the order of their ids. So a channel that has ended behind a newer barrier does not count
    for an older one: its producer has taken no snapshot for that checkpoint, which can never complete.

    Args:
        channels: the task's input channels, those of static inputs included.
        ended: those that had ended when the task was restored.
        tracked: maximum number of pending checkpoints.
    """

    def __init__(self, channels: Iterable[str], *, ended: Iterable[str] = (), tracked: int = MOST_TRACKED) -> None:
        self._channels = InputChannels(channels, ended)
        self._tracked = tracked
        self._passed = dict.fromkeys(self._channels.all, 0)
        """By channel, the newest checkpoint whose barrier or cancellation marker it has delivered."""
        self._last_completed = 0
        self._aborted: set[int] = set()
        """Newer checkpoints that were aborted: their late barriers are ignored."""
        self._pending: dict[int, tuple[CheckpointBarrier, set[str]]] = {}

    @property
    def pending_ids(self) -> tuple[int, ...]:
        """The checkpoints that lack a barrier, oldest first."""
        return tuple(sorted(self._pending))

    def next_deadline(self) -> None:
        """No AlignmentTick is ever due."""

    def handle(self, event: BarrierEvent) -> list[BarrierAction]:
        """Take one event, return what the gate has to do, in this order.

        Raises:
            UnknownChannel: the event names a channel that the task does not have.
            UnexpectedEvent: it is none of a barrier handler's events.
        """
        match event:
            case BarrierReceived(channel, barrier):
                self._channels.check(channel)
                return self._barrier(channel, barrier)
            case TriggerReceived(barrier):
                return self._barrier(None, barrier)
            case CancellationReceived(channel, checkpoint_id):
                if channel is not None:
                    self._channels.check(channel)
                    self._passed[channel] = max(self._passed[channel], checkpoint_id)
                return self._cancel(checkpoint_id)
            case EndOfPartitionReceived(channel):
                self._channels.check(channel)
                self._channels.open.discard(channel)
                return self._complete() + self._abort_hopeless()
            case BarrierAnnounced(channel):
                self._channels.check(channel)
                return []
            case AlignmentTick():
                return []
            case _:
                raise UnexpectedEvent(f"{event!r} is no event of a barrier handler. Feed it only what `BarrierEvent` lists.")

    def _barrier(self, channel: str | None, barrier: CheckpointBarrier) -> list[BarrierAction]:
        checkpoint_id = barrier.checkpoint_id
        if channel is not None:
            self._passed[channel] = max(self._passed[channel], checkpoint_id)
        if checkpoint_id <= self._last_completed or checkpoint_id in self._aborted:
            return []
        _, seen = self._pending.setdefault(checkpoint_id, (barrier, set()))
        if channel is not None:
            seen.add(channel)
        return self._complete() + self._abort_hopeless() + self._abort_oldest()

    def _cancel(self, checkpoint_id: int) -> list[BarrierAction]:
        if checkpoint_id <= self._last_completed or checkpoint_id in self._aborted:
            return []
        return [self._abort(checkpoint_id, FailureReason.CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER)]

    def _abort(self, checkpoint_id: int, reason: FailureReason) -> AbortAlignment:
        self._pending.pop(checkpoint_id, None)
        self._aborted = {*sorted(self._aborted)[-self._tracked :], checkpoint_id}
        return AbortAlignment(checkpoint_id, reason)

    def _abort_hopeless(self) -> list[BarrierAction]:
        """Decline the checkpoints whose barrier can no longer come, because its channel has ended behind a newer one."""
        hopeless = [i for i, (_, seen) in self._pending.items() if any(not self._may_count(c, i) for c in self._ended - seen)]
        return [self._abort(i, FailureReason.CHECKPOINT_DECLINED_INPUT_END_OF_STREAM) for i in sorted(hopeless)]

    def _abort_oldest(self) -> list[BarrierAction]:
        too_many = sorted(self._pending)[: max(len(self._pending) - self._tracked, 0)]
        return [self._abort(i, FailureReason.CHECKPOINT_DECLINED_SUBSUMED) for i in too_many]

    @property
    def _ended(self) -> set[str]:
        return set(self._channels.all) - self._channels.open

    def _may_count(self, channel: str, checkpoint_id: int) -> bool:
        """Whether the end of a channel counts as its barrier of this checkpoint."""
        return channel not in self._channels.open and self._passed[channel] < checkpoint_id

    def _complete(self) -> list[BarrierAction]:
        """Complete the newest checkpoint that has all its barriers; older ones are subsumed by it."""
        complete = [
            i for i, (_, seen) in self._pending.items() if all(c in seen or self._may_count(c, i) for c in self._channels.all)
        ]
        if not complete:
            return []
        newest = max(complete)
        barrier, _ = self._pending[newest]
        subsumed = sorted(i for i in self._pending if i < newest)
        self._pending = {i: pending for i, pending in self._pending.items() if i > newest}
        self._aborted = {aborted for aborted in self._aborted if aborted > newest}
        self._last_completed = newest
        return [
            *(AbortAlignment(i, FailureReason.CHECKPOINT_DECLINED_SUBSUMED) for i in subsumed),
            TakeSnapshot(barrier),
        ]
