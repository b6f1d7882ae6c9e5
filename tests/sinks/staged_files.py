"""A FileSink or ParquetSink over a directory, and rows for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from dagster_checkpoints.sinks import FileSink, ParquetSink, SinkContext

BATCH: Any = SimpleNamespace(columns=["n"])


def context(
    *, job: int = 1, epoch: int = 1, stage: str = "delays", index: int = 0, parallelism: int = 1, history: str = "h1"
) -> SinkContext:
    return SinkContext("flights", stage, str(index), index, parallelism, job, f"a{epoch}", history=history, epoch=epoch)


def numbers(*values: int) -> pa.Table:
    return pa.table({"n": pa.array(values, pa.int64())})


def opened(sink: FileSink, epoch: int) -> FileSink:
    """An instance of the sink, for the owner of an epoch."""
    sink = sink.new_instance()
    sink.open(context(epoch=epoch))
    return sink


def staged(sink: FileSink, folder: Path, checkpoint_id: int, *rows: int) -> str:
    """Write a batch of two files of these rows, and pre-commit: the transaction."""
    file = folder / f"{checkpoint_id}.parquet"
    pq.write_table(pa.table({"n": pa.array(rows, pa.int64()), "day": [f"é+/ {n % 2}" for n in rows]}), file)
    sink.write(BATCH, [str(file), str(file)], checkpoint_id)
    file.unlink()
    transaction = sink.pre_commit(checkpoint_id)
    assert transaction is not None
    return transaction


class Folder:
    """A sink's directory, and rows for it.

    Args:
        folder: an empty directory.
        kind: the sink's class.
    """

    def __init__(self, folder: Path, kind: type[FileSink] = FileSink) -> None:
        self.path = folder / "rows"
        self.kind = kind
        self._work = folder / "work"
        self._work.mkdir()
        self._files = 0

    @property
    def whole(self) -> bool:
        """Whether a commit is a directory."""
        return self.kind is ParquetSink

    def sink(self, *arguments: Any, **settings: Any) -> FileSink:
        return self.kind(self.path, *arguments, **settings)

    def opened(self, *arguments: Any, as_: SinkContext | None = None, new: bool = True, **settings: Any) -> FileSink:
        sink = self.sink(*arguments, **settings).new_instance()
        sink.open(as_ or context())
        if new:
            sink.start_new()
        return sink

    def file(self, rows: pa.Table) -> str:
        self._files += 1
        file = self._work / f"{self._files}.parquet"
        pq.write_table(rows, file)
        return str(file)

    def staged(self, sink: FileSink, checkpoint_id: int, *batches: pa.Table) -> str:
        for number, rows in enumerate(batches):
            file = self.file(rows)
            sink.write(BATCH, [file], 10 * checkpoint_id + number)
            Path(file).unlink()
        transaction = sink.pre_commit(checkpoint_id)
        assert transaction is not None
        return transaction

    def commit(self, sink: FileSink, checkpoint_id: int, *batches: pa.Table) -> None:
        sink.commit(self.staged(sink, checkpoint_id, *batches))

    @property
    def visible(self) -> list[Path]:
        """The files that readers see, oldest first."""
        names = (file.relative_to(self.path).as_posix() for file in self.path.rglob("*.*") if file.is_file())
        found = [self.path / name for name in names if name[0] not in "._"]
        return sorted(found, key=lambda file: (file.name if self.whole else int(file.name.split("-")[2]), file.name))

    @property
    def hidden(self) -> list[Path]:
        """The files of rows that are staged or taken back."""
        names = (file.relative_to(self.path).as_posix() for file in self.path.rglob("*"))
        return sorted(self.path / name for name in names if name[0] in "._" and name.endswith((".staged", ".parquet")))

    def numbers(self, format: str = "parquet") -> list[int]:
        """The rows that readers see."""
        table = ds.dataset(self.path, format=format, partitioning="hive").to_table()
        return sorted(table["n"].to_pylist()) if "n" in table.column_names else []

    def everything(self) -> dict[str, bytes]:
        return {str(f.relative_to(self.path)): f.read_bytes() for f in sorted(self.path.rglob("*")) if f.is_file()}
