"""Columns whose names have characters that mean something in Spark's SQL: rows are routed by them, and their state moves."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, unbounded_source
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
