"""A directory with one Delta table: its sinks, other programs that write to it, and the rows that readers see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from dagster_checkpoints.sinks import DeltaSink
from tests.sinks.lake_rows import LakeRows


class Table(LakeRows[DeltaSink]):
    commits = (DeltaTable, "create_write_transaction")

    def sink(self, **settings: Any) -> DeltaSink:
        return DeltaSink(self.path, **settings)

    def found(self) -> pa.Table | None:
        """By the library's reader and by pyarrow's, which must agree."""
        if not DeltaTable.is_deltatable(str(self.path)):
            return None
        table = DeltaTable(self.path)
        rows = table.to_pyarrow_table()
        other = pa.table(table.scan(columns=rows.column_names).read_all())
        assert sorted(map(repr, rows.to_pylist())) == sorted(map(repr, other.to_pylist()))
        return rows

    def files(self) -> set[Path]:
        return {Path(file) for file in DeltaTable(self.path).file_uris()}

    def version(self) -> int:
        return DeltaTable(self.path).version()

    def data_files(self) -> list[Path]:
        return sorted(self.path.glob("dagster-checkpoints/**/*.parquet"))

    def append(self, *rows: int, **columns: Any) -> None:
        write_deltalake(self.path, pa.table(columns or {"n": pa.array(rows, pa.int64())}), mode="append")

    def rewrite(self) -> None:
        DeltaTable(self.path).optimize.compact()

    def delete(self, where: str) -> None:
        DeltaTable(self.path).delete(where)
