"""Which changes of a stage's program may keep the state of a checkpoint: pairs of programs, and what is said of each.

Plans only, nothing runs; `test_restored_programs` continues with state under changed programs, and compares the rows.

What Spark plans is recorded in checkpoints: `plans/` holds what each version of Spark plans. After a deliberate change,
`REWRITE_PLANS=1 pytest tests/spark/test_planned_state.py`, under each version, writes these files again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
import pyspark
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructType

from dagster_checkpoints.spark.query.channel_sources import ChannelSources
from dagster_checkpoints.spark.query.fused_plans import fused_source
from dagster_checkpoints.spark.query.plan_fingerprint import PlanDescription, describe
from dagster_checkpoints.spark.query.plans import QueryPlan
from dagster_checkpoints.spark.query.query_gate import QueryGate
from dagster_checkpoints.spark.query.stage_inputs import EventTime, StreamInput, stream_dataframe, table_dataframe
from dagster_checkpoints.state.errors import StatefulPlanChanged
from dagster_checkpoints.state.metadata import PlannedOperator, QuerySnapshot, StageInstanceSnapshot, TaskSnapshot
from dagster_checkpoints.state.plans import check_stateful_plans

ROWS = StructType().add("k", "string").add("ts", "timestamp").add("v", "long").add("w", "long")
Program = Callable[[DataFrame, DataFrame], DataFrame]
"""A stage's function: its inputs are two streams with the same columns."""


class Recorded(msgspec.Struct):
    """What a version of Spark plans for a program, as in a file."""

    declared: tuple[str, ...]
    planned: tuple[PlannedOperator, ...]


def inputs(spark: SparkSession, one: str = "one", two: str = "two") -> tuple[DataFrame, DataFrame]:
    """Two inputs of a stage, as it receives them from channels."""
    sources = ChannelSources(spark)
    first, second = (
        stream_dataframe(sources, StreamInput(uid, ROWS, QueryGate({}), {}, EventTime("ts", 3_600_000), 0)) for uid in (one, two)
    )
    return first, second


def described(frame: DataFrame, output_mode: str = "append") -> PlanDescription:
    return describe(QueryPlan(frame, frame.schema, True, False, outputs={"stage": frame}, output_mode=output_mode))


def refusal(before: PlanDescription, now: PlanDescription) -> str | None:
    """What a restore of the one plan's state under the other one is refused for; None if it is not."""
    assert before.planned is not None and now.planned is not None
    held = StageInstanceSnapshot(state_plan=before.operators["stage"], planned=before.planned["stage"])
    snapshot = TaskSnapshot({"stage": held}, QuerySnapshot(4))
    try:
        check_stateful_plans(snapshot, now.operators, "0", {}, "checkpoint 7", now.planned)
    except StatefulPlanChanged as error:
        return str(error)
    return None


# The programs


def windows(rows: DataFrame, *functions: Any, by: str = "k") -> DataFrame:
    return rows.groupBy(F.window("ts", "10 minutes"), by).agg(*(functions or [F.count("*").alias("n")]))


def sums(rows: DataFrame) -> DataFrame:
    return windows(rows, F.sum("v").alias("v"), F.sum("w").alias("w"))


def pivoted(rows: DataFrame, *values: str) -> DataFrame:
    return rows.groupBy(F.window("ts", "1 hour")).pivot("k", list(values or ("a", "b"))).agg(F.sum("v"))


def groups_of_counts(rows: DataFrame) -> DataFrame:
    return windows(rows, F.sum("v").alias("v")).groupBy("window", "v").count()


def above_the_mean(rows: DataFrame) -> DataFrame:
    return rows.sparkSession.sql("SELECT * FROM {groups} WHERE k > (SELECT avg(id) FROM range(3))", groups=windows(rows))


def of_bytes(rows: DataFrame) -> DataFrame:
    return windows(rows.withColumn("b", F.encode("k", "UTF-8")), by="b")


