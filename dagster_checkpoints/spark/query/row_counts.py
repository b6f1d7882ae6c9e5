"""Counts the rows that stages inside a query emit, with observed metrics of Spark; those of the last stage are counted where they
are written.

The observation also keeps Spark from moving a reader's filters below the stage: rows that the reader drops are rows of the stage.
Must not know tasks or checkpoints.

Source: Spark's `Dataset.observe`, `CollectMetricsExec` and `RangePartitioner`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F

from dagster_checkpoints.spark.query.plan_nodes import children

_PREFIX = "__dagster_checkpoints_rows_"
_NODE = "CollectMetrics"
_OBSERVED_SECONDS = 30.0
_POLL_SECONDS = 0.01

# Physical operators that evaluate their input more than once. A Cartesian product reads its left side again for each partition of
# its right side. A shuffle by ranges takes a sample of its input to find the bounds; Spark 4.3 counts the last evaluation.
_REPEATS = "CartesianProduct"
_SAMPLES = "rangepartitioning("
_SAMPLES_COUNT_BEFORE = (4, 3)


def counted(stage: str, frame: DataFrame) -> tuple[DataFrame, Observation | None]:
    """The output of a stage, whose rows Spark counts when it evaluates them.

    Returns:
        The output, and what has the number after a plan without streams was evaluated; None for a stream.
    """
    count = F.count(F.lit(1)).alias("rows")
    if frame.isStreaming:
        return frame.observe(f"{_PREFIX}{stage}", count), None
    observation = Observation(f"{_PREFIX}{stage}")
    return frame.observe(observation, count), observation


def counted_stage(kind: str, name: str) -> str | None:
    """The stage at whose output a node of a plan counts rows; None if it does not.

    Args:
        kind: the kind of the node.
        name: the node's name for what it observes.
    """
    return name.removeprefix(_PREFIX) if kind == _NODE and name.startswith(_PREFIX) else None


def rows_of_batch(execution: Any, stages: Iterable[str]) -> dict[str, int | None]:
    """By stage, the number of rows that it has emitted in a micro-batch; None if Spark has counted an evaluation twice.

    Args:
        execution: Spark's execution of the batch, which has been evaluated (a JVM object).
        stages: Stages whose output is counted.
    """
    metrics, repeated = execution.observedMetrics(), _repeated(execution)
    found: dict[str, int | None] = {}
    for stage in stages:
        name = f"{_PREFIX}{stage}"
        row = metrics.get(name)
        found[stage] = None if name in repeated else _rows(row.get()) if row.isDefined() else 0
    return found


def rows_of_table(observations: Mapping[str, Observation]) -> dict[str, int | None]:
    """The same for a plan without streams that has been evaluated.

    Spark hands the numbers over on another thread; None if it does not.
    """
    deadline, found = time.monotonic() + _OBSERVED_SECONDS, dict[str, int | None]()
    for stage, observation in observations.items():
        assert observation._jo is not None
        observed = observation._jo.future()
        while not observed.isCompleted() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        found[stage] = _rows(observed.value().get().get()) if observed.isCompleted() else None
    return found


def _rows(row: Any) -> int:
    """The number in a row of metrics, which is empty if Spark did not need the rows of the stage, and evaluated none of them."""
    return int(row.getLong(0)) if row.length() else 0


def _repeated(execution: Any) -> set[str]:
    """The names of the counts that are too high, because an operator above them evaluates its input more than once."""
    plan = execution.executedPlan()
    version = tuple(int(part) for part in str(execution.sparkSession().version()).split(".")[:2])
    marks = [_REPEATS, *([_SAMPLES] if version < _SAMPLES_COUNT_BEFORE else [])]
    text = str(plan.toString())
    return set(_counts_below(plan, marks)) if any(mark in text for mark in marks) else set()


def _counts_below(plan: Any, marks: Iterable[str], repeats: bool = False) -> Iterator[str]:
    name = str(plan.nodeName())
    if name == _NODE and repeats:
        yield str(plan.name())
    if name == "Exchange":  # its own output is stored, and read again
        repeats = any(mark in str(plan.outputPartitioning().toString()) for mark in marks)
    below = (
        [plan.executedPlan()] if name == "AdaptiveSparkPlan" else [plan.plan()] if name.endswith("QueryStage") else children(plan)
    )
    for child in below:
        yield from _counts_below(child, marks, repeats or name == _REPEATS)
