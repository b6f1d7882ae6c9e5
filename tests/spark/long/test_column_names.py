"""Columns whose names have characters that mean something in Spark's SQL: as the key of rows and state, and as the event time."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, bounded_source, stage, unbounded_source
from tests.spark.conftest import Lab

ROWS = "k long, v long"


@pytest.mark.parametrize("key", ["a`b.c", "``"])
def test_a_key_of_any_name_routes_rows_and_moves_with_its_state(lab: Lab, key: str) -> None:
    def pipeline(instances: list[str]) -> Pipeline:
        @unbounded_source
        def rows(context: Any) -> Any:
            return lab.stream("in", ROWS).withColumnRenamed("k", key)

        class First(Stage):
            def transform(self, context: Any, rows: Any) -> Any:
                return rows.dropDuplicates([key])

            def process_batch(self, batch: Any, batch_id: int) -> Any:
                return batch.toDF("k", "v").select("v", "k").toDF("v", key)  # in another order

        return Pipeline(
            "p", [rows, First(name="first", inputs={"rows": StageInput(key=key)}, instances=instances, sink=lab.sink())]
        )

    first = lab.start(pipeline(["x", "y"]), interval=None)
    lab.put("in", ROWS, [(k, 1) for k in range(20)])
    first.wait_until(lambda: first.execution.rows().get("first") == 20)
    first.done("stop")
    first.finished()
    second = lab.start(pipeline(["x", "y", "z"]), interval=None)
    lab.put("in", ROWS, [(k, 2) for k in range(10, 30)])
    second.wait_until(lambda: second.execution.rows().get("rows") == 40)
    second.drain()
    second.finished()
    lab.check([(k, 1) for k in range(20)] + [(k, 2) for k in range(20, 30)])


@pytest.mark.parametrize("chaining", [True, False])
@pytest.mark.parametrize("column", ["event time", "début-1"])
def test_a_column_of_any_name_is_the_event_time(lab: Lab, column: str, chaining: bool) -> None:
    @bounded_source(watermark=(column, "1 minute"))
    def early(context: Any) -> Any:
        return lab.stream("early", f"`{column}` timestamp")

    @unbounded_source(watermark=(column, "1 minute"))
    def late(context: Any) -> Any:
        return lab.stream("late", f"`{column}` timestamp")

    @stage(sink=lab.sink())
    def hours(early: Any, late: Any) -> Any:
        return early.union(late).groupBy(F.window(f"`{column}`", "1 hour")).count().select("window.start", "count")

    pipeline = Pipeline("p", [early, late, hours], chaining=chaining)
    lab.put("early", f"`{column}` timestamp", [(lab.at(60 * minute),) for minute in range(90)])
    lab.put("late", f"`{column}` timestamp", [(lab.at(60 * minute),) for minute in range(60, 120)])
    first = lab.start(pipeline)
    first.wait_until(lambda: lab.count() == 1)  # of the first hour
    first.done("stop")
    first.finished()
    second = lab.start(pipeline)  # a source has ended
    second.drain()
    second.finished()
    lab.check([(lab.at(0), 60), (lab.at(3600), 90)])
