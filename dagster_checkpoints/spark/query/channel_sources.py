"""The streaming sources behind every stage input: its records and its watermark.

Both implement Spark's interfaces for data sources (Data Source V2) here, in the driver: py4j lets the JVM call Python objects.
So a source sees the task's gate in memory, and decides exactly where a micro-batch ends. The rows are read by Spark's own
Parquet reader in the executors; no Python process takes part, and every type that Parquet files hold is carried.

`RecordsStream` reads the Parquet segments of all channels of one input, up to the positions to which the task's gate has opened.
`WatermarkStream` emits one row at W + lateness whenever the task's watermark W moves; a filter drops the row again, after
`withWatermark` has read its time.

Source: Spark's `org.apache.spark.sql.connector.read.streaming.MicroBatchStream`;
https://www.py4j.org/advanced_topics.html#implementing-java-interfaces-from-python-callback
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.spark.query.query_gate import QueryGate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECORDS = "dagster_checkpoints_channels"
WATERMARKS = "dagster_checkpoints_watermark"
INPUT_OPTION = "input"
"""The option of a source's plan node that names the stage that is read."""

_CONNECTOR = "org.apache.spark.sql.connector"
READ_OPTIONS = {"ignoreCorruptFiles": "false", "ignoreMissingFiles": "false", "__globPaths__": "false"}
"""Options of every read of segments, whatever the session says: no file is skipped silently, and paths are no patterns."""
_LISTING_IN_A_JOB = "spark.sql.sources.parallelPartitionDiscovery.threshold"
_T = TypeVar("_T")


class ReadableChannel(Protocol):
    """What a source reads of a channel. Positions count the channel's elements from the first one of the job."""

    @property
    def base(self) -> int:
        """The position of the attempt's first element."""

    def behind_records(self, position: int) -> int:
        """The position behind the last records in front of `position`; `base` if there are none."""

    def files(self, first: int, last: int) -> list[Path]:
        """The Parquet files of the records from position `first` up to, not including, position `last`."""


class SegmentsLostError(DagsterCheckpointsError):
    """Records that were emitted cannot be read: the attempt fails, and the job continues from its newest checkpoint."""


class SourceFailed(Exception):
    """Raised in the JVM in place of an error of a source, which the query's gate keeps (see `query.BatchFailed`)."""


class ChannelSources:
    """Makes the streaming DataFrames over channels in one Spark session.

    Args:
        spark: The session.
    """

    def __init__(self, spark: SparkSession) -> None:
        from pyspark.java_gateway import ensure_callback_server_started

        self.spark = spark
        self.gateway: Any = spark.sparkContext._gateway
        ensure_callback_server_started(self.gateway)
        jvm: Any = spark._jvm
        self.jvm = jvm
        self.sql = jvm.org.apache.spark.sql
        self._segments = spark._jsparkSession.newSession()
        self._segments.conf().set(_LISTING_IN_A_JOB, str(2**31 - 1))  # the driver lists the files of a batch by itself
        self._relation = spark.readStream.format("rate").load()._jdf.queryExecution().analyzed()

    def records(self, input_name: str, schema: StructType, gate: QueryGate, channels: Mapping[str, ReadableChannel]) -> DataFrame:
        """The records of all channels of one input.

        Args:
            input_name: The stage that is read.
            schema: The schema of the records.
            gate: The gate of the task's query.
            channels: The channels by name.
        """
        java_schema = self.java_schema(schema)
        make = functools.partial(RecordsStream, self, java_schema, gate, input_name, channels)
        return self._stream(RECORDS, input_name, java_schema, make)

    def watermarks(
        self, input_name: str, schema: StructType, gate: QueryGate, column: str, lateness_ms: int, attempt: int
    ) -> DataFrame:
        """The watermark of one input, as rows that hold nothing but a time.

        Args:
            input_name: The stage that is read.
            schema: The schema of the records.
            gate: The gate of the task's query.
            column: The column that gets the time.
            lateness_ms: How much later than the watermark the time is.
            attempt: The number of the job's attempt: a new attempt emits its watermark again.
        """
        java_schema = self.java_schema(schema)
        ordinal = schema.names.index(column)
        make = functools.partial(WatermarkStream, self, java_schema, gate, ordinal, lateness_ms, attempt)
        return self._stream(WATERMARKS, input_name, java_schema, make)

    def _stream(self, name: str, input_name: str, schema: Any, make: Callable[[], Any]) -> DataFrame:
        """The DataFrame of a source: Spark's node for a streaming relation, around our table.

        There is no public way to read a table that is not in a catalog and whose class is not on the class path. So the node is
        made from that of another source.
        """
        none = self.jvm.scala.Option.apply(None)
        table = _Table(self, name, schema, make)
        options = self._options({INPUT_OPTION: input_name})
        attributes = self.sql.catalyst.types.DataTypeUtils.toAttributes(schema)
        fields = [none, name, table, options, attributes, none, none, none]
        fields += [self._relation.productElement(index) for index in range(len(fields), self._relation.productArity())]
        arguments = self.jvm.java.util.ArrayList()
        for field in fields:
            arguments.add(field)
        plan = self._relation.makeCopy(arguments.toArray())
        return DataFrame(self.sql.classic.Dataset.ofRows(self.spark._jsparkSession, plan), self.spark)

    def _options(self, options: Mapping[str, str]) -> Any:
        java_map = self.jvm.java.util.HashMap()
        for key, value in options.items():
            java_map.put(key, value)
        return self.sql.util.CaseInsensitiveStringMap(java_map)

    def java_schema(self, schema: StructType) -> Any:
        return self.spark._jsparkSession.parseDataType(schema.json())

    def offset(self, value: Mapping[str, Any]) -> Any:
        """An offset of Spark's that holds a JSON object."""
        return self.sql.execution.streaming.runtime.SerializedOffset(json.dumps(value, sort_keys=True))

    def scan(self, schema: Any, files: Sequence[Path]) -> Any:
        """Spark's scan of Parquet files as one batch."""
        options = self._options(READ_OPTIONS)
        paths = self.jvm.PythonUtils.toSeq([str(file) for file in files])
        table = self.sql.execution.datasources.v2.parquet.ParquetTable(
            "segments", self._segments, options, paths, self.jvm.scala.Option.apply(schema), None
        )
        return table.newScanBuilder(options).build().toBatch()

    def row(self, columns: int, ordinal: int, value: int) -> Any:
        """A row of Spark's in which all columns are NULL except one, which holds a 64-bit number."""
        unsafe_row = self.sql.catalyst.expressions.UnsafeRow
        size = unsafe_row.calculateBitSetWidthInBytes(columns) + 8 * columns
        row = unsafe_row(columns)
        row.pointTo(bytes(size), size)
        for column in range(columns):
            row.setNullAt(column)
        row.setLong(ordinal, value)
        return row

    def array(self, name: str, *members: Any) -> Any:
        """A Java array of a class of Spark's SQL connector or execution."""
        kind = functools.reduce(getattr, name.split("."), self.jvm)
        made = self.gateway.new_array(kind, len(members))
        for index, member in enumerate(members):
            made[index] = member
        return made


