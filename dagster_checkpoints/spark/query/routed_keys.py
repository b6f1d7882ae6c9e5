"""Whether the state of a query belongs to the column by which rows are routed to the instances.

Only then can the state be moved with the key: equal values of the column meet in one instance, and all state of a value is there.
Analysis only; must not know tasks or storage.
"""

from __future__ import annotations

from collections.abc import Iterator

from dagster_checkpoints.spark.query.plan_fingerprint import stateful_nodes
from dagster_checkpoints.spark.query.plan_text import Node, column_origins, traced
from dagster_checkpoints.spark.query.plans import QueryPlan

_KEYS = {
    "Aggregate": "groupingExpressions",
    "Deduplicate": "keys",
    "DeduplicateWithinWatermark": "keys",
    "FlatMapGroupsInPandasWithState": "groupingAttributes",
}


def operators_without(plan: QueryPlan, key: str) -> list[str]:
    """The kinds of the query's stateful operators whose key does not hold a column of the inputs, unchanged and under its name.

    Args:
        plan: The plan of the query.
        key: The column by which the rows of all inputs are routed.
    """
    return [node.kind for node in stateful_nodes(plan.frame) if key not in _keys(node)]


def _keys(node: Node) -> Iterator[str]:
    """The columns of the inputs in the key of an operator's state."""
    if node.kind in _KEYS:
        for each in node.expressions(_KEYS[node.kind]):
            name = str(each.fields.get("name"))
            if each.kind == "AttributeReference" and traced(each, node.children) == name:
                yield name
    elif node.kind == "TransformWithStateInPySpark":
        yield from column_origins(node.children[0])[: int(node.fields.get("groupingAttributesLen") or 0)]
    elif node.kind == "Distinct":
        yield from column_origins(node.children[0])
