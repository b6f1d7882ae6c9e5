"""Whether queries that were separate in a checkpoint keep the same state as one query: a comparison of optimized plans.

What the optimizer leaves in the state of one query depends on all of its stages (`optimized_state`). Analysis only; must not know
tasks or storage.

Source: Spark's `ColumnPruning`, `CollapseProject` and `RemoveRedundantAggregates`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.spark.query.optimized_state import aggregate_functions, columns_of_sides, optimized_nodes
from dagster_checkpoints.spark.query.plan_text import Node, as_written

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


@dataclass(frozen=True)
class _OptimizedOperator:
    """A stateful operator of an optimized plan.

    Attributes:
        text: All that its state consists of, in order, with the columns under their names.
        shape: The same without the names, which are others if the operator reads a channel.
    """

    text: str
    shape: tuple[str, ...]


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
        kept, added = after[: len(before)], [each.shape for each in after[len(before) :]]
        if kept != before or added != [each.shape for each in _operators(alone)]:
            name = earlier[0] if kept != before else tail
            return f"Spark would keep other columns, or in another order, in the state of the query that ends with {name!r}"
    return None


def _operators(frame: DataFrame) -> list[_OptimizedOperator]:
    """The stateful operators of the optimized plan, from the input to the output."""
    return [_operator(node, of) for node, of in optimized_nodes(frame)]


def _operator(node: Node, of: Any) -> _OptimizedOperator:
    keys = [as_written(each) for name in ("groupingExpressions", "keys", "groupingAttributes") for each in node.expressions(name)]
    functions = {as_written(each): each.children[0].kind for each in aggregate_functions(node)}
    sides = columns_of_sides(of) if node.kind == "Join" else []
    text = f"{node.kind} by {keys}: {list(functions)} {sides} {node.fields.get('groupingAttributesLen')}"
    counts = (len(keys), *map(len, sides), node.fields.get("groupingAttributesLen"))
    return _OptimizedOperator(text, (node.kind, *map(str, counts), *functions.values()))