def _interface(name: str) -> type:
    """What tells py4j which interface of Spark's SQL connector a class implements."""
    return type("Java", (), {"implements": (f"{_CONNECTOR}.{name}",)})


class _JavaObject:
    """A Python object that the JVM calls. Two are equal if they are the same."""

    def hashCode(self) -> int:
        return id(self) >> 4 & 0x7FFFFFFF

    def equals(self, other: object) -> bool:
        return self is other

    def toString(self) -> str:
        return type(self).__name__


class _Table(_JavaObject):
    """One source as a table that can only be read as a stream."""

    def __init__(self, sources: ChannelSources, name: str, schema: Any, make: Callable[[], Any]) -> None:
        self.sources = sources
        self._name = name
        self._schema = schema
        self.make = make

    def name(self) -> str:
        return self._name

    def toString(self) -> str:
        return self._name

    def schema(self) -> Any:
        return self._schema

    def columns(self) -> Any:
        return self.sources.sql.connector.catalog.CatalogV2Util.structTypeToV2Columns(self._schema)

    def capabilities(self) -> Any:
        jvm = self.sources.jvm
        return jvm.java.util.Collections.singleton(self.sources.sql.connector.catalog.TableCapability.MICRO_BATCH_READ)

    def newScanBuilder(self, options: Any) -> _ScanBuilder:
        return _ScanBuilder(self)

    Java = _interface("catalog.SupportsRead")


class _ScanBuilder(_JavaObject):
    def __init__(self, table: _Table) -> None:
        self._table = table

    def build(self) -> _Scan:
        return _Scan(self._table)

    Java = _interface("read.ScanBuilder")


class _Scan(_JavaObject):
    def __init__(self, table: _Table) -> None:
        self._table = table

    def readSchema(self) -> Any:
        return self._table.schema()

    def description(self) -> str:
        return self._table.name()

    def toMicroBatchStream(self, checkpoint: str) -> Any:
        return self._table.make()

    def columnarSupportMode(self) -> Any:
        return self._table.sources.sql.connector.read.Scan.ColumnarSupportMode.PARTITION_DEFINED

    def supportedCustomMetrics(self) -> Any:
        return self._table.sources.array(f"{_CONNECTOR}.metric.CustomMetric")

    def reportDriverMetrics(self) -> Any:
        return self._table.sources.array(f"{_CONNECTOR}.metric.CustomTaskMetric")

    Java = _interface("read.Scan")


