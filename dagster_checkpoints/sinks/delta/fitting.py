"""A stage's files for a Delta table: which tables and columns fit, and the data files.

Must not know transactions or checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from dagster_checkpoints.sinks.delta.columns import schema_of, unfit_for_key, unkept_promises, unpartitionable
from dagster_checkpoints.sinks.delta.data_files import file_columns, prepare
from dagster_checkpoints.sinks.delta.log import DeltaLog
from dagster_checkpoints.sinks.lake.columns import Column, SchemaEvolution
from dagster_checkpoints.sinks.lake.fitting import FileFitting, Target
from dagster_checkpoints.sinks.lake.replacement import Replacement
from dagster_checkpoints.sinks.lake.table_log import PreparedFile
from dagster_checkpoints.systems.errors import SinkColumnsMismatch


class DeltaFitting(FileFitting):
    """Fits a stage's files to a Delta table; see ``FileFitting``."""

    def __init__(
        self,
        log: DeltaLog,
        partition_by: Sequence[str] | None,
        evolution: SchemaEvolution,
        sink: str,
        replacement: Replacement,
    ) -> None:
        super().__init__(log, partition_by, evolution, sink, replacement)
        self._delta = log

    def check_table(self) -> None:
        table = self._delta.table
        assert table is not None
        metadata, wanted = table.metadata(), self._partition_by
        if wanted is not None and list(wanted) != metadata.partition_columns:
            raise SinkColumnsMismatch(
                f"{self._sink}: expected a table with the partition columns {list(wanted)}, found {metadata.partition_columns}. "
                "Change partition_by, or leave it out to take the table's"
            )
        unkept = unkept_promises(table.schema().to_json(), metadata.configuration, replaces=bool(self.replacement))
        if self.replacement and "deletionVectors" in (table.protocol().reader_features or ()):
            unkept.append("deletion vectors")
        if unkept:
            raise SinkColumnsMismatch(
                f"{self._sink}: expected a table whose rules hold without checking each row, found {'; '.join(unkept)}. The "
                "stage's files become part of the table as they are. Remove these rules from the table, or write to another table"
            )

    def prepare(self, file: Path, target: Target, scratch: Path) -> Iterator[PreparedFile]:
        return prepare(file, target.columns, target.partition_by, scratch, self.replacement.key)

    def _columns_in(self, file: Path) -> tuple[Column, ...]:
        from deltalake import Schema

        columns = file_columns(file)
        Schema.from_json(schema_of(columns))
        return columns

    def _unfit_for_key(self, columns: Sequence[Column], key: Sequence[str]) -> list[str]:
        return unfit_for_key(columns, key)

    def _unpartitionable(self, columns: Sequence[Column], partition_by: Sequence[str]) -> list[str]:
        return unpartitionable(columns, partition_by)
