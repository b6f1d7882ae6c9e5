"""Data files of an Iceberg table: the columns of a Parquet file, values of partitions, and metrics.

Metrics are stored by the path of the column in the file, not by field id. Must not know checkpoints.

Of the files whose rows readers see, it is said which may hold some rows, and how their rows are read: a file may have been
written before a column was renamed or dropped: its columns are the table's fields with the same ids, and not those with the same
names.

Source: Iceberg's specification, "Manifests" and "Column Projection" (files without field ids), and "Scan Planning".
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from dagster_checkpoints.sinks.iceberg.columns import columns_of_arrow, columns_of_spark
from dagster_checkpoints.sinks.lake.columns import Column
from dagster_checkpoints.sinks.lake.table_log import DataFile, PreparedFile
from dagster_checkpoints.sinks.parquet_files import arrow_schema, spark_schema

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile as IcebergFile
    from pyiceberg.manifest import ManifestFile
    from pyiceberg.table import Table


_NO_BOUNDS = {"write.metadata.metrics.default": "counts"}


class FileMetrics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metrics of a data file by the path of the column in the file.

    Args:
        sizes: size of the column in bytes.
        values: number of its values, with nulls.
        nulls: number of its nulls.
        lower: its smallest value, serialized as Iceberg's specification says, in base 64.
        upper: likewise the largest value.
        splits: offsets in the file at which readers may split it.
    """

    sizes: dict[str, int]
    values: dict[str, int]
    nulls: dict[str, int]
    lower: dict[str, str]
    upper: dict[str, str]
    splits: tuple[int, ...]


# Created at import: two threads that decode a type for the first time at the same moment crash msgspec.
_METRICS = msgspec.json.Decoder(FileMetrics)


def file_columns(file: Path) -> tuple[Column, ...]:
    """The columns of a Parquet file, in Iceberg's types.

    Raises:
        TypeError: a type that Iceberg does not have.
    """
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(file)
    recorded = spark_schema(metadata)
    return columns_of_arrow(arrow_schema(metadata)) if recorded is None else columns_of_spark(recorded)


def has_the_formats_paths(metadata: Any, table: Table) -> bool:
    """Whether the nested columns of a file are stored as Iceberg says; Spark's older format has other names between them.

    Args:
        metadata: the file's footer.
        table: the table, which has the file's columns.
    """
    from pyiceberg.io.pyarrow import parquet_path_to_id_mapping

    known = parquet_path_to_id_mapping(table.schema())
    return all(metadata.schema.column(number).path in known for number in range(metadata.num_columns))


def iceberg_file(file: DataFile, table: Table, location: str) -> IcebergFile:
    """A data file as a manifest of the table names it.

    Args:
        file: the file.
        table: the table, whose columns are those of the file.
        location: the table's location, without a slash at its end.
    """
    from pyiceberg.io.pyarrow import parquet_path_to_id_mapping
    from pyiceberg.manifest import DataFile as IcebergFile
    from pyiceberg.manifest import DataFileContent, FileFormat

    metrics = _METRICS.decode(file.statistics)
    ids = parquet_path_to_id_mapping(table.schema())
    found = IcebergFile.from_args(
        content=DataFileContent.DATA,
        file_path=f"{location}/{file.path}",
        file_format=FileFormat.PARQUET,
        partition=_partition_record(table, file.partition),
        record_count=file.rows,
        file_size_in_bytes=file.size,
        column_sizes={ids[path]: size for path, size in metrics.sizes.items()},
        value_counts={ids[path]: number for path, number in metrics.values.items()},
        null_value_counts={ids[path]: number for path, number in metrics.nulls.items()},
        nan_value_counts={},
        lower_bounds={ids[path]: b64decode(bound) for path, bound in metrics.lower.items()},
        upper_bounds={ids[path]: b64decode(bound) for path, bound in metrics.upper.items()},
        split_offsets=list(metrics.splits),
    )
    found.spec_id = table.metadata.default_spec_id
    return found


