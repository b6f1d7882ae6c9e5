"""Errors of Spark: first the remedy for a pipeline, then Spark's text, whose hints are meant for a query without a pipeline."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F

from dagster_checkpoints.cli.loading import CodeNotImported, load_code
from dagster_checkpoints.pipeline import Pipeline, bounded_source, stage
from dagster_checkpoints.spark.errors import PlanRefusedError, StageError, StageFailedError
from dagster_checkpoints.spark.job.pipeline_checks import check_plans
from dagster_checkpoints.spark.query.error_text import advice_on_failed_query, no_pandas

FLIGHTS = "k string, ts timestamp, v long"


def outer_join(flights: Any) -> Any:
    return flights.alias("a").join(flights.select("k", F.col("v").alias("w")).alias("b"), "k", "left")


def writes(flights: Any) -> Any:
    flights.write.parquet("/nowhere")
    return flights


def subquery(flights: Any) -> Any:
    return flights.sparkSession.sql("SELECT * FROM {f} WHERE v IN (SELECT v FROM {f})", f=flights)


@pytest.mark.parametrize(
    ("watermark", "function", "kind", "remedy"),
    [
        (
            None,
            lambda flights: flights.groupBy("k").count(),
            PlanRefusedError,
            r"groups are never complete: no event time reaches it\. Declare watermark=\(column, lateness\) at the source "
            r"'flights' \(.*test_spark_advice\.py:\d+\).* output_mode=\"update\" or \"complete\"",
        ),
        (
            "ts",
            lambda flights: flights.groupBy("k").count(),
            PlanRefusedError,
            r"use its event time 'ts' as well.*F\.window\('ts'",
        ),
        ("ts", lambda flights: flights.orderBy("v"), PlanRefusedError, r"remove the sort.*output_mode=\"complete\""),
        (
            None,
            lambda flights: flights.dropDuplicatesWithinWatermark(["k"]),
            PlanRefusedError,
            r"It is not known how long rows must be kept to find duplicates: .*Declare watermark=",
        ),
        (None, outer_join, PlanRefusedError, r"outer join.*declare watermark=\(column, lateness\) at the sources of both inputs"),
        (None, writes, StageFailedError, r"returns the DataFrame: set sink= of the stage"),
        (None, lambda flights: [flights.count()], StageFailedError, r"reads rows of a stream.*return the DataFrame"),
        (None, subquery, StageFailedError, r"reads a stream in a subquery.*mode=\"static\""),
    ],
)
def test_the_remedy_comes_before_what_spark_says(
    lab: Any, watermark: str | None, function: Callable[[Any], Any], kind: type[StageError], remedy: str
) -> None:
    @bounded_source(watermark=(watermark, "1 minute") if watermark else None)
    def flights(context):
        return lab.stream("in", FLIGHTS)

    @stage(sink=lab.sink())
    def last(flights):
        return function(flights)

    error = lab.start(Pipeline("p", [flights, last], chaining=False)).result().error
    assert type(error) is kind
    assert re.match(r"Stage 'last' \(instance '0'\): ", str(error))
    parts = re.split(r"\n(?=Spark: |AnalysisException: )", str(error), maxsplit=1)
    assert len(parts) == 2, f"{error} ({error.__cause__!r})"
    ours, sparks = parts
    assert re.search(remedy, ours, re.DOTALL)
    assert "stream" in sparks.lower()


def test_the_error_for_changed_state_names_the_remedy_and_warns_of_sparks_own_hint(lab: Any) -> None:
    lab.put("in", FLIGHTS, [("a", lab.at(0), 1)])

    def run(key: str) -> None:
        counted = lab.stream("in", FLIGHTS).groupBy(key).count()
        writer = counted.writeStream.outputMode("complete").option("checkpointLocation", str(lab.folder / "checkpoint"))
        writer.trigger(availableNow=True).foreachBatch(lambda batch, _: batch.collect()).start().awaitTermination()

    run("k")
    lab.put("in", FLIGHTS, [("b", lab.at(1), 2)])
    with pytest.raises(StreamingQueryException) as raised:
        run("v")
    assert "stateSchemaCheck" in str(raised.value)
    advice = advice_on_failed_query(raised.value)
    assert "revert that change and resume" in advice
    assert "Do not delete the checkpoint" in advice
    assert "do not set the Spark configuration" in advice
    assert advice_on_failed_query(ValueError("[STATE]")) == ""


def test_a_processor_that_emits_rows_behind_the_watermark_gets_a_remedy() -> None:
    """Executors' errors have Spark's condition as text."""
    error = RuntimeError("[EMITTING_ROWS_OLDER_THAN_WATERMARK_NOT_ALLOWED] Previous node emitted a row with eventTime=1")
    assert "Leave out eventTimeColumnName" in advice_on_failed_query(error)


def test_pandas_that_is_not_installed_is_named_with_its_extra(lab: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @bounded_source
    def flights(context):
        return lab.stream("in", FLIGHTS)

    @stage(sink=lab.sink())
    def last(flights):
        monkeypatch.setitem(sys.modules, "pandas", None)  # as if it were not installed
        return flights.mapInPandas(lambda batches: batches, FLIGHTS)

    report = check_plans(Pipeline("p", [flights, last]), lab.spark)
    remedy = "pip install 'dagster-checkpoints[pandas]'"
    assert remedy in str(report.failed["last"]) and "mapInPandas" in str(report.failed["last"])
    (tmp_path / "code.py").write_text("from pyspark.sql import functions as F\ntwice = F.pandas_udf(lambda v: v * 2, 'long')\n")
    with pytest.raises(CodeNotImported, match=re.escape(remedy)):
        load_code(None, str(tmp_path / "code.py"))
    for text in ("[PACKAGE_NOT_INSTALLED] Pyarrow >= 18.0.0 must be installed", "No module named 'pandas_of_mine'"):
        assert not no_pandas(ImportError(text))
    assert remedy in advice_on_failed_query(RuntimeError("ModuleNotFoundError: No module named 'pandas'"))
