"""How far a task's query may read its input channels, and the watermark of these channels; shared by the query's sources.

Before each micro-batch Spark asks all sources of the query, one after the other, for their newest offsets: a *round*. All sources
get the same view in a round, whatever their order, so a batch that reads a watermark also reads all records in front of it.
Spark has no way to wait for a source that has nothing new; it asks again and again. So the gate keeps the first source of a round
waiting if nothing has changed since the round before and no batch has run in between. Such a query costs nothing.

It must not know Spark, channels' contents, nor why the gate opens.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

IDLE_SECONDS = 2.0
"""Maximum seconds that the gate keeps a source waiting: Spark must notice a stop by others, and does its own bookkeeping."""


@dataclass(frozen=True)
class GateView:
    """What the sources may read in one round.

    Attributes:
        positions: By channel, the number of elements from the first one of the job that may be read.
        watermark: The watermark of the inputs that carry one, epoch ms; None before the first one.
    """

    positions: Mapping[str, int]
    watermark: int | None = None


class QueryGate:
    """The gate of one query. The task's thread opens it, Spark's thread of the query asks it.

    Args:
        positions: The first positions, by channel.

    Attributes:
        error: What a source failed with; None if none has.
    """

    def __init__(self, positions: Mapping[str, int]) -> None:
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._newest = GateView(dict(positions))
        self._view: GateView | None = None  # of the present round; None before the first one
        self._asked: set[object] = set()  # the sources that were asked in this round
        self._batch_ran = False  # since the present round began
        self._waiting = False
        self._closing = False

    def open_to(self, positions: Mapping[str, int], watermark: int | None) -> None:
        """Let the query read further.

        Args:
            positions: The new positions, by channel; other channels keep theirs.
            watermark: The new watermark, epoch ms; None leaves it as it is.
        """
        with self._changed:
            newest = GateView({**self._newest.positions, **positions}, self._newest.watermark if watermark is None else watermark)
            if newest != self._newest:
                self._newest = newest
                self._changed.notify_all()

    def look(self, source: object) -> GateView:
        """What `source` may read in this round. Called by Spark's thread of the query; waits if the query has nothing to do."""
        with self._changed:
            if self._view is None or source in self._asked:
                if self._view is self._newest and not self._batch_ran:
                    self._wait()
                self._asked.clear()
                self._view, self._batch_ran = self._newest, False
            self._asked.add(source)
            return self._view

    def _wait(self) -> None:
        self._waiting = True
        try:
            self._changed.wait_for(lambda: self._closing or self._view is not self._newest, IDLE_SECONDS)
        finally:
            self._waiting = False

    def batch_ran(self) -> None:
        """A batch was processed: Spark may have more to do although nothing is new, such as a batch for an advanced watermark."""
        with self._changed:
            self._batch_ran = True

    def begin(self) -> None:
        """Before the query starts, again or for the first time."""
        with self._changed:
            self._closing, self._view, self.error = False, None, None
            self._asked.clear()

    def close(self) -> None:
        """Before the query stops: a source that waits returns."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    @property
    def positions(self) -> Mapping[str, int]:
        """How far the query may read, by channel."""
        return self._newest.positions

    @property
    def watermark(self) -> int | None:
        """The newest watermark that the query may read, epoch ms; None before the first one."""
        return self._newest.watermark

    @property
    def asked(self) -> bool:
        """Whether Spark has asked a source since the query began."""
        with self._changed:
            return self._view is not None

    @property
    def idle(self) -> bool:
        """Whether Spark has asked all sources since the newest batch and since the gate was opened, and found nothing to do."""
        with self._changed:
            return self._waiting and self._view is self._newest
