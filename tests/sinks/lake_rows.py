"""What tests of Delta and Iceberg tables have in common: the instance, and files of micro-batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_checkpoints.sinks import SinkContext, TwoPhaseCommitSink

BATCH: Any = SimpleNamespace()
S = TypeVar("S", bound=TwoPhaseCommitSink)


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
    def append(self, *rows: int) -> None:
        """Another program adds rows."""

    @abstractmethod
    def rows(self) -> list[int]:
        """The column n as readers see it."""

    @abstractmethod
    def version(self) -> object:
        """The table's version, which each commit changes."""

    @abstractmethod
    def data_files(self) -> list[Path]:
        """The files that the sink has written."""

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
