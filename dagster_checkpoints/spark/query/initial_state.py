"""Refuses the initial state of a `transformWithState` processor where each of several instances would take all of it.

Spark reads it in the first micro-batch of a query, and in no other one. Analysis only.

Source: Spark's `IncrementalExecution`, and
https://spark.apache.org/docs/latest/streaming/structured-streaming-transform-with-state.html
"""

from __future__ import annotations

from collections.abc import Sequence

from dagster_checkpoints.spark.errors import PlanRefusedError
from dagster_checkpoints.spark.query.plans import QueryPlan
from dagster_checkpoints.spark.query.stage_calls import StageCall
from dagster_checkpoints.spark.query.stateful_nodes import PROCESSOR, stateful_nodes


def check_no_initial_state(plan: QueryPlan, calls: Sequence[StageCall]) -> None:
    """Check that a query of one of several instances, which begins with its first micro-batch, has no initial state.

    Args:
        plan: The plan of the query.
        calls: The stages of the chain, in order.

    Raises:
        PlanRefusedError: A processor has one.
    """
    found = stateful_nodes(plan.frame) if plan.streaming else []
    owners = list(reversed(plan.stateful)) if len(plan.stateful) == len(found) else [calls[-1].stage.name] * len(found)
    for node, owner in zip(found, owners, strict=True):
        if node.kind == PROCESSOR and node.fields.get("hasInitialState"):
            call = next(each for each in calls if each.stage.name == owner)
            raise PlanRefusedError(
                owner,
                call.context.instance,
                f"its result ({call.stage.location}) has a processor with an initial state (initialState=), and the stage has "
                f"{call.context.parallelism} instances. The query of each instance that begins takes all of the initial state, "
                "also that of keys whose rows other instances get, and would emit rows of it. Give the stage one instance; when "
                "it has processed its first rows, stop with a savepoint, and continue from it with several instances: the state "
                "moves to them with its keys, and the initial state is not read again.",
            )
