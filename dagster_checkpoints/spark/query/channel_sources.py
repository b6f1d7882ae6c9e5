"""The streaming sources behind every stage input: its records and its watermark.

Both are sources in the driver (`driver_sources`): a source sees the task's gate in memory, and decides exactly where a
micro-batch ends.

`RecordsStream` reads the Parquet segments of all channels of one input, up to the positions to which the task's gate has opened.
`WatermarkStream` emits one row at W + lateness whenever the task's watermark W moves; a filter drops the row again, after
`withWatermark` has read its time.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.spark.files.work_path import WorkPath, urls
from dagster_checkpoints.spark.query.driver_sources import (
    CONNECTOR,
    DriverSources,
    JavaObject,
    ParquetScans,
    SourceFailed,
    interfaces,
)
from dagster_checkpoints.spark.query.file_index import FilesLost
from dagster_checkpoints.spark.query.query_gate import QueryGate

RECORDS = "dagster_checkpoints_channels"
WATERMARKS = "dagster_checkpoints_watermark"
ENDED = "dagster_checkpoints_ended"
INPUT_OPTION = "input"
"""The option of a source's plan node that names the stage that is read."""

_T = TypeVar("_T")


class ReadableChannel(Protocol):
    """What a source reads of a channel. Positions count the channel's elements from the first one of the job."""

    @property
    def base(self) -> int:
        """The position of the attempt's first element."""

    def behind_records(self, position: int) -> int:
        """The position behind the last records in front of `position`; `base` if there are none."""

    def files(self, first: int, last: int) -> list[WorkPath]:
        """The Parquet files of the records from position `first` up to, not including, position `last`."""


class SegmentsLostError(DagsterCheckpointsError):
    """Records that were emitted cannot be read: the attempt fails, and the job continues from its newest checkpoint."""


class ChannelSources(DriverSources):
    """Makes the streaming DataFrames over channels in one Spark session."""

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
        return self.stream(RECORDS, {INPUT_OPTION: input_name}, java_schema, make)

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
        return self.stream(WATERMARKS, {INPUT_OPTION: input_name}, java_schema, make)

    def ended(self, source: str, schema: StructType) -> DataFrame:
        """A stream without rows, in place of a source that has ended.

        Args:
            source: The source.
            schema: The schema of its rows.
        """
        java_schema = self.java_schema(schema)
        return self.stream(ENDED, {INPUT_OPTION: source}, java_schema, functools.partial(EndedStream, self))

    def row(self, columns: int, ordinal: int, value: int) -> Any:
        """A row of Spark's in which all columns are NULL except one, which holds a 64-bit number."""
        nulls = (1 << columns) - 1 ^ 1 << ordinal  # a bit for each column, in words of 64 bits
        words = [nulls >> first & (1 << 64) - 1 for first in range(0, columns, 64)]
        values = [value if column == ordinal else 0 for column in range(columns)]
        data = struct.pack(f"={len(words)}Q{columns}q", *words, *values)
        row = self.sql.catalyst.expressions.UnsafeRow(columns)
        row.pointTo(data, len(data))
        return row


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


class _Stream(JavaObject):
    """What both streams have in common: an offset is a JSON object."""

    def __init__(self, sources: ChannelSources, schema: Any, gate: QueryGate) -> None:
        self._sources = sources
        self._schema = schema
        self._gate = gate
        self._newest: tuple[Mapping[str, Any], Any] | None = None  # the offset that was made last

    def _offset(self, value: Mapping[str, Any]) -> Any:
        """An offset of Spark's. Most are the one before: an idle query asks again and again."""
        if self._newest is None or self._newest[0] != value:
            self._newest = (value, self._sources.offset(value))
        return self._newest[1]

    def deserializeOffset(self, text: str) -> Any:
        return self._sources.offset(json.loads(text))

    def commit(self, end: Any) -> None:
        """Nothing: the task releases what its snapshots no longer need."""

    def stop(self) -> None:
        """Nothing to release."""


class EndedStream(JavaObject):
    """A stream that never has rows. It has no offset."""

    def __init__(self, sources: ChannelSources) -> None:
        self._sources = sources

    def toString(self) -> str:
        return ENDED

    def initialOffset(self) -> Any:
        return self._sources.offset({})

    def latestOffset(self) -> None:
        """None: no batch is run for this stream."""

    def deserializeOffset(self, text: str) -> Any:
        return self._sources.offset(json.loads(text))

    def planInputPartitions(self, start: Any, end: Any) -> Any:
        return self._sources.array(f"{CONNECTOR}.read.InputPartition")

    def createReaderFactory(self) -> Any:
        return getattr(getattr(self._sources.sql.execution.streaming.runtime, "MemoryStreamReaderFactory$"), "MODULE$")

    def commit(self, end: Any) -> None:
        """Nothing to release."""

    def stop(self) -> None:
        """Nothing to release."""

    Java = interfaces("read.streaming.MicroBatchStream")


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
        self._made_scans: ParquetScans | None = None

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
        return self._offset(newest) if newest != self._base else None

    @_kept
    def planInputPartitions(self, start: Any, end: Any) -> Any:
        first, last = str(start.json()), str(end.json())
        if self._planned is None or self._planned[:2] != (first, last):  # Spark plans a batch twice
            positions, until = json.loads(first), json.loads(last)
            files = [
                f for name, c in self._channels.items() for f in c.files(positions.get(name, c.base), until.get(name, c.base))
            ]
            self._planned = (first, last, self._partitions(files))
        return self._planned[2]

    def _partitions(self, files: Sequence[WorkPath]) -> Any:
        if not files:
            return self._sources.array(f"{CONNECTOR}.read.InputPartition")
        try:
            return self._scans().of(urls(files)).toBatch().planInputPartitions()
        except FilesLost as error:
            raise SegmentsLostError(
                f"expected the {len(files)} files of the next records of input {self._input_name!r} in the work directory, as "
                f"they were written. Spark: {error}. Let nothing else write to the work directory or clean it up"
            ) from error

    @_kept
    def createReaderFactory(self) -> Any:
        if self._factory is None:
            self._factory = self._scans().having().createReaderFactory()
        return self._factory

    def _scans(self) -> ParquetScans:
        if self._made_scans is None:
            self._made_scans = ParquetScans(self._sources, self._schema)
        return self._made_scans

    Java = interfaces("read.streaming.MicroBatchStream")


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
        return None if watermark is None else self._offset({"attempt": self._attempt, "watermark": watermark})

    @_kept
    def planInputPartitions(self, start: Any, end: Any) -> Any:
        if start.json() == end.json():
            return self._sources.array(f"{CONNECTOR}.read.InputPartition")
        # Microseconds; they may be after the year 9999, which datetime cannot represent.
        moment_us = (int(json.loads(end.json())["watermark"]) + self._lateness_ms) * 1000
        row = self._sources.row(self._columns, self._ordinal, moment_us)
        rows = self._sources.array("org.apache.spark.sql.catalyst.expressions.UnsafeRow", row)
        partition = self._sources.sql.execution.streaming.runtime.MemoryStreamInputPartition(rows)
        return self._sources.array(f"{CONNECTOR}.read.InputPartition", partition)

    @_kept
    def createReaderFactory(self) -> Any:
        return getattr(getattr(self._sources.sql.execution.streaming.runtime, "MemoryStreamReaderFactory$"), "MODULE$")

    Java = interfaces("read.streaming.MicroBatchStream")
