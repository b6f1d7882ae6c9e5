"""Stages with several instances whose state does not belong to the column by which rows are routed: a warning names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, stage, unbounded_source
from dagster_checkpoints.spark.job.pipeline_checks import check_plans
from tests.spark.conftest import Lab

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = "k string, ts timestamp, v long"
Transform = Callable[["DataFrame", "DataFrame"], "DataFrame"]


def right(b: DataFrame) -> DataFrame:
    return b.selectExpr("k AS rk", "ts AS rts", "v AS rv")


def joined(condition: str, how: str = "inner") -> Transform:
    within = "rts BETWEEN ts - INTERVAL 1 HOUR AND ts + INTERVAL 1 HOUR"
    return lambda a, b: a.join(right(b), F.expr(f"{condition} AND {within}"), how)


def one_key(a: DataFrame, b: DataFrame) -> DataFrame:
    both = joined("k = rk", "left")(a, b).selectExpr("coalesce(rk, k) AS id", "ts")
    return both.groupBy("id", F.window("ts", "1 hour")).count()


def limited(a: DataFrame, b: DataFrame) -> DataFrame:
    return a.union(b).limit(3)


STAGES: dict[str, tuple[Transform, list[str]]] = {
    "no_state": (lambda a, b: a.union(b), []),
    "windows_by_the_key": (lambda a, b: a.union(b).groupBy("k", F.window("ts", "1 hour")).count(), []),
    "under_another_name": (lambda a, b: right(a.union(b)).groupBy("rk", F.window("rts", "1 hour")).count(), []),
    "windows": (lambda a, b: a.union(b).groupBy(F.window("ts", "1 hour")).count(), ["Aggregate"]),
    "by_a_changed_key": (lambda a, b: a.union(b).groupBy(F.lower("k"), F.window("ts", "1 hour")).count(), ["Aggregate"]),
    "by_parts_of_the_key": (
        lambda a, b: a.union(b).withColumn("k", F.explode(F.split("k", ","))).groupBy("k", F.window("ts", "1 hour")).count(),
        ["Aggregate"],
    ),
    "duplicates_of_the_key": (lambda a, b: a.union(b).dropDuplicatesWithinWatermark(["k", "v"]), []),
    "duplicates": (lambda a, b: a.union(b).dropDuplicates(["v", "ts"]), ["Deduplicate"]),
    "different_rows": (lambda a, b: a.union(b).distinct(), []),
    "join_by_the_key": (joined("k = rk"), []),
    "join_by_the_key_or_null": (joined("k <=> rk", "full"), []),
    "join_by_the_key_and_more": (joined("v = rv AND k = rk", "left"), []),
    "join": (joined("v = rv"), ["Join"]),
    "join_by_a_changed_key": (joined("lower(k) = lower(rk)"), ["Join"]),
    "the_key_of_an_outer_join": (one_key, []),
    "windows_behind_a_join": (
        lambda a, b: joined("k = rk")(a, b).groupBy(F.window("ts", "1 hour"), "v").count(),
        ["Aggregate"],
    ),
    "limit": (limited, ["GlobalLimit"]),
}


def pipeline(lab: Any, transforms: Mapping[str, Transform], instances: list[str], key: str | None) -> Pipeline:
    """Two inputs; a stage that is routed by `key` passes `a` on to those with the state, row for row."""
    how = None if key is None else {name: StageInput(key=key) for name in "ab"}

    def read(name: str) -> Stage:
        def read_rows(context: Any) -> DataFrame:
            return lab.stream(name, ROWS)

        return unbounded_source(name=name, watermark=("ts", "1 hour"), instances=instances if how is None else None)(read_rows)

    @stage(name="routed", inputs=how and {"a": how["a"]}, instances=instances)
    def routed(a: DataFrame) -> DataFrame:
        return a.filter("v > 0")

    def with_state(name: str, transform: Transform) -> Stage:
        @stage(name=name, inputs=how and {"b": how["b"]}, instances=instances, sink=lab.sink(name))
        def state(routed: DataFrame, b: DataFrame) -> DataFrame:
            return transform(routed, b)

        return state

    return Pipeline("instances", [read("a"), read("b"), routed, *(with_state(*each) for each in transforms.items())])


@pytest.fixture(scope="module")
def warnings(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The warnings of a check of all stages, in two instances."""
    lab = Lab(spark, tmp_path_factory.mktemp("lab"))
    report = check_plans(pipeline(lab, {name: each for name, (each, _) in STAGES.items()}, ["x", "y"], "k"), spark)
    assert report.failed == {}
    return report.warnings


