"""Rows per second of a channel's source, compared with Spark's file source over the same Parquet files."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench import computation, throughput
from bench.environment import Environment
from bench.measures import Measure
from dagster_checkpoints.pipeline import ChannelId
from dagster_checkpoints.spark.channels.channel_log import Channel, Records
from dagster_checkpoints.spark.channels.segments import write_segment
from dagster_checkpoints.spark.query.channel_sources import ChannelSources
from dagster_checkpoints.spark.query.query_gate import QueryGate
from dagster_checkpoints.spark.query.stage_inputs import StreamInput, nullable, stream_dataframe

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_checkpoints.spark.channels.channel_log import SegmentFiles

PART = "Channel"


def measure(environment: Environment) -> Iterator[Measure]:
    rows = throughput.input_rows(environment)
    lines = environment.spark.read.schema(computation.SCHEMA).parquet(str(rows.folder))
    frame = computation.parsed(lines)
    segment = write_segment(frame, environment.fresh("segment"))
    assert segment is not None
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(environment.repeats + 1):
        seconds["file source"].append(_consume(environment, _file_source(environment, frame, segment)))
        seconds["channel source"].append(_consume(environment, _channel_source(environment, frame, segment)))
    # The first round only warms up.
    took = {name: median(values[1:]) for name, values in seconds.items()}
    for name, value in took.items():
        yield Measure(PART, name, segment.rows / value, "rows/s")
    yield Measure(PART, "channel source / file source", took["file source"] / took["channel source"], "")


def _file_source(environment: Environment, frame: DataFrame, segment: SegmentFiles) -> DataFrame:
    return environment.spark.readStream.schema(frame.schema).parquet(str(segment.files[0].parent))


def _channel_source(environment: Environment, frame: DataFrame, segment: SegmentFiles) -> DataFrame:
    channel = Channel(ChannelId("a", 0, "b", 0))
    channel.append(Records(segment))
    name = str(channel.id)
    gate = QueryGate({name: 1})
    gate.close()  # nothing more will come: it keeps no source waiting
    source = StreamInput("a", nullable(frame.schema), gate, {name: channel}, None, 1)
    return stream_dataframe(ChannelSources(environment.spark), source)


def _consume(environment: Environment, frame: DataFrame) -> float:
    """Seconds from the start of a query until it has read all rows, as one micro-batch whose result is discarded."""
    checkpoint: Path = environment.fresh("noop")
    began = time.monotonic()
    query = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).start()
    try:
        query.processAllAvailable()
        return time.monotonic() - began
    finally:
        query.stop()
