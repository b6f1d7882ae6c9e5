"""DeltaSink with overwrite_partitions: the partitions that a job has written to hold exactly its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from dagster_checkpoints.pipeline import Pipeline, StageContext, bounded_source, stage, unbounded_source
from dagster_checkpoints.pipeline.errors import UnboundedSinkError
from dagster_checkpoints.sinks import DeltaSink, SinkCannotTakeBack, SinkColumnsMismatch, SinkContext, SinkHoldsEarlierRows

BATCH: Any = SimpleNamespace()


class Table:
    """A table with the partition column `day`, its jobs, and its rows as readers see them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "table"
        self._folder = folder
        self._files = 0

    def configured(self, **settings: Any) -> DeltaSink:
        return DeltaSink(self.path, partition_by="day", overwrite_partitions=True, **{"at_new_start": "keep", **settings})

    def sink(self, job_id: int = 1, *, epoch: int = 1, index: int = 0) -> DeltaSink:
        sink = self.configured()
        sink.open(SinkContext("flights", "delays", str(index), index, 2, job_id, f"a{epoch}", history="h1", epoch=epoch))
        return sink

    def staged(self, sink: DeltaSink, checkpoint_id: int, *rows: tuple[str | None, str]) -> str:
        self._files += 1
        file = self._folder / f"segment-{self._files}.parquet"
        pq.write_table(_columns(rows), file)
        sink.write(BATCH, [str(file)], checkpoint_id)
        transaction = sink.pre_commit(checkpoint_id)
        assert transaction is not None
        return transaction

    def commit(self, sink: DeltaSink, checkpoint_id: int, *rows: tuple[str | None, str]) -> None:
        sink.commit(self.staged(sink, checkpoint_id, *rows))

    def append(self, *rows: tuple[str | None, str]) -> None:
        write_deltalake(self.path, _columns(rows), mode="append", partition_by=["day"])

    def rows(self) -> Counter[tuple[str | None, str]]:
        return Counter((row["day"], row["v"]) for row in DeltaTable(self.path).to_pyarrow_table().to_pylist())


def _columns(rows: Sequence[tuple[str | None, str]]) -> pa.Table:
    return pa.table({"day": pa.array([day for day, _ in rows], pa.string()), "v": [v for _, v in rows]})


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


def test_a_job_replaces_the_partitions_that_it_writes_to(table: Table) -> None:
    table.append(("mon", "other"), ("tue", "other"), (None, "other"), ("wed é/=", "other"))
    first = table.sink()
    first.start_new()
    table.commit(first, 1, ("mon", "1a"), (None, "1a"))
    assert table.rows() == Counter([("mon", "1a"), (None, "1a"), ("tue", "other"), ("wed é/=", "other")])
    table.commit(first, 2, ("mon", "1b"), ("mon", "1b"), ("tue", "1b"))
    assert table.rows() == Counter(
        [("mon", "1a"), ("mon", "1b"), ("mon", "1b"), (None, "1a"), ("tue", "1b"), ("wed é/=", "other")]
    )
    second = table.sink(2, epoch=2)
    second.start_new()
    table.commit(second, 1, ("mon", "2a"), ("wed é/=", "2a"))
    assert table.rows() == Counter([("mon", "2a"), (None, "1a"), ("tue", "1b"), ("wed é/=", "2a")])


def test_all_instances_of_a_job_share_its_partitions(table: Table) -> None:
    table.append(("mon", "other"), ("tue", "other"))
    one, two = table.sink(index=0), table.sink(index=1)
    texts = [table.staged(one, 1, ("mon", "i0")), table.staged(two, 1, ("mon", "i1"), ("tue", "i1"))]
    two.commit(texts[1])
    one.commit(texts[0])
    table.commit(one, 2, ("tue", "i0"))
    assert table.rows() == Counter([("mon", "i0"), ("mon", "i1"), ("tue", "i1"), ("tue", "i0")])


