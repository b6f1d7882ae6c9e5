"""Whether queries that were separate in a checkpoint keep the same state as one query: a comparison of planned operators.

What Spark leaves in the state of one query depends on all of its stages (`planned_state`). Analysis only; must not know
tasks or storage.

Source: Spark's `ColumnPruning`, `CollapseProject` and `RemoveRedundantAggregates`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from dagster_checkpoints.spark.query.plan_fingerprint import stream_text
from dagster_checkpoints.spark.query.plan_nodes import analyzed
from dagster_checkpoints.spark.query.planned_query import query_execution
from dagster_checkpoints.spark.query.planned_state import planned_operators
from dagster_checkpoints.state import PlannedOperator

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class QueriesStayApart(Exception):
    """Recorded queries cannot go on as one; they can as separate ones.

    Args:
        chain: The name of the chain that was to be made of them.
        reason: Why they cannot.
    """

    def __init__(self, chain: str, reason: str) -> None:
        super().__init__(reason)
        self.chain = chain
        self.reason = reason


def differing_state(outputs: Mapping[str, DataFrame], parts: Sequence[tuple[str, DataFrame]]) -> str | None:
    """In words, what is different in the state of queries if they run as one; None if nothing is.

    Args:
        outputs: The result of each stage in the joined plan.
        parts: By separate query, in order, its last stage, and the result of that stage in its plan.
    """
    try:
        return _different(outputs, parts)
    except Exception as error:  # of the optimizer, or of a plan that cannot be written as JSON: nothing is known of the state
        return f"their optimized plans cannot be compared ({type(error).__name__}: {error})"


def _different(outputs: Mapping[str, DataFrame], parts: Sequence[tuple[str, DataFrame]]) -> str | None:
    found = [_operators(outputs[tail]) for tail, _ in parts]
    if found[0] != _operators(parts[0][1]):
        return f"the state of the query that ends with {parts[0][0]!r} is another one there"
    for (before, after), (earlier, (tail, alone)) in zip(pairwise(found), pairwise(parts), strict=True):
        kept, added = after[: len(before)], list(map(_shape, after[len(before) :]))
        if kept != before or added != list(map(_shape, _operators(alone))):
            name = earlier[0] if kept != before else tail
            return f"Spark would keep other columns, or in another order, in the state of the query that ends with {name!r}"
    return None


def _operators(frame: DataFrame) -> list[PlannedOperator]:
    """The operators that Spark plans, without what stands in front of them, which is the same."""
    execution = query_execution(frame.sparkSession, analyzed(frame), "append")
    return [
        msgspec.structs.replace(each, sides=tuple(msgspec.structs.replace(side, steps=()) for side in each.sides))
        for each in planned_operators(frame, execution, "append", stream_text)
    ]


def _shape(operator: PlannedOperator) -> tuple[object, ...]:
    """All that the state of an operator consists of, without the names of columns, which are others if it reads a channel."""
    functions = () if len(operator.sides) > 1 else operator.sides[0].columns
    return operator.kind, len(operator.keys), len(operator.pushed), [len(side.columns) for side in operator.sides], functions
