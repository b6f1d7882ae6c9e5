"""Stages that cannot run: refused before anything starts, by an error that names the stage and says what to do."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.errors import (
    EventTimeError,
    PlanRefusedError,
    StageError,
    StageFailedError,
    StageResultError,
    StageWatermarkError,
)
from dagster_checkpoints.spark.job.events import JobStarted

FLIGHTS = "k string, ts timestamp, v long"


def no_dataframe(flights: Any) -> Any:
    return [flights]


def own_watermark(flights: Any) -> Any:
    return flights.withWatermark("ts", "1 hour")


def window_struct(flights: Any) -> Any:
    return flights.groupBy(F.window("ts", "1 hour").alias("ts")).count()


def no_time_zone(flights: Any) -> Any:
    return flights.withColumn("ts", F.col("ts").cast("timestamp_ntz"))


def event_time_dropped(flights: Any) -> Any:
    return flights.groupBy(F.window("ts", "1 hour")).count()


def struct_of_another_kind(flights: Any) -> Any:
    return flights.withColumn("ts", F.struct(F.col("ts").alias("at"), "v"))


def event_time_in_a_struct(flights: Any) -> Any:
    return flights.select("k", F.struct(F.col("ts").alias("start"), F.col("ts").alias("end")).alias("span"))


def no_watermark_in_reach(flights: Any) -> Any:
    return flights.groupBy("k").count().withColumn("ts", F.lit(None).cast("timestamp"))


def raises(flights: Any) -> Any:
    return flights.select("no_such_column")  # the user's own line


def twice_the_same_column(flights: Any) -> Any:
    return flights.select("k", "ts", "v", F.lit(1).alias("V"))


def column_without_a_type(flights: Any) -> Any:
    return flights.withColumn("nothing", F.lit(None))


@pytest.mark.parametrize(
    ("function", "error", "texts"),
    [
        (no_dataframe, StageResultError, ["to return a Spark DataFrame, found a list", "test_stage_errors.py:"]),
        (own_watermark, StageWatermarkError, ["withWatermark", "already carries one", "at its source"]),
        (window_struct, EventTimeError, ["found 'ts' of type struct", "F.window_time('ts')", "event_time="]),
        (no_time_zone, EventTimeError, ["timestamp_ntz", "cast('timestamp')", "no time zone"]),
        (event_time_dropped, EventTimeError, ["no column 'ts'", "F.window_time('window').alias('ts')"]),
        (struct_of_another_kind, EventTimeError, ["found 'ts' of type struct", "select the field that holds it as a separate"]),
        (event_time_in_a_struct, EventTimeError, ["no column 'ts' among k, span", "keep the column"]),
        (no_watermark_in_reach, PlanRefusedError, ["Spark refuses", "output mode 'append'"]),
        (raises, StageFailedError, ["no_such_column", "# the user's own line", "in raises"]),
        (twice_the_same_column, StageResultError, ["more than one column 'v'", "Rename or drop"]),
        (column_without_a_type, StageResultError, ["no type for column 'nothing'", "Cast the column"]),
    ],
)
def test_a_stage_that_cannot_run_is_refused_by_name_before_anything_starts(
    lab: Any, function: Callable[[Any], Any], error: type[StageError], texts: list[str]
) -> None:
    @bounded_source(watermark=("ts", "1 minute"))
    def flights(context):
        return lab.stream("in", FLIGHTS)

    @stage(sink=lab.sink())
    def last(broken):
        return broken

    broken = stage(name="broken")(function)
    job = lab.start(Pipeline("p", [flights, broken, last], chaining=False))
    result = job.result()
    assert result.status == "FAILED"
    assert type(result.error) is error
    assert str(result.error).startswith("Stage 'broken' (instance '0'): ")
    for text in texts:
        assert text in str(result.error)
    assert job.of(JobStarted) == []
    assert lab.committed() == []


def test_an_unbounded_source_must_not_return_a_batch(lab: Any) -> None:
    @unbounded_source
    def flights(context):
        return lab.table("in", FLIGHTS)

    @stage(sink=lab.sink())
    def last(flights):
        return flights

    lab.put("in", FLIGHTS, [("a", lab.at(0), 1)])
    error = lab.start(Pipeline("p", [flights, last])).result().error
    assert type(error) is StageResultError
    assert re.match(r"Stage 'flights' \(instance '0'\): .*batch DataFrame.*spark.readStream", str(error))


def test_an_input_must_be_used(lab: Any) -> None:
    @bounded_source
    def one(context):
        return lab.stream("in", FLIGHTS)

    @bounded_source
    def other(context):
        return lab.stream("in", FLIGHTS)

    @stage(sink=lab.sink())
    def last(one, other):
        return one

    error = lab.start(Pipeline("p", [one, other, last])).result().error
    assert type(error) is StageResultError
    assert "Stage 'last'" in str(error)
    assert "does not read its input 'other'" in str(error)


def test_a_key_must_be_a_column_of_the_stage_that_is_read(lab: Any) -> None:
    @bounded_source
    def flights(context):
        return lab.stream("in", FLIGHTS)

    @stage(inputs={"flights": StageInput(key="tail")}, instances=["x", "y"], sink=lab.sink())
    def last(flights):
        return flights

    error = lab.start(Pipeline("p", [flights, last])).result().error
    assert type(error) is StageResultError
    assert "Stage 'flights'" in str(error)
    assert "to 'last' is distributed by key 'tail'" in str(error)
    assert "k, ts, v" in str(error)


def test_an_error_at_run_time_names_the_stage_and_the_line_in_the_users_function(lab: Any) -> None:
    lab.put("in", FLIGHTS, [("a", lab.at(0), 1), ("b", lab.at(1), 0)])

    @bounded_source(watermark=("ts", "1 minute"))
    def flights(context):
        return lab.stream("in", FLIGHTS)

    @stage
    def shares(flights):
        @F.udf("long")
        def share(v):
            return 100 // v  # the line that raises

        return flights.withColumn("v", share("v"))

    @stage(sink=lab.sink())
    def last(shares):
        return shares.where("k != 'c'")

    job = lab.start(Pipeline("p", [flights, shares, last]))
    error = job.result().error
    assert job.chains == (("flights", "shares", "last"),)
    cause = error.__cause__
    assert type(cause) is StageFailedError
    assert cause.stage == "shares"
    assert str(cause).startswith("Stage 'shares' (instance '0')")
    assert "ZeroDivisionError" in str(cause)
    assert re.search(r"at .*test_stage_errors\.py:\d+, in share: return 100 // v", str(cause))
    assert "shares" in str(error)
    assert lab.committed() == []


def test_what_process_batch_returns_must_have_the_columns_of_transform(lab: Any) -> None:
    lab.put("in", FLIGHTS, [("a", lab.at(0), 1)])

    @bounded_source
    def flights(context):
        return lab.stream("in", FLIGHTS)

    class Halves(Stage):
        def transform(self, context, flights):
            return flights

        def process_batch(self, batch, batch_id):
            return batch.withColumn("v", F.col("v") / 2)

    error = lab.start(Pipeline("p", [flights, Halves(sink=ParquetSink(lab.folder / "out"))])).result().error
    assert "Stage 'halves'" in str(error)
    assert "process_batch" in str(error)
    assert "v:double" in str(error)
    assert lab.committed() == []


class UncaughtErrors:
    """Records every thread of the JVM that ends with an error."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def uncaughtException(self, thread: Any, error: Any) -> None:
        self.found.append(str(error.getClass().getName()))

    class Java:
        implements: ClassVar = ["java.lang.Thread$UncaughtExceptionHandler"]


