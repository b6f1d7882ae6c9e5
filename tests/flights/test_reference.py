"""The comparison of two tables: missing, duplicated and unexpected rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from assets.reference import Comparison, compare

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Rows = list[tuple[str | None, float | None]]

CASES: dict[str, tuple[Rows, Rows, Comparison]] = {
    "equal, in another order": ([("a", 1.0), ("b", None)], [("b", None), ("a", 1.0)], Comparison(2, 0, 0, 0)),
    "both empty": ([], [], Comparison(0, 0, 0, 0)),
    "one missing": ([("a", 1.0), ("b", 2.0)], [("a", 1.0)], Comparison(2, 1, 0, 0)),
    "nothing written": ([("a", 1.0), ("b", 2.0)], [], Comparison(2, 2, 0, 0)),
    "one twice": ([("a", 1.0), ("b", 2.0)], [("a", 1.0), ("b", 2.0), ("b", 2.0)], Comparison(2, 0, 1, 0)),
    "a row that may be there twice": ([("a", 1.0)] * 2, [("a", 1.0)] * 3, Comparison(2, 0, 1, 0)),
    "a row that should be there twice": ([("a", 1.0)] * 2, [("a", 1.0)], Comparison(2, 1, 0, 0)),
    "nothing expected": ([], [("a", 1.0), ("a", 1.0)], Comparison(0, 0, 0, 2)),
    "a wrong value": ([("a", 1.0)], [("a", 1.5)], Comparison(1, 1, 0, 1)),
    "null for a value": ([(None, 1.0)], [(None, None)], Comparison(1, 1, 0, 1)),
}


def table(spark: SparkSession, rows: Rows) -> DataFrame:
    return spark.createDataFrame(rows, "key STRING, value DOUBLE")


@pytest.mark.parametrize("name", CASES)
def test_rows_are_counted(spark: SparkSession, name: str) -> None:
    expected, actual, counts = CASES[name]
    result = compare(table(spark, expected), table(spark, actual))
    assert result == counts
    assert result.is_equal == (sorted(expected, key=str) == sorted(actual, key=str))


def test_the_order_of_columns_does_not_matter(spark: SparkSession) -> None:
    written = table(spark, [("a", 1.0)])
    assert compare(written, written.select("value", "key")).is_equal


def test_other_columns_are_refused_by_name(spark: SparkSession) -> None:
    written = table(spark, [("a", 1.0)])
    with pytest.raises(ValueError, match=r"'value': \('double', 'absent'\)"):
        compare(written, written.drop("value"))
    with pytest.raises(ValueError, match=r"'value': \('double', 'int'\)"):
        compare(written, written.selectExpr("key", "cast(value AS int) AS value"))