def of_arrays(rows: DataFrame, found: Callable[[Any], Any]) -> DataFrame:
    return rows.groupBy("ts", F.filter(F.array("v"), found).alias("found")).agg(F.count("*"))


def found_in_a_table(rows: DataFrame, how: str = "left_semi") -> DataFrame:
    return rows.join(rows.sparkSession.range(3).selectExpr("string(id) AS k"), "k", how)


def joined(one: DataFrame, two: DataFrame, how: str = "inner", on: str = "k = k2 AND ts = ts2") -> DataFrame:
    return one.join(two.select(*[F.col(name).alias(f"{name}2") for name in two.columns]), F.expr(on), how)


def counted(key: Any, frames: Any, state: Any) -> Any:
    yield from frames


class Processor(StatefulProcessor):
    def init(self, handle: Any) -> None:
        handle.getValueState("n", "n long")

    def handleInputRows(self, key: Any, rows: Any, timers: Any) -> Any:
        yield from rows

    def close(self) -> None: ...


def in_pandas(rows: DataFrame, *by: str) -> DataFrame:
    return rows.groupBy(*by).applyInPandasWithState(counted, ROWS, "n int", "append", "NoTimeout")


def processed(rows: DataFrame, *by: str) -> DataFrame:
    return rows.groupBy(*by).transformWithStateInPandas(Processor(), ROWS, "Append", "None")


def one_of(function: Callable[..., DataFrame], *arguments: Any) -> Program:
    """A program that uses the first input, and passes the rows of the second one on."""
    return lambda one, two: function(one, *arguments)


def halves(first: str, second: str, function: Callable[[DataFrame], DataFrame] = windows) -> Program:
    return lambda one, two: function(one.where(first)).unionByName(function(one.where(second)))


GROUPED, SUMMED = one_of(windows), one_of(sums)
near = "k = k2 AND ts2 BETWEEN ts AND ts + INTERVAL 1 HOUR"
ANOTHER_KEY, OF_ONE_SHAPE, BEHIND = "another key for its state", "operators of one shape", "has behind an operator in front"
EXCHANGED, SIDES, VALUES = "have exchanged their names", "sides of its join", "keeps other state"

