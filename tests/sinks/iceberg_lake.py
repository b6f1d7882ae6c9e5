"""A catalog in a directory with one Iceberg table: its sinks, other programs that write to it, and the rows that readers see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table as IcebergTable

from dagster_checkpoints.sinks import IcebergSink, SinkContext

BATCH: Any = SimpleNamespace()
NAME = "shops.sales"


class Lake:
    """The catalog, and files of micro-batches."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lake"
        self._work = folder / "work"
        self._work.mkdir(parents=True)
        self._written = 0

    def opened(self, *, settings: Any = None, **changes: Any) -> IcebergSink:
        sink = IcebergSink(NAME, warehouse=self.path, **(settings or {}))
        sink.open(context(**changes))
        return sink

    def segment(self, *rows: int, **columns: Any) -> str:
        """A Parquet file of a micro-batch, as the runtime writes it."""
        data = columns or {"n": pa.array(rows, pa.int64())}
        self._written += 1
        file = self._work / f"segment-{self._written}.snappy.parquet"
        pq.write_table(pa.table(data), file)
        return str(file)

    def staged(self, sink: IcebergSink, checkpoint_id: int, *rows: int, **columns: Any) -> str:
        sink.write(BATCH, [self.segment(*rows, **columns)], checkpoint_id)
        transaction = sink.pre_commit(checkpoint_id)
        assert transaction is not None
        return transaction

    @property
    def catalog(self) -> Any:
        return load_catalog("default", type="sql", uri=f"sqlite:///{self.path}/catalog.db", warehouse=f"file://{self.path}")

    @property
    def table(self) -> IcebergTable:
        return self.catalog.load_table(NAME)  # type: ignore[no-any-return]

    def append(self, *rows: int, **columns: Any) -> None:
        """Another program adds rows."""
        self.table.append(pa.table(columns or {"n": pa.array(rows, pa.int64())}))

    def rows(self) -> list[int]:
        if not (self.path / "catalog.db").exists() or not self.catalog.table_exists(NAME):
            return []
        return sorted(self.table.scan().to_arrow()["n"].to_pylist())

    def data_files(self) -> list[Path]:
        return sorted(self.path.glob("shops/sales/dagster-checkpoints/**/*.parquet"))

    def snapshots(self) -> int:
        return len(self.table.snapshots())


def context(**changes: Any) -> SinkContext:
    values: dict[str, Any] = {
        "pipeline": "flights",
        "stage": "delays",
        "instance": "0",
        "index": 0,
        "parallelism": 1,
        "job_id": 1,
        "attempt": "a1",
        "history": "h1",
        "epoch": 1,
    }
    return SinkContext(**{**values, **changes})


def overtake(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let another program act between the plan of the next commit and the commit."""
    real = SqlCatalog.commit_table

    def overtaken(self: SqlCatalog, *arguments: Any) -> Any:
        monkeypatch.setattr(SqlCatalog, "commit_table", real)
        act()
        return real(self, *arguments)

    monkeypatch.setattr(SqlCatalog, "commit_table", overtaken)
