"""A table of Parquet files with versions as a stream of Spark's: the offset is a position in its files, which Spark reads itself.

The stream lives in the driver (`driver_sources`). Must not know a table's format.

Source: Spark's `MicroBatchStream`, `SupportsAdmissionControl` and `SupportsTriggerAvailableNow`
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from dagster_checkpoints.sources.errors import InvalidSource, SourceRowsLost
from dagster_checkpoints.sources.lake.positions import (
    LakeFile,
    TableHistory,
    TablePosition,
    advanced,
    check_table,
    files_between,
    leads_to,
)
from dagster_checkpoints.spark.query.driver_sources import DriverSources, JavaObject, interfaces, kept
from dagster_checkpoints.spark.query.file_index import FilesLost
from dagster_checkpoints.spark.query.partitioned_scan import PartitionedScan


class LakeTable(TableHistory, Protocol):
    """A table as it is read by one query.

    Attributes:
        shown: the table as errors name it.
        id: its id.
    """

    shown: str
    id: str

    def open(self) -> None:
        """Read the newest state of the table. Its columns remain those of the first time."""

    def resolved(self, files: Sequence[LakeFile]) -> Sequence[LakeFile]:
        """The files with the columns that are read from each."""

    def check_columns(self) -> None:
        """Check that the newest version has no other columns. Raises SourceColumnsChanged."""


_IDLE_SECONDS = 0.05
"""How long a stream without new files keeps Spark waiting, which would ask again at once."""


@dataclass(frozen=True, slots=True)
class LakeReading:
    """What is read.

    Args:
        table: the table.
        columns: the columns in the files.
        partition_by: the columns whose values are known for each file, and not in it.
        files_per_trigger: the largest number of files in one micro-batch.
        only: the only version that is read; None: the newest one, and those that follow.
    """

    table: LakeTable
    columns: StructType
    partition_by: StructType
    files_per_trigger: int
    only: int | None


def lake_stream(spark: SparkSession, name: str, options: dict[str, str], reading: LakeReading) -> DataFrame:
    """The table as a streaming DataFrame.

    Args:
        spark: the session.
        name: the source's name in plans.
        options: options that the plan and the checkpoint show.
        reading: what is read.
    """
    sources = DriverSources(spark)
    scan = PartitionedScan(sources, reading.columns, reading.partition_by)
    return sources.stream(name, options, scan.schema, lambda: LakeStream(sources, scan, reading))


def _alike(files: Sequence[LakeFile]) -> int | None:
    """The number of the first files of which the same columns are read, as in one micro-batch; None if all files are alike."""
    return next((at for at, file in enumerate(files) if file.columns != files[0].columns), None)


class LakeStream(JavaObject):
    """The stream. Spark's thread of the query calls it; `prepareForTriggerAvailableNow` may come from another thread.

    Args:
        sources: what makes Spark's objects.
        scan: reads the files.
        reading: what is read.
    """

    def __init__(self, sources: DriverSources, scan: PartitionedScan, reading: LakeReading) -> None:
        self._sources = sources
        self._scan = scan
        self._reading = reading
        self._lock = threading.RLock()
        self._last = reading.only
        self._start: TablePosition | None = None
        self._planned: tuple[str, str, Any] | None = None  # the range that was planned last, and its partitions
        self._read = ""  # the columns to read from the files that were planned last
        self._factories: dict[str, Any] = {}
        self._opened = False
        self._ends = reading.only is None
        """Whether reading on comes to the only version that is read, as far as there is one."""

    @property
    def _table(self) -> LakeTable:
        if not self._opened:
            self._reading.table.open()
            self._opened = True
        return self._reading.table

    def toString(self) -> str:
        return self._reading.table.shown

    # Offsets

    @kept
    def initialOffset(self) -> Any:
        with self._lock:
            if self._start is None:  # Spark asks more than once
                table = self._table
                # Of a bounded source Spark has asked for the end before: a version that came since would be behind it.
                self._start = TablePosition.at_start(table.id, table.newest() if self._last is None else self._last)
                if self._reading.only is None:
                    table.check_columns()
            return self._sources.offset(self._start.to_json())

    def deserializeOffset(self, text: str) -> Any:
        return self._sources.offset(json.loads(text))

    @kept
    def prepareForTriggerAvailableNow(self) -> None:
        with self._lock:
            if self._reading.only is None:
                self._last = self._table.newest()

    @kept
    def getDefaultReadLimit(self) -> Any:
        return self._sources.sql.connector.read.streaming.ReadLimit.maxFiles(self._reading.files_per_trigger)

    @kept
    def latestOffset(self, start: Any, limit: Any) -> Any:
        with self._lock:
            position = self._position(start)
            self._check_only(position)
            files = int(limit.maxFiles()) if limit.getClass().getSimpleName() == "ReadMaxFiles" else None
            reached = advanced(self._table, position, files, self._last)
            alike = _alike(self._table.resolved(files_between(self._table, position, reached)))
            if alike is not None:
                reached = advanced(self._table, position, alike, self._last)
            waits = reached == position and self._last is None
        if waits:
            time.sleep(_IDLE_SECONDS)
        return self._sources.offset(reached.to_json())

    def reportLatestOffset(self) -> None:
        """None: Spark's progress does not show how far the table reaches."""

    def _check_only(self, position: TablePosition) -> None:
        """Refuse an only version that was passed: without it the stream would have no end."""
        only = self._reading.only
        if only is not None and not self._ends and not leads_to(self._table, position, only):
            raise InvalidSource(
                f"{self._reading.table.shown}: expected to read {only} and nothing that comes later, found that the checkpoint "
                f"began with {position.first} and has read up to {position.version}, which does not lead to {only}. Take the "
                "change back; or read it in a stage with another name, or make a new start"
            )
        self._ends = True

    def _position(self, offset: Any) -> TablePosition:
        position = TablePosition.from_json(json.loads(offset.json()))
        check_table(self._reading.table.shown, position.table, self._table.id)
        return position

    # Rows

    @kept
    def planInputPartitions(self, start: Any, end: Any) -> Any:
        first, last = str(start.json()), str(end.json())
        with self._lock:
            if self._planned is None or self._planned[:2] != (first, last):  # Spark plans a batch twice
                files = self._table.resolved(files_between(self._table, self._position(start), self._position(end)))
                self._planned = (first, last, self._partitions(files))
                self._read = files[0].columns if files else ""
            return self._planned[2]

    def _partitions(self, files: Sequence[LakeFile]) -> Any:
        try:
            return self._scan.plan({file.path: file.partition for file in files})
        except FilesLost as error:
            raise SourceRowsLost(
                f"{self._reading.table.shown}, files of the next rows: {error}. Keep files of older versions for longer than "
                "a run may pause; restore them, or make a new start"
            ) from None

    @kept
    def createReaderFactory(self) -> Any:
        with self._lock:
            if self._read not in self._factories:
                self._factories[self._read] = self._scan.reader_factory(self._read)
            return self._factories[self._read]

    def commit(self, end: Any) -> None:
        """Nothing: the table keeps its rows."""

    def stop(self) -> None:
        """Nothing to release."""

    Java = interfaces("read.streaming.MicroBatchStream", "read.streaming.SupportsTriggerAvailableNow")
