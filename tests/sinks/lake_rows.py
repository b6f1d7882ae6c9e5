"""What tests of Delta and Iceberg tables have in common: a table in a directory, and files of micro-batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_checkpoints.sinks import TwoPhaseCommitSink
from tests.sinks.sink_instance import BATCH, context

S = TypeVar("S", bound=TwoPhaseCommitSink)


class LakeRows(ABC, Generic[S]):
    """A table in a directory, and rows for it.

    Args:
        folder: an empty directory.
    """

    commits: ClassVar[tuple[Any, str]]
    """The class and the method by which a library commits."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lake"
        self._work = folder / "work"
        self._work.mkdir(parents=True)
        self._written = 0

    @abstractmethod
    def sink(self, **settings: Any) -> S: ...

    @abstractmethod
    def found(self) -> pa.Table | None:
        """All rows as readers see them; None if there is no table."""

    @abstractmethod
    def files(self) -> set[Path]:
        """The data files of the table's newest version."""

    @property
    @abstractmethod
    def directory(self) -> Path:
        """The table's directory."""

    @abstractmethod
    def version(self) -> str:
        """The table's version, which each commit changes."""

    @abstractmethod
    def create(self, schema: pa.Schema) -> None:
        """Another program creates the table."""

    @abstractmethod
    def append(self, *rows: int, **columns: Any) -> None:
        """Another program adds rows, to a new table if there is none."""

    @abstractmethod
    def rewrite(self) -> None:
        """Another program writes all rows again."""

    @abstractmethod
    def delete(self, where: str) -> None:
        """Another program deletes rows."""

    @abstractmethod
    def drop(self) -> None:
        """Another program drops the table; its data files stay."""

    @abstractmethod
    def add_column(self, name: str) -> None:
        """Another program adds a column of whole numbers."""

    @abstractmethod
    def forget(self) -> None:
        """Another program removes what the table remembers of earlier versions."""

    @abstractmethod
    def clean(self) -> None:
        """Another program deletes the files that no version refers to."""

    @abstractmethod
    def matching(self, predicate: str) -> int:
        """The number of rows for which a predicate is true, by a reader that skips files by their statistics."""

    @abstractmethod
    def statistics(self, column: str) -> tuple[Any, Any, int]:
        """The smallest and the largest value of a column, and the number of its nulls, of the only file."""

    def data_files(self) -> list[Path]:
        """The files that the sink has written."""
        return sorted(self.directory.glob("dagster-checkpoints/**/*.parquet"))

    def rows(self) -> list[int]:
        """The column n as readers see it."""
        found = self.found()
        return [] if found is None else sorted(found["n"].to_pylist())

    def sorted_rows(self, *names: str) -> list[tuple[Any, ...]]:
        """All rows, or these columns of them."""
        found = self.found()
        assert found is not None
        return sorted((tuple(row.values()) for row in found.select(names or found.column_names).to_pylist()), key=repr)

    def remainders(self) -> list[Path]:
        """The files with what remains of rows that were replaced by key."""
        return [file for file in self.data_files() if file.parent.name == "remainders"]

    def opened(self, *, settings: Any = None, **changes: Any) -> S:
        sink = self.sink(**(settings or {}))
        sink.open(context(**changes))
        return sink

    def segment(self, *rows: int, **columns: Any) -> str:
        """A Parquet file of a micro-batch, as the runtime writes it."""
        data = columns or {"n": pa.array(rows, pa.int64())}
        self._written += 1
        file = self._work / f"segment-{self._written}.snappy.parquet"
        pq.write_table(pa.table(data), file)
        return str(file)

    def staged(self, sink: S, checkpoint_id: int, *rows: int, **columns: Any) -> str:
        sink.write(BATCH, [self.segment(*rows, **columns)], checkpoint_id)
        transaction = sink.pre_commit(checkpoint_id)
        assert transaction is not None
        return transaction

    def overtake(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
        """Let another program act between the plan of the next commit and the commit."""
        owner, name = self.commits
        real = getattr(owner, name)

        def overtaken(*arguments: Any, **keywords: Any) -> Any:
            monkeypatch.setattr(owner, name, real)
            act()
            return real(*arguments, **keywords)

        monkeypatch.setattr(owner, name, overtaken)
