"""Days that have ended, as splits."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass, field
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from dagster_checkpoints.sources.errors import InvalidSource


@dataclass(frozen=True, slots=True)
class DateSplits:
    """Days, in order: a discovery for `split_source`, with `split_type=date`.

    Without `last` a day is a split once it has ended: a bounded source reads the days up to now, an unbounded one goes on with
    each day that ends.

    Args:
        first: The first day.
        last: The last day; all days up to it are splits at once, ended or not. None for all days that have ended.
        delay: How long after its end a day becomes a split: the time that its data may be late.
        zone: Time zone of the days, such as `America/New_York`.
        clock: Gives the present time, with a time zone; for tests.

    Raises:
        InvalidSource: An argument cannot be used.

    Examples:
        >>> days = DateSplits(dt.date(2026, 1, 1), delay=dt.timedelta(hours=2))
    """

    first: dt.date
    last: dt.date | None = None
    delay: dt.timedelta = dt.timedelta()
    zone: str = "UTC"
    clock: Callable[[], dt.datetime] = field(default=lambda: dt.datetime.now(dt.UTC), repr=False)

    def __post_init__(self) -> None:
        wrong = [each for each in (self.first, self.last) if each is not None and type(each) is not dt.date]
        if wrong:
            raise InvalidSource(f"DateSplits: expected first and last to be of datetime.date, found {wrong[0]!r}.")
        if self.last is not None and self.last < self.first:
            raise InvalidSource(f"DateSplits: expected the last day not to be before the first, {self.first}, found {self.last}.")
        if self.delay < dt.timedelta() or (self.delay and self.last is not None):
            raise InvalidSource(
                f"DateSplits: expected a delay of at least 0, and none with a last day, at which no day is waited for; found "
                f"{self.delay} with last={self.last}."
            )
        try:
            ZoneInfo(self.zone)
        except (ZoneInfoNotFoundError, ValueError) as error:
            raise InvalidSource(
                f"DateSplits: expected a time zone such as 'Europe/Paris', found {self.zone!r}: {error}."
            ) from None

    def __call__(self) -> list[dt.date]:
        """The days that are splits now."""
        last = self.last
        if last is None:
            # Local time of the day: a day has ended when the next one begins there, also where clocks are changed.
            last = (self.clock() - self.delay).astimezone(ZoneInfo(self.zone)).date() - dt.timedelta(1)
        return [self.first + dt.timedelta(number) for number in range((last - self.first).days + 1)]
