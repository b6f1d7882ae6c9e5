"""An owner that was suspended and resumes after a newer owner has taken over changes nothing that the newer owner wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from dagster_checkpoints.sinks import ParquetSink, SinkContext, SinkError, SinkFenced, SinkPathInUse
from dagster_checkpoints.sinks.engine import SinkLife

BATCH: Any = SimpleNamespace(columns=["n"])


class Table:
    """A sink's directory and the rows that readers see."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "table"
        self._work = folder / "work"
        self._work.mkdir()
        self._files = 0

    def opened(
        self, epoch: int, *, job: int = 1, history: str = "h1", at_new_start: Literal["keep", "replace"] = "keep"
    ) -> ParquetSink:
        sink = ParquetSink(self.path, at_new_start)
        sink.open(SinkContext("flights", "delays", "0", 0, 1, job, f"e{epoch}a1", history=history, epoch=epoch))
        return sink

    def staged(self, sink: ParquetSink, checkpoint_id: int, *rows: int) -> str:
        self._files += 1
        file = self._work / f"{self._files}.parquet"
        pq.write_table(pa.table({"n": pa.array(rows, pa.int64())}), file)
        sink.write(BATCH, [str(file)], checkpoint_id)
        transaction = sink.pre_commit(checkpoint_id)
        assert transaction is not None
        return transaction

    def rows(self) -> list[int]:
        table = ds.dataset(self.path, format="parquet", partitioning="hive").to_table()
        return sorted(table["n"].to_pylist()) if "n" in table.column_names else []

    def everything(self) -> dict[str, bytes]:
        return {str(f.relative_to(self.path)): f.read_bytes() for f in sorted(self.path.rglob("*")) if f.is_file()}


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


LATE: list[Callable[[ParquetSink], object]] = [
    lambda sink: sink.recover([]),
    lambda sink: sink.recover([], restored=4),
    lambda sink: sink.start_new(),
]


@pytest.mark.parametrize("act", LATE, ids=["recover", "go back", "new start"])
@pytest.mark.parametrize("at_new_start", ["keep", "replace"])
def test_a_late_owner_neither_aborts_nor_takes_back(table: Table, act: Any, at_new_start: Any) -> None:
    late = table.opened(6, at_new_start=at_new_start)
    newer = table.opened(7)
    newer.recover([])
    newer.commit(table.staged(newer, 5, 1, 2))
    waiting = table.staged(newer, 6, 3)
    before = table.everything()
    with pytest.raises(SinkFenced, match=r"epoch 6.*epoch 7"):
        act(late)
    assert table.everything() == before
    newer.commit(waiting)
    assert table.rows() == [1, 2, 3]


def test_a_late_owner_cannot_open_it(table: Table) -> None:
    table.opened(7).close()
    with pytest.raises(SinkFenced, match="changes nothing"):
        table.opened(6)
    assert issubclass(SinkFenced, SinkError)  # the attempt ends as it does with any error of a sink
    table.opened(7).close()
    table.opened(8).close()


@pytest.mark.parametrize("act", LATE, ids=["recover", "go back", "new start"])
def test_what_a_newer_owner_stages_after_the_check_is_not_aborted(
    table: Table, act: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, newer = table.opened(6), table.opened(7)
    waiting = table.staged(newer, 6, 3)
    monkeypatch.setattr(SinkLife, "check_owner", lambda self, ledger: None)  # the check was before the newer owner's
    act(late)
    newer.commit(waiting)
    assert table.rows() == [3]


def test_a_late_owner_records_no_branch(table: Table) -> None:
    late = table.opened(6)
    late.recover([], restored=4)
    newer = table.opened(7)
    newer.recover([], restored=2)
    newer.commit(table.staged(newer, 5, 1))
    before = table.everything()
    with pytest.raises(SinkFenced):
        table.staged(late, 6, 9)
    assert {name: data for name, data in table.everything().items() if ".staging" not in name} == before


def test_a_newer_owner_aborts_what_an_older_one_has_left(table: Table) -> None:
    old = table.opened(6)
    kept, lost = table.staged(old, 5, 1), table.staged(old, 6, 2)
    newer = table.opened(7)
    newer.recover([kept])
    assert table.rows() == [1]
    assert list((table.path / ".staging" / "delays-0").iterdir()) == []
    with pytest.raises(SinkFenced):
        old.commit(lost)
    with pytest.raises(SinkError, match=r"found no \.staging"):
        newer.commit(lost)


def test_epochs_of_another_storage_do_not_count(table: Table) -> None:
    other = table.opened(9, history="h1")
    table.staged(other, 5, 1)
    sink = table.opened(1, history="h2")
    sink.start_new()
    assert list((table.path / ".staging" / "delays-0").iterdir()) == []
    sink.commit(table.staged(sink, 1, 7))
    assert table.rows() == [7]


def test_a_fence_that_cannot_be_read_says_what_to_do(table: Table) -> None:
    table.opened(7).close()
    (table.path / ".ledgers" / "delays-0.json").write_text("{")
    with pytest.raises(SinkPathInUse, match=r"delays-0\.json.*delete it"):
        table.opened(8)
