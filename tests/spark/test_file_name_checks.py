"""Names of the files of rows: refused behind the sources, where the files are the pipeline's own, in whatever layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, stage
from dagster_checkpoints.spark.errors import PlanRefusedError
from dagster_checkpoints.spark.job.pipeline_checks import check_plans
from tests.spark.conftest import Lab

ROWS = "k string, v long"
Transform = Callable[[Any, Any], Any]


def lookup(rows: Any) -> Any:
    """A table that the stage reads itself."""
    folder = str(Path(__file__).parent)
    return rows.sparkSession.read.schema("k string").parquet(folder).select("k", F.input_file_name().alias("file"))


REFUSED: dict[str, tuple[Transform, str]] = {
    "a column": (lambda rows, table: rows.withColumn("file", F.input_file_name()), "input_file_name()"),
    "in an expression": (
        lambda rows, table: rows.select(F.concat(F.lit("at "), F.input_file_block_start().cast("string")).alias("at")),
        "input_file_block_start()",
    ),
    "in a filter": (lambda rows, table: rows.where(F.input_file_block_length() > 0), "input_file_block_length()"),
    "behind a join with a table of its own": (
        lambda rows, table: rows.join(lookup(rows).select("k"), "k").select(F.input_file_name().alias("file")),
        "input_file_name()",
    ),
    "of one side of a join with itself": (
        lambda rows, table: rows.join(rows.select("k", F.input_file_name().alias("file")), "k").select("file"),
        "input_file_name()",
    ),
    "of a static input": (
        lambda rows, table: rows.join(table.select("k", F.input_file_name().alias("file")), "k").select("file"),
        "input_file_name()",
    ),
    "the hidden column of a static input": (
        lambda rows, table: rows.join(table.select("k", "_metadata.file_path"), "k").select("file_path"),
        "_metadata",
    ),
}
ACCEPTED: dict[str, Transform] = {
    "none": lambda rows, table: rows.join(table, "k"),
    "of a table of its own": lambda rows, table: rows.join(lookup(rows), "k"),
    "a column of that name": lambda rows, table: rows.join(table.select("k", F.col("_metadata")), "k"),
}


def pipeline(lab: Lab, function: Transform, *, chaining: bool) -> Pipeline:
    @bounded_source
    def rows(context: Any) -> Any:
        return lab.stream("in", ROWS).withColumn("file", F.input_file_name())

    @bounded_source
    def table(context: Any) -> Any:
        own = "_metadata" if function is ACCEPTED["a column of that name"] else "name"
        return lab.table("table", "k string").withColumn(own, F.lit("its own"))

    @stage(inputs={"rows": StageInput(), "table": StageInput(mode="static")})
    def named(rows: Any, table: Any) -> Any:
        return function(rows.withColumnRenamed("file", "read_from"), table)

    @stage(sink=lab.sink())
    def last(named: Any) -> Any:
        return named

    return Pipeline("p", [rows, table, named, last], chaining=chaining)


@pytest.mark.parametrize("chaining", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_a_stage_does_not_ask_for_the_files_of_its_inputs(lab: Lab, name: str, chaining: bool) -> None:
    function, found = REFUSED[name]
    error = check_plans(pipeline(lab, function, chaining=chaining), lab.spark).failed.get("named")
    assert type(error) is PlanRefusedError, error
    assert f"has {found} of rows of its inputs" in str(error) and "_metadata.file_path" in str(error)


@pytest.mark.parametrize("chaining", [True, False])
@pytest.mark.parametrize("name", ACCEPTED)
def test_a_source_names_its_files_and_a_stage_those_that_it_reads_itself(lab: Lab, name: str, chaining: bool) -> None:
    assert not check_plans(pipeline(lab, ACCEPTED[name], chaining=chaining), lab.spark).failed


def test_a_stage_in_the_query_of_its_source_does_not_either(lab: Lab) -> None:
    @bounded_source
    def rows(context: Any) -> Any:
        return lab.stream("in", ROWS).withColumn("file", F.col("_metadata.file_path")).withColumn("also", F.input_file_name())

    passed = stage(name="passed")(lambda rows: rows.select("file", "also"))
    last = stage(name="last", sink=lab.sink())(lambda passed: passed)
    assert not check_plans(Pipeline("p", [rows, passed, last]), lab.spark).failed
    named = stage(name="passed")(lambda rows: rows.withColumn("name", F.input_file_name()))
    for chaining in (True, False):
        (error,) = check_plans(Pipeline("p", [rows, named, last], chaining=chaining), lab.spark).failed.values()
        assert type(error) is PlanRefusedError and error.stage == "passed"
