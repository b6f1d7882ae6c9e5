"""How much a micro-batch of a query with several sources reads of each, so that it ends within a bound.

Sources that share a query share its micro-batches: the rows of one wait while those of another are processed. So the limits of
sources follow the measured durations:

    micro-batch ends ──> its seconds, and what each source had ──> the limits of the next one

A part of a batch's time does not depend on its rows; it is estimated from the last ones. The rest is
proportional to the rows, which says how many fit into the bound. Only half of the estimated part is counted: if it was wrong, the
next batch takes twice the bound at most. Each source that reached its limit asks for more, and they share what fits. Unbounded
sources come first, since their rows are awaited; an eighth is left for bounded ones, which otherwise would never end. A source
that did not reach its limit keeps it: how long more would take is not measured.

The first batch has the smallest limits. If a batch with few rows takes half of the bound, the bound gives way: otherwise most of
the time would pass without rows.

It must not know: what is read, the unit of a limit, Spark.

Source: TCP's congestion window (RFC 5681), and its validation (RFC 7661): what is not used does not grow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from statistics import linear_regression

import msgspec

BATCH_SECONDS = 5.0
"""The default of the time that a micro-batch is to take at most."""
ALONE = 6
"""How much longer a micro-batch of bounded sources alone may take: no rows are awaited; a crash loses its work."""
MAX_GROWTH = 8
"""The largest factor by which a limit grows from one batch to the next."""
_BOUNDED_SHARE = 1 / 8
"""The share of the rows of a batch that unbounded sources leave to bounded ones."""
_REMEMBERED = 16
"""The number of batches from which the time without rows is estimated."""


class SourceRead(msgspec.Struct, frozen=True):
    """What one source had in a micro-batch.

    Attributes:
        rows: its rows.
        amount: how much of it was read, in the unit of its limit; of no meaning for a source that is not limited here.
    """

    rows: int
    amount: int = 0


class SourceLimits:
    """The limits of the sources of one query; see the module's docstring.

    Args:
        first: by source that is limited, the limit of its first batch, from 1; in the unit of the source.
        unbounded: the sources that do not end by themselves, limited or not.
        seconds: the time that a micro-batch is to take at most; `ALONE` times as long without unbounded sources.
    """

    def __init__(self, first: Mapping[str, int], unbounded: Collection[str], seconds: float) -> None:
        self._limits = dict(first)
        self._unbounded = frozenset(unbounded)
        self._seconds = seconds if unbounded else ALONE * seconds
        self._begun = False
        self._last: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        """The last batches, as rows and seconds."""
        self._without_rows = 0.0
        """The estimated seconds of a batch that do not depend on its rows."""

    @property
    def limits(self) -> Mapping[str, int]:
        """By source that is limited, the limit of the next batch."""
        return self._limits

    def processed(self, seconds: float, read: Mapping[str, SourceRead]) -> None:
        """A micro-batch was processed.

        Args:
            seconds: its duration, more than 0.
            read: by source with rows in it, what it had.
        """
        rows = {name: max(had.rows, 1) for name, had in read.items()}
        total = sum(rows.values())
        if self._begun:  # in the first batch Spark compiles its plan
            self._last.append((total, seconds))
        self._begun = True
        differ = self._estimate_seconds_without_rows()
        without_rows = min(self._without_rows, seconds)
        bound = max(self._seconds, 2 * without_rows)
        fit = total * (bound - without_rows / 2) / (seconds - without_rows / 2)
        if not differ and len(self._last) > 1 and min(other for _, other in self._last) > bound:
            fit = 2 * total  # all were long, and of about this size: one of another size says why
        wanted = {name: count * (MAX_GROWTH if self._is_full(name, read[name]) else 1) for name, count in rows.items()}
        of_unbounded = sum(count for name, count in wanted.items() if name in self._unbounded)
        of_bounded = sum(wanted.values()) - of_unbounded
        for_unbounded = min(of_unbounded, fit - min(of_bounded, fit * _BOUNDED_SHARE))
        for name, had in read.items():
            if name not in self._limits:
                continue
            granted = for_unbounded / of_unbounded if name in self._unbounded else min(1.0, (fit - for_unbounded) / of_bounded)
            if self._is_full(name, had):
                self._limits[name] = max(1, int(had.amount * MAX_GROWTH * granted))
            elif seconds > bound:
                self._limits[name] = min(self._limits[name], max(1, 2 * had.amount))

    def _is_full(self, name: str, had: SourceRead) -> bool:
        """Whether a source has probably read no more because of its limit: another file may not have fit."""
        return 2 * had.amount >= self._limits.get(name, float("inf"))

    def _estimate_seconds_without_rows(self) -> bool:
        """Estimate it from the last batches. Returns False if all had about as many rows: then the last estimate stands."""
        rows, seconds = [rows for rows, _ in self._last], [seconds for _, seconds in self._last]
        if len(set(rows)) < 2 or max(rows) < 2 * min(rows):
            return False
        self._without_rows = min(max(linear_regression(rows, seconds).intercept, 0.0), *seconds)
        return True
