"""A stage's files for an Iceberg table: which tables and columns fit, and the data files.

Must not know transactions or checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_checkpoints.sinks.iceberg.columns import nested_required, unfit_for_key, unpartitionable
from dagster_checkpoints.sinks.iceberg.data_files import file_columns, prepare
from dagster_checkpoints.sinks.iceberg.log import IcebergLog
from dagster_checkpoints.sinks.lake.columns import Column, SchemaEvolution
from dagster_checkpoints.sinks.lake.fitting import FileFitting, Target
from dagster_checkpoints.sinks.lake.replacement import Replacement
from dagster_checkpoints.sinks.lake.table_log import PreparedFile
from dagster_checkpoints.systems.errors import SinkColumnsMismatch

if TYPE_CHECKING:
    from pyiceberg.table import Table

_VERSION = 2


class IcebergFitting(FileFitting):
    """Fits a stage's files to an Iceberg table; see ``FileFitting``."""

    def __init__(
        self,
        log: IcebergLog,
        partition_by: Sequence[str] | None,
        evolution: SchemaEvolution,
        sink: str,
        replacement: Replacement,
    ) -> None:
        super().__init__(log, partition_by, evolution, sink, replacement)
        self._iceberg = log

    def check_table(self) -> None:
        table = self._iceberg.opened
        unkept = _unkept(table) + (self._iceberg.obstacles() if self.replacement else [])
        if unkept:
            raise SinkColumnsMismatch(
                f"{self._sink}: expected a table that takes Parquet files as the stage has written them, found "
                f"{'; '.join(unkept)}. Change the table, or write to another one"
            )
        found, wanted = list(self.log.shape().partition_by), self._partition_by
        if wanted is not None and list(wanted) != found:
            raise SinkColumnsMismatch(
                f"{self._sink}: expected a table with the partition columns {list(wanted)}, found {found}. Change partition_by, "
                "or leave it out to take the table's"
            )

    def prepare(self, file: Path, target: Target, scratch: Path) -> Iterator[PreparedFile]:
        return prepare(file, self._iceberg.opened, target.partition_by, scratch, self.replacement.key)

    def _columns_in(self, file: Path) -> tuple[Column, ...]:
        return file_columns(file)

    def _unfit_for_key(self, columns: Sequence[Column], key: Sequence[str]) -> list[str]:
        return unfit_for_key(columns, key)

    def _unpartitionable(self, columns: Sequence[Column], partition_by: Sequence[str]) -> list[str]:
        return unpartitionable(columns, partition_by)


def _unkept(table: Table) -> list[str]:
    """What the table asks of its writers and this sink does not do, a text for each."""
    from pyiceberg.transforms import IdentityTransform

    found = [] if table.format_version == _VERSION else [f"format version {table.format_version}, not {_VERSION}"]
    found += [
        f"partition field {field.name!r} with the transform {field.transform}, not identity"
        for field in table.spec().fields
        if not isinstance(field.transform, IdentityTransform)
    ]
    found += nested_required(table.schema().model_dump_json())
    mapping = table.name_mapping()
    if mapping is not None:
        # Files without field ids are read by the names of their columns.
        mapped = {name: field.field_id for field in mapping.root for name in field.names}
        found += [
            f"the property schema.name-mapping.default without column {field.name!r}"
            for field in table.schema().fields
            if mapped.get(field.name) != field.field_id
        ]
    return found