@pytest.mark.parametrize("name", STAGES)
def test_state_that_does_not_belong_to_the_routed_column(warnings: list[str], name: str) -> None:
    found = [text for text in warnings if f"Stage {name!r} (" in text]
    operators = STAGES[name][1]
    assert len(found) == len(operators)
    for text, operator in zip(found, operators, strict=True):
        assert f"has 2 instances, and its rows are routed by 'k', which is not in the key of its {operator}:" in text


@pytest.mark.parametrize(
    ("instances", "key", "named"),
    [("x", "v", None), ("x", None, None), ("xy", "v", "its rows are routed by 'v'"), ("xy", None, "no column routes its rows")],
)
def test_one_instance_has_all_rows_and_several_without_a_key_have_any(
    lab: Any, instances: str, key: str | None, named: str | None
) -> None:
    transform, _ = STAGES["windows_by_the_key"]
    report = check_plans(pipeline(lab, {"windows": transform}, list(instances), key), lab.spark)
    warnings = [text for text in report.warnings if "Stage 'windows'" in text]  # another one is of the source's instances
    assert [named in text for text in warnings if named] == [True] * len(warnings) == [True] * bool(named)


KINDS = [
    *(("double", "double"), ("float", "float"), ("struct<x:double>", "struct<x:double>"), ("array<float>", "array<float>")),
    *(("tinyint", "int"), ("decimal(10,2)", "decimal(12,2)"), ("struct<x:smallint>", "struct<x:int>")),
]
"""Types of keys that Spark compares in another form: zeros are equal, and so are numbers of two types with the same hashes."""


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_keys_that_spark_compares_in_another_form(lab: Lab, kinds: tuple[str, str]) -> None:
    def read(name: str, kind: str) -> Stage:
        return unbounded_source(name=name, watermark=("ts", "1 hour"))(
            lambda context: lab.stream(name, f"k {kind}, ts timestamp, v long")
        )

    def with_state(name: str, transform: Transform) -> Stage:
        @stage(name=name, inputs={each: StageInput(key="k") for each in "ab"}, instances=["x", "y"], sink=lab.sink(name))
        def state(a: DataFrame, b: DataFrame) -> DataFrame:
            return transform(a, b)

        return state

    stages = [with_state(name, STAGES[name][0]) for name in ("join_by_the_key", "windows_by_the_key", "duplicates_of_the_key")]
    report = check_plans(Pipeline("numbers", [*map(read, "ab", kinds), *stages]), lab.spark)
    assert (report.failed, [text for text in report.warnings if "routed" in text]) == ({}, [])


@pytest.mark.parametrize(("key", "warned"), [("upper(k) AS k", True), ("k AS id", False), ("k", False)])
def test_a_key_that_a_query_in_front_has_changed_or_renamed(lab: Any, key: str, warned: bool) -> None:
    """Of a changed key, equal ones may be in two instances."""

    @unbounded_source(watermark=("ts", "1 hour"))
    def live(context):
        return lab.stream("live", ROWS)

    @stage(inputs={"live": StageInput(key="k")}, instances=["x", "y"])
    def before(live):
        return live.select(F.expr(key), "ts")

    @stage(instances=["x", "y"], sink=lab.sink())
    def windows(before):
        return before.groupBy(before.columns[0], F.window("ts", "1 hour")).count()

    report = check_plans(Pipeline("instances", [live, before, windows], chaining=False), lab.spark)
    assert report.failed == {}
    assert ["Stage 'windows'" in text and "no column routes its rows" in text for text in report.warnings] == [True] * warned
