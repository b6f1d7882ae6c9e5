"""Which queries keep the same state as one query, as far as Spark's optimizer is concerned. Plans only, nothing runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dagster_checkpoints.spark.query.joined_plans import differing_state

Function = Callable[[DataFrame], DataFrame]


def sums(rows: DataFrame) -> DataFrame:
    window = rows.groupBy(F.window("ts", "10 minutes"), "k")
    return window.agg(F.sum("v").alias("v"), F.sum("w").alias("w")).select(F.window_time("window").alias("ts"), "k", "v", "w")


def once(rows: DataFrame) -> DataFrame:
    return rows.dropDuplicatesWithinWatermark(["k", "v"])


def windows(*columns: str, by: str = "k") -> Function:
    def counted(rows: DataFrame) -> DataFrame:
        return rows.groupBy(F.window("ts", "1 hour"), by).agg(*[F.sum(column).alias(column) for column in columns])

    return counted


def named(rows: DataFrame) -> DataFrame:
    return rows.select("ts", F.lit("x").alias("k"), "v", "w")


def paired(rows: DataFrame) -> DataFrame:
    other = rows.select(F.col("k").alias("k2"), F.col("ts").alias("ts2"), F.col("w").alias("w2"))
    return rows.join(other, F.expr("k = k2 and ts = ts2")).select("ts", "k", "v", "w")


@pytest.mark.parametrize(
    ("stages", "different"),
    [
        ([sums, windows("v", "w")], None),
        ([once, sums, windows("v", "w")], None),
        ([lambda rows: rows.where("v > 0").withColumn("w", F.col("w") + 1), windows("v")], None),
        ([sums, windows("v")], 0),  # the state of the first sums would have no `w`
        ([sums, lambda rows: rows.select("ts", "k", "w", "v")], 0),  # Spark would take one sum for the other
        ([once, sums, lambda rows: rows.select("ts", "k", "w", "v")], 1),
        ([named, windows("v")], None),
        ([paired, windows("v")], 0),  # the state of the join would have no `w`
        ([once, paired], 1),  # the operator in front of the join would be there twice
    ],
)
def test_what_the_optimizer_changes_in_the_state(spark: SparkSession, stages: list[Function], different: int | None) -> None:
    def rows() -> DataFrame:
        rate = (
            spark.readStream.format("rate")
            .load()
            .selectExpr("timestamp as ts", "string(value) as k", "value as v", "value + 1 as w")
        )
        return rate.withWatermark("ts", "1 minute")

    names = [f"stage{number}" for number in range(len(stages))]
    outputs, parts, frame = {}, [], rows()
    for name, function in zip(names, stages, strict=True):
        alone: Any = function(rows())
        frame = outputs[name] = function(frame)
        parts.append((name, alone))
    found = differing_state(outputs, parts)
    assert (found is None) == (different is None), found
    assert different is None or found is None or found.endswith(f"query that ends with '{names[different]}'")
