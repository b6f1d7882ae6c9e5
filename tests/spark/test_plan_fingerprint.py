"""The text that describes a plan's state: equal in every process and behind every input, and different if the state differs.

The texts are compared with texts in this module: a release that wrote other texts would refuse checkpoints of this release.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from dagster_checkpoints.pipeline import Pipeline, StageContext, stage, unbounded_source
from dagster_checkpoints.spark.query import plans, row_counts
from dagster_checkpoints.spark.query.plan_fingerprint import PlanDescription, describe
from dagster_checkpoints.state.plans import IN_STATE

ROWS = "k string, ts timestamp, v long"


class Counter(StatefulProcessor):
    """Declares its state, and does not use it."""

    states: tuple[str, ...] = ("n long",)

    def init(self, handle: Any) -> None:
        handle.deleteIfExists("former")  # not only declarations
        self.kept = [handle.getValueState(f"s{number}", schema) for number, schema in enumerate(self.states)]
        self.seen = handle.getMapState("seen", "k string", "n int", 1000)

    def handleInputRows(self, key: Any, rows: Any, timers: Any) -> Any:
        yield from rows

    def close(self) -> None: ...


def counted(key: Any, frames: Any, state: Any) -> Any:
    yield from frames


HOUR = "watermark ts - 1 hours"
near = "l.k = r.k AND r.ts BETWEEN l.ts AND l.ts + INTERVAL 10 MINUTES"


def join(rows: Any, kind: str = "inner", condition: str = near) -> Any:
    return rows.alias("l").join(rows.alias("r"), F.expr(condition), kind).select("l.k", "l.ts", "l.v")


PLANS: list[tuple[Callable[[Any], Any], tuple[str, ...]]] = [
    (lambda rows: rows.where("v > 3").withColumn("w", F.col("v") * 2), ()),
    (
        lambda rows: rows.groupBy(F.window("ts", "5 minutes"), "k").agg(F.sum("v"), F.avg(F.col("v") + 1)),
        (f"aggregate by window(ts, 5 minutes), k: sum(v long), average((v long + 1)); {HOUR}",),
    ),
    (
        lambda rows: rows.groupBy(F.window("ts", "10 minutes", "5 minutes", "1 minute")).count(),
        (f"aggregate by window(ts, 10 minutes, every 5 minutes, from 1 minute): count(1); {HOUR}",),
    ),
    (
        lambda rows: rows.groupBy(F.session_window("ts", "10 minutes"), "k").count(),
        (f"aggregate by session_window(ts, gap '10 minutes'), k: count(1); {HOUR}",),
    ),
    (  # the expression of a computed key is part of the text
        lambda rows: rows.withColumn("at", F.date_trunc("day", "ts")).groupBy("at", "ts").agg(F.max("k")),
        (f"aggregate by trunc_timestamp('day', ts, in UTC), ts: max(k string); {HOUR}",),
    ),
    (
        lambda rows: rows.unionByName(rows.withColumn("k", F.upper("k"))).dropDuplicatesWithinWatermark(["k"]),
        (f"drop duplicates within the watermark by {{k | upper(k)}}; {HOUR}",),
    ),
    (lambda rows: rows.dropDuplicates(["v", "ts"]), (f"drop duplicates by ts, v; {HOUR}",)),
    (
        lambda rows: rows.groupBy((F.rand() * 4).cast("int"), "ts").count(),
        (f"aggregate by cast((rand() * 4) as integer), ts: count(1); {HOUR}",),
    ),
    (
        join,
        (
            "inner join of streams on ((left.k = right.k) AND ((right.ts >= left.ts) AND (right.ts <= cast("
            f"timestamp_add_interval(left.ts, 10 minutes, in UTC) as timestamp in UTC)))); {HOUR}",
        ),
    ),
    (lambda rows: rows.select("v").limit(7), (f"limit 7; {HOUR}",)),
    (
        lambda rows: rows.groupBy("k").applyInPandasWithState(counted, ROWS, "n int", "append", "EventTimeTimeout"),
        (f"applyInPandasWithState by k: state struct<n integer>, output mode append, EventTimeTimeout; {HOUR}",),
    ),
    (
        lambda rows: rows.groupBy("k").transformWithStateInPandas(Counter(), ROWS, "Append", "EventTime"),
        (
            "transformWithState by k: Counter with map seen struct<k:string> -> struct<n:int>, kept 1000 ms, value s0 "
            f"struct<n:bigint>, output mode append, time mode eventtime; {HOUR}",
        ),
    ),
    (
        lambda rows: (
            rows.groupBy(F.window("ts", "5 minutes"), "k").count().groupBy(F.window("window", "1 hour")).agg(F.sum("count"))
        ),
        (
            f"aggregate by window(ts, 5 minutes), k: count(1); {HOUR}",
            "aggregate by window(precise_timestamp_conversion((precise_timestamp_conversion(window(ts, 5 minutes).end, fromType "
            f"timestamp, toType long) - 1), fromType long, toType timestamp), 1 hour): sum(count long); {HOUR}",
        ),
    ),
]


def described(lab: Any, *functions: Callable[[Any], Any], more: Any = None) -> PlanDescription:
    """The description of a chain of a source and one stage for each function; the source reads the stream `more` as well."""

    @unbounded_source(watermark=("ts", "1 hour"))
    def live(context):
        rows = lab.stream("live", ROWS)
        return rows if more is None else rows.unionByName(more)

    stages = [live]
    for number, function in enumerate(functions):
        names = [live.name, *(f"s{n}" for n in range(number + 1))]
        scope: dict[str, Any] = {"function": function}
        exec(f"def made({names[-2]}): return function({names[-2]})", scope)
        last = number == len(functions) - 1
        stages.append(stage(name=names[-1], sink=lab.sink() if last else None)(scope["made"]))
    pipeline = Pipeline("described", stages)
    calls = [plans.StageCall(s, StageContext(lab.spark, s.name, "0", 0, 1, None, None)) for s in stages]  # type: ignore[arg-type]
    return describe(plans.build_plan(pipeline, calls, {}))


def in_front(rows: Any) -> Any:
    """An operator without state and without a computed key."""
    return rows.where("v > 0").withColumn("more", F.lit(1)).select("k", "more", F.col("ts"), "v").drop("more").repartition(2)


def declared(operators: tuple[str, ...]) -> tuple[str, ...]:
    """The texts without what the optimizer leaves in the state."""
    return tuple(text.partition(IN_STATE)[0] for text in operators)


@pytest.mark.parametrize(("function", "expected"), PLANS)
def test_the_text_of_a_stages_stateful_plan(lab: Any, function: Callable[[Any], Any], expected: tuple[str, ...]) -> None:
    alone, behind = described(lab, function), described(lab, in_front, function)
    assert {name: declared(texts) for name, texts in alone.operators.items()} == {"live": (), "s0": expected}
    assert behind.operators == {"live": (), "s0": (), "s1": alone.operators["s0"]}
    assert set(alone.sources) == {f"parquet {lab.input('live')}"}


def reordered(rows: Any) -> Any:
    return rows.withColumn("w", F.upper("k")).select(*sorted(rows.columns, reverse=True), "w").where("v < 9").drop("w")


@pytest.mark.parametrize(("function", "expected"), PLANS)
def test_state_does_not_depend_on_how_the_rows_of_stages_are_counted(
    lab: Any, function: Callable[[Any], Any], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints of releases that counted the rows of all stages by observations are restored."""

    def timed(rows: Any) -> Any:
        windows = [name for name in rows.columns if name.endswith("window")]
        rows = rows.withColumn("ts", F.window_time(windows[0])).drop(*windows) if windows else rows
        return rows.select(*(F.col(f"`{name}`") for name in sorted(rows.columns)))  # not the order in which they are aggregated

    chain: tuple[Callable[[Any], Any], ...] = (in_front, reordered, lambda rows: timed(function(rows)))
    if "limit" not in str(expected):  # which is behind a selection without event time
        chain += (lambda rows: rows,)
    found = described(lab, *chain)
    monkeypatch.setattr(
        plans, "counted", lambda stage, position, frame, state: row_counts.counted(stage, position, frame, state=True)
    )
    assert described(lab, *chain) == found


