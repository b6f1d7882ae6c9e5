"""Finds joins of two streams that Spark cannot run, and those that keep their rows for ever.

Spark looks up the rows of the other side by their key, so the condition needs an equality of columns of both sides. It drops a
row of a stream-stream join from its state when no matching row can arrive any more. It derives that from a watermark on the
join's keys, or from a watermark on both sides and a condition that bounds one time by the other.

Source: https://spark.apache.org/docs/latest/streaming/apis-on-dataframes-and-datasets.html#stream-stream-joins, and Spark's
`StreamingSymmetricHashJoinHelper.getStateWatermarkPredicates`, whose conditions this module evaluates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.sql import DataFrame

from dagster_checkpoints.spark.errors import PlanRefusedError
from dagster_checkpoints.spark.query.plan_nodes import analyzed, children, nodes
from dagster_checkpoints.spark.query.stage_calls import StageCall

_ANY_WATERMARK_MS = 1 << 40  # Spark adds it to the bound; this module only needs to know whether there is a bound


def check_join_keys(call: StageCall, frame: DataFrame) -> None:
    """Check that each join of two streams has a key. Spark itself finds that out when it plans the first micro-batch.

    Args:
        frame: The stage's result.

    Raises:
        PlanRefusedError: A join has none.
    """
    if not _joins(analyzed(frame)):
        return
    jvm = frame.sparkSession._jvm
    assert jvm is not None
    keys = jvm.org.apache.spark.sql.catalyst.planning.ExtractEquiJoinKeys
    for join in _joins(_optimized(frame)):
        if keys.unapply(join).isEmpty():
            condition = join.condition()
            raise PlanRefusedError(
                call.stage.name,
                call.context.instance,
                f"its result ({call.stage.location}) joins two streams on "
                f"{condition.get().sql() if condition.isDefined() else 'no condition'}, without an equality: Spark finds "
                "matching rows by the values that are equal on both sides, and cannot run this join. Add an equality, of a key, "
                "or of windows of the event time (F.window) that contain all times that may match.",
            )


def check_joins(call: StageCall, frame: DataFrame, arguments: Mapping[str, DataFrame]) -> list[str]:
    """Find a stage's joins of two streams in which Spark keeps a side's rows for ever.

    Args:
        frame: The stage's result.
        arguments: The stage's inputs; their joins belong to earlier stages of the chain.
    """
    if not _joins(analyzed(frame)):
        return []
    kept = _kept_sides(frame)
    if not kept or len(kept) <= sum(len(_kept_sides(given)) for given in arguments.values() if given.isStreaming):
        return []
    sides = " and ".join(dict.fromkeys(kept))
    return [
        f"Stage {call.stage.name!r} ({call.stage.location}): its join of two streams keeps every row of its {sides} side for "
        "ever, since Spark cannot know when a row has no more matching rows: its state and every checkpoint grow without end. "
        "Declare watermark= at the sources of both inputs, and join on the event time as well: equal times, or a range such as "
        "right_ts BETWEEN left_ts AND left_ts + INTERVAL 1 HOUR."
    ]


def _kept_sides(frame: DataFrame) -> list[str]:
    """The sides ("left", "right") of the plan's stream-stream joins whose rows are never dropped."""
    if not _joins(analyzed(frame)):
        return []
    jvm = frame.sparkSession._jvm
    assert jvm is not None
    helper = jvm.org.apache.spark.sql.catalyst.analysis.StreamingJoinHelper
    kept = []
    for join in _joins(_optimized(frame)):
        if helper.isWatermarkInJoinKeys(join):
            continue
        for side, own, other in (("left", join.left(), join.right()), ("right", join.right(), join.left())):
            watermark = jvm.scala.Option.apply(_ANY_WATERMARK_MS)
            bound = helper.getStateValueWatermark(own.outputSet(), other.outputSet(), join.condition(), watermark)
            if not (_has_watermark(own) and bound.isDefined()):
                kept.append(side)
    return kept


def _optimized(frame: DataFrame) -> Any:
    return frame.sparkSession._jsparkSession.sessionState().optimizer().execute(analyzed(frame))


def _joins(plan: Any) -> list[Any]:
    return [node for node in nodes(plan) if node.nodeName() == "Join" and all(child.isStreaming() for child in children(node))]


def _has_watermark(plan: Any) -> bool:
    output = plan.output()
    return any(output.apply(index).metadata().contains("spark.watermarkDelayMs") for index in range(output.size()))