def _kept(method: Callable[..., _T]) -> Callable[..., _T]:
    """Keep an error in the query's gate: in the JVM it would be a text."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any) -> _T:
        try:
            return method(self, *arguments)
        except BaseException as error:
            self._gate.error = error
            raise SourceFailed("A source failed; its task reports the error.") from None

    return call


class _Stream(_JavaObject):
    """What both streams have in common: an offset is a JSON object."""

    def __init__(self, sources: ChannelSources, schema: Any, gate: QueryGate) -> None:
        self._sources = sources
        self._schema = schema
        self._gate = gate

    def deserializeOffset(self, text: str) -> Any:
        return self._sources.offset(json.loads(text))

    def commit(self, end: Any) -> None:
        """Nothing: the task releases what its snapshots no longer need."""

    def stop(self) -> None:
        """Nothing to release."""


class RecordsStream(_Stream):
    """The records of one input's channels. Offset: `{channel: position}`, the position behind the last records of each channel.

    Marks behind these records need no batch.
    """

    def __init__(
        self,
        sources: ChannelSources,
        schema: Any,
        gate: QueryGate,
        input_name: str,
        channels: Mapping[str, ReadableChannel],
    ) -> None:
        super().__init__(sources, schema, gate)
        self._input_name = input_name
        self._channels = channels
        self._base = {name: channel.base for name, channel in channels.items()}
        self._planned: tuple[str, str, Any] | None = None  # the range that was planned last, and its partitions
        self._factory: Any = None

    def toString(self) -> str:
        return RECORDS

    @_kept
    def initialOffset(self) -> Any:
        return self._sources.offset(self._base)

    @_kept
    def latestOffset(self) -> Any:
        positions = self._gate.look(self).positions
        newest = {name: channel.behind_records(positions[name]) for name, channel in self._channels.items()}
        # None: there is nothing to read, and no batch without rows is run for it.
        return self._sources.offset(newest) if newest != self._base else None

    @_kept
    def planInputPartitions(self, start: Any, end: Any) -> Any:
        first, last = str(start.json()), str(end.json())
        if self._planned is None or self._planned[:2] != (first, last):  # Spark plans a batch twice
            positions, until = json.loads(first), json.loads(last)
            files = [f for name, c in self._channels.items() for f in c.files(positions.get(name, c.base), until[name])]
            self._planned = (first, last, self._partitions(files))
        return self._planned[2]

    def _partitions(self, files: Sequence[Path]) -> Any:
        if not files:
            return self._sources.array(f"{_CONNECTOR}.read.InputPartition")
        try:
            return self._sources.scan(self._schema, files).planInputPartitions()
        except AnalysisException as error:
            raise SegmentsLostError(
                f"expected the {len(files)} files of the next records of input {self._input_name!r} in the work directory, as "
                f"they were written. Spark: {error}. Let nothing else write to the work directory or clean it up"
            ) from error

    @_kept
    def createReaderFactory(self) -> Any:
        if self._factory is None:
            self._factory = self._sources.scan(self._schema, ()).createReaderFactory()
        return self._factory

    Java = _interface("read.streaming.MicroBatchStream")


class WatermarkStream(_Stream):
    """The watermark of one input. Offset: `{"watermark": ms, "attempt": n}`.

    A new attempt emits its watermark again, since Spark does not restore the watermark of each input.
    """

    def __init__(
        self, sources: ChannelSources, schema: Any, gate: QueryGate, ordinal: int, lateness_ms: int, attempt: int
    ) -> None:
        super().__init__(sources, schema, gate)
        self._columns = schema.length()
        self._ordinal = ordinal
        self._lateness_ms = lateness_ms
        self._attempt = attempt

    def toString(self) -> str:
        return WATERMARKS

    @_kept
    def initialOffset(self) -> Any:
        return self._sources.offset({"attempt": 0, "watermark": None})

    @_kept
    def latestOffset(self) -> Any:
        watermark = self._gate.look(self).watermark
        return None if watermark is None else self._sources.offset({"attempt": self._attempt, "watermark": watermark})

    @_kept
    def planInputPartitions(self, start: Any, end: Any) -> Any:
        if start.json() == end.json():
            return self._sources.array(f"{_CONNECTOR}.read.InputPartition")
        # Microseconds; they may be after the year 9999, which datetime cannot represent.
        moment_us = (int(json.loads(end.json())["watermark"]) + self._lateness_ms) * 1000
        row = self._sources.row(self._columns, self._ordinal, moment_us)
        rows = self._sources.array("org.apache.spark.sql.catalyst.expressions.UnsafeRow", row)
        partition = self._sources.sql.execution.streaming.runtime.MemoryStreamInputPartition(rows)
        return self._sources.array(f"{_CONNECTOR}.read.InputPartition", partition)

    @_kept
    def createReaderFactory(self) -> Any:
        return getattr(getattr(self._sources.sql.execution.streaming.runtime, "MemoryStreamReaderFactory$"), "MODULE$")

    Java = _interface("read.streaming.MicroBatchStream")
