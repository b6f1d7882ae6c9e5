"""Spark's face of a table that is read in splits: a Python data source whose offset is the number of splits that were read.

Spark starts a Python process beside the driver that answers for the offsets, and reads the rows in Python workers of the
executors.

Source: https://spark.apache.org/docs/latest/api/python/tutorial/sql/python_data_source.html
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxFiles, SupportsTriggerAvailableNow
from pyspark.sql.types import StructField, StructType

from dagster_checkpoints.sources.sql.columns import TableColumn
from dagster_checkpoints.sources.sql.rows import SqlTable
from dagster_checkpoints.sources.sql.splits import SplitOffset, SplitRange

NAME = "sql_table"


@dataclass(frozen=True, slots=True)
class SqlReading:
    """What is read.

    Args:
        table: the table.
        columns: the columns that are read.
        by: the column by which the table is split.
        splits: the number of splits.
        per_trigger: the number of splits in one micro-batch.
    """

    table: SqlTable
    columns: tuple[TableColumn, ...]
    by: TableColumn
    splits: int
    per_trigger: int


class SqlSplit(InputPartition):
    """One split, as it is sent to an executor."""

    def __init__(self, values: SplitRange) -> None:
        super().__init__(values)
        self.values = values


class SqlStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the splits in order.

    Args:
        reading: what is read.
    """

    def __init__(self, reading: SqlReading) -> None:
        self._reading = reading
        self._start: SplitOffset | None = None

    def initialOffset(self) -> dict[str, int]:
        if self._start is None:  # Spark asks more than once
            lower, upper = self._reading.table.bounds(self._reading.by)
            self._start = SplitOffset.at_start(lower, upper, self._reading.splits)
        return self._start.to_json()

    def prepareForTriggerAvailableNow(self) -> None:
        """Nothing: the division into splits ends where the table ended when it was made."""

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxFiles(self._reading.per_trigger)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        offset = SplitOffset.from_json(start)
        after = offset.after(limit.max_files) if isinstance(limit, ReadMaxFiles) else offset.at_end()
        return after.to_json()

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        last = SplitOffset.from_json(end)  # a planned first batch keeps its division when it is planned again
        return [SqlSplit(last.range_of(split)) for split in range(SplitOffset.from_json(start).done, last.done)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SqlSplit)
        return self._reading.table.rows(self._reading.columns, self._reading.by, partition.values)


class SqlDataSource(DataSource):
    """The data source.

    What it reads is an attribute of a subclass, and not an option: Spark shows options, and the URL holds a password.
    """

    reading: ClassVar[SqlReading]

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        return StructType([StructField(column.name, column.type) for column in self.reading.columns])

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return SqlStreamReader(self.reading)
