"""Finds plans of which Spark's optimizer makes others, with which rows would be missing.

Spark plans each micro-batch of what its optimizer makes of the stage's plan, and checks only the stage's. The optimizer leaves
out what does not change the rows of a table, such as the other side of an outer join of which nothing is used; and it makes joins
and groups of a subquery that refers to the rows around it. Of a stream, event time then stands still, or rows are never due.

Source: Spark's `EliminateOuterJoin`, `PropagateEmptyRelation`, `DecorrelateInnerQuery` and `WatermarkTracker`, which waits for
every watermark of the plan that it was made of.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql import DataFrame

from dagster_checkpoints.spark.jvm import jvm_of
from dagster_checkpoints.spark.query.fused_plans import refused_plan, watermark_nodes
from dagster_checkpoints.spark.query.operators import WITH_STATE, keeping_state
from dagster_checkpoints.spark.query.plan_nodes import PlanNode, analyzed, analyzed_nodes, optimized_nodes, reads_streams
from dagster_checkpoints.spark.query.stage_calls import StageCall

_WATERMARK = "EventTimeWatermark"


def check_optimized(call: StageCall, frame: DataFrame, *, divisible: bool) -> None:
    """Check that the optimizer leaves a stage's plan its event time, and adds no operators with state to it.

    Args:
        frame: The stage's result, a stream.
        divisible: Whether the stage may begin a query of its own, whose inputs the optimizer does not look through.

    Raises:
        RefusedAtStage: Rows would be missing, and the stage may begin a query of its own.
        PlanRefusedError: Rows would be missing.
    """
    if keeping_state(frame) and _leaves_out_event_time(frame):
        text = (
            f"its result ({call.stage.location}) reads a stream that has no effect on the rows: the other side of an outer join "
            "of which no column is used, or rows that a condition never lets through. Spark's optimizer leaves it out, and its "
            "event time with it, for which the rest of the query would wait for ever. Remove the join or the branch; or return "
            "it from a stage of its own, with all its columns"
        )
        raise refused_plan(call, text, "Spark would leave out a stream on whose event time the rest waits", divisible=divisible)
    if _has_subquery(frame) and (made := _made_by_optimizer(frame)):
        text = (
            f"its result ({call.stage.location}) has a subquery, or a lateral join, that refers to the rows of a stream by more "
            f"than equal columns: Spark makes {made} of it, which would lose rows without a match. Refer to them by equalities "
            "of columns alone; or join the table with the condition, and choose among the matches of a row in process_batch"
        )
        raise refused_plan(call, text, f"Spark makes {made} of its subquery", divisible=divisible)


def _leaves_out_event_time(frame: DataFrame) -> bool:
    before = set(watermark_nodes(frame))
    if len(before) < 2:  # a plan without any stream has no state
        return False
    after = {str(node.of.nodeId().toString()) for node in optimized_nodes(frame) if node.name == _WATERMARK}
    return not before <= after


def _has_subquery(frame: DataFrame) -> bool:
    patterns = jvm_of(frame.sparkSession).org.apache.spark.sql.catalyst.trees.TreePattern
    return bool(analyzed(frame).containsPattern(patterns.PLAN_EXPRESSION()))


def _made_by_optimizer(frame: DataFrame) -> str:
    """What the optimizer makes of a plan that keeps state and was not there before; empty if nothing."""
    before, after = _state_in(analyzed_nodes(frame)), _state_in(optimized_nodes(frame))
    made = [what for what in before if after[what] > before[what]]
    return " and ".join(made)


def _state_in(nodes: Iterable[PlanNode]) -> dict[str, int]:
    streaming: list[PlanNode] = [node for node in nodes if node.of.isStreaming()]
    joins = sum(node.name == "Join" and reads_streams(node.of) for node in streaming)
    return {"a join of two streams": joins, "groups of a stream": sum(node.name in WITH_STATE for node in streaming)}
