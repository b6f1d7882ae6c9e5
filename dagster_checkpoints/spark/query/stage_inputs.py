"""The DataFrames that a stage receives: streams of channels, and static tables; hidden from Spark's optimizer.

No rule of the optimizer may conclude anything from an input of a stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from dagster_checkpoints.spark.files.work_path import WorkPath, urls
from dagster_checkpoints.spark.identifiers import identifier
from dagster_checkpoints.spark.jvm import jvm_of
from dagster_checkpoints.spark.query.channel_sources import ChannelSources, ReadableChannel
from dagster_checkpoints.spark.query.driver_sources import READ_OPTIONS
from dagster_checkpoints.spark.query.file_index import exact_index
from dagster_checkpoints.spark.query.query_gate import QueryGate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def opaque(*branches: DataFrame) -> DataFrame:
    """The rows of some streams with the same columns, as one stream through which the optimizer does not look.

    One more branch has no rows and no partitions, which the optimizer does not know: so the stream is neither empty nor small in
    any micro-batch. The filter drops nothing; since it is not deterministic, nothing is pushed below it.

    Args:
        branches: The streams; the first one decides the columns' metadata, such as the watermark.
    """
    frame = branches[0]._jdf
    for other in branches[1:]:
        frame = frame.unionByName(other._jdf)
    return DataFrame(frame.union(_without_rows(branches[0])).where("spark_partition_id() >= 0"), branches[0].sparkSession)


def whole(frame: DataFrame) -> DataFrame:
    """The same rows, of which the optimizer leaves out no column: a source reads all of them, whatever its reader uses.

    The condition is true for each row; what is behind it, and names all columns, is never evaluated.
    """
    columns = F.struct(*[F.col(identifier(name)) for name in frame.columns])
    return frame.where(F.when(F.spark_partition_id() >= 0, True).otherwise(F.raise_error(columns.cast("string")).cast("boolean")))


def _without_rows(frame: DataFrame) -> Any:
    """A stream without rows that is no source of the query: Spark never replaces it by an empty relation."""
    session: Any = frame.sparkSession
    rows = session.sparkContext._jsc.emptyRDD().rdd()
    return session._jsparkSession.internalCreateDataFrame(rows, frame._jdf.schema(), True)


@dataclass(frozen=True)
class EventTime:
    """The event-time column of a stage input and its lateness in milliseconds."""

    column: str
    lateness_ms: int


@dataclass(frozen=True)
class StreamInput:
    """One streaming input of a task.

    Attributes:
        uid: The uid of the stage that is read; the plan's description names the stage by it.
        schema: The schema of the input's records.
        gate: The gate of the task's query.
        channels: The input's channels by name.
        event_time: The input's event time; None if it carries none.
        attempt: The number of the job's attempt.
    """

    uid: str
    schema: StructType
    gate: QueryGate
    channels: Mapping[str, ReadableChannel]
    event_time: EventTime | None
    attempt: int


def stream_dataframe(sources: ChannelSources, stream: StreamInput) -> DataFrame:
    """The streaming DataFrame of an input, carrying its watermark if it has event time."""
    records = sources.records(stream.uid, stream.schema, stream.gate, stream.channels)
    if stream.event_time is None:
        return opaque(records)
    column, lateness_ms = stream.event_time.column, stream.event_time.lateness_ms
    times = sources.watermarks(stream.uid, stream.schema, stream.gate, column, lateness_ms, stream.attempt)
    watermark = times._jdf.withWatermark(identifier(column), f"{lateness_ms} milliseconds")
    # No row is as early: those of the watermark source are not before the year 1970 less a lateness. The condition is not
    # deterministic as a whole: no part of it is pushed down, or counts as a constraint.
    never = f"CASE WHEN spark_partition_id() >= 0 THEN {identifier(column)} < TIMESTAMP_LTZ '0001-01-02 00:00:00' END"
    return opaque(DataFrame(watermark.where(never), times.sparkSession), records)


def table_dataframe(spark: SparkSession, schema: StructType, files: Sequence[WorkPath]) -> DataFrame:
    """The rows of segments as a table: a static input, or a batch that was written.

    Without files it is the same relation, so that a plan whose static inputs are not read yet is planned as with small tables.

    Raises:
        FilesLost: Files are gone.
    """
    session, jvm = spark._jsparkSession, jvm_of(spark)
    datasources, parse = jvm.org.apache.spark.sql.execution.datasources, session.parseDataType
    relation = datasources.HadoopFsRelation(
        exact_index(jvm, session, urls(files)),
        parse(StructType().json()),
        parse(nullable(schema).json()),
        jvm.scala.Option.apply(None),
        datasources.parquet.ParquetFileFormat(),
        jvm.PythonUtils.toScalaMap(dict(READ_OPTIONS)),
        session,
    )
    return DataFrame(session.baseRelationToDataFrame(relation), spark)


def nullable(schema: StructType) -> StructType:
    """The schema with every column, also nested ones, nullable, as channels carry it."""
    return StructType([StructField(f.name, _nullable(f.dataType), True, f.metadata) for f in _plain(schema)])


def without_event_time(schema: StructType) -> StructType:
    """The schema without what Spark notes of a watermark in a column's metadata."""
    return StructType(_plain(schema))


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
