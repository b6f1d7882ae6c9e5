"""Joins of two streams, whatever arrives in which micro-batch: their rows are those of the batch result.

The optimizer plans each micro-batch from scratch: an input without rows there must not change what it does with the other inputs.
Some joins, in each layout; `long/test_table_of_joins.py` has every join with every arrival.
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F

from bench.stream_programs.arrivals import START, Arrival
from bench.stream_programs.jobs import job_rows
from bench.stream_programs.program import (
    COLUMNS,
    CONDITIONS,
    Filter,
    Join,
    Several,
    Union,
    frame_of,
)
from bench.stream_programs.queries import Refused, query_rows, rows_of
from bench.stream_programs.random_programs import random_case
from bench.stream_programs.search import run_case
from dagster_checkpoints.pipeline import Pipeline, Stage, StageContext, bounded_source, stage
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.errors import PlanRefusedError
from dagster_checkpoints.spark.job.pipeline_checks import check_plans
from dagster_checkpoints.spark.query.fused_plans import fused_source
from dagster_checkpoints.spark.query.join_checks import check_join_keys, check_null_keys
from dagster_checkpoints.spark.query.stage_calls import StageCall, transform_stage
from tests.spark.joins_of_streams import ARRIVALS, COALESCED, JOINS, ONCE, A, B, case_of, check, hourly, rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.usefixtures("settings_of_the_session")

SOME = ("inner, key and times", "left, key and range")


def test_joins_behind_channels_whose_inputs_have_rows_in_turn(spark: Any, tmp_path: Path) -> None:
    """Both at once in one query, whose micro-batches have rows of one input."""
    case = case_of(Several(tuple(JOINS[name] for name in SOME)), ARRIVALS["alternating"], "channels", channels=2)
    check(spark, case, tmp_path, query_rows(spark, case, tmp_path, "channels"))


@pytest.mark.parametrize(
    ("join", "arrival"), [("inner, key and times", "one side empty"), ("left, key and range", "alternating")]
)
def test_a_join_of_fused_sources_one_of_which_ends(spark: Any, tmp_path: Path, join: str, arrival: str) -> None:
    """After the second micro-batch the query starts again, and an empty stream stands in for an input that has ended."""
    case = case_of(ONCE[join], ARRIVALS[arrival], "fused", restarts=frozenset({1}), ends_early=True)
    check(spark, case, tmp_path, query_rows(spark, case, tmp_path, "fused"))


@pytest.mark.parametrize(
    ("join", "named"),
    [
        (Join(A, B, "left_anti", "key and times"), "Spark has no left anti join of two streams"),
        (Join(A, B, "inner", "range"), "without an equality"),
        (Join(A, B, "left_semi", "range"), "without an equality"),
        (Join(A, B, "full", "key"), "It is not known when a row of an outer join has no more matching rows"),
        # Spark accepts these, and never emits rows without a match.
        (Join(A, B, "left", "key and range", "v > 1"), r"left outer join .* left side .* takes \(v > 1L?\) for a bound"),
        (Join(A, B, "right", "key and range", "rv > 1"), r"right side .* takes \(rv > 1L?\) for a bound"),
        (Join(A, B, "full", "key and range", "v > 1"), r"left side .* takes \(v > 1L?\) for a bound"),
        (Join(A, B, "full", "key and range", "rv > 1"), r"right side .* takes \(rv > 1L?\) for a bound"),
        (Join(A, B, "full", "key", "rts <= ts + INTERVAL 10 MINUTES"), "right side .* no bound of that side's event time"),
        (Join(A, B, "full", "key", "rts >= ts - INTERVAL 10 MINUTES"), "left side .* no bound of that side's event time"),
        (Join(COALESCED, A, "full", "key and range"), "left side .* the left side has no event time here"),
        (Join(COALESCED, A, "left", "key and range"), "left side .* the left side has no event time here"),
        # Spark accepts it, and loses rows whose match comes in the same micro-batch.
        (Join(hourly(A), hourly(B), "left_semi", "times"), r"left semi join .* \(ts = rts\), both sides .* a stage of its own"),
    ],
)
def test_what_spark_cannot_join_is_refused_by_name(spark: Any, tmp_path: Path, join: Join, named: str) -> None:
    case = case_of(join, ARRIVALS["alternating"], "channels")
    with pytest.raises(Refused, match=named):
        query_rows(spark, case, tmp_path, "channels")


def test_outer_joins_in_a_row_with_a_comparison_and_a_computed_time(spark: Any, tmp_path: Path) -> None:
    """As the texts of refused joins advise: the comparison is a column of its side, the second join has a stage of its own."""
    merged = ("coalesce(k, rk) AS k", "coalesce(ts, rts) AS ts")

    def first(a: DataFrame, b: DataFrame) -> DataFrame:
        left = a.selectExpr("*", "v > 3 AS chosen")
        right = b.selectExpr("k AS rk", "ts AS rts", "v AS rv")
        joined = left.join(right, F.expr(f"{CONDITIONS['key and range']} AND chosen"), "left")
        return joined.selectExpr(*merged, "coalesce(v, -1) * 10 + coalesce(rv, -1) AS v")

    def second(of: DataFrame, b: DataFrame) -> DataFrame:
        right = b.selectExpr("k AS rk", "ts AS rts", "v AS rv")
        joined = of.join(right, F.expr(CONDITIONS["key and range"]), "full")
        return joined.selectExpr(*merged, "coalesce(v, -100) * 10 + coalesce(rv, -1) AS v")

    @stage(name="pairs")
    def pairs(a: DataFrame, b: DataFrame) -> DataFrame:
        return first(a, b)

    def stages(sink: ParquetSink) -> list[Stage]:
        @stage(name="result", sink=sink)
        def result(pairs: DataFrame, b: DataFrame) -> DataFrame:
            return second(pairs, b)

        return [pairs, result]

    arrivals = [*ARRIVALS["one side empty"], Arrival({"a": rows(50, 2), "b": [(4, at, 5) for _, at, _ in rows(20, 3)]})]
    case = case_of(A, arrivals, "job: channels")
    found = job_rows(spark, case, tmp_path, stages)
    tables = {side: [row for arrival in arrivals for row in arrival.rows[side]] for side in ("a", "b")}
    a, b = (spark.createDataFrame(table, COLUMNS) for table in tables.values())
    expected = rows_of(second(first(a, b), b))
    assert sorted(found, key=repr) == expected
    assert sum(row[2] < -900 for row in expected) > 1  # rows of the second join's right side without a match


def test_a_semi_join_of_windows_of_earlier_stages_has_a_query_of_its_own(spark: Any, tmp_path: Path) -> None:
    """As the text of a refused one advises."""

    def stages(sink: ParquetSink) -> list[Stage]:
        @stage(name="of_a")
        def of_a(a: DataFrame) -> DataFrame:
            return frame_of(hourly(A), {"a": a})

        @stage(name="of_b")
        def of_b(b: DataFrame) -> DataFrame:
            return frame_of(hourly(B), {"b": b})

        @stage(name="result", sink=sink)
        def result(of_a: DataFrame, of_b: DataFrame) -> DataFrame:
            return frame_of(Join(A, B, "left_semi", "times"), {"a": of_a, "b": of_b})

        return [of_a, of_b, result]

    case = case_of(Join(hourly(A), hourly(B), "left_semi", "times"), ARRIVALS["alternating"], "job: fused")
    check(spark, case, tmp_path, job_rows(spark, case, tmp_path, stages))


@pytest.mark.parametrize("layout", ["channels", "fused"])
def test_inputs_without_event_time(spark: Any, tmp_path: Path, layout: str) -> None:
    """Also behind a union of two inputs of which one has no rows in a micro-batch."""
    join = Join(A, B, "inner", "key and times")
    program = (
        join if layout == "fused" else Several((join, Join(Union(A, B), B, "inner", "key and later"), JOINS["chained, inner"]))
    )
    case = case_of(program, ARRIVALS["alternating"], layout, event_time=False)
    check(spark, case, tmp_path, query_rows(spark, case, tmp_path, layout))


def test_random_programs_are_equal_to_their_batch_results(spark: Any, chance: Any) -> None:
    """A few of the search `python -m bench.stream_programs`; a failure prints the seed."""
    first = chance.randrange(10**9)
    compared = 0
    for seed in range(first, first + 30):
        case = random_case(seed, jobs=False)
        outcome = run_case(spark, case)
        assert not outcome.wrong, f"{outcome.kind}: {outcome.text}\n{case}"
        compared += outcome.kind == "equal"
        if compared == 2:
            return
    raise AssertionError(f"of 30 programs from seed {first}, Spark runs {compared}")


@pytest.mark.parametrize(
    ("join", "warned"),
    [
        (Join(A, B, "full", "key and times"), ["k IS NOT NULL AND ts IS NOT NULL"]),
        (Join(A, B, "full", "key and times", "k IS NOT NULL AND rts IS NOT NULL"), []),
        (Join(Filter(A, "k >= 0 AND ts IS NOT NULL"), B, "full", "key and times"), []),
        (Join(A, B, "left", "key and times"), []),
    ],
)
def test_keys_that_may_be_null_in_a_full_outer_join(spark: Any, tmp_path: Path, join: Join, warned: list[str]) -> None:
    """Spark matches them with each other; with the condition that the warning names it does not."""

    @stage(name="joined")
    def joined(a: DataFrame, b: DataFrame) -> DataFrame:
        return frame_of(join, {"a": a, "b": b})

    files = spark.readStream.schema(COLUMNS).parquet
    empty = {side: fused_source(side, files(str(tmp_path)).withWatermark("ts", "1 minute")) for side in "ab"}
    context = StageContext(spark, "joined", "0", 0, 1, None, None)
    call = StageCall(joined, context)
    found = check_null_keys(call, transform_stage(call, empty), empty)
    assert [text.partition("... AND ")[2].rstrip(".") for text in found] == warned
    if warned:
        return
    nulls = [(None, START, 1), (1, START, 2)]
    last = [(2, START + dt.timedelta(hours=3), 1)]
    case = case_of(join, [Arrival({"a": nulls, "b": nulls}), Arrival({"a": last, "b": last})], "channels")
    check(spark, case, tmp_path, query_rows(spark, case, tmp_path, "channels"))


COMPUTED_KEYS = {
    "upper(trim({}s))": True,
    "coalesce({}s, {}t)": True,
    "TRY_CAST({}s AS INT)": True,
    "{}c": True,
    "{}n.c": True,
    "lower({}s)": False,
    "coalesce({}s, 'none')": False,
    "{}f": False,
    "{}n": True,
    "length({}s) % 2": False,
    "date_trunc('hour', {}ts)": False,
}
"""By a key that a join's condition computes of each side's columns, whether Spark matches rows in which it is null."""


@pytest.mark.parametrize("key", COMPUTED_KEYS)
def test_keys_that_may_be_null_and_are_computed_in_the_condition(lab: Any, key: str) -> None:
    """A warning names each join whose rows differ from those of tables, and a condition under which they do not."""
    schema = "s string, t string, f double, number int, ts timestamp"
    texts = (None, "1", "x")
    for side in "ab":
        values = [(s, None, None if s is None else 0.5, n, lab.at(n)) for n, s in enumerate(texts)]
        lab.put(side, schema, values)

    def prepared(frame: DataFrame, side: str) -> DataFrame:
        text = "s COLLATE UTF8_LCASE"
        frame = frame.selectExpr("*", f"{text} AS c", f"IF(s IS NULL, NULL, named_struct('c', {text})) AS n")
        return frame.selectExpr(*(f"{name} AS {side}{name}" for name in frame.columns))

    def joined(a: DataFrame, b: DataFrame, also: str) -> DataFrame:
        first, second = key.replace("{}", "a"), key.replace("{}", "b")
        within = "bts BETWEEN ats - INTERVAL 1 MINUTE AND ats + INTERVAL 1 MINUTE"
        return a.join(b, F.expr(f"{first} = {second} AND {within}{also}"), "left").select("anumber", "bnumber")

    def rows_of_stream(number: int, frame: DataFrame) -> list[Any]:
        found: list[Any] = []
        writer = frame.writeStream.foreachBatch(lambda batch, _: found.extend(lab.rows(batch)))
        writer = writer.option("checkpointLocation", str(lab.folder / f"query{number}"))
        writer.trigger(availableNow=True).start().awaitTermination()
        return [row for row in found if row[1] is not None]  # rows without a match wait for later event times

    call = StageCall(stage(name="joined")(lambda a, b: a), StageContext(lab.spark, "joined", "0", 0, 1, None, None))
    tables = {side: prepared(lab.table(side, schema), side) for side in "ab"}
    streams = {side: prepared(lab.stream(side, schema).withWatermark("ts", "1 minute"), side) for side in "ab"}
    expected = [row for row in lab.rows(joined(**tables, also="")) if row[1] is not None]
    frame = joined(**streams, also="")
    if key == "{}n.c":
        with pytest.raises(PlanRefusedError, match=r"UTF8_LCASE.*as a column of its side"):
            check_join_keys(call, frame)
        streams = {side: streams[side].withColumn(f"{side}c", F.col(f"{side}n.c")) for side in "ab"}
        key = "{}c"
        frame = joined(**streams, also="")
    check_join_keys(call, frame)
    warnings = check_null_keys(call, frame, {})
    assert (rows_of_stream(0, frame) != expected) == bool(warnings) == COMPUTED_KEYS[key]
    for text in warnings:
        assert rows_of_stream(1, joined(**streams, also=" AND " + text.partition("... AND ")[2].rstrip("."))) == expected


def by_hour(a: DataFrame, b: DataFrame) -> DataFrame:
    return a.join(b, F.expr("k = rk AND ts = date_trunc('hour', rts)"))


def by_hour_and_range(a: DataFrame, b: DataFrame) -> DataFrame:
    return a.join(b, F.expr("k = rk AND rts >= ts AND rts < ts + INTERVAL 1 HOUR"))


def by_window(a: DataFrame, b: DataFrame) -> DataFrame:
    left = a.select("k", F.window("ts", "1 hour").alias("hour"))
    return left.join(b.select("rk", F.window("rts", "1 hour").alias("rhour")), F.expr("k = rk AND hour = rhour"))


@pytest.mark.parametrize(
    ("function", "watermark", "refused"),
    [
        (by_hour, "1 minute", True),
        (lambda a, b: by_hour(b.selectExpr("rk AS k", "rts AS ts"), a.selectExpr("k AS rk", "ts AS rts")), "1 minute", True),
        (by_hour, None, False),  # the second source holds event time back
        (by_hour_and_range, "1 minute", False),
        (by_window, "1 minute", False),
    ],
)
def test_the_event_time_of_one_side_is_joined_with_that_of_the_other(
    lab: Any, function: Any, watermark: str | None, refused: bool
) -> None:
    @bounded_source(watermark=("ts", "1 minute"))
    def a(context):
        return lab.stream("a", "k string, ts timestamp")

    @bounded_source(watermark=("rts", watermark) if watermark else None)
    def b(context):
        return lab.stream("b", "rk string, rts timestamp")

    @stage(sink=lab.sink())
    def joined(a, b):
        return function(a, b)

    found = [str(error) for error in check_plans(Pipeline("p", [a, b, joined]), lab.spark).failed.values()]
    assert len(found) == refused
    if refused:
        assert "date_trunc" in found[0] and "only the first is event time" in found[0] and "Bound the event times" in found[0]
