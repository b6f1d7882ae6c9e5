"""The initial state of a processor: only one query may take it, and other instances get it as state that moves with its keys."""

from __future__ import annotations

import re
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.errors import PlanRefusedError
from dagster_checkpoints.spark.job.pipeline_checks import check_plans
from tests.spark.conftest import Lab

ROWS = "k long, ts timestamp, v long"
TOTALS = "k long, total long"
INITIAL = [(1, 1000), (2, 2000), (7, 7000)]
DUE_MS = 1_767_225_600_000 + 3 * 3_600_000  # 3 o'clock of the day of the rows


class Total(StatefulProcessor):
    """The sum of a key's values, and of its initial state; emitted when its timer is due."""

    def init(self, handle: Any) -> None:
        self.handle, self.total = handle, handle.getValueState("total", "total long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        added = sum(int(each["v"].sum()) if isinstance(each, pd.DataFrame) else each.v for each in rows)
        self.keep((self.total.get()[0] if self.total.exists() else 0) + added)
        return iter(())

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        first = initialState["total"].iloc[0] if isinstance(initialState, pd.DataFrame) else initialState.total
        self.keep(int(first))

    def keep(self, total: int) -> None:
        self.total.update((total,))
        self.handle.registerTimer(DUE_MS)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        yield Row(k=key[0], total=self.total.get()[0])

    def close(self) -> None:
        pass


def pipeline(lab: Lab, instances: list[str] | None, *, initial: bool = True, in_pandas: bool = False, **options: Any) -> Pipeline:
    @unbounded_source(watermark=("ts", "1 minute"))
    def rows(context: Any) -> Any:
        return lab.stream("in", ROWS)

    @bounded_source
    def former(context: Any) -> Any:
        return lab.table("former", TOTALS)

    reads = {"rows": StageInput(key="k"), "former": StageInput(mode="static")}

    @stage(inputs=reads, sink=lab.sink(), instances=instances, **options)
    def totals(rows: Any, former: Any) -> Any:
        grouped, state = rows.groupBy("k"), former.groupBy("k") if initial else None
        method = grouped.transformWithStateInPandas if in_pandas else grouped.transformWithState
        return method(Total(), TOTALS, "Append", "EventTime", initialState=state)

    return Pipeline("p", [rows, former, totals])


@pytest.mark.parametrize("in_pandas", [True, False])
def test_several_instances_do_not_begin_with_an_initial_state(lab: Lab, in_pandas: bool) -> None:
    lab.put("former", TOTALS, INITIAL)
    (error,) = check_plans(pipeline(lab, ["x", "y"], in_pandas=in_pandas), lab.spark).failed.values()
    assert type(error) is PlanRefusedError and error.stage == "totals"
    assert re.search(r"test_initial_state.py.*initialState=.* has 2 instances.*one instance;.*savepoint", str(error)), error
    for accepted in (pipeline(lab, ["x"], in_pandas=in_pandas), pipeline(lab, ["x", "y"], initial=False, in_pandas=in_pandas)):
        assert not check_plans(accepted, lab.spark).failed
