"""Days as splits: those that have ended where they are counted."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from dagster_checkpoints.sources import DateSplits, FileSplits, InvalidSource, TableSplits

FIRST = dt.date(2026, 3, 27)


def days(now: str, **options: Any) -> list[str]:
    found = DateSplits(FIRST, clock=lambda: dt.datetime.fromisoformat(now), **options)()
    return [f"{day:%m-%d}" for day in found]


@pytest.mark.parametrize(
    ("now", "options", "expected"),
    [
        ("2026-03-27T23:59:59+00:00", {}, []),
        ("2026-03-28T00:00:00+00:00", {}, ["03-27"]),
        ("2026-03-29T00:00:00+00:00", {}, ["03-27", "03-28"]),
        ("2026-03-28T01:59:59+00:00", {"delay": dt.timedelta(hours=2)}, []),
        ("2026-03-28T02:00:00+00:00", {"delay": dt.timedelta(hours=2)}, ["03-27"]),
        ("2026-03-28T03:59:59+00:00", {"zone": "America/New_York"}, []),
        ("2026-03-28T04:00:00+00:00", {"zone": "America/New_York"}, ["03-27"]),
        ("2026-03-29T21:59:59+00:00", {"zone": "Europe/Berlin"}, ["03-27", "03-28"]),  # a day of 23 hours
        ("2026-03-29T22:00:00+00:00", {"zone": "Europe/Berlin"}, ["03-27", "03-28", "03-29"]),
        ("2020-01-01T00:00:00+00:00", {}, []),
        ("2020-01-01T00:00:00+00:00", {"last": dt.date(2026, 3, 28)}, ["03-27", "03-28"]),
    ],
)
def test_a_day_is_a_split_once_it_has_ended(now: str, options: dict[str, Any], expected: list[str]) -> None:
    assert days(now, **options) == expected


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DateSplits(dt.datetime(2026, 1, 1)), "to be of datetime.date, found datetime.datetime"),
        (lambda: DateSplits(FIRST, dt.date(2026, 1, 1)), "not to be before the first, 2026-03-27, found 2026-01-01"),
        (lambda: DateSplits(FIRST, delay=dt.timedelta(hours=-1)), "expected a delay of at least 0"),
        (lambda: DateSplits(FIRST, FIRST, dt.timedelta(hours=1)), "none with a last day"),
        (lambda: DateSplits(FIRST, zone="Europe/Nowhere"), "expected a time zone such as 'Europe/Paris', found 'Europe/Nowhere'"),
        (lambda: FileSplits("/"), "expected a pattern such as"),
        (lambda: FileSplits("s3a://b/day=*/"), "a prefix that ends with a slash and has no wildcards"),
        (lambda: FileSplits("/x", complete="*"), "expected complete to be the name of a file"),
        (lambda: TableSplits(""), "expected a database"),
        (lambda: TableSplits("x", like="a'b"), "a pattern of names without '"),
    ],
)
def test_what_is_refused(make: Any, text: str) -> None:
    with pytest.raises(InvalidSource, match=text):
        make()
