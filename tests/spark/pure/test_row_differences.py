"""Rows of two results: equal in any order, and within the rounding of floating-point numbers."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row

from dagster_checkpoints.testing.row_differences import differences, in_column_order
from dagster_checkpoints.testing.source_rows import InvalidTestRowsError

VALUES = [
    None,
    0,
    1,
    True,
    "1",
    b"1",
    1.0,
    Decimal("1"),
    dt.date(2026, 1, 1),
    dt.datetime(2026, 1, 1),
    float("nan"),
    [1],
    (1, None),
    {"a": 1.0},
    {"a": 1},
    [],
    {},
]
values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=1), inner, max_size=3),
    max_leaves=6,
)
rows = st.lists(st.tuples(values, values), max_size=8)


@given(rows, st.randoms())
def test_rows_in_another_order_are_the_same(rows: list[Any], chance: Any) -> None:
    other = chance.sample(rows, len(rows))
    assert differences(rows, other) == ([], [])


@given(rows, st.data())
def test_a_row_that_is_missing_or_there_twice_is_found(rows: list[Any], data: st.DataObject) -> None:
    if rows:
        row = data.draw(st.sampled_from(rows))
        missing, unexpected = differences(rows, [each for each in rows if each is not row])
        assert row in missing or row != row
        assert not unexpected
        missing, unexpected = differences(rows, [*rows, row])
        assert (len(missing), len(unexpected)) == (0, 1)


@pytest.mark.parametrize("one", range(len(VALUES)))
@pytest.mark.parametrize("other", range(len(VALUES)))
def test_a_value_equals_itself_only(one: int, other: int) -> None:
    missing, unexpected = differences([(VALUES[one],)], [(VALUES[other],)])
    assert (not missing and not unexpected) == (one == other)


def test_a_moment_with_a_zone_equals_the_same_moment_as_pyspark_gives_it() -> None:
    moment = dt.datetime(2026, 7, 1, 12, tzinfo=dt.timezone(dt.timedelta(hours=5)))
    assert differences([(moment,)], [(dt.datetime.fromtimestamp(moment.timestamp()),)]) == ([], [])
    assert differences([(moment,)], [(dt.datetime.fromtimestamp(moment.timestamp() + 1),)]) != ([], [])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (0.1 + 0.2, 0.3, True),
        (1e300, 1e300 * (1 + 1e-12), True),
        (1.0, 1.0001, False),
        (0.0, -0.0, True),
        (float("inf"), float("inf"), True),
        (float("inf"), float("-inf"), False),
    ],
)
def test_floating_point_numbers_are_equal_within_rounding(one: float, other: float, same: bool) -> None:
    assert (differences([("x", [one])], [("x", [other])]) == ([], [])) is same


def test_rows_with_the_same_texts_and_several_numbers_are_paired() -> None:
    assert differences([("x", 1.0), ("x", 2.0), ("x", 2.0)], [("x", 2.0), ("x", 3.0), ("x", 1.0)]) == ([("x", 2.0)], [("x", 3.0)])


def test_values_with_names_are_compared_by_name() -> None:
    expected = in_column_order("s", [{"b": 1, "a": 2}, Row(b=1, a=2)], ["a", "b"], ())
    assert differences(expected, [Row(a=1, b=2)] * 2) != ([], [])
    assert differences(expected, [Row(a=2, b=1)] * 2) == ([], [])
    assert in_column_order("s", [{"b": 1, "a": 2, "c": 3}, Row(a=2, c=0, b=1)], ["a", "c", "b"], ["c"]) == [(2, 1)] * 2
    assert in_column_order("s", [(2, 1), Row(x=2, y=1)], ["a", "b"], ()) == [(2, 1)] * 2
    assert in_column_order("s", [{"b": 1, "a": 2}], None, ["a"]) == [(1,)]


def test_a_dictionary_with_other_columns_is_refused_by_name() -> None:
    with pytest.raises(InvalidTestRowsError, match=r"Stage 's': expected rows with the columns a, b, .* found .* with a, c"):
        in_column_order("s", [{"a": 1, "c": 2}], ["a", "b"], ())