PAIRS: Mapping[str, tuple[Program, Program, str | None]] = {
    # The order of a key
    "duplicates by keys in another order": (
        one_of(lambda rows: rows.dropDuplicates(["v", "w", "ts"])),
        one_of(lambda rows: rows.dropDuplicates(["w", "v", "ts"])),
        ANOTHER_KEY,
    ),
    "duplicates within the watermark by keys in another order": (
        one_of(lambda rows: rows.dropDuplicatesWithinWatermark(["v", "w"])),
        one_of(lambda rows: rows.dropDuplicatesWithinWatermark(["w", "v"])),
        ANOTHER_KEY,
    ),
    "distinct rows of columns in another order": (
        one_of(lambda rows: rows.select("v", "w").distinct()),
        one_of(lambda rows: rows.select("w", "v").distinct()),
        VALUES,
    ),
    "groups by keys in another order": (
        one_of(lambda rows: rows.groupBy("ts", "v", "w").count()),
        one_of(lambda rows: rows.groupBy("ts", "w", "v").count()),
        VALUES,
    ),
    "sessions by keys in another order": (
        one_of(lambda rows: rows.groupBy(F.session_window("ts", "1 minute"), "v", "w").count()),
        one_of(lambda rows: rows.groupBy(F.session_window("ts", "1 minute"), "w", "v").count()),
        VALUES,
    ),
    "applyInPandasWithState by exchanged columns": (one_of(in_pandas, "v", "w"), one_of(in_pandas, "w", "v"), VALUES),
    "transformWithState by exchanged columns": (one_of(processed, "v", "w"), one_of(processed, "w", "v"), VALUES),
    "keys that a projection in front has exchanged": (
        one_of(lambda rows: rows.dropDuplicates(["v", "w", "ts"])),
        one_of(
            lambda rows: rows.select("k", "ts", F.col("w").alias("v"), F.col("v").alias("w")).dropDuplicates(["v", "w", "ts"])
        ),
        VALUES,
    ),
    # The key of a join, and how long it keeps rows
    "another equality behind a join": (
        lambda one, two: joined(one, two).where("v = v2"),
        lambda one, two: joined(one, two).where("w = w2"),
        ANOTHER_KEY,
    ),
    "an equality behind a join": (joined, lambda one, two: joined(one, two).where("v = v2"), ANOTHER_KEY),
    "an equality in a join's key, and not behind it": (
        lambda one, two: joined(one, two, on="k = k2 AND ts = ts2 AND v = v2"),
        lambda one, two: joined(one, two).where("v = v2"),
        VALUES,
    ),
    "a join's key in another order": (
        lambda one, two: joined(one, two, on="k = k2 AND ts = ts2"),
        lambda one, two: joined(one, two, on="ts = ts2 AND k = k2"),
        VALUES,
    ),
    "another bound on the time behind a join": (
        lambda one, two: joined(one, two, on="k = k2").where("ts2 BETWEEN ts AND ts + INTERVAL 1 HOUR"),
        lambda one, two: joined(one, two, on="k = k2").where("ts2 BETWEEN ts AND ts + INTERVAL 2 HOURS"),
        "times that its join keeps rows",
    ),
    "another comparison of both sides behind a join": (
        lambda one, two: joined(one, two).where("v < v2"),
        lambda one, two: joined(one, two).where("v > v2"),
        None,
    ),
    "a filter behind an outer join that makes it an inner one": (
        lambda one, two: joined(one, two, "left_outer"),
        lambda one, two: joined(one, two, "left_outer").where("v2 > 3"),
        "plans another operator",
    ),
    "sides of a self-join that are exchanged": (
        lambda one, two: joined(one.where("v > 0"), one.where("v <= 0")),
        lambda one, two: joined(one.where("v <= 0"), one.where("v > 0")),
        SIDES,
    ),
    "another filter on one side of a self-join": (
        lambda one, two: joined(one.where("v > 0"), one.where("v <= 0")),
        lambda one, two: joined(one.where("v > 1"), one.where("v <= 0")),
        None,
    ),
    "another filter in front of both sides of a self-join": (
        lambda one, two: joined(one.where("v > 0"), one.where("v > 0")),
        lambda one, two: joined(one.where("v > 1"), one.where("v > 1")),
        None,
    ),
    "sides of a join that are exchanged": (
        lambda one, two: joined(one, two).select("k", "ts"),
        lambda one, two: joined(two, one).select("k", "ts"),
        SIDES,
    ),
    # Operators of one shape
    "two groups that exchange places": (halves("v > 0", "v <= 0"), halves("v <= 0", "v > 0"), OF_ONE_SHAPE),
    "another filter in front of both of two groups": (halves("v > 0", "v <= 0"), halves("v <= 1", "v > 1"), OF_ONE_SHAPE),
    "another filter in front of one of two groups": (halves("v > 0", "v <= 0"), halves("v > 0", "v <= 1"), None),
    "a filter in front of both of two groups": (halves("v > 0", "v <= 0"), halves("v > 0 AND w > 3", "v <= 0 AND w > 3"), None),
    "two groups whose filters behind them exchange places": (
        lambda one, two: windows(one).where("k > 'm'").unionByName(windows(one).where("k <= 'm'")),
        lambda one, two: windows(one).where("k <= 'm'").unionByName(windows(one).where("k > 'm'")),
        BEHIND,
    ),
    "two groups of two inputs that exchange places": (
        lambda one, two: windows(one).unionByName(windows(two)),
        lambda one, two: windows(two).unionByName(windows(one)),
        OF_ONE_SHAPE,
    ),
    "two groups that a projection tells apart": (
        lambda one, two: sums(one.withColumn("w", F.col("w") * 3)).unionByName(sums(one.withColumn("w", F.col("w") * 2))),
        lambda one, two: sums(one.withColumn("w", F.col("w") * 2)).unionByName(sums(one.withColumn("w", F.col("w") * 3))),
        OF_ONE_SHAPE,
    ),
    "two groups that an explosion tells apart": (
        lambda one, two: windows(one).unionByName(windows(one.withColumn("e", F.explode(F.sequence(F.lit(1), F.col("v")))))),
        lambda one, two: windows(one.withColumn("e", F.explode(F.sequence(F.lit(1), F.col("v"))))).unionByName(windows(one)),
        OF_ONE_SHAPE,
    ),
    "two sets of duplicates that exchange places": (
        halves("v > 0", "v <= 0", lambda rows: rows.dropDuplicates(["k", "ts"])),
        halves("v <= 0", "v > 0", lambda rows: rows.dropDuplicates(["k", "ts"])),
        OF_ONE_SHAPE,
    ),
    "two sets of sessions that exchange places": (
        halves("v > 0", "v <= 0", lambda rows: rows.groupBy(F.session_window("ts", "1 minute"), "k").count()),
        halves("v <= 0", "v > 0", lambda rows: rows.groupBy(F.session_window("ts", "1 minute"), "k").count()),
        OF_ONE_SHAPE,
    ),
    "two joins that exchange places": (
        lambda one, two: joined(one.where("v > 0"), two).unionByName(joined(one.where("v <= 0"), two)),
        lambda one, two: joined(one.where("v <= 0"), two).unionByName(joined(one.where("v > 0"), two)),
        OF_ONE_SHAPE,
    ),
    "two processors that exchange places": (
        halves("v > 0", "v <= 0", lambda rows: processed(rows, "k")),
        halves("v <= 0", "v > 0", lambda rows: processed(rows, "k")),
        OF_ONE_SHAPE,
    ),
    "two chains of groups that exchange places": (
        halves("v > 0", "v <= 0", lambda rows: windows(windows(rows).select(F.window_time("window").alias("ts"), "k"))),
        halves("v <= 0", "v > 0", lambda rows: windows(windows(rows).select(F.window_time("window").alias("ts"), "k"))),
        OF_ONE_SHAPE,
    ),
    # What Spark moves in front of an operator
    "a filter on a key behind a group": (GROUPED, one_of(lambda rows: windows(rows).where("k > 'm'")), BEHIND),
    "another filter on a key behind a group": (
        one_of(lambda rows: windows(rows).where("k > 'm'")),
        one_of(lambda rows: windows(rows).where("k > 'a'")),
        BEHIND,
    ),
    "no filter on a key behind a group any more": (one_of(lambda rows: windows(rows).where("k > 'm'")), GROUPED, BEHIND),
    "a filter on NULL keys behind a group": (GROUPED, one_of(lambda rows: windows(rows).where("k IS NOT NULL")), BEHIND),
    "a filter on values behind a group": (GROUPED, one_of(lambda rows: windows(rows).where("n > 3")), None),
    "a filter on a key in front of a group, and behind it": (
        one_of(lambda rows: windows(rows.where("k > 'm'"))),
        one_of(lambda rows: windows(rows.where("k > 'm'")).where("k > 'm'")),
        None,
    ),
    "a filter on one side behind a join": (joined, lambda one, two: joined(one, two).where("v > 3"), BEHIND),
    "a lookup behind a group": (
        GROUPED,
        one_of(
            lambda rows: (
                windows(rows).join(rows.sparkSession.range(3).selectExpr("string(id) AS k"), "k").select("window", "k", "n")
            )
        ),
        None,
    ),
    "a lookup behind a group that only keeps rows": (GROUPED, one_of(lambda rows: found_in_a_table(windows(rows))), BEHIND),
    "no such lookup behind duplicates any more": (
        one_of(lambda rows: found_in_a_table(rows.dropDuplicates(["k", "v"]), "left_anti")),
        one_of(lambda rows: rows.dropDuplicates(["k", "v"])),
        None,  # Spark leaves it behind them
    ),
    # Values
    "functions over exchanged columns": (
        SUMMED,
        one_of(lambda rows: windows(rows, F.sum("w").alias("v"), F.sum("v").alias("w"))),
        VALUES,
    ),
    "functions over columns that a projection has exchanged": (
        SUMMED,
        one_of(lambda rows: sums(rows.select("k", "ts", F.col("w").alias("v"), F.col("v").alias("w")))),
        EXCHANGED,
    ),
    "columns of a join that a projection has exchanged": (
        joined,
        lambda one, two: joined(one.select("k", "ts", F.col("w").alias("v"), F.col("v").alias("w")), two),
        EXCHANGED,
    ),
    "functions in another order behind a group": (
        SUMMED,
        one_of(lambda rows: sums(rows).select("window", "k", "w", "v")),
        VALUES,
    ),
    # Constants that Spark's JSON of a plan leaves out
    "another list of many constants behind a group": (
        one_of(lambda rows: windows(rows).where(F.col("k").isin([f"{n}" for n in range(20)]))),
        one_of(lambda rows: windows(rows).where(F.col("k").isin([f"{n}" for n in range(21)]))),
        BEHIND,
    ),
    "the same list of many constants in another order": (
        one_of(lambda rows: windows(rows).where(F.col("k").isin([f"{n}" for n in range(20)]))),
        one_of(lambda rows: windows(rows).where(F.col("k").isin([f"{n}" for n in reversed(range(20))]))),
        None,
    ),
    "another pattern of LIKE ANY in an aggregation": (
        one_of(lambda rows: windows(rows, F.expr("count_if(k LIKE ANY ('a%', 'b_c%d'))"))),
        one_of(lambda rows: windows(rows, F.expr("count_if(k LIKE ANY ('a%', 'e_f%g'))"))),
        VALUES,
    ),
    "other values of a pivot": (
        one_of(pivoted),
        one_of(lambda rows: pivoted(rows, "b", "a")),
        VALUES,
    ),
    "other bytes behind a group": (
        one_of(lambda rows: of_bytes(rows).where(F.col("b") != F.lit(bytearray(b"ab")))),
        one_of(lambda rows: of_bytes(rows).where(F.col("b") != F.lit(bytearray(b"ac")))),
        BEHIND,
    ),
    "the same bytes behind a group": (
        one_of(lambda rows: of_bytes(rows).where(F.col("b") != F.lit(bytearray(b"ab")))),
        one_of(lambda rows: of_bytes(rows).where(F.col("b") != F.lit(bytearray(b"ab")))),
        None,
    ),
    # Results of an aggregation, which Spark names by the ids of columns
    "the same groups by the results of others": (one_of(groups_of_counts), one_of(lambda rows: groups_of_counts(rows)), None),
    # What an explosion gives
    "groups by what another explosion gives": (
        one_of(lambda rows: rows.withColumn("e", F.explode(F.array("v"))).groupBy("ts", "e").count()),
        one_of(lambda rows: rows.withColumn("e", F.explode(F.array("w"))).groupBy("ts", "e").count()),
        VALUES,
    ),
    # Names that Spark numbers
    "the same subquery behind a group": (one_of(above_the_mean), one_of(lambda rows: above_the_mean(rows)), None),
    # Functions over arrays, whose variables PySpark numbers
    "the same function over an array": (
        one_of(lambda rows: of_arrays(rows, lambda x: F.exists(F.array("w"), lambda y: x == y))),
        one_of(lambda rows: of_arrays(rows, lambda x: F.exists(F.array("w"), lambda y: x == y))),
        None,
    ),
    "another variable in a function over an array": (
        one_of(lambda rows: of_arrays(rows, lambda x: F.exists(F.array("w"), lambda y: x == 1))),
        one_of(lambda rows: of_arrays(rows, lambda x: F.exists(F.array("w"), lambda y: y == 1))),
        VALUES,
    ),
    # What stays free
    "the same": (SUMMED, SUMMED, None),
    "another filter in front of a group": (
        one_of(lambda rows: sums(rows.where("v > 3"))),
        one_of(lambda rows: sums(rows.where("w > 4"))),
        None,
    ),
    "another projection in front of a group": (
        SUMMED,
        one_of(lambda rows: sums(rows.withColumn("v", F.col("v") * 3).withColumn("w", F.col("w") + F.col("v")))),
        None,
    ),
    "another filter and projection in front of a join": (
        joined,
        lambda one, two: joined(one.where("v > 3"), two.withColumn("v", F.col("v") + 1)),
        None,
    ),
    "a projection behind a join": (joined, lambda one, two: joined(one, two).withColumn("sum", F.expr("v + v2")), None),
    "an explosion in front of duplicates": (
        one_of(lambda rows: rows.dropDuplicates(["k", "ts"])),
        one_of(lambda rows: rows.withColumn("v", F.explode(F.array("v", "w"))).dropDuplicates(["k", "ts"])),
        None,
    ),
    "a stateless branch beside a group": (
        one_of(lambda rows: windows(rows).select("k", "n")),
        lambda one, two: windows(one).select("k", "n").unionByName(one.select("k", F.col("v").alias("n"))),
        None,
    ),
}


