"""The texts of errors: the user's line comes first, what is not a DataFrame is named, a file's wrong type names its source."""

from __future__ import annotations

import logging.config
import re
import types
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, bounded_source, stage
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.errors import SourceFileError, StageError, StageFailedError, StageResultError
from dagster_checkpoints.spark.job.events import JobRestarting
from dagster_checkpoints.spark.job.pipeline_checks import check_plans

ROWS = "k string, v long"
FOLDER = str(Path(__file__).parent)


def refused(spark: SparkSession, function: Any) -> StageError:
    """The error with which `check` refuses a stage that returns the function's result."""

    @bounded_source
    def orders(context):
        return spark.readStream.schema(ROWS).parquet(FOLDER)

    daily = stage(name="daily", sink=ParquetSink("/nowhere"))(lambda orders: function(orders))
    (error,) = check_plans(Pipeline("p", [orders, daily]), spark).failed.values()
    return error


# The user's line


def missing_column(orders: Any) -> Any:
    return orders.groupBy("day").count()  # the line


def missing_in_text(orders: Any) -> Any:
    return orders.selectExpr("v + nothing AS v")  # the line


def missing_in_where(orders: Any) -> Any:
    return orders.where("x > 1").join(orders.groupBy("k").count(), "k")  # the line


def missing_table(orders: Any) -> Any:
    return orders.join(orders.sparkSession.table("no_such_table"), "k")  # the line


def wrong_types(orders: Any) -> Any:
    return orders.withColumn("v", F.array("k", "v") + F.lit(1))  # the line


def no_aggregate(orders: Any) -> Any:
    return orders.groupBy("k").agg(F.col("v"))  # the line


def no_query(orders: Any) -> Any:
    return orders.sparkSession.sql("SELEC k")  # the line


def two_branches(orders: Any) -> Any:
    return orders.union(orders.select("k"))  # the line


def not_of_spark(orders: Any) -> Any:
    return orders.select([][0])  # the line


def deep_in_a_library(orders: Any) -> Any:
    return orders.select(re.sub("(", "", "k"))  # the line


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (missing_column, "UNRESOLVED_COLUMN"),
        (missing_in_text, "UNRESOLVED_COLUMN"),
        (missing_in_where, "UNRESOLVED_COLUMN"),
        (missing_table, "TABLE_OR_VIEW_NOT_FOUND"),
        (wrong_types, "DATATYPE_MISMATCH"),
        (no_aggregate, "MISSING_AGGREGATION|MISSING_GROUP_BY"),
        (no_query, "PARSE_SYNTAX_ERROR"),
        (two_branches, "NUM_COLUMNS_MISMATCH"),
        (not_of_spark, "IndexError"),
        (deep_in_a_library, "error: missing"),
    ],
)
def test_the_users_line_comes_first_and_no_plan_of_sparks_at_all(
    spark: SparkSession, function: Any, found: str, capfd: pytest.CaptureFixture[str]
) -> None:
    text = str(refused(spark, function))
    first, *rest = text.splitlines()
    assert re.fullmatch(r"Stage 'daily' \(instance '0'\): failed at .*test_error_texts\.py:\d+, in \w+: .*# the line", first), (
        text
    )
    assert re.search(found, "\n".join(rest))
    assert len(rest) < 12
    assert not re.search(r"^\s*(\+-|'?(Project|Filter|Join|Aggregate|\w+Relation)\b)", text, re.MULTILINE)
    assert "\tat org.apache" not in text and "Traceback" not in text
    # PySpark logs each of these errors, with the plan, as a line of JSON on the standard error.
    assert "QueryContextLogger" not in capfd.readouterr().err


def test_an_error_without_a_line_of_the_users_names_the_definition_and_no_line_of_a_library(spark: SparkSession) -> None:
    from dagster_checkpoints.spark.query.error_location import located

    @bounded_source
    def orders(context):
        return None

    try:
        Path("/proc/no/such/directory").mkdir(parents=True)
    except OSError as error:
        error.__traceback__ = error.__traceback__.tb_next  # as if only pathlib had been called
        text = located(error, orders)
    assert text.startswith(f"in the stage that {orders.location} defines\n")
    assert "pathlib.py" not in text


# What is not a DataFrame


def polars_frame() -> Any:
    module = types.ModuleType("polars.dataframe.frame")
    exec("class DataFrame: pass", module.__dict__)
    return module.DataFrame()


class Geo(pd.DataFrame):
    """A subclass, as geopandas has one."""


def yields(orders: Any) -> Any:
    yield orders


async def awaits(orders: Any) -> Any:
    return orders


