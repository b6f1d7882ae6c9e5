"""A query of many sources asks them less often than one of a few."""

from __future__ import annotations

from functools import reduce
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from dagster_checkpoints.pipeline import Pipeline, Stage, StageContext, StageInput, unbounded_source
from dagster_checkpoints.spark.query.query_sessions import POLLING_DELAY, USUAL_POLLING_DELAY


def test_the_query_of_five_sources_has_a_delay_of_its_own(lab: Any, spark: SparkSession) -> None:
    names = [f"s{number}" for number in range(5)]

    def source(name: str) -> Stage:
        lab.put(name, "v long", [(1,)])
        return unbounded_source(name=name)(lambda context: lab.stream(name, "v long"))

    class All(Stage):
        def transform(self, context: StageContext, **inputs: DataFrame) -> DataFrame:
            return reduce(DataFrame.union, inputs.values())

    together = All("together", inputs={name: StageInput() for name in names}, sink=lab.sink())
    job = lab.start(Pipeline("polls", [*map(source, names), together]))
    job.wait_until(lambda: lab.count() == len(names))
    [task] = job.execution.deployment.tasks.values()
    assert task.query.execution.sparkSession().conf().get(POLLING_DELAY) == "100ms"
    job.drain()
    job.finished()
    assert spark.conf.get(POLLING_DELAY) == USUAL_POLLING_DELAY  # other queries keep theirs
