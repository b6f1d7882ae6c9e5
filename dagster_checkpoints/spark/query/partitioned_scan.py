"""Parquet files whose partition columns are not in the files and not in their paths: their values are given for each file.

Spark's own reader adds the values as constant columns behind those of the files. Spark has no public way to give them.

Source: Spark's `ParquetScan`, `FilePartition` and `PartitionedFile`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.sql.types import StructType

from dagster_checkpoints.spark.query.driver_sources import CONNECTOR, DriverSources, ParquetScans

PartitionValues = tuple[str | None, ...]
"""The values of a file's partition columns as text, in the order of these columns."""


class PartitionedScan:
    """Reads files with given partition values.

    Args:
        sources: what makes Spark's objects.
        columns: the columns in the files.
        partition_by: the partition columns; may be empty.
    """

    def __init__(self, sources: DriverSources, columns: StructType, partition_by: StructType) -> None:
        self._sources = sources
        self._scans = ParquetScans(sources, sources.java_schema(columns))
        self._partition_by = partition_by
        self._java_partition_by = sources.java_schema(partition_by)
        self.schema = sources.java_schema(StructType([*columns.fields, *partition_by.fields]))
        """The columns of the rows, as Spark's Java object."""

    def plan(self, files: Mapping[str, PartitionValues]) -> Any:
        """Spark's input partitions for some files.

        Args:
            files: the partition values of each file, by the file's path as Hadoop writes it (`file:/data/…`, `s3a://bucket/…`).
        """
        if not files:
            return self._sources.array(f"{CONNECTOR}.read.InputPartition")
        planned = self._scans.of(list(files)).toBatch().planInputPartitions()
        if not self._partition_by.fields:
            return planned
        rows = {values: self._row(values) for values in set(files.values())}
        made = [self._with_values(partition, files, rows) for partition in planned]
        return self._sources.array(f"{CONNECTOR}.read.InputPartition", *made)

    def reader_factory(self, columns: str = "") -> Any:
        """What reads the partitions in the executors.

        Args:
            columns: the names of the columns in the files, if they are others, as the JSON of Spark's types.
        """
        scans = ParquetScans(self._sources, self._sources.java_type(columns)) if columns else self._scans
        return scans.having(readPartitionSchema=self._java_partition_by).createReaderFactory()

    def _with_values(self, partition: Any, files: Mapping[str, PartitionValues], rows: Mapping[PartitionValues, Any]) -> Any:
        datasources = self._sources.sql.execution.datasources
        made = []
        for file in partition.files():
            fields = [file.productElement(index) for index in range(file.productArity())]
            fields[0] = rows[files[str(file.filePath().toPath().toString())]]
            made.append(datasources.PartitionedFile(*fields))
        array = self._sources.array("org.apache.spark.sql.execution.datasources.PartitionedFile", *made)
        return datasources.FilePartition(partition.index(), array)

    def _row(self, values: PartitionValues) -> Any:
        """The values as a row of Spark's, each cast from text to its column's type."""
        expressions = self._sources.sql.catalyst.expressions
        casts = self._sources.jvm.java.util.ArrayList()
        text = self._sources.java_type('"string"')
        for value, column in zip(values, self._partition_by.fields, strict=True):
            literal = _module(expressions, "Literal").create(value, text)
            cast = _module(expressions, "Cast").apply(literal, self._sources.java_type(column.dataType.json()), True)
            casts.append(cast.withTimeZone("UTC"))
        # Not a compiled projection: py4j takes classes of one name for one class.
        made = _module(expressions, "InterpretedUnsafeProjection").createProjection(self._sources.jvm.PythonUtils.toSeq(casts))
        return made.apply(None).copy()


def _module(package: Any, name: str) -> Any:
    """A Scala object."""
    return getattr(getattr(package, f"{name}$"), "MODULE$")
