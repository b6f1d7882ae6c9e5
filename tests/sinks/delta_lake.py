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

    def append(self, *rows: int) -> None:
        write_deltalake(self.path, pa.table({"n": pa.array(rows, pa.int64())}), mode="append")

    def rows(self) -> list[int]:
        """By the library's reader and by pyarrow's, which must agree."""
        if not DeltaTable.is_deltatable(str(self.path)):
            return []
        table = DeltaTable(self.path)
        rows = sorted(table.to_pyarrow_dataset().to_table()["n"].to_pylist())
        assert rows == sorted(pa.table(table.scan(columns=["n"]).read_all())["n"].to_pylist())
        return rows

    def data_files(self) -> list[Path]:
        return sorted(self.path.glob("dagster-checkpoints/**/*.parquet"))

    def version(self) -> int:
        return DeltaTable(self.path).version()
