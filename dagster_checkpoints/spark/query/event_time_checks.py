"""Finds stages that wait for event time which a source without a watermark holds back.

Must not know tasks. `pipeline.watermark_reach` knows which sources these are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pyspark.sql import DataFrame

from dagster_checkpoints.pipeline import Pipeline, watermark_reach
from dagster_checkpoints.spark.errors import EventTimeHeldBackError
from dagster_checkpoints.spark.query.join_checks import is_outer
from dagster_checkpoints.spark.query.operators import keeping_state
from dagster_checkpoints.spark.query.plan_nodes import analyzed_nodes, stream_joins
from dagster_checkpoints.spark.query.stage_calls import StageCall

_AGGREGATES = frozenset({"Aggregate", "Distinct", "Except"})
"""Plan nodes that Spark runs as an aggregation: SELECT DISTINCT, a UNION or EXCEPT in SQL."""


def check_event_time_moves(
    pipeline: Pipeline, call: StageCall, frame: DataFrame, arguments: Mapping[str, DataFrame], own: Collection[str]
) -> list[str]:
    """Check that event time moves at a stage which keeps state.

    Args:
        pipeline: The pipeline.
        call: The stage.
        frame: The stage's result, a stream.
        arguments: The stage's inputs; their operators belong to earlier stages of the chain.
        own: Stages that set a watermark themselves.

    Returns:
        Warnings: results come only after a bounded source has ended, or state is never dropped.

    Raises:
        EventTimeHeldBackError: The stage emits its rows when event time advances, and an unbounded source holds it back.
    """
    reach = watermark_reach(pipeline, call.stage.name, own)
    if not reach.is_held_back or call.stage.output_mode == "complete":
        return []
    streams = [given for given in arguments.values() if given.isStreaming]
    if keeping_state(frame) <= sum(map(keeping_state, streams)):
        return []
    waits = call.stage.output_mode == "append" and _waiting(frame) > sum(map(_waiting, streams))
    endless = [name for name in reach.without if not pipeline.is_bounded(name)]
    where = {name: f"{name!r} ({pipeline.stage(name).location})" for name in (*reach.declaring, *reach.without)}
    having, lacking = (", ".join(where[name] for name in names) for names in (reach.declaring, endless or reach.without))
    text = (
        f"it keeps state by event time, and reads {having}, which declares a watermark, together with {lacking}, which declares "
        "none. The watermark of a stage is the minimum over its inputs, and an input without one holds it back"
    )
    remedy = (
        f"Declare watermark=(column, lateness) at {', '.join(map(repr, endless or reach.without))} as well, also if all its rows "
        "are on time; or read a table instead of a stream."
    )
    if waits and endless:
        raise EventTimeHeldBackError(
            call.stage.name, call.context.instance, f"{text}: no row would be emitted before the pipeline is drained. {remedy}"
        )
    what = "no row is emitted" if waits else "its state is not dropped, and no timer of event time fires,"
    until = "before the pipeline is drained" if endless else "before that source has ended"
    return [f"Stage {call.stage.name!r} ({call.stage.location}): {text}: {what} {until}. {remedy}"]


def _waiting(frame: DataFrame) -> int:
    """The number of operators of a DataFrame's analyzed plan that emit rows only when event time advances."""
    aggregates = sum(each.name in _AGGREGATES and bool(each.of.isStreaming()) for each in analyzed_nodes(frame))
    return aggregates + sum(map(is_outer, stream_joins(frame)))
