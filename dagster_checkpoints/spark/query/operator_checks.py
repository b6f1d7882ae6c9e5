"""Refuses operators over a stream that Spark's own check of a plan accepts, and whose rows are not those of a batch.

Analysis only.

Source: Spark's `UnsupportedOperationChecker`.
"""

from __future__ import annotations

from pyspark.sql import DataFrame

from dagster_checkpoints.spark.errors import PlanRefusedError
from dagster_checkpoints.spark.query.plan_nodes import analyzed_nodes
from dagster_checkpoints.spark.query.stage_calls import StageCall

_OF_MICRO_BATCHES = {
    "FlatMapGroupsInPandas": "applyInPandas",
    "FlatMapGroupsInArrow": "applyInArrow",
    "FlatMapCoGroupsInPandas": "cogroup(...).applyInPandas",
    "FlatMapCoGroupsInArrow": "cogroup(...).applyInArrow",
}
"""By plan node, the method of a groupBy whose function gets the rows that a group has in one micro-batch."""
_CHECKED = frozenset(_OF_MICRO_BATCHES)


def check_operators(call: StageCall, frame: DataFrame) -> None:
    """Check that each operator of a stage's plan computes over the stream what it computes over a table.

    Args:
        call: The stage.
        frame: Its result, a stream.

    Raises:
        PlanRefusedError: An operator does not.
    """
    for each in analyzed_nodes(frame):
        if each.name not in _CHECKED or not each.of.isStreaming():
            continue
        problem = ""
        if each.name in _OF_MICRO_BATCHES:
            problem = (
                f"calls {_OF_MICRO_BATCHES[each.name]} of a groupBy on a stream. Spark accepts it, but calls the function with "
                "the rows that a group has in one micro-batch: a group would be divided wherever a micro-batch ends. Collect the "
                "rows of each window, groupBy(F.window(...), key).agg(F.collect_list(F.struct(...))), and compute with the "
                "arrays; keep state with transformWithStateInPandas or applyInPandasWithState; or join the streams, in place of "
                "a cogroup."
            )
        if problem:
            raise PlanRefusedError(call.stage.name, call.context.instance, f"its result ({call.stage.location}) {problem}")
