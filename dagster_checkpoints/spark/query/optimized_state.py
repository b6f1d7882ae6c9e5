"""What Spark's optimizer leaves of a query's stateful operators: the columns and values that are really in their state.

The optimizer works on a whole query. It drops the columns that later operators do not read, also from the state of aggregations
and joins, and the order of the columns that a later projection selects decides the order of an aggregation's values. Spark
compares only the types of these, so that after a restore with another projection one sum could continue as another one.
Analysis only; must not know tasks or storage.

Source: Spark's `ColumnPruning`, `CollapseProject` and `StateSchemaCompatibilityChecker`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.spark.query.plan_json import plan_json
from dagster_checkpoints.spark.query.plan_nodes import children, nodes
from dagster_checkpoints.spark.query.plan_text import Node, parse
from dagster_checkpoints.spark.query.stateful_nodes import stateful_nodes, stateful_nodes_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def _optimized_nodes(plan: Any) -> list[tuple[Node, Any]]:
    """The stateful operators of an optimized plan, from the input to the output, each with Spark's object."""
    wanted = stateful_nodes_of(parse(plan_json(plan)))
    objects = list(nodes(plan)) if wanted else []  # in the order of the JSON
    return [(node, objects[node.number]) for node in wanted]


def aggregate_functions(node: Node) -> Iterator[Node]:
    """The aggregate functions of an aggregation, in order; one that is used twice appears twice."""
    for each in node.expressions("aggregateExpressions"):
        yield from (part for part in each.all() if part.kind == "AggregateExpression")


def kept_in_state(frame: DataFrame, optimized_plan: Any) -> list[str] | None:
    """By stateful operator, from the input to the output, what its state holds; an empty text if its declaration says that.

    Aggregate functions are named by their positions among the declared ones, from 1: the optimizer also replaces the expressions
    inside them. None if it has replaced an operator by others.

    Args:
        frame: the result of a query.
        optimized_plan: its optimized plan, a JVM object.
    """
    declared, optimized = stateful_nodes(frame), _optimized_nodes(optimized_plan)
    if len(declared) != len(optimized):
        return None
    found = [_kept(node, kept, of) for node, (kept, of) in zip(declared, optimized, strict=True)]
    return None if None in found else [text or "" for text in found]


def _kept(declared: Node, optimized: Node, of: Any) -> str | None:
    if declared.kind == optimized.kind == "Join":
        left, right = (_columns(child) for child in children(of))
        return f"{', '.join(left) or 'nothing'} of the left side, {', '.join(right) or 'nothing'} of the right side"
    if declared.kind != "Aggregate" or optimized.kind != "Aggregate":
        return ""
    positions = {_id(function): number for number, function in enumerate(aggregate_functions(declared), start=1)}
    kept = list(dict.fromkeys(positions.get(_id(function)) for function in aggregate_functions(optimized)))
    if None in kept:
        return None
    return f"functions {', '.join(map(str, kept))}" if kept else "no function"


def _id(function: Node) -> int:
    return int(function.fields["resultId"]["id"])


def _columns(plan: Any) -> list[str]:
    output = plan.output()
    columns = (output.apply(number) for number in range(output.size()))
    return [f"{column.name()} {column.dataType().catalogString()}" for column in columns]