@pytest.fixture(scope="module")
def describe_program(spark: SparkSession) -> Callable[[Program], PlanDescription]:
    """Describes a program once, also if several tests use it."""
    return lru_cache(maxsize=None)(lambda program: described(program(*inputs(spark))))


@pytest.mark.parametrize(("before", "now", "said"), PAIRS.values(), ids=PAIRS)
def test_what_a_changed_program_is_refused_for(
    describe_program: Callable[[Program], PlanDescription], before: Program, now: Program, said: str | None
) -> None:
    found = refusal(describe_program(before), describe_program(now))
    assert found is None if said is None else found is not None and said in found, found


@pytest.mark.parametrize(
    "name", ["two joins that exchange places", "a filter on a key behind a group", "functions over exchanged columns"]
)
def test_what_the_runtime_adds_to_an_input_does_not_show(
    spark: SparkSession, describe_program: Callable[[Program], PlanDescription], name: str
) -> None:
    """A release may hold the optimizer off in another way: the state of checkpoints stays the same."""
    (_, program, _), opaque = PAIRS[name], F.spark_partition_id() >= 0
    one, two = (rows.where(opaque) for rows in inputs(spark))
    found = described(program(one, two))
    assert found.planned == describe_program(program).planned and found.operators == describe_program(program).operators
    assert "spark_partition_id" not in str(found)