def test_a_failing_stage_ends_the_batches_of_the_others_without_an_error_in_spark_itself(lab: Any) -> None:
    """A batch that is cancelled raises a long Java stack trace, which Spark searches by a regular expression that overflows."""
    marker = lab.folder / "second batch"
    lab.put("in", FLIGHTS, [("a", lab.at(0), 1)])
    lab.put("in", FLIGHTS, [("a", lab.at(1), 2)])

    @unbounded_source
    def flights(context):
        @F.udf("long")
        def slowly(v):
            if v == 2:
                marker.touch()
                time.sleep(8)
            return v

        return lab.stream("in", FLIGHTS).withColumn("v", slowly("v"))

    class Raises(Stage):
        def transform(self, context, flights):
            return flights

        def process_batch(self, batch, batch_id):
            until = time.monotonic() + 60
            while not marker.exists() and time.monotonic() < until:
                time.sleep(0.05)
            raise ValueError("no database")

    uncaught = UncaughtErrors()
    threads = lab.spark._jvm.java.lang.Thread
    ensure_callback_server_started(lab.spark.sparkContext._gateway)
    threads.setDefaultUncaughtExceptionHandler(uncaught)
    try:
        error = lab.start(Pipeline("p", [flights, Raises(sink=lab.sink())], chaining=False)).result().error
    finally:
        threads.setDefaultUncaughtExceptionHandler(None)
    assert marker.exists()
    assert re.search(r"Stage 'raises' .*: failed at .* in process_batch: raise ValueError.*\nValueError: no database", str(error))
    assert uncaught.found == []
