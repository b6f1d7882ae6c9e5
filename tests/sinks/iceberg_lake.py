"""A catalog in a directory with one Iceberg table: its sinks, other programs that write to it, and the rows that readers see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table as IcebergTable
from pyiceberg.types import LongType

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

    @property
    def directory(self) -> Path:
        return self.path / NAME.replace(".", "/")

    def found(self) -> pa.Table | None:
        if not (self.path / "catalog.db").exists() or not self.catalog.table_exists(NAME):
            return None
        return self.table.scan().to_arrow()

    def files(self) -> set[Path]:
        return {Path(task.file.file_path.removeprefix("file://")) for task in self.table.scan().plan_files()}

    def version(self) -> str:
        snapshot = self.table.current_snapshot()
        return "" if snapshot is None else str(snapshot.snapshot_id)

    def create(self, schema: pa.Schema) -> None:
        self.path.mkdir(exist_ok=True)
        self.catalog.create_namespace_if_not_exists(NAME.split(".")[0])
        self.catalog.create_table(NAME, schema)

    def append(self, *rows: int, **columns: Any) -> None:
        added = pa.table(columns or {"n": pa.array(rows, pa.int64())})
        if self.found() is None:
            self.create(added.schema)
        self.table.append(added)

    def rewrite(self) -> None:
        self.table.overwrite(self.table.scan().to_arrow())

    def delete(self, where: str) -> None:
        self.table.delete(where)

    def drop(self) -> None:
        self.catalog.drop_table(NAME)

    def add_column(self, name: str) -> None:
        with self.table.update_schema() as update:
            update.add_column(name, LongType())

    def forget(self) -> None:
        table = self.table
        table.maintenance.expire_snapshots().by_ids([each.snapshot_id for each in table.snapshots()[:-1]]).commit()

    def clean(self) -> None:
        for file in {*self.data_files()} - self.files():
            file.unlink()

    def matching(self, predicate: str) -> int:
        return len(self.table.scan(predicate).to_arrow())

    def statistics(self, column: str) -> tuple[Any, Any, int]:
        (found,) = (metrics[column] for metrics in self.table.inspect.files()["readable_metrics"].to_pylist())
        return found["lower_bound"], found["upper_bound"], found["null_value_count"]
