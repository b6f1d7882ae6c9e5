"""Joins of two streams, whatever arrives in which micro-batch: their rows are those of the batch result.

The optimizer plans each micro-batch from scratch: an input without rows there must not change what it does with the other inputs.
`FULL_TABLE_OF_JOINS=1` runs every join in every layout; the default is a part of them in which each join, each arrival and each
layout occurs.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F

from bench.stream_programs.arrivals import START, Arrival, Row
from bench.stream_programs.jobs import job_rows
from bench.stream_programs.program import (
    COLUMNS,
    CONDITIONS,
    Filter,
    Input,
    Join,
    Program,
    Select,
    Several,
    Union,
    Windows,
    frame_of,
)
from bench.stream_programs.queries import Refused, batch_rows, query_rows, rows_of
from bench.stream_programs.random_programs import Case, random_case
from bench.stream_programs.search import run_case
from dagster_checkpoints.pipeline import Stage, StageContext, stage
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.query.join_checks import check_null_keys
from dagster_checkpoints.spark.query.stage_calls import StageCall, transform_stage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SETTINGS = ("spark.sql.shuffle.partitions", "spark.sql.streaming.stateStore.providerClass", "spark.sql.codegen.wholeStage")


@pytest.fixture(autouse=True)
def settings_of_the_session(spark: Any) -> Iterator[None]:
    """A case changes settings of the session, which all tests share."""
    before = {name: spark.conf.get(name) for name in SETTINGS}
    yield
    for name, value in before.items():
        spark.conf.set(name, value)


A, B = Input("a"), Input("b")
BOTH = Union(Select(A, "k", "2 * v"), Select(B, "k", "2 * v + 1"))
"""One stream of the rows of both inputs, as an earlier stage of the same query returns it."""
OF_A, OF_B = Filter(BOTH, "v % 2 = 0"), Filter(BOTH, "v % 2 = 1")
COALESCED = Join(A, B, "full", "times")
"""Its event time is computed: the time of one input, or of the other one."""
LATE = ("key and times", "key and range", "times", "windows")


def hourly(of: Program) -> Windows:
    return Windows(of, "10 minutes", by_key=False, session=False, kept=True)


JOINS: dict[str, Program] = {
    **{f"inner, {on}": Join(A, B, "inner", on) for on in ("key", *LATE)},
    **{f"{how}, {on}": Join(A, B, how, on) for how in ("left", "right", "full", "left_semi") for on in LATE},
    "inner, a further condition": Join(A, B, "inner", "key and range", "v <= rv"),
    "windows of counts": Join(hourly(A), hourly(B), "inner", "times"),
    "windows of counts, left": Join(hourly(A), hourly(B), "left", "times"),
    "self-join": Join(A, Filter(A, "v > 2"), "inner", "key and later"),
    "three ways": Join(Join(A, B, "inner", "key and times"), A, "inner", "key and times"),
    "semi join of a union": Join(Union(A, B), B, "left_semi", "key and later"),
    **{f"chained, {how}": Join(OF_A, OF_B, how, "key and times") for how in ("inner", "left", "full", "left_semi")},
}
IN_PART = (
    "inner, key and times", "inner, windows", "left, key and range", "right, times", "full, key and times",
    "left_semi, key and range", "windows of counts", "self-join", "three ways", "chained, left_semi",
)  # fmt: skip
WHOLE = bool(os.environ.get("FULL_TABLE_OF_JOINS"))
BEHIND_CHANNELS = tuple(JOINS[name] for name in (JOINS if WHOLE else IN_PART))
ONCE = {name: join for name, join in JOINS.items() if isinstance(join, Join) and "three" not in name and "self" not in name}
"""The joins that read each input once, so that sources can be fused."""


def rows(first: int, count: int, step: int = 1) -> list[Row]:
    return [(n % 3, START + dt.timedelta(minutes=n), n % 7) for n in range(first, first + count * step, step)]


ARRIVALS: dict[str, list[Arrival]] = {
    "both sides in one batch": [Arrival({"a": rows(0, 12), "b": rows(0, 12)}), Arrival({"a": rows(12, 8), "b": rows(12, 6, 2)})],
    "one side empty": [Arrival({"a": rows(0, 20), "b": []}), Arrival({"a": [], "b": rows(0, 12, 2)})],
    "alternating": [
        Arrival({"a": [], "b": rows(0, 6, 2)}),
        Arrival({"a": rows(0, 10), "b": []}),
        Arrival({"a": [], "b": rows(12, 6, 2)}),
        Arrival({"a": rows(10, 10), "b": []}),
    ],
}


def case_of(program: Program, arrivals: Sequence[Arrival], layout: str, **settings: Any) -> Case:
    fields: dict[str, Any] = {
        "event_time": True, "channels": 1, "partitions": 1, "restarts": frozenset(), "ends_early": False, "rocksdb": False,
        "compiled": False, **settings,
    }  # fmt: skip
    return Case(0, program, "", arrivals, layout, **fields)


def check(spark: Any, case: Case, folder: Path, found: Sequence[Any]) -> None:
    expected = batch_rows(spark, case, folder)
    assert expected
    assert sorted(found, key=repr) == expected


@pytest.mark.parametrize("arrival", ARRIVALS)
def test_every_join_behind_channels(spark: Any, tmp_path: Path, arrival: str) -> None:
    """All joins at once in one query, whose micro-batches have rows of both inputs or of one."""
    case = case_of(Several(BEHIND_CHANNELS), ARRIVALS[arrival], "channels", channels=2)
    check(spark, case, tmp_path, query_rows(spark, case, tmp_path, "channels"))


PART = [
    ("inner, key and times", "one side empty"),
    ("windows of counts", "alternating"),
    ("left, key and range", "alternating"),
    ("left_semi, key and range", "one side empty"),
    ("full, windows", "both sides in one batch"),
]


@pytest.mark.parametrize(("join", "arrival"), list(product(ONCE, ARRIVALS)) if WHOLE else PART)
def test_a_join_of_fused_sources_one_of_which_ends(spark: Any, tmp_path: Path, join: str, arrival: str) -> None:
    """After the second micro-batch the query starts again, and an empty stream stands in for an input that has ended."""
    case = case_of(ONCE[join], ARRIVALS[arrival], "fused", restarts=frozenset({1}), ends_early=True)
    check(spark, case, tmp_path, query_rows(spark, case, tmp_path, "fused"))


@pytest.mark.parametrize("on", JOINS if WHOLE else [None])
def test_joins_in_a_job_of_two_instances(spark: Any, tmp_path: Path, on: str | None) -> None:
    chosen = [JOINS["inner, key and times"], JOINS["left, key and range"], JOINS["left_semi, key and range"]]
    case = case_of(
        Several(tuple(chosen)) if on is None else JOINS[on], ARRIVALS["alternating"], "job: two instances of each stage"
    )
    check(spark, case, tmp_path, job_rows(spark, case, tmp_path))


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
        if compared == 4:
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

    empty = {side: spark.readStream.schema(COLUMNS).parquet(str(tmp_path)).withWatermark("ts", "1 minute") for side in "ab"}
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
