"""The splits of a table: ranges of one column that together hold every row once.

Numbers only; must not know a database. Dates are counted in days, timestamps in microseconds.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from enum import Enum
from typing import Any

_EPOCH = dt.datetime(1970, 1, 1)
_MICROSECOND = dt.timedelta(microseconds=1)


class SplitUnit(Enum):
    """What the numbers of a split column count."""

    NUMBER = "number"
    DAY = "day"
    MICROSECOND = "microsecond"
    MICROSECOND_UTC = "microsecond of a point in time"

    def to_number(self, value: Any) -> int:
        """A value of the column as a number, rounded down."""
        match self:
            case SplitUnit.NUMBER:
                return value.__floor__() if isinstance(value, Decimal) else int(value)
            case SplitUnit.DAY:
                return dt.date.toordinal(value)
            case SplitUnit.MICROSECOND:
                return (value - _EPOCH) // _MICROSECOND
            case SplitUnit.MICROSECOND_UTC:
                return (value - _EPOCH.replace(tzinfo=dt.UTC)) // _MICROSECOND

    def to_value(self, number: int) -> Any:
        """The column's value for a number."""
        match self:
            case SplitUnit.NUMBER:
                return number
            case SplitUnit.DAY:
                return dt.date.fromordinal(number)
            case SplitUnit.MICROSECOND:
                return _EPOCH + number * _MICROSECOND
            case SplitUnit.MICROSECOND_UTC:
                return _EPOCH.replace(tzinfo=dt.UTC) + number * _MICROSECOND


@dataclass(frozen=True, slots=True)
class SplitRange:
    """The values of one split.

    Args:
        begin: the smallest value; None: no bound, and rows without a value belong to the split.
        end: the first value that does not belong to the split; None: no bound.
    """

    begin: int | None
    end: int | None


@dataclass(frozen=True, slots=True)
class SplitOffset:
    """How far a table was read. The table's division is part of it: it stays as it was when the first split was planned.

    Args:
        done: the number of splits that were read.
        splits: the number of splits.
        lower: the smallest value when the division was made.
        upper: the largest value then.
    """

    done: int
    splits: int
    lower: int
    upper: int

    @classmethod
    def at_start(cls, lower: int | None, upper: int | None, splits: int) -> SplitOffset:
        """The offset before the first row.

        Args:
            lower: the smallest value of the column; None if there is none.
            upper: the largest value.
            splits: the number of splits that were asked for; there are never more than values.
        """
        if lower is None or upper is None:
            return cls(0, 1, 0, 0)
        return cls(0, max(1, min(splits, upper - lower + 1)), lower, upper)

    @classmethod
    def from_json(cls, offset: Mapping[str, int]) -> SplitOffset:
        return cls(**offset)

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    def after(self, count: int) -> SplitOffset:
        """The offset after some more splits."""
        return SplitOffset(min(self.done + count, self.splits), self.splits, self.lower, self.upper)

    def at_end(self) -> SplitOffset:
        """The offset after the last split."""
        return self.after(self.splits)

    def range_of(self, split: int) -> SplitRange:
        """The values of a split, counted from 0. The first and the last one have no outer bound: together they hold every row."""
        return SplitRange(
            self._boundary(split) if split > 0 else None,
            self._boundary(split + 1) if split + 1 < self.splits else None,
        )

    def _boundary(self, split: int) -> int:
        return self.lower + (self.upper - self.lower + 1) * split // self.splits
