"""The splits of a table: together they hold every row once, also rows without a value and rows outside of the first range."""

from __future__ import annotations

import datetime as dt
import itertools
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.sources.sql.splits import SplitOffset, SplitUnit

NUMBERS = st.integers(-(10**20), 10**20) | st.integers(-5, 5)


def holds(offset: SplitOffset, split: int, value: int | None) -> bool:
    values = offset.range_of(split)
    if value is None:
        return values.begin is None
    return (values.begin is None or value >= values.begin) and (values.end is None or value < values.end)


@given(NUMBERS, NUMBERS, st.integers(1, 50), st.none() | NUMBERS)
def test_every_value_is_in_one_split(one: int, other: int, splits: int, value: int | None) -> None:
    offset = SplitOffset.at_start(min(one, other), max(one, other), splits)
    assert 1 <= offset.splits <= splits
    for each in (value, one, other):
        assert [holds(offset, split, each) for split in range(offset.splits)].count(True) == 1


@given(NUMBERS, st.integers(0, 10**6), st.integers(1, 50))
def test_splits_are_equally_wide(lower: int, span: int, splits: int) -> None:
    offset = SplitOffset.at_start(lower, lower + span, splits)
    ranges = [offset.range_of(split) for split in range(offset.splits)]
    bounds = [lower, *[each.begin for each in ranges[1:]], lower + span + 1]
    widths = [end - begin for begin, end in itertools.pairwise(bounds)]  # type: ignore[operator]
    assert min(widths) >= 1 and max(widths) - min(widths) <= 1


@given(NUMBERS, NUMBERS, st.integers(1, 50), st.integers(1, 7))
def test_reading_ends_and_its_offsets_are_text(one: int, other: int, splits: int, per_trigger: int) -> None:
    offset = start = SplitOffset.at_start(min(one, other), max(one, other), splits)
    batches = 0
    while (after := SplitOffset.from_json(offset.to_json()).after(per_trigger)) != offset:
        offset, batches = after, batches + 1
    assert offset == start.at_end()
    assert batches == -(-start.splits // per_trigger)


def test_a_table_without_values_is_one_split() -> None:
    offset = SplitOffset.at_start(None, None, 9)
    assert offset.splits == 1 and holds(offset, 0, None) and holds(offset, 0, 4)


@pytest.mark.parametrize(
    ("unit", "value", "number", "back"),
    [
        (SplitUnit.NUMBER, Decimal("-2.5"), -3, -3),
        (SplitUnit.NUMBER, 7, 7, 7),
        (SplitUnit.DAY, dt.date(1, 1, 2), 2, dt.date(1, 1, 2)),
        (
            SplitUnit.MICROSECOND,
            dt.datetime(1969, 12, 31, 23, 59, 59, 999_999),
            -1,
            dt.datetime(1969, 12, 31, 23, 59, 59, 999_999),
        ),
        (
            SplitUnit.MICROSECOND_UTC,
            dt.datetime(1970, 1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1))),
            0,
            dt.datetime(1970, 1, 1, tzinfo=dt.UTC),
        ),
    ],
)
def test_units(unit: SplitUnit, value: object, number: int, back: object) -> None:
    assert unit.to_number(value) == number
    assert unit.to_value(number) == back
