"""A directory with one Delta table: its sinks, other programs that write to it, and the rows that readers see."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, Field, Schema, write_deltalake
from deltalake.schema import PrimitiveType

from dagster_checkpoints.sinks import DeltaSink
from tests.sinks.lake_rows import LakeRows


class Table(LakeRows[DeltaSink]):
    commits = (DeltaTable, "create_write_transaction")

    def sink(self, **settings: Any) -> DeltaSink:
        return DeltaSink(self.path, **settings)

    @property
    def directory(self) -> Path:
        return self.path

    @property
    def table(self) -> DeltaTable:
        return DeltaTable(self.path)

    def found(self) -> pa.Table | None:
        """By the library's reader and by pyarrow's, which must agree."""
        if not DeltaTable.is_deltatable(str(self.path)):
            return None
        table = self.table
        rows = table.to_pyarrow_table()
        other = pa.table(table.scan(columns=rows.column_names).read_all())
        assert sorted(map(repr, rows.to_pylist())) == sorted(map(repr, other.to_pylist()))
        return rows

    def files(self) -> set[Path]:
        return {Path(file) for file in self.table.file_uris()}

    def version(self) -> str:
        return str(self.table.version())

    def create(self, schema: pa.Schema) -> None:
        DeltaTable.create(self.path, Schema.from_arrow(schema))

    def append(self, *rows: int, **columns: Any) -> None:
        write_deltalake(self.path, pa.table(columns or {"n": pa.array(rows, pa.int64())}), mode="append")

    def rewrite(self) -> None:
        self.table.optimize.compact()

    def delete(self, where: str) -> None:
        self.table.delete(where)

    def drop(self) -> None:
        shutil.rmtree(self.path / "_delta_log")

    def add_column(self, name: str) -> None:
        self.table.alter.add_columns([Field(name, PrimitiveType("long"))])

    def forget(self) -> None:
        self.table.create_checkpoint()

    def clean(self) -> None:
        self.table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True)

    def matching(self, predicate: str) -> int:
        return len(pa.table(self.table.scan(columns=["n"], predicate=predicate).read_all()))

    def statistics(self, column: str) -> tuple[Any, Any, int]:
        found = self.table.get_add_actions(flatten=True)
        low, high, nulls = (found[f"{bound}.{column}"].to_pylist() for bound in ("min", "max", "null_count"))
        return low[0], high[0], nulls[0]
