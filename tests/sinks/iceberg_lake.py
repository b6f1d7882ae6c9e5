"""A catalog in a directory with one Iceberg table: its sinks, other programs that write to it, and the rows that readers see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table as IcebergTable

from dagster_checkpoints.sinks import IcebergSink
from tests.sinks.lake_rows import LakeRows

NAME = "shops.sales"


class Lake(LakeRows[IcebergSink]):
    commits = (SqlCatalog, "commit_table")

    def sink(self, **settings: Any) -> IcebergSink:
        return IcebergSink(NAME, warehouse=self.path, **settings)

    @property
    def catalog(self) -> Any:
        return load_catalog("default", type="sql", uri=f"sqlite:///{self.path}/catalog.db", warehouse=f"file://{self.path}")

    @property
    def table(self) -> IcebergTable:
        return self.catalog.load_table(NAME)  # type: ignore[no-any-return]

    def found(self) -> pa.Table | None:
        if not (self.path / "catalog.db").exists() or not self.catalog.table_exists(NAME):
            return None
        return self.table.scan().to_arrow()

    def files(self) -> set[Path]:
        return {Path(task.file.file_path.removeprefix("file://")) for task in self.table.scan().plan_files()}

    def version(self) -> object:
        return self.table.metadata_location

    def data_files(self) -> list[Path]:
        return sorted(self.path.glob("shops/sales/dagster-checkpoints/**/*.parquet"))

    def append(self, *rows: int, **columns: Any) -> None:
        self.table.append(pa.table(columns or {"n": pa.array(rows, pa.int64())}))

    def rewrite(self) -> None:
        self.table.overwrite(self.table.scan().to_arrow())

    def delete(self, where: str) -> None:
        self.table.delete(where)

    def snapshots(self) -> int:
        return len(self.table.snapshots())