def test_what_stands_in_for_a_fused_source_that_has_ended_does_not_show(spark: SparkSession) -> None:
    def plan(one: DataFrame, two: DataFrame) -> PlanDescription:
        return described(halves("v > 0", "v <= 0")(fused_source("live", one), two))

    one, two = inputs(spark)
    before, now = plan(one.where("w > 3"), two), plan(inputs(spark, "other")[0], two)
    assert before.planned == now.planned and "source 'live'" in str(now.planned)


# Settings that decide the plan

JOINED_EQUAL = PAIRS["an equality behind a join"][1]


def test_a_static_input_that_is_not_read_yet_is_planned_as_a_small_table(
    spark: SparkSession, describe_program: Callable[[Program], PlanDescription]
) -> None:
    names = table_dataframe(spark, StructType().add("k", "string"), [])
    found = describe_program(one_of(lambda rows: windows(rows).join(names, "k", "left_semi")))
    assert found.planned is not None and found.planned["stage"][0].pushed == ("lookup in a table, leftsemi by k, k",)


EXCLUDED, RULES = "spark.sql.optimizer.excludedRules", "org.apache.spark.sql.catalyst.optimizer"


@pytest.mark.parametrize(
    ("program", "setting", "value", "said"),
    [
        (SUMMED, "spark.sql.ansi.enabled", "false", None),
        (SUMMED, "spark.sql.caseSensitive", "true", None),
        (JOINED_EQUAL, "spark.sql.adaptive.enabled", "false", None),
        (JOINED_EQUAL, "spark.sql.exchange.reuse", "true", None),
        (
            PAIRS["a filter behind an outer join that makes it an inner one"][1],
            EXCLUDED,
            f"{RULES}.EliminateOuterJoin",
            "another operator",
        ),
        (PAIRS["sides of a join that are exchanged"][0], EXCLUDED, f"{RULES}.ColumnPruning", VALUES),
    ],
)
def test_settings_of_spark_that_decide_the_plan(
    spark: SparkSession,
    describe_program: Callable[[Program], PlanDescription],
    program: Program,
    setting: str,
    value: str,
    said: str | None,
) -> None:
    session = spark.newSession()
    session.conf.set(setting, value)
    found = refusal(describe_program(program), described(program(*inputs(session))))
    assert found is None if said is None else found is not None and said in found, found


