"""Counts the rows that stages inside a query emit; those of the last stage are counted where they are written.

In a stream, a filter that drops nothing stands at the output of each stage, and Spark counts the rows that pass it. An
observation (`Dataset.observe`) would take an eighth of the time of a query of three stages: Spark generates no code for it.
Behind the first operator with state, where rows are fewer, an observation counts them all the same: Spark would move the filter
below the columns that the stage selects, and the values in the state would get another order. So it does in a plan without
streams, because Spark plans such a plan again when it is written.

Both also keep Spark from moving a reader's filters below the stage: rows that the reader drops are rows of the stage.
Must not know tasks or checkpoints.

Source: Spark's `FilterExec` with its metric `numOutputRows`, `Dataset.observe`, `PushPredicateThroughProject`, and
`RangePartitioner`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F

from dagster_checkpoints.spark.query.plan_nodes import ExecutedNodes, executed_children
from dagster_checkpoints.spark.query.plan_text import Node, conjuncts

_PREFIX = "__dagster_checkpoints_rows_"
_FILTER, _OBSERVATION = "Filter", "CollectMetrics"
_HIGHEST = -(1 << 30)
"""The filter of a chain's first stage drops all partitions up to this number: none. That of the next stage has one less."""
_CONDITION = re.compile(r"SPARK_PARTITION_ID\(\) > (-\d+)\)")
_OBSERVED_SECONDS = 30.0
_POLL_SECONDS = 0.01

# Physical operators that evaluate their input more than once. A Cartesian product reads its left side again for each partition of
# its right side. A shuffle by ranges takes a sample of its input to find the bounds.
_REPEATS = "CartesianProduct"
_SAMPLES = "rangepartitioning("


def counted(stage: str, position: int, frame: DataFrame, *, state: bool) -> tuple[DataFrame, Observation | None]:
    """The output of a stage, whose rows Spark counts when it evaluates them.

    Args:
        stage: The stage's name.
        position: The stage's position in its chain, from 0.
        frame: The stage's output.
        state: Whether the plan has an operator that keeps state.

    Returns:
        The output, and what has the number after a plan without streams was evaluated; None for a stream.
    """
    count = F.count(F.lit(1)).alias("rows")
    if not frame.isStreaming:
        observation = Observation(f"{_PREFIX}{stage}")
        return frame.observe(observation, count), observation
    if state:
        return frame.observe(f"{_PREFIX}{stage}", count), None
    return frame.where(F.spark_partition_id() > F.lit(_HIGHEST - position)), None


def counted_stage(node: Node, stages: Sequence[str]) -> str | None:
    """The stage at whose output a node of an analyzed plan counts rows; None if it does not.

    Args:
        node: The node.
        stages: The stages of the chain, in order.
    """
    if node.kind == _OBSERVATION:
        return _observed(str(node.fields.get("name")))
    for part in (each for condition in node.expressions("condition") for each in conjuncts(condition)):
        if node.kind == _FILTER and part.kind == "GreaterThan" and part.children[0].kind == "SparkPartitionID":
            return _stage(str(part.children[1].fields.get("value")), stages)
    return None


def _observed(name: str) -> str | None:
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else None


def _stage(number: str, stages: Sequence[str]) -> str | None:
    position = _HIGHEST - int(number) if re.fullmatch(r"-\d+", number) else -1
    return stages[position] if 0 <= position < len(stages) else None


class RowCounts:
    """The rows that the stages of a streaming query have emitted in each of its micro-batches.

    Args:
        stages: The stages of the chain, in order, two or more; those in front of the last one are counted.
        stateful: Those of them whose operators keep state.
    """

    def __init__(self, stages: Sequence[str], stateful: Collection[str]) -> None:
        first = next((position for position, stage in enumerate(stages) if stage in stateful), len(stages))
        self._stages = tuple(stages[:-1])
        self._observed = self._stages[first:]
        self._nodes = ExecutedNodes(_FILTER, self._stages[:first], self._counted)

    def of_batch(self, execution: Any) -> dict[str, int | None]:
        """By stage, the number of rows that it has emitted in a micro-batch; None if an operator has evaluated its rows twice.

        Args:
            execution: Spark's execution of the batch, which has been evaluated (a JVM object).
        """
        plan = execution.executedPlan()
        found: dict[str, int | None] = dict.fromkeys(self._stages, 0)  # Spark leaves out a part of a plan that has no rows
        for stage, node in self._nodes.of(plan):
            # A stage that is read twice stands twice in the plan.
            found[stage] = max(found[stage] or 0, int(node.longMetric("numOutputRows").value()))
        if self._observed:
            metrics = execution.observedMetrics()
            rows = {stage: metrics.get(f"{_PREFIX}{stage}") for stage in self._observed}
            found |= {stage: _rows(row.get()) for stage, row in rows.items() if row.isDefined()}
        return found | dict.fromkeys(self._repeated(plan))

    def _counted(self, node: Any) -> str | None:
        condition = _CONDITION.search(str(node.condition().toString()))
        return _stage(condition[1], self._stages) if condition is not None else None

    def _repeated(self, plan: Any) -> set[str]:
        """The stages whose counts are too high, because an operator above them evaluates its input more than once."""
        text = str(plan.toString())
        return set(self._below(plan)) if _REPEATS in text or _SAMPLES in text else set()

    def _below(self, plan: Any, repeats: bool = False) -> Iterator[str]:
        name = str(plan.nodeName())
        if repeats and name in (_FILTER, _OBSERVATION):
            stage = self._counted(plan) if name == _FILTER else _observed(str(plan.name()))
            if stage is not None:
                yield stage
        if name == "Exchange":  # its own output is stored, and read again
            repeats = _SAMPLES in str(plan.outputPartitioning().toString())
        for child in executed_children(plan):
            yield from self._below(child, repeats or name == _REPEATS)


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