def test_instances_that_begin_a_partition_at_the_same_time(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.append(("mon", "other"))
    one, two = table.sink(index=0), table.sink(index=1)
    texts = [table.staged(one, 1, ("mon", "i0")), table.staged(two, 1, ("mon", "i1"))]
    real = DeltaTable.create_write_transaction

    def overtaken(*arguments: Any, **keywords: Any) -> None:
        monkeypatch.setattr(DeltaTable, "create_write_transaction", real)
        two.commit(texts[1])
        real(*arguments, **keywords)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", overtaken)
    one.commit(texts[0])
    assert table.rows() == Counter([("mon", "i0"), ("mon", "i1")])


def test_rows_of_the_job_stay_whatever_other_programs_do_between_its_commits(table: Table) -> None:
    table.append(("mon", "other"))
    sink = table.sink()
    table.commit(sink, 1, ("mon", "a"))
    table.commit(sink, 2, ("mon", "b"))
    DeltaTable(table.path).optimize.compact()
    table.append(("mon", "late"))
    table.commit(sink, 3, ("mon", "c"))
    again = table.sink(epoch=2)  # a restart reads from storage which partitions the job has
    again.recover([], restored=3)
    table.commit(again, 4, ("mon", "d"))
    assert table.rows() == Counter([("mon", v) for v in ("a", "b", "late", "c", "d")])


def test_an_older_checkpoint_takes_back_the_jobs_rows_and_nothing_else(table: Table) -> None:
    table.append(("mon", "other"), ("tue", "other"), ("wed", "other"))
    sink = table.sink()
    table.commit(sink, 1, ("mon", "a"))
    table.commit(sink, 2, ("mon", "b"), ("tue", "b"))
    table.commit(sink, 3, ("tue", "c"))
    back = table.sink(epoch=2)
    back.recover([], restored=1)
    assert table.rows() == Counter([("mon", "a"), ("wed", "other")])
    table.append(("tue", "between"))
    table.commit(back, 4, ("tue", "b again"))
    assert table.rows() == Counter([("mon", "a"), ("tue", "between"), ("tue", "b again"), ("wed", "other")])
    forth = table.sink(epoch=3)
    forth.recover([], restored=3)
    assert table.rows() == Counter([("mon", "a"), ("mon", "b"), ("tue", "b"), ("tue", "c"), ("tue", "between"), ("wed", "other")])


def test_a_savepoint_of_another_job_needs_a_table_without_its_rows(table: Table, tmp_path: Path) -> None:
    sink = table.sink()
    table.commit(sink, 1, ("mon", "a"))
    text = table.staged(sink, 2, ("mon", "b"))
    files = {name: tmp_path / name for name in sink.transaction_files(text)}
    for name, file in sink.transaction_files(text).items():
        files[name].write_bytes(file.read_bytes())
    moved = table.sink(2, epoch=2)
    with pytest.raises(SinkCannotTakeBack, match=r"found rows of job 1\.h1"):
        moved.recover([text])
    assert table.rows() == Counter([("mon", "a")])
    (tmp_path / "elsewhere").mkdir()
    elsewhere = Table(tmp_path / "elsewhere")
    sink = elsewhere.sink(2)
    sink.restore_transaction(text, files)
    sink.recover([text])
    assert elsewhere.rows() == Counter([("mon", "b")])


def test_settings(table: Table) -> None:
    for settings, text in (
        ({"partition_by": None}, "partition_by"),
        ({"key": "k"}, "found both"),
        ({"at_new_start": "replace"}, "'replace', which removes all rows"),
    ):
        with pytest.raises(ValueError, match=text):
            DeltaSink("/t", **{"partition_by": "day", "overwrite_partitions": True, **settings})  # type: ignore[arg-type]
    table.commit(table.sink(), 1, ("mon", "a"))
    context = SinkContext("flights", "delays", "0", 0, 1, 2, "", history="h1", epoch=2)
    with pytest.raises(SinkHoldsEarlierRows, match="job 1 has committed"):
        table.configured(at_new_start="refuse").check_new_start(context)
    DeltaTable(table.path).alter.set_table_properties({"delta.appendOnly": "true"})
    with pytest.raises(SinkColumnsMismatch, match=r"delta\.appendOnly"):
        table.configured().check_new_start(context)


def test_an_unbounded_stage_cannot_overwrite_partitions() -> None:
    sink = DeltaSink("/t", partition_by="day", overwrite_partitions=True)
    assert "overwrite_partitions=True" in repr(sink)

    def read(context: StageContext) -> Any: ...

    def delays(read: Any) -> Any: ...

    Pipeline("daily", [bounded_source(read), stage(sink=sink)(delays)])
    with pytest.raises(UnboundedSinkError, match=r"'delays' is unbounded \(it reads the unbounded source 'read'\)"):
        Pipeline("daily", [unbounded_source(read), stage(sink=sink)(delays)])