RESULTS: list[tuple[Any, str, str]] = [
    (lambda f: pd.DataFrame({"k": ["a"]}), "found a pandas.DataFrame", "spark.createDataFrame"),
    (lambda f: Geo({"k": ["a"]}), "found a pandas.DataFrame", "spark.createDataFrame"),
    (lambda f: pd.Series([1]), "found a pandas.Series", "spark.createDataFrame"),
    (lambda f: pa.table({"k": ["a"]}), "found a pyarrow.Table", "spark.createDataFrame"),
    (lambda f: polars_frame(), "found a polars.DataFrame", "createDataFrame(rows.to_arrow())"),
    (lambda f: F.col("v"), "found a Column", "frame.select(column)"),
    (lambda f: f.groupBy("k"), "found a GroupedData", ".agg(...)"),
    (lambda f: f.groupBy("k").pivot("v", [1]), "found a GroupedData", ".agg(...)"),
    (lambda f: None, "found None", "has no return"),
    (lambda f: [("a", 1)], "found a list", "createDataFrame(rows)"),
    (lambda f: [f, f], "found a list of 2 DataFrames", "unionByName"),
    (lambda f: (f,), "found a tuple that holds a DataFrame", "comma"),
    (lambda f: {"rows": f}, "found a dict that holds a DataFrame", "itself"),
    (lambda f: f.writeStream, "found a DataStreamWriter", "sink="),
    (lambda f: f.sparkSession.range(1).write, "found a DataFrameWriter", "sink="),
    (lambda f: f.sparkSession.readStream, "found a DataStreamReader, which has read nothing", ".load()"),
    (lambda f: f.sparkSession.read, "found a DataFrameReader, which has read nothing", ".parquet(path)"),
    (lambda f: f.sparkSession.range(1).rdd, "found an RDD", "toDF()"),
    (lambda f: f.distinct, "found a method that was not called", "frame.distinct()"),
    (lambda f: lambda: f, "found a function", "call it"),
    (yields, "found a generator", "yield"),
    (lambda f: "orders", "found a text", "context.spark.table(name)"),
    (lambda f: 3, "found an object of the class builtins.int", "Return the DataFrame"),
]


@pytest.mark.parametrize(("function", "found", "remedy"), RESULTS, ids=[found for _, found, _ in RESULTS])
def test_what_is_not_a_dataframe_is_named_with_what_makes_it_one(
    spark: SparkSession, function: Any, found: str, remedy: str
) -> None:
    error = refused(spark, function)
    assert type(error) is StageResultError
    assert f"expected its function ({Path(__file__)}:" in str(error) and "to return a Spark DataFrame, " + found in str(error)
    assert remedy.lower() in str(error).lower()


def test_a_coroutine_is_no_dataframe(spark: SparkSession) -> None:
    made: list[Any] = []

    def kept(orders: Any) -> Any:
        made.append(awaits(orders))
        return made[0]

    assert "found a coroutine. The function is declared async def: write def" in str(refused(spark, kept))
    made[0].close()


def test_a_dataframe_of_spark_connect_is_of_another_session() -> None:
    from pyspark.sql import DataFrame

    from dagster_checkpoints.spark.query.stage_calls import no_dataframe

    connect = type("DataFrame", (DataFrame,), {"__module__": "pyspark.sql.connect.dataframe", "__new__": object.__new__})
    assert "Spark Connect" in no_dataframe(connect())


# Files of a source


WRONG_TYPES = [  # written, declared; whether another source of the same query reads sound files
    ("v string", "7", "v long", "'v' of type bigint", "BINARY", False),
    ("v long", 7, "v int", "'v' of type int", "INT64", True),
    ("v double", 7.5, "v timestamp", "'v' of type timestamp", "DOUBLE", False),
    ("s struct<x: long>", {"x": 1}, "s struct<x: string>", "'s.x' of type string", "INT64", True),
    ("s array<long>", [1], "s array<string>", "'s.list.element' of type string", "INT64", False),
]


@pytest.mark.parametrize(("written", "value", "declared", "expected", "found", "fused"), WRONG_TYPES)
def test_a_files_wrong_type_names_the_source_the_file_and_the_column(
    lab: Any, written: str, value: Any, declared: str, expected: str, found: str, fused: bool
) -> None:
    file = lab.put("in 1", written, [(value,)])
    lab.put("sound", declared, [])

    @bounded_source
    def sound(context):
        return lab.stream("sound", declared)

    @bounded_source
    def orders(context):
        return lab.stream(file.parent.name, declared)

    if fused:

        @stage(sink=lab.sink())
        def last(sound, orders):
            return sound.unionByName(orders)
    else:

        @stage(sink=lab.sink())
        def last(orders):
            return orders

    job = lab.start(Pipeline("p", [sound, orders, last] if fused else [orders, last]))
    result = job.result()
    cause = result.error.__cause__
    assert type(cause) is SourceFileError and cause.stage == "orders", repr(cause)
    assert not job.of(JobRestarting)
    text = str(cause)
    assert f"{orders.location} defines: expected column {expected}" in text
    assert file.name in text and f"found the Parquet type {found}" in text
    assert "py4j" not in text and "cast the column behind the source" in text


def test_a_file_that_is_none_names_the_source_and_the_file(lab: Any) -> None:
    lab.put("in", ROWS, [("a", 1)])
    broken = lab.input("in") / "zz.parquet"
    broken.write_text("no Parquet")

    @bounded_source
    def orders(context):
        return lab.stream("in", ROWS)

    @stage(sink=lab.sink())
    def last(orders):
        return orders

    error = lab.start(Pipeline("p", [orders, last])).result().error.__cause__
    assert type(error) is StageFailedError and error.stage == "orders"
    assert f"{broken.name}, found: " in str(error) and "is not a Parquet file" in str(error)


@pytest.mark.parametrize("column", [F.expr, F.col], ids=["SQL", "DataFrame"])
def test_the_logs_of_pyspark_that_repeat_an_error_are_off(spark: SparkSession, capfd: Any, column: Any) -> None:
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})  # as Dagster does
    with pytest.raises(AnalysisException):
        spark.range(1).select(column("absent")).collect()
    assert "QueryContextLogger" not in capfd.readouterr().err