def described(file: Path, metadata: Any, table: Table, partition: Mapping[str, str | None]) -> PreparedFile:
    """A file that fits the table, with its metrics.

    Args:
        file: the file on this machine.
        metadata: the file's footer.
        table: the table.
        partition: the partition's values as text, by column.
    """
    metrics = _metrics(metadata, table)
    return PreparedFile(file, metadata.num_rows, metrics.nulls, msgspec.json.encode(metrics).decode(), dict(partition))


def partition_texts(table: Table, values: Sequence[Any]) -> dict[str, str | None]:
    """The values of a partition as text, by column.

    Args:
        table: the table.
        values: the values as Iceberg stores them, in the order of the table's partition fields: of times and dates a number.
    """
    names = [table.schema().find_column_name(field.source_id) or "" for field in table.spec().fields]
    return {name: None if value is None else str(value) for name, value in zip(names, values, strict=True)}


def _metrics(metadata: Any, table: Table) -> FileMetrics:
    from pyiceberg.io.pyarrow import compute_statistics_plan, data_file_statistics_from_parquet_metadata
    from pyiceberg.io.pyarrow import parquet_path_to_id_mapping as mapping

    schema = table.schema()
    ids = mapping(schema)
    try:
        plan = compute_statistics_plan(schema, table.properties)
        found = data_file_statistics_from_parquet_metadata(metadata, plan, ids).to_serialized_dict()
    except (ArithmeticError, OSError, ValueError):  # a date that Python's types cannot hold
        plan = compute_statistics_plan(schema, _NO_BOUNDS)
        found = data_file_statistics_from_parquet_metadata(metadata, plan, ids).to_serialized_dict()
    paths = {field_id: path for path, field_id in ids.items()}
    return FileMetrics(
        sizes={paths[column]: size for column, size in found["column_sizes"].items()},
        values={paths[column]: number for column, number in found["value_counts"].items()},
        nulls={paths[column]: number for column, number in found["null_value_counts"].items()},
        lower={paths[column]: b64encode(bound).decode() for column, bound in found["lower_bounds"].items()},
        upper={paths[column]: b64encode(bound).decode() for column, bound in found["upper_bounds"].items()},
        splits=tuple(found["split_offsets"]),
    )


def texts_of(table: Table, values: Mapping[str, Any]) -> dict[str, str | None]:
    """A partition's values as text, by column; the values are those of Python."""
    from pyiceberg.partitioning import partition_record_value

    schema, fields = table.schema(), table.spec().fields
    if not values:
        return {}
    names = [schema.find_column_name(field.source_id) or "" for field in fields]
    return partition_texts(table, [partition_record_value(f, values[n], schema) for f, n in zip(fields, names, strict=True)])


def _partition_record(table: Table, texts: dict[str, str | None]) -> Any:
    from pyiceberg.conversions import partition_to_py
    from pyiceberg.typedef import Record
    from pyiceberg.types import PrimitiveType, StringType

    values: list[Any] = []
    for field in table.spec().fields:
        source = table.schema().find_field(field.source_id)
        text = texts[source.name]
        assert isinstance(source.field_type, PrimitiveType)
        is_text = text is None or isinstance(source.field_type, StringType)
        values.append(text if is_text else partition_to_py(source.field_type, str(text)))
    return Record(*values)


class ActiveFiles:
    """The files of a table's newest snapshot; a manifest that was read is not read again."""

    def __init__(self) -> None:
        self._known: dict[str, list[IcebergFile]] = {}

    def read(self, table: Table) -> list[IcebergFile]:
        """All data files that the newest snapshot names."""
        from pyiceberg.manifest import ManifestContent

        manifests = [manifest for manifest in manifests_of(table) if manifest.content == ManifestContent.DATA]
        self._known = {m.manifest_path: self._known.get(m.manifest_path) or _files_in(m, table) for m in manifests}
        return [file for files in self._known.values() for file in files]


