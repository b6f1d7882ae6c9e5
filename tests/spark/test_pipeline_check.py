"""`check_pipeline`: mistakes that a batch or a look at the plans shows, what it compares, and what it refuses.

Mistakes that only a job shows, and sound pipelines, are in `long/test_planted_mistakes.py`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dagster_checkpoints import ParquetSink, Pipeline, bounded_source, stage
from dagster_checkpoints.spark.job.pipeline_checks import check_plans
from dagster_checkpoints.testing import (
    HistoryMismatchError,
    InvalidTestRowsError,
    SourceRows,
    StageFindingError,
    check_pipeline,
)
from dagster_checkpoints.testing.replaced_pipeline import ReplacedPipeline
from tests.spark.planted_mistakes import (
    MISTAKES,
    NOWHERE,
    ROWS,
    at,
    found_mistake,
    hourly,
    newest,
    numbered,
    once_each,
    pipeline,
    recent,
    some_rows,
)


@pytest.mark.parametrize("name", [name for name, mistake in MISTAKES.items() if mistake.quick])
def test_a_mistake_is_found_and_made_small(name: str, spark: SparkSession, tmp_path: Path) -> None:
    found_mistake(name, spark, tmp_path)


def test_a_sound_pipeline_as_a_batch_and_as_a_job(spark: SparkSession) -> None:
    checked = check_pipeline(pipeline(hourly), {"orders": some_rows()}, spark=spark, histories=2)
    assert (checked.reference, checked.rows) == ("batch", {"hourly": 12})
    assert [history.engine for history in checked.histories] == ["batch", "batch", "batch", "stream", "stream"]
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"


def test_rows_in_order_are_not_shuffled(spark: SparkSession) -> None:
    inputs = {"orders": some_rows()}
    checked = check_pipeline(pipeline(newest), inputs, spark=spark, histories=0, in_order=["orders"])
    assert [history.engine for history in checked.histories] == ["batch"] * 3


def test_findings_that_are_meant_to_be_so(spark: SparkSession) -> None:
    inputs = {"orders": some_rows()}
    with pytest.raises(StageFindingError) as raised:
        check_pipeline(pipeline(recent), inputs, spark=spark, histories=0)
    (finding,) = raised.value.findings
    assert finding.startswith("Stage 'recent' (") and "planted_mistakes.py:" in finding
    check_pipeline(pipeline(recent), inputs, spark=spark, histories=0, allow=["asks the clock"])


def test_a_bounded_source_without_rows_yet_is_no_finding(spark: SparkSession, tmp_path: Path) -> None:
    """A source whose directory is empty is warned of; that of a test's rows is empty while the plans are looked at."""
    history = bounded_source(name="history", sink=ParquetSink("/nowhere"))(lambda context: None)
    replaced = ReplacedPipeline(Pipeline("p", [history]), {"history[0]": "n long"}, ["history"], tmp_path, spark)
    report = check_plans(replaced.pipeline(), spark)
    assert (report.warnings, report.failed) == ([], {})


def test_columns_that_are_not_compared(spark: SparkSession) -> None:
    inputs = {"orders": some_rows()}
    with pytest.raises(HistoryMismatchError, match="number="):
        check_pipeline(pipeline(numbered), inputs, spark=spark, histories=0)
    check_pipeline(pipeline(numbered), inputs, spark=spark, histories=0, ignore={"numbered": ["number"]})


def test_what_the_user_expects(spark: SparkSession) -> None:
    """He expects whole hours; a batch has the same."""
    asked = []

    def expected(rows: Any) -> Any:
        asked.append(len(rows["orders"]))
        return {"dear": [{"price": row.price} for row in rows["orders"] if row.price >= least]}

    @stage(sink=ParquetSink(NOWHERE))
    def dear(orders: Any) -> Any:
        return orders.where("price >= 10").select("price")

    least = 10
    checked = check_pipeline(pipeline(dear), {"orders": some_rows()}, expected=expected, spark=spark, histories=1)
    assert (checked.reference, checked.rows["dear"], asked) == ("expected", 13, [40])
    least = 9
    with pytest.raises(HistoryMismatchError, match="Expected, not found") as raised:
        check_pipeline(pipeline(dear), {"orders": some_rows()}, expected=expected, spark=spark, histories=1)
    (row,) = raised.value.rows["orders[0]"].values()
    assert row["price"] == 9 and raised.value.failure.missing == [(9,)]


def test_an_operator_of_streams_is_compared_with_one_micro_batch(spark: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dagster_checkpoints"):
        checked = check_pipeline(once_each(), {"orders": some_rows()}, spark=spark, histories=1)
    assert checked.reference == "one micro-batch"
    assert "give expected= to compare with what you expect" in caplog.text


def test_an_operator_of_streams_is_compared_with_what_is_expected(spark: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    def expected(rows: Any) -> Any:
        return {"once": {(row.price, row.at) for row in rows["orders"]}}

    with caplog.at_level(logging.WARNING, "dagster_checkpoints"):
        checked = check_pipeline(once_each(), {"orders": some_rows()}, expected=expected, spark=spark, histories=1)
    assert checked.reference == "expected"
    assert "give expected=" not in caplog.text


def test_a_stage_that_fails_as_it_is_raises_its_own_error(spark: SparkSession) -> None:
    @stage(sink=ParquetSink(NOWHERE))
    def broken(orders: Any) -> Any:
        raise ValueError("not today")

    with pytest.raises(Exception, match="not today") as raised:
        check_pipeline(pipeline(broken), {"orders": some_rows()}, spark=spark)
    assert not isinstance(raised.value, HistoryMismatchError)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"orders": SourceRows(ROWS, [])}, "expected rows to compare, found none of hourly"),
        ({"order": SourceRows(ROWS, [])}, "found 'order'.*orders"),
        ({}, r"found none of orders\[0\]"),
        ({"orders": SourceRows(ROWS, [("x", "noon", 1)])}, r"The rows of orders\[0\], step 0, do not fit"),
        ({"orders": SourceRows("shop string, price long", [("x", 1)])}, "watermark's column 'at'.*found 'shop', 'price'"),
        ({"orders": SourceRows("at string", [("x",)])}, "watermark's column 'at' as a timestamp.*found string"),
    ],
)
def test_rows_with_which_nothing_can_be_checked(given: dict[str, SourceRows], text: str, spark: SparkSession) -> None:
    with pytest.raises(InvalidTestRowsError, match=text):
        check_pipeline(pipeline(hourly), given, spark=spark)


def test_a_stage_whose_rows_are_empty_is_no_success(spark: SparkSession) -> None:
    @stage(sink=ParquetSink(NOWHERE))
    def none(orders: Any) -> Any:
        return orders.where(F.col("price") > 1_000_000)

    with pytest.raises(InvalidTestRowsError, match="found none of none"):
        check_pipeline(pipeline(none), {"orders": SourceRows(ROWS, [("x", at(0), 1)])}, spark=spark)