# What each version of Spark plans

RECORDED = Path(__file__).with_name("plans")
VERSION = ".".join(pyspark.__version__.split(".")[:2])
OF_VERSIONS = {
    "duplicates": PAIRS["duplicates by keys in another order"][0],
    "duplicates within the watermark": PAIRS["duplicates within the watermark by keys in another order"][0],
    "groups": PAIRS["groups by keys in another order"][0],
    "windows": SUMMED,
    "sessions": PAIRS["sessions by keys in another order"][0],
    "chained windows": PAIRS["two chains of groups that exchange places"][0],
    "distinct rows": PAIRS["distinct rows of columns in another order"][0],
    "applyInPandasWithState": PAIRS["applyInPandasWithState by exchanged columns"][0],
    "transformWithState": PAIRS["transformWithState by exchanged columns"][0],
    "join": PAIRS["another bound on the time behind a join"][0],
    "join with an equality behind it": JOINED_EQUAL,
    "two joins": PAIRS["two joins that exchange places"][0],
    "a filter behind a group": PAIRS["a filter on a key behind a group"][1],
    "a lookup behind a group": PAIRS["a lookup behind a group"][1],
}


@pytest.mark.parametrize(("name", "program"), OF_VERSIONS.items(), ids=OF_VERSIONS)
def test_what_this_version_of_spark_plans(
    describe_program: Callable[[Program], PlanDescription], name: str, program: Program
) -> None:
    found = describe_program(program)
    assert found.planned is not None
    file = RECORDED / f"spark-{VERSION}.json"
    recorded = json.loads(file.read_text()) if file.exists() else {}
    present = json.loads(msgspec.json.encode({"declared": found.operators["stage"], "planned": found.planned["stage"]}))
    if os.environ.get("REWRITE_PLANS"):
        file.write_text(json.dumps({**recorded, name: present}, indent=1) + "\n")
    else:
        assert recorded.get(name) == present, f"Spark plans {name} in another way than {file} says"


@pytest.mark.parametrize("name", OF_VERSIONS)
def test_what_one_version_of_spark_has_planned_fits_another_one(name: str) -> None:
    plans = [msgspec.convert(json.loads(file.read_text())[name], Recorded) for file in sorted(RECORDED.iterdir())]
    assert len(plans) > 1
    for before, now in permutations(plans, 2):
        held = StageInstanceSnapshot(state_plan=before.declared, planned=before.planned)
        snapshot = TaskSnapshot({"stage": held}, QuerySnapshot(4))
        check_stateful_plans(snapshot, {"stage": now.declared}, "0", {}, "checkpoint 7", {"stage": now.planned})
