"""Which checkpoint request runs next.

Order: savepoint before checkpoint, forced before not, user before periodic, then time. Only periodic requests
obey the minimum pause. Must not know: how a checkpoint is triggered.

Source: Flink's CheckpointRequestDecider. It differs in one point: Flink refuses a new request when the queue is full of
users' requests; here the lowest entry is dropped, also if a user asked for it, so that a savepoint is always queued (PROTOCOL 3).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from dagster_checkpoints.coordination.checkpoints import CheckpointProperties
from dagster_checkpoints.coordination.failures import FailureReason


class CheckpointRequest(msgspec.Struct, frozen=True):
    """A checkpoint or savepoint that is wanted.

    Attributes:
        properties: the properties of the checkpoint.
        requested_at: the coordinator's `now`, seconds.
        request_id: id of the request to answer; None for the interval and for the end of the data.
        for_end_of_data: whether every task ends with the checkpoint.
    """

    properties: CheckpointProperties
    requested_at: float
    request_id: str | None = None
    for_end_of_data: bool = False


class Dropped(msgspec.Struct, frozen=True):
    """A request that will not run, and why.

    Attributes:
        retry_at: when a periodic request may be made again, seconds; None if that is not known.
    """

    request: CheckpointRequest
    reason: FailureReason
    retry_at: float | None = None


@dataclass(order=True, slots=True)
class _Queued:
    rank: tuple[bool, bool, bool, float]
    request: CheckpointRequest = field(compare=False)


class RequestQueue:
    """The waiting requests, best first."""

    def __init__(self, *, max_concurrent: int, min_pause: float, max_queued: int) -> None:
        self._max_concurrent = max_concurrent
        self._min_pause = min_pause
        self._max_queued = max_queued
        self._queue: list[_Queued] = []
        self._periodic = 0
        self._end_of_data = 0

    def __len__(self) -> int:
        return len(self._queue)

    # Read at every event, so they are counted and not searched for.

    @property
    def has_periodic(self) -> bool:
        return self._periodic > 0

    @property
    def has_end_of_data(self) -> bool:
        return self._end_of_data > 0

    def _count(self, request: CheckpointRequest, change: int) -> CheckpointRequest:
        self._periodic += change * request.properties.periodic
        self._end_of_data += change * request.for_end_of_data
        return request

    def add(self, request: CheckpointRequest) -> Dropped | None:
        """Queue a request; a full queue drops its last entry, which may be another one."""
        p = request.properties
        rank = (not p.is_savepoint, not p.forced, p.periodic, request.requested_at)
        # After requests of the same rank: those run in the order in which they came.
        insort(self._queue, _Queued(rank, self._count(request, 1)))
        if len(self._queue) > self._max_queued:
            return Dropped(self._count(self._queue.pop().request, -1), FailureReason.TOO_MANY_CHECKPOINT_REQUESTS)
        return None

    def choose(self, *, pending: int, last_completion: float | None, now: float) -> CheckpointRequest | Dropped | None:
        """Take the request that may run now out of the queue. The caller triggers it in the same step, before it chooses another.

        Args:
            pending: number of pending checkpoints.
            now: seconds.
            last_completion: when the last checkpoint completed, seconds; None if none has.

        Returns:
            The request to run; or a periodic one that is dropped because the minimum pause has not passed; or None.
        """
        if not self._queue:
            return None
        first = self._queue[0].request
        if pending >= self._max_concurrent and not first.properties.forced:
            return None
        self._count(self._queue.pop(0).request, -1)
        if first.properties.periodic and not first.properties.forced and last_completion is not None:
            allowed_at = last_completion + self._min_pause
            if now < allowed_at:
                return Dropped(first, FailureReason.MINIMUM_TIME_BETWEEN_CHECKPOINTS, retry_at=allowed_at)
        return first

    def withdraw(self, request_id: str) -> bool:
        """Take the request with this id out of the queue; returns whether it was queued."""
        return self._take_out(lambda request: request.request_id == request_id) > 0

    def withdraw_end_of_data(self) -> None:
        """Take the request for the end of the data out of the queue: another checkpoint takes its place."""
        if self.has_end_of_data:
            self._take_out(lambda request: request.for_end_of_data)

    def withdraw_periodic(self) -> None:
        """Take the periodic request out of the queue."""
        if self.has_periodic:
            self._take_out(lambda request: request.properties.periodic)

    def drain(self) -> list[CheckpointRequest]:
        """Take everything out of the queue."""
        requests = [queued.request for queued in self._queue]
        self._take_out(lambda request: True)
        return requests

    def _take_out(self, chosen: Callable[[CheckpointRequest], bool]) -> int:
        kept = [queued for queued in self._queue if not chosen(queued.request)]
        taken = len(self._queue) - len(kept)
        self._queue = kept
        self._periodic = sum(queued.request.properties.periodic for queued in kept)
        self._end_of_data = sum(queued.request.for_end_of_data for queued in kept)
        return taken
