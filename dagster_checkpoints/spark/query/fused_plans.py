"""Fused sources in a plan: several sources in the query of the stage that reads them, and what stands in for one that has ended.

Each fused source must keep an end of its own: its stream is one stream of the query, Spark can hold it to what is there at a
moment, and it keeps no state. Analysis only; must not know tasks or checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from dagster_checkpoints.pipeline import Pipeline, Stage
from dagster_checkpoints.spark.errors import PlanRefusedError
from dagster_checkpoints.spark.identifiers import identifier
from dagster_checkpoints.spark.query.channel_sources import ChannelSources
from dagster_checkpoints.spark.query.column_origins import BOUNDARY
from dagster_checkpoints.spark.query.operators import keeping_state
from dagster_checkpoints.spark.query.plan_nodes import StreamSet, analyzed_nodes, once, streams
from dagster_checkpoints.spark.query.source_checks import Limit, limit_in_query, source_of
from dagster_checkpoints.spark.query.stage_calls import StageCall
from dagster_checkpoints.spark.query.stage_inputs import opaque

HELD_BY_SPARK = frozenset({"files", "kafka", "delta", "iceberg", "rate-micro-batch"})
"""Short names of sources that can be held to what is there at a moment while their query runs (`SupportsTriggerAvailableNow`)."""


class RefusedAtStage(Exception):
    """The combined plan cannot run; it can up to the stage before `stage`, or without the sources that `stage` reads."""

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(reason)
        self.stage = stage
        self.reason = reason


def refused_plan(call: StageCall, text: str, reason: str, *, divisible: bool) -> RefusedAtStage | PlanRefusedError:
    """The error for a stage's plan with which rows would be lost.

    Args:
        call: The stage.
        text: What was found and what to do, for a plan that is refused.
        reason: Why the stage cannot share the query, for one that is divided.
        divisible: Whether the stage may begin a query of its own.
    """
    if divisible:
        return RefusedAtStage(call.stage.name, reason)
    return PlanRefusedError(call.stage.name, call.context.instance, text)


@dataclass(frozen=True)
class FusedStream:
    """The stream of one fused source in its query.

    Attributes:
        position: Its position among the streams of the query, as Spark numbers them.
        watermark_node: The id of its watermark node; empty if it has no event time.
        can_be_held: Whether it can be held to what is there at a moment while the query runs.
        limit: What its task limits its micro-batches by; None if its options do, or if it cannot.
    """

    position: int
    watermark_node: str
    can_be_held: bool
    limit: Limit | None = None


def fused_source(name: str, frame: DataFrame) -> DataFrame:
    """The output of a fused source, or what stands in for it, as the reader gets it.

    Spark would push the reader's own filters below the watermark: rows that they drop would neither be counted as rows of the
    source, nor advance its watermark.
    """
    return opaque(frame).alias(f"{BOUNDARY}{name}")


def stand_in(sources: ChannelSources, stage: Stage, schema: StructType) -> DataFrame:
    """What stands in for a fused source that has ended: a stream without rows, with the same columns and watermark.

    Args:
        sources: Makes streaming DataFrames.
        stage: The source.
        schema: The schema of its rows, as recorded.
    """
    empty = sources.ended(stage.name, schema)
    if stage.watermark is not None:
        empty = empty.withWatermark(identifier(stage.watermark.column), f"{stage.watermark.lateness_ms} milliseconds")
    return fused_source(stage.name, empty)


def positions(frame: DataFrame, fused: Mapping[str, DataFrame], ended: Collection[str]) -> dict[str, FusedStream]:
    """The first stream of each fused source among the streams of the query.

    Args:
        frame: The output of the query.
        fused: The output of each fused source.
        ended: The sources that have ended: their output is what stands in for them.
    """
    found: dict[str, FusedStream] = {}
    leaves = streams(frame)
    for name, source in fused.items():
        own = StreamSet([source])
        position = next((number for number, leaf in enumerate(leaves) if leaf in own), -1)
        reads = source_of(source, leaves[position]) if name not in ended and position >= 0 else None
        can_be_held = reads is not None and reads.kind in HELD_BY_SPARK
        limit = limit_in_query(reads) if reads is not None else None
        found[name] = FusedStream(position, next(iter(watermark_nodes(source)), ""), can_be_held, limit)
    if all(stream.can_be_held for name, stream in found.items() if name not in ended):
        return found
    # Spark itself ends this query, perhaps after one batch: what a limit leaves for a second one would not be read.
    return {name: replace(stream, limit=None) for name, stream in found.items()}


def check_passes_on(reader: str, outputs: Mapping[str, DataFrame]) -> None:
    """Check that the stages in front of the one at which fused sources meet keep no state.

    The watermark of the query is that of all sources together; such a stage alone would have run under that of its own source.

    Args:
        reader: The stage at which they meet.
        outputs: The output of each stage in front of it, also of sources.

    Raises:
        RefusedAtStage: One of them keeps state; names the stage at which the sources meet.
    """
    for name, frame in outputs.items():
        if keeping_state(frame):
            raise RefusedAtStage(reader, f"{name!r}, which is in front of it, keeps state")


def check_fused(
    reader: str,
    pipeline: Pipeline,
    fused: Mapping[str, DataFrame],
    ended: Collection[str],
    found: Mapping[str, FusedStream],
    count: int,
) -> None:
    """Check that each source keeps an end of its own in the query.

    Args:
        reader: The stage at which the sources meet.
        pipeline: The pipeline.
        fused: The output of each fused source.
        ended: The sources that have ended: their output is what stands in for them.
        found: The stream of each fused source in the query.
        count: The number of streams of the query.

    Raises:
        RefusedAtStage: The sources are to be read through channels; names the stage at which they meet.
    """
    unbounded = [name for name in fused if not pipeline.is_bounded(name)]
    for name, frame in fused.items():
        if name in ended:
            continue
        leaves = streams(frame)
        if len(leaves) != 1:
            raise RefusedAtStage(reader, f"the source {name!r} consists of {len(leaves)} streams")
        if unbounded and not found[name].can_be_held:
            kind = source_of(frame, leaves[0]).kind
            raise RefusedAtStage(reader, f"Spark cannot hold the source {name!r} ({kind}) to what is there at a moment")
    if count != len(fused) or any(stream.position < 0 for stream in found.values()):
        raise RefusedAtStage(reader, f"{reader!r} reads {count} streams of {len(fused)} sources: it uses a source twice")


@once
def watermark_nodes(frame: DataFrame) -> list[str]:
    """The ids of the watermark nodes of a streaming plan."""
    if not frame.isStreaming:
        return []
    return [str(each.of.nodeId().toString()) for each in analyzed_nodes(frame) if each.name == "EventTimeWatermark"]