def test_each_change_of_the_stateful_plan_changes_its_text(lab: Any) -> None:
    """No two of these may share a state."""

    def processor(*states: str) -> Counter:
        made = Counter()
        made.states = states
        return made

    def aggregated(length: str = "5 minutes", key: str = "k", *functions: Any) -> Callable[[Any], Any]:
        return lambda rows: rows.groupBy(F.window("ts", length), key).agg(*(functions or [F.sum("v")]))

    def per(unit: str) -> Callable[[Any], Any]:
        return lambda rows: rows.withColumn("at", F.date_trunc(unit, "ts")).groupBy("at", "ts").count()

    different: list[Callable[[Any], Any]] = [
        aggregated(),
        aggregated("10 minutes"),
        aggregated("5 minutes", "v"),
        aggregated("5 minutes", "k", F.max("v")),
        aggregated("5 minutes", "k", F.sum("v"), F.max("v")),
        per("day"),
        per("hour"),
        lambda rows: join(rows, "left_outer"),
        lambda rows: join(rows, condition=near.replace("10", "20")),
        lambda rows: rows.groupBy("k").applyInPandasWithState(counted, ROWS, "n long", "append", "EventTimeTimeout"),
        lambda rows: rows.groupBy("k").applyInPandasWithState(counted, ROWS, "n long", "append", "ProcessingTimeTimeout"),
        *(
            lambda rows, made=made: rows.groupBy("k").transformWithStateInPandas(made, ROWS, "Append", "EventTime")
            for made in (processor("n long"), processor("n int"), processor("n long", "m long"))
        ),
    ]
    texts = [described(lab, function).operators["s0"] for function in different]
    assert all(texts) and len(set(texts)) == len(texts)


