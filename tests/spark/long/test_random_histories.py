"""Random pipelines under random histories: an operator with state, its inputs, instances and layout, against its batch result.

The stages are sound, so whatever `check_pipeline` finds is a fault of the runtime. (The sessions in user code of
`test_stateful_operators` are not: rows of one micro-batch are one session, whatever is between them.)
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dagster_checkpoints import ParquetSink, Pipeline, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.testing import SourceRows, check_pipeline
from tests.spark.planted_mistakes import NOWHERE, at, unreachable
from tests.spark.test_stateful_operators import (
    BUYS,
    CLICKS,
    bought_within,
    five_minutes,
    sessions_of,
)

KINDS = (bounded_source, unbounded_source)


def by_minute(clicks: Any) -> Any:
    minutes = clicks.groupBy(F.window("ts", "1 minute"), "k").agg(F.sum("v").alias("v"))
    return five_minutes(minutes.select(F.window_time("window").alias("ts"), "k", "v"), "ts")


OF_CLICKS = {
    "windows": lambda clicks: five_minutes(clicks, "ts"),
    "windows of windows": by_minute,
    "sessions": sessions_of,
    "each once": lambda clicks: clicks.select("k", "ts").dropDuplicates(["k", "ts"]),
    "each once within the watermark": lambda clicks: clicks.select("k", "ts").dropDuplicatesWithinWatermark(["k", "ts"]),
}
JOINS = ("inner", "left_outer", "full_outer", "left_semi")


class RandomPipeline:
    """A pipeline of one stage with state, drawn by chance, with rows for its sources."""

    def __init__(self, chance: Random) -> None:
        self.name = chance.choice([*OF_CLICKS, *JOINS])
        joins = self.name in JOINS
        sources = [self._source("clicks", "ts", chance)] + ([self._source("buys", "bought", chance)] if joins else [])
        one_each = all(source.parallelism == 1 for source in sources)
        layout = chance.choice(["fused", "keyed", "keyed", "all to all"] if one_each else ["keyed", "all to all"])
        keys = {"clicks": "k", "buys": "who"}
        inputs = {
            source.name: StageInput(key=keys[source.name])
            if layout == "keyed"
            else StageInput(edge=None if layout == "fused" else "all_to_all")
            for source in sources
        }
        instances = ["p", "q", "r"][: chance.randint(1, 3)] if layout == "keyed" else ["p"]
        self.text = (
            f"{self.name}, {layout}, {len(instances)} instances of {[(each.kind.value, each.instances) for each in sources]}"
        )
        self.pipeline = Pipeline("random", [*sources, self._stage(inputs, instances)], chaining=chance.random() < 0.6)
        self.rows = {"clicks": SourceRows(CLICKS, self._rows(chance, 40))}
        if joins:
            self.rows["buys"] = SourceRows(BUYS, self._rows(chance, 15))

    def _source(self, name: str, time: str, chance: Random) -> Any:
        instances = chance.choice([["0"], ["0"], ["a", "b"]])
        return chance.choice(KINDS)(name=name, watermark=(time, "1 minute"), instances=instances)(unreachable)

    def _rows(self, chance: Random, number: int) -> list[tuple[str, Any, int]]:
        return [(chance.choice("abc"), at(chance.randrange(900) / 60), index) for index in range(number)]

    def _stage(self, inputs: dict[str, StageInput], instances: list[str]) -> Any:
        options: dict[str, Any] = {"sink": ParquetSink(NOWHERE), "inputs": inputs, "instances": instances}
        if self.name in JOINS:

            @stage(**options)
            def found(clicks: Any, buys: Any) -> Any:
                return bought_within(clicks, buys, self.name)

            return found

        @stage(**options)
        def of_clicks(clicks: Any) -> Any:
            return OF_CLICKS[self.name](clicks)

        return of_clicks


@pytest.mark.parametrize("number", range(3))
def test_a_random_pipeline_has_its_batch_result_under_random_histories(spark: SparkSession, chance: Random, number: int) -> None:
    drawn = RandomPipeline(Random(chance.randrange(10**9) + number))
    print(drawn.text)
    checked = check_pipeline(
        drawn.pipeline, drawn.rows, spark=spark, histories=7, seed=chance.randrange(10**9), allow=["key is null"]
    )
    assert sum(checked.rows.values())
