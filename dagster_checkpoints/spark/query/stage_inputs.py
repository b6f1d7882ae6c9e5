"""The DataFrames that a stage receives: streams of channels, and static tables.

A stream that carries event time is the union of a *watermark source* and the *channel source*, in this order: the union
takes the event time's metadata from its first child. A nondeterministic filter drops the watermark's row: Spark would push a
deterministic filter, with the user's filters and joins, below the watermark, which would then stop.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from dagster_checkpoints.spark.query.sources import CHANNELS_FORMAT, WATERMARK_FORMAT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# The watermark source never has a row before this time: its rows are not before the year 1970 less a lateness.
NEVER = dt.datetime(1, 1, 2)


@dataclass(frozen=True)
class EventTime:
    """The event-time column of a stage input and its lateness in milliseconds."""

    column: str
    lateness_ms: int


@dataclass(frozen=True)
class StreamInput:
    """One streaming input of a task.

    Attributes:
        name: The name of the stage that is read.
        schema: The schema of the input's records.
        gate: The path of the gate file.
        logs: The log file of each channel.
        base: The first position of each channel.
        event_time: The input's event time; None if it carries none.
        attempt: The number of the job's attempt.
    """

    name: str
    schema: StructType
    gate: Path
    logs: Mapping[str, Path]
    base: Mapping[str, int]
    event_time: EventTime | None
    attempt: int


def stream_dataframe(spark: SparkSession, source: StreamInput) -> DataFrame:
    """The streaming DataFrame of an input, carrying its watermark if it has event time."""
    records = (
        spark.readStream.format(CHANNELS_FORMAT)
        .schema(source.schema)
        .option("gate", str(source.gate))
        .option("logs", json.dumps({channel: str(path) for channel, path in source.logs.items()}))
        .option("base", json.dumps(dict(source.base)))
        .option("tasks", str(spark.sparkContext.defaultParallelism))
        .load()
    )
    if source.event_time is None:
        return records
    column, lateness_ms = source.event_time.column, source.event_time.lateness_ms
    watermark = (
        spark.readStream.format(WATERMARK_FORMAT)
        .schema(source.schema)
        .option("gate", str(source.gate))
        .option("attempt", str(source.attempt))
        .option("column", column)
        .option("lateness_ms", str(lateness_ms))
        .load()
        .withWatermark(column, f"{lateness_ms} milliseconds")
    )
    dropped = watermark.where((F.col(f"`{column}`") < F.lit(NEVER)) & (F.spark_partition_id() >= 0))
    return dropped.unionByName(records)


def static_dataframe(spark: SparkSession, schema: StructType, files: Sequence[Path]) -> DataFrame:
    """A static input: the table of all rows that its upstream stage has written."""
    if not files:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(*[str(file) for file in files])


def nullable(schema: StructType) -> StructType:
    """The schema with every column, also nested ones, nullable, as channels carry it."""
    return StructType([StructField(f.name, _nullable(f.dataType), True, f.metadata) for f in _plain(schema)])


def _plain(schema: StructType) -> list[StructField]:
    # Spark keeps the watermark's delay in the column's metadata; a channel must not carry it.
    kept = []
    for field in schema.fields:
        metadata = {k: v for k, v in (field.metadata or {}).items() if k != "spark.watermarkDelayMs"}
        kept.append(StructField(field.name, field.dataType, field.nullable, metadata))
    return kept


def _nullable(kind: DataType) -> DataType:
    if isinstance(kind, StructType):
        return StructType([StructField(f.name, _nullable(f.dataType), True, f.metadata) for f in kind.fields])
    if isinstance(kind, ArrayType):
        return ArrayType(_nullable(kind.elementType), True)
    if isinstance(kind, MapType):
        return MapType(_nullable(kind.keyType), _nullable(kind.valueType), True)
    return kind
