"""Finds the stateful operators in the plan of a streaming DataFrame, analyzed or optimized. Must not know what they keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_checkpoints.spark.query.plan_nodes import analyzed, once
from dagster_checkpoints.spark.query.plan_text import Node, is_streaming, parse, plan_json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PROCESSOR = "TransformWithStateInPySpark"
_KINDS = frozenset(
    {
        "Aggregate",
        "Deduplicate",
        "DeduplicateWithinWatermark",
        "Distinct",
        "Except",
        "FlatMapGroupsInPandasWithState",
        "GlobalLimit",
        "Intersect",
        PROCESSOR,
    }
)


@once
def analyzed_plan(frame: DataFrame) -> Node:
    """A DataFrame's analyzed plan, as a value."""
    return parse(plan_json(analyzed(frame)))


@once
def stateful_nodes(frame: DataFrame) -> list[Node]:
    """The stateful operators of a streaming DataFrame's analyzed plan, from the input to the output."""
    return stateful_nodes_of(analyzed_plan(frame))


def stateful_nodes_of(plan: Node) -> list[Node]:
    """The stateful operators of a plan of a streaming DataFrame, from the input to the output."""
    return [node for node in plan.bottom_up() if _is_stateful_join(node) or (node.kind in _KINDS and is_streaming(node))]


def _is_stateful_join(node: Node) -> bool:
    return node.kind == "Join" and all(is_streaming(child) for child in node.children)
