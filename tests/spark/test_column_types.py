"""Types of columns: a channel carries them exactly, or the job is refused before anything starts."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as t

from dagster_checkpoints.cli.state import values
from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, stage
from dagster_checkpoints.spark.errors import StageResultError
from dagster_checkpoints.spark.job.pipeline_checks import check_plans
from dagster_checkpoints.spark.query.column_types import not_written, repeated_names
from dagster_checkpoints.spark.query.stage_inputs import nullable

CARRIED = """
    named_struct('d', INTERVAL '1 02:03:04.5' DAY TO SECOND, 'none', CAST(NULL AS INT)) AS nested,
    array(INTERVAL '3' HOUR, NULL) AS hours,
    map('a', named_struct('x', array(1S, NULL))) AS deep,
    TIMESTAMP_NTZ '0001-01-01 00:00:00' AS ntz,
    TIMESTAMP '9999-12-31 23:59:59.999999' AS late,
    DATE '0001-01-01' AS day,
    CAST(-1.5 AS DECIMAL(38, 18)) AS exact,
    X'00ff' AS bytes,
    'É' COLLATE UTF8_LCASE AS collated,
    CAST('a' AS CHAR(3)) AS padded,
    float('nan') AS nothing,
    INTERVAL '1-2' YEAR TO MONTH AS months,
    named_struct('y', INTERVAL '3' YEAR, 'v', parse_json('[1, "a"]')) AS loose,
    1Y AS small
"""


def test_a_channel_carries_these_types_exactly(lab: Any) -> None:
    @bounded_source
    def rows(context):
        return context.spark.range(3).select("id", F.expr("'x' || id").alias("key"), *_columns(context.spark))

    @stage(inputs={"rows": StageInput(key="key")}, instances=["a", "b"], sink=lab.sink())
    def copied(rows):
        return rows.select("*", F.col("hours")[0].alias("hour"))

    lab.start(Pipeline("types", [rows, copied])).finished()
    found = lab.spark.read.parquet(str(lab.folder / "out")).drop("checkpoint")
    expected = lab.spark.range(3).select("id", F.expr("'x' || id").alias("key"), *_columns(lab.spark))
    expected = expected.select("*", F.col("hours")[0].alias("hour"))
    assert {f.name: f.dataType for f in found.schema} == {f.name: f.dataType for f in nullable(expected.schema)}
    assert lab.rows(_collectable(found)) == lab.rows(_collectable(expected))
    assert found.where("isnan(nothing)").count() == 3


def test_what_no_file_holds_is_refused_before_anything_starts(lab: Any) -> None:
    @bounded_source
    def rows(context):
        return context.spark.range(3).select(F.expr("named_struct('c', make_interval(1, 2))").alias("s"))

    @stage(sink=lab.sink())
    def counted(rows):
        return rows.select(F.lit(1).alias("one"))

    job = lab.start(Pipeline("types", [rows, counted]))
    error = str(job.result().error)
    assert "Stage 'rows' (instance '0')" in error and "test_column_types.py" in error
    assert "of type interval" in error and "cast('string')" in error
    assert not (lab.folder / "out").exists()


def test_which_types_segments_hold() -> None:
    held = "a map<string,array<struct<x:decimal(3,1),y:interval day>>>, b array<variant>, c struct<c:map<int,interval year>>"
    assert not_written(t.StructType.fromDDL(held)) == []
    neither = t.StructType([t.StructField("i", t.CalendarIntervalType()), t.StructField("n", t.ArrayType(t.TimeType()))])
    assert [path for path, _ in not_written(neither)] == ["i", "n"]
    empty = "s struct<>, n struct<a:int,e:struct<>>, a array<struct<>>, m map<int,array<struct<x:struct<>>>>, k map<struct<>,int>"
    assert [path for path, _ in not_written(t.StructType.fromDDL(empty))] == ["s", "n.e", "a", "m.x", "k"]


def test_which_names_a_structure_has_twice() -> None:
    twice = "a int, s struct<b:int,B:int,n:array<struct<c:int,C:int>>>, m map<struct<d:int,D:int>,struct<d:int,e:int>>, S int"
    assert list(repeated_names(t.StructType.fromDDL(twice))) == ["s", "s.b", "s.n.c", "m.d"]
    assert list(repeated_names(t.StructType.fromDDL("a struct<a:int,b:struct<a:int>>, b array<struct<a:int>>"))) == []


REFUSED = {
    "no column": (lambda rows: rows.select(), "has no column. Select at least one"),
    "a structure": (lambda rows: rows.select("k", F.struct().alias("s")), "of type struct<>.*Give the structure a field"),
    "a structure in an array": (lambda rows: rows.select(F.array(F.struct()).alias("s")), "column 's' of type struct<>"),
    "a structure in a structure": (
        lambda rows: rows.select(F.struct("k", F.struct().alias("e")).alias("s")),
        r"column 's\.e' of type struct<>",
    ),
    "fields of one name": (
        lambda rows: rows.selectExpr("array(named_struct('e', k, 'E', k)) AS s"),
        r"more than one column 's\.e' \(upper and lower case",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_channel_carries_is_known_at_check(lab: Any, name: str) -> None:
    function, text = REFUSED[name]

    @bounded_source
    def rows(context):
        return lab.stream("in", "k long")

    last = stage(name="last", sink=lab.sink())(lambda rows: function(rows))
    (error,) = check_plans(Pipeline("types", [rows, last]), lab.spark).failed.values()
    assert type(error) is StageResultError and error.stage == "last" and re.search(text, str(error)), error


def test_values_that_the_command_line_shows_of_state_have_all_their_digits(spark: Any) -> None:
    moments = "TIMESTAMP '2026-01-01 00:00:00.000001' AS at, TIMESTAMP_NTZ '0001-01-01 23:59:59.999999' AS local"
    (row,) = values(spark.sql(f"SELECT named_struct('n', 12345678901234567.89BD) AS key, {moments}, CAST(NULL AS INT) AS none"))
    assert row == {
        "key": {"n": Decimal("12345678901234567.89")},
        "at": "2026-01-01T00:00:00.000001Z",
        "local": "0001-01-01T23:59:59.999999",
        "none": None,
    }


def _collectable(frame: DataFrame) -> DataFrame:
    """The rows in types that Spark can hand to Python, and without the column that no value equals."""
    texts = {"months": F.col("months").cast("string"), "loose": F.to_json("loose")}
    return frame.drop("nothing").withColumns(texts)


def _columns(spark: Any) -> list[Any]:
    frame = spark.sql(f"SELECT {CARRIED}")
    depth, part, columns = 0, "", []
    for letter in CARRIED:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            columns.append(part)
            part = ""
        else:
            part += letter
    columns.append(part)
    assert len(columns) == len(frame.columns)
    return [F.expr(column.strip()) for column in columns]
