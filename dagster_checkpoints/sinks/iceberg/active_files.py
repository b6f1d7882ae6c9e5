"""The files whose rows readers of an Iceberg table see: which of them may hold some rows, and how their rows are read.

A file may have been written before a column was renamed or dropped: its columns are the table's fields with the same ids, and not
those with the same names. Must not know which rows a sink has written.

Source: Iceberg's specification, "Column Projection" and "Scan Planning".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from dagster_checkpoints.sinks.iceberg.data_files import partition_texts

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile as IcebergFile
    from pyiceberg.manifest import ManifestFile
    from pyiceberg.table import Table


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
