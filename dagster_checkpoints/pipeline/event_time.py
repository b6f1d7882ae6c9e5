"""Event time as a source declares it: the column, the lateness of rows, and when a channel without rows is idle.

Spark parses the lateness again when a query starts. This module parses it to refuse a wrong value at the stage that
declares it, and because the coordination floor counts in milliseconds.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from dagster_checkpoints.pipeline.errors import InvalidWatermarkError
from dagster_checkpoints.pipeline.setting_values import no_seconds

_MS_PER_UNIT = {
    "microsecond": Fraction(1, 1000),
    "millisecond": Fraction(1),
    "second": Fraction(1000),
    "minute": Fraction(60_000),
    "hour": Fraction(3_600_000),
    "day": Fraction(86_400_000),
    "week": Fraction(7 * 86_400_000),
}
_LONGEST_MS = 253_402_300_799_000  # from 1970 to the end of 9999, the last event time of Spark
_NUMBER = re.compile(r"\d{1,18}(\.\d{1,9})?", re.ASCII)


@dataclass(frozen=True)
class Watermark:
    """Declares event time where it enters the pipeline, at a source.

    Args:
        column: The event-time column of the source's output: a top-level TIMESTAMP.
        lateness: How much older than the newest row a row may be and still count, as a Spark interval: "10 seconds",
            "1 hour", "1 day 2 hours".
        idle_after: Seconds without a row after which an instance no longer holds back the watermark of the others; None: it
            always holds it back.

    Raises:
        InvalidWatermarkError: One of the arguments cannot be used.
    """

    column: str
    lateness: str
    idle_after: float | None = None

    def __post_init__(self) -> None:
        check_event_time_column(self.column)
        interval_ms(self.lateness)
        if self.idle_after is None:
            return
        problem = no_seconds(self.idle_after, above=0)
        if problem:
            raise InvalidWatermarkError(f"idle_after={self.idle_after!r}: {problem}; or None for a source that is never idle.")

    @property
    def lateness_ms(self) -> int:
        """The lateness in whole milliseconds, rounded down as Spark does."""
        return interval_ms(self.lateness)


def check_event_time_column(column: object, where: str = "") -> None:
    """Refuse an event-time column that cannot be a top-level one.

    Args:
        column: Name of the column.
        where: The stage that declares it, for the error.

    Raises:
        InvalidWatermarkError: The name is empty, not a text, or one that Spark does not take for the name of a top-level column.
    """
    at_stage = f"{where}: " if where else ""
    if not isinstance(column, str) or not column.strip():
        raise InvalidWatermarkError(f"{at_stage}event-time column {column!r}: expected the name of a top-level TIMESTAMP column.")
    if "." in column or "`" in column:
        raise InvalidWatermarkError(
            f"{at_stage}event-time column {column!r}: expected the name of a top-level column, found a dot or a backtick in it, "
            "which Spark takes for a path into a struct, or for a quotation mark. If it is a column's name, rename the column; "
            'for a field of a struct, add a column that holds it, for a window with F.window_time("window"), and name that.'
        )


def read_event_time(event_time: object, where: str) -> tuple[str, int]:
    """The column and the lateness that a stage's `event_time` declares.

    The lateness is the largest time by which rows of the stage's output may be older than the watermark of its input: rows of a
    timer, of the beginning of a session, of another event-time column. The stage sends its watermark on earlier by the lateness.

    Args:
        event_time: Name of a column, or (column, lateness).
        where: The stage that declares it, for the error.

    Returns:
        The column, and the lateness in whole milliseconds; 0 if none is declared.

    Raises:
        InvalidWatermarkError: `event_time` is neither of the two.
    """
    if isinstance(event_time, str):
        check_event_time_column(event_time, where)
        return event_time, 0
    if not isinstance(event_time, tuple | list) or len(event_time) != 2:
        raise InvalidWatermarkError(
            f"{where}: event_time={event_time!r}; expected the name of a column, or (column, lateness), such as "
            '("at", "10 minutes").'
        )
    column, lateness = event_time
    check_event_time_column(column, where)
    try:
        return column, interval_ms(lateness)
    except InvalidWatermarkError as error:
        raise InvalidWatermarkError(f"{where}: event_time={event_time!r}: {error}") from None


def interval_ms(text: object) -> int:
    """The length of a Spark interval, in whole milliseconds.

    Args:
        text: Numbers with units from microseconds to weeks: "10 seconds", "1 day 2 hours", "interval 1.5
            seconds". Only seconds may have a fraction. Months and years are not allowed: they have no fixed
            length.

    Raises:
        InvalidWatermarkError: `text` is not such an interval.
    """
    words = text.lower().split() if isinstance(text, str) else []
    if words[:1] == ["interval"]:
        words = words[1:]
    if not words or len(words) % 2:
        raise _not_an_interval(text)
    total = Fraction(0)
    for number, plural in zip(words[::2], words[1::2], strict=True):
        unit = plural.removesuffix("s")
        if not _NUMBER.fullmatch(number) or unit not in _MS_PER_UNIT or ("." in number and unit != "second"):
            raise _not_an_interval(text)
        total += Fraction(number) * _MS_PER_UNIT[unit]
    if total > _LONGEST_MS:
        raise InvalidWatermarkError(
            f"lateness {text!r} is longer than all of event time, which ends in the year 9999: no watermark "
            f"would ever be sent. Use a shorter one."
        )
    return math.floor(total)


def _not_an_interval(text: object) -> InvalidWatermarkError:
    units = ", ".join(f"{unit}s" for unit in _MS_PER_UNIT)
    return InvalidWatermarkError(
        f'lateness {text!r}: expected an interval such as "10 seconds", "1 hour" or "1 day 2 hours", that '
        f"is whole numbers, not negative, with units ({units}); seconds may have a fraction."
    )