JOINED = "k string, ts timestamp"


def sums(rows: Any) -> Any:
    windows = rows.groupBy(F.window("ts", "5 minutes"), "k").agg(F.sum("v").alias("a"), F.sum(F.col("v") + 1).alias("b"))
    return windows.select(F.window_time("window").alias("ts"), "k", "a", "b")


def selected(*columns: str) -> Callable[[Any], Any]:
    return lambda rows: rows.select("ts", *columns)


def paired(rows: Any) -> Any:
    return rows.alias("l").join(rows.withColumn("w", F.col("v")).alias("r"), F.expr(near)).select("l.k", "l.ts", "l.v", "r.w")


@pytest.mark.parametrize(
    ("functions", "kept"),
    [
        ([sums], "functions 1, 2"),
        ([sums, selected("k", "a", "b")], "functions 1, 2"),
        ([sums, selected("k", "b", "a")], "functions 1, 2"),
        ([sums, selected("k", "b")], "functions 2"),
        ([sums, selected("k")], "no function"),
        ([sums, lambda rows: rows.selectExpr("ts", "b * 2 AS c", "a + 1")], "functions 1, 2"),
        ([lambda rows: rows.withColumn("v", F.col("v") * 3), sums, selected("b")], "functions 2"),
        (
            [paired, selected("k", "v")],
            "k string, ts timestamp, v bigint of the left side, k string, ts timestamp of the right side",
        ),
        (
            [paired, selected("k", "w")],
            "k string, ts timestamp of the left side, k string, ts timestamp, w bigint of the right side",
        ),
    ],
)
def test_what_later_projections_leave_in_the_state_is_in_the_text(
    lab: Any, functions: list[Callable[[Any], Any]], kept: str
) -> None:
    """Spark compares the types in a state only: of two sums it would take one for the other."""
    [text] = [text for operators in described(lab, *functions).operators.values() for text in operators]
    assert text.partition(IN_STATE)[2] == kept


def test_an_operator_belongs_to_the_stage_that_adds_it(lab: Any) -> None:
    def deduplicated(rows: Any) -> Any:
        return rows.dropDuplicates(["k", "ts"])

    def windows(rows: Any) -> Any:
        return rows.groupBy(F.window("ts", "5 minutes")).count()

    found = described(lab, deduplicated, in_front, windows).operators
    assert [len(operators) for operators in found.values()] == [0, 1, 0, 1]
    assert found["s0"][0].startswith("drop duplicates by k, ts") and found["s2"][0].startswith("aggregate by window")


def test_sources_are_named_by_what_they_read_and_never_by_their_secrets(lab: Any) -> None:
    rate = lab.spark.readStream.format("rate").option("rowsPerSecond", 3).option("password", "secret").load()
    more = rate.selectExpr("'rate' AS k", "timestamp AS ts", "value AS v")
    assert described(lab, in_front, more=more).sources == (f"parquet {lab.input('live')}", "rate")


def test_a_file_stream_is_known_by_its_absolute_path(lab: Any) -> None:
    """A run in another directory would find other files under the same relative path, and read all of them."""
    there = lab.input("live")
    for path in (os.path.relpath(there), f"{os.path.relpath(there.parent)}/{{live,none}}"):
        more = lab.spark.readStream.schema("k string, ts timestamp, v long").parquet(path)
        assert described(lab, in_front, more=more).sources[1] == f"parquet {there.parent}/{path.rpartition('/')[2]}"
