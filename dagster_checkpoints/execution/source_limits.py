"""How much a micro-batch of a query with several sources reads of each, so that it ends within a bound.

Sources that share a query share its micro-batches: the rows of one wait while those of another are processed. So the limits of
sources follow the measured durations:

    micro-batch ends ──> its seconds, and what each source had ──> the limits of the next one

A part of a batch's time does not depend on its rows; it is estimated from two batches of different sizes. The rest is
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

from collections.abc import Collection, Mapping

import msgspec

BATCH_SECONDS = 2.0
"""The default of the time that a micro-batch is to take at most."""
MAX_GROWTH = 8
"""The largest factor by which a limit grows from one batch to the next."""
_BOUNDED_SHARE = 1 / 8
"""The share of the rows of a batch that unbounded sources leave to bounded ones."""


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
        seconds: the time that a micro-batch is to take at most.
    """

    def __init__(self, first: Mapping[str, int], unbounded: Collection[str], seconds: float) -> None:
        self._limits = dict(first)
        self._unbounded = frozenset(unbounded)
        self._seconds = seconds
        self._begun = False
        self._seen: dict[int, tuple[int, float]] = {}
        """By the number of digits of its rows, the newest batch, as rows and seconds; the newest one last."""

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
        estimate = self._seconds_without_rows(total, seconds)
        without_rows = estimate or 0.0
        bound = max(self._seconds, 2 * without_rows)
        fit = total * (bound - without_rows / 2) / (seconds - without_rows / 2)
        if estimate is None and self._seen and min(seconds, *(other for _, other in self._seen.values())) > bound:
            fit = 2 * total  # the one before was long, too, and as large: one of another size is needed for an estimate
        if self._begun:  # in the first batch Spark compiles its plan
            self._seen.pop(total.bit_length(), None)
            self._seen[total.bit_length()] = (total, seconds)
        self._begun = True
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

    def _seconds_without_rows(self, rows: int, seconds: float) -> float | None:
        """The part of a batch's time that does not depend on its rows: by this batch, and the newest one of another size.

        None if there was none of less than half its rows, or more than twice.
        """
        for other, seconds_of_other in reversed(self._seen.values()):
            if max(rows, other) >= 2 * min(rows, other):
                of_a_row = (seconds - seconds_of_other) / (rows - other) if rows != other else 0.0
                return min(max(seconds - of_a_row * rows, 0.0), seconds, seconds_of_other)
        return None