def manifests_of(table: Table) -> list[ManifestFile]:
    """The manifests of the table's newest snapshot; none if there is no snapshot."""
    snapshot = table.current_snapshot()
    return [] if snapshot is None else snapshot.manifests(table.io)


def obstacles(table: Table) -> list[str]:
    """What keeps files of the table from being replaced by files with other rows, a text for each."""
    from pyiceberg.manifest import ManifestContent

    manifests = manifests_of(table)
    found = []
    if any(manifest.content == ManifestContent.DELETES for manifest in manifests):
        found.append("delete files (write.delete.mode=merge-on-read; rewrite_data_files applies them)")
    if any(manifest.partition_spec_id != table.metadata.default_spec_id for manifest in manifests):
        found.append("files of another partitioning than the table's newest one (rewrite_data_files changes them)")
    return found


def may_hold(file: IcebergFile, table: Table, bounds: Mapping[str, tuple[pa.Scalar, pa.Scalar]]) -> bool:
    """Whether a file may hold a row whose values are all within bounds.

    Args:
        file: the file.
        table: its table.
        bounds: the smallest and the largest value of columns.
    """
    from pyiceberg.conversions import from_bytes
    from pyiceberg.types import PrimitiveType

    for column, (low, high) in bounds.items():
        field = table.schema().find_field(column)
        smallest, largest = (found.get(field.field_id) for found in (file.lower_bounds or {}, file.upper_bounds or {}))
        if smallest is None or largest is None or not isinstance(field.field_type, PrimitiveType):
            continue
        if from_bytes(field.field_type, smallest) > _stored(high) or from_bytes(field.field_type, largest) < _stored(low):
            return False
    return True


def partition_of(file: IcebergFile, table: Table) -> dict[str, str | None]:
    """A file's partition values as text, by column; the file has the table's newest partitioning."""
    return partition_texts(table, [file.partition[place] for place in range(len(file.partition))])


def readable(file: IcebergFile, table: Table) -> Any:
    """A file for ``pyarrow.parquet``, with the names of the table's columns."""
    scheme, _, path = _place(table, file.file_path)
    source: Any = Path(path) if scheme == "file" else table.io.new_input(file.file_path).open()
    if _has_the_tables_names(source, table):
        return source if scheme == "file" else table.io.new_input(file.file_path).open()
    return _projected(file, table)


def _files_in(manifest: ManifestFile, table: Table) -> list[IcebergFile]:
    return [entry.data_file for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True)]


def _place(table: Table, path: str) -> tuple[str, str, str]:
    from pyiceberg.io.pyarrow import PyArrowFileIO

    return PyArrowFileIO.parse_location(path, table.io.properties)


def _has_the_tables_names(source: Any, table: Table) -> bool:
    from pyiceberg.io.pyarrow import pyarrow_to_schema

    schema = table.schema()
    try:
        found = pyarrow_to_schema(pq.read_schema(source), table.name_mapping(), downcast_ns_timestamp_to_us=True)
    except (TypeError, ValueError):  # a column that the table does not have any more, or another type
        return False
    return all(schema.find_column_name(number) == found.find_column_name(number) for number in found.field_ids)


def _projected(file: IcebergFile, table: Table) -> Any:
    """The file's rows as rows of the table, in memory."""
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow
    from pyiceberg.table import FileScanTask

    rows = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue()).to_table([FileScanTask(file)])
    buffer = pa.BufferOutputStream()
    pq.write_table(rows.cast(schema_to_pyarrow(table.schema(), include_field_ids=False)), buffer)
    return pa.BufferReader(buffer.getvalue())


def _stored(value: pa.Scalar) -> Any:
    """A value as Iceberg's bounds have it: of times the number of microseconds, of dates the number of days."""
    counted = pa.types.is_timestamp(value.type) or pa.types.is_date(value.type)
    return value.value if counted else value.as_py()
