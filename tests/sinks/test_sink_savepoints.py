"""A savepoint that is restored later loses no row and doubles no row, after any events of the job in between."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_checkpoints.sinks import (
    ParquetSink,
    SinkContext,
    SinkError,
    SinkTransactionConflict,
    SinkTransactionLost,
    TwoPhaseCommitSink,
)
from dagster_checkpoints.sinks.branches import Branches
from dagster_checkpoints.spark.tasks.task_sink import TaskSink

BATCH: Any = SimpleNamespace(columns=["n"])


@dataclass
class Job:
    """A sink's task in one attempt after another, over one table."""

    folder: Path
    at_new_start: Any = "keep"
    table: Path = field(init=False)
    attempts: int = 0
    batches: int = 0

    def __post_init__(self) -> None:
        self.table = self.folder / "table"

    def attempt(
        self,
        transactions: Sequence[str] | None,
        restored: int | None = None,
        files: Mapping[int, Mapping[str, Path]] | None = None,
        job_id: int = 1,
    ) -> TaskSink:
        self.attempts += 1
        unused: Any = None
        context = SinkContext("flights", "delays", "0", 0, 1, job_id, f"a{self.attempts}")
        sink = TaskSink(ParquetSink(self.table, self.at_new_start), context, unused, unused, Path("never used"))
        sink.open(transactions, restored, files)
        return sink

    def write(self, sink: TaskSink, *rows: str) -> None:
        self.batches += 1
        segment = self.folder / f"segment-{self.batches}"
        pq.write_table(pa.table({"row": rows}), segment)
        sink._sink.write(BATCH, [str(segment)], self.batches)

    def rows(self) -> list[str]:
        files = (file for directory in self.table.glob("checkpoint=*") for file in directory.iterdir())
        return sorted(row for file in files for row in rows_in(file))

    def savepoint(self, sink: TaskSink, checkpoint_id: int) -> tuple[tuple[str, ...], dict[int, dict[str, Path]]]:
        transactions = sink.pre_commit(checkpoint_id)
        pins = self.folder / f"pins-{checkpoint_id}"
        stored = self.folder / f"savepoint-{checkpoint_id}"
        files = sink.pin_transactions(pins)
        copied = {}
        for position, named in files.items():
            (stored / str(position)).mkdir(parents=True)
            copied[position] = {name: Path(shutil.copy(file, stored / str(position))) for name, file in named.items()}
        shutil.rmtree(pins, ignore_errors=True)
        return transactions, copied


def rows_in(file: Path) -> list[str]:
    found: list[str] = pq.read_table(file)["row"].to_pylist()
    return found


def staged_folder(job: Job, transaction: str) -> Path:
    return job.table / ".staging" / "delays-0" / str(json.loads(transaction)["staged"]["name"])


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def committed(job: Job, sink: TaskSink, checkpoint_id: int, *rows: str) -> tuple[str, ...]:
    job.write(sink, *rows)
    transactions = sink.pre_commit(checkpoint_id)
    sink.commit_up_to(checkpoint_id)
    return transactions


def test_a_savepoint_restored_after_its_transactions_were_aborted_and_later_checkpoints_committed(job: Job) -> None:
    first = job.attempt(None)
    checkpoint = committed(job, first, 41, "1")
    job.write(first, "2")
    transactions, files = job.savepoint(first, 43)
    second = job.attempt(checkpoint, 41)  # a crash: from the newest checkpoint, the savepoint's rows are read again
    assert job.rows() == ["1"]
    committed(job, second, 44, "2", "3")
    committed(job, second, 45, "4")
    assert job.rows() == ["1", "2", "3", "4"]
    third = job.attempt(transactions, 43, files)
    assert job.rows() == ["1", "2"]
    committed(job, third, 46, "3")
    assert job.rows() == ["1", "2", "3"]


def test_a_savepoint_is_restored_whether_or_not_its_transactions_were_committed_since(job: Job) -> None:
    sink = job.attempt(None)
    job.write(sink, "1")
    sink.pre_commit(42)  # pending while the savepoint is taken
    job.write(sink, "2")
    transactions, files = job.savepoint(sink, 43)
    assert [sorted(named) for named in files.values()] == [["00000-e0-a1-000000.parquet"], ["00000-e0-a1-000001.parquet"]]
    sink.commit_up_to(42)
    for _ in range(2):  # the second time after a crash
        job.attempt(transactions, 43, files)
        assert job.rows() == ["1", "2"]
    assert list((job.table / ".staging" / "delays-0").iterdir()) == []


def test_going_back_and_forward_again_between_savepoints(job: Job) -> None:
    sink = job.attempt(None)
    saved = {}
    for checkpoint_id in (1, 3, 5):
        committed(job, sink, checkpoint_id, f"{checkpoint_id}")
        job.write(sink, f"{checkpoint_id + 1}")
        saved[checkpoint_id + 1] = job.savepoint(sink, checkpoint_id + 1)
        sink.commit_up_to(checkpoint_id + 1)
    sink = job.attempt(saved[2][0], 2, saved[2][1])
    assert job.rows() == ["1", "2"]
    committed(job, sink, 7, "3", "4", "5", "6", "7")
    job.write(sink, "8")
    saved[8] = job.savepoint(sink, 8)
    for checkpoint_id in (6, 4, 8, 2, 6, 8):
        transactions, files = saved[checkpoint_id]
        sink = job.attempt(transactions, checkpoint_id, files)
        assert job.rows() == [str(n) for n in range(1, checkpoint_id + 1)]
    job.attempt(saved[6][0], 6, saved[6][1]).pre_commit(9)
    job.attempt(saved[8][0], 8, saved[8][1])
    assert job.rows() == [str(n) for n in range(1, 9)]


def test_rows_that_are_both_visible_and_taken_back_are_shown_once(job: Job) -> None:
    sink = job.attempt(None)
    checkpoint = committed(job, sink, 1, "1")
    job.write(sink, "2")
    transactions, files = job.savepoint(sink, 2)
    sink.commit_up_to(2)
    job.attempt(checkpoint, 1)
    job.attempt(transactions, None, files)  # no id is given, so no rows are shown again: they are committed again
    assert job.rows() == ["1", "2"]
    job.attempt(checkpoint, 1)
    assert job.rows() == ["1"]
    job.attempt(transactions, None, files)
    job.attempt(transactions, 2, files)
    assert job.rows() == ["1", "2"]
    assert list((job.table / ".taken-back").iterdir()) == []


def test_the_error_names_taken_back_rows_that_were_deleted(job: Job) -> None:
    sink = job.attempt(None)
    earlier = committed(job, sink, 1, "1")
    later = committed(job, sink, 2, "2")
    newest = committed(job, sink, 3, "3")
    job.attempt(earlier, 1)
    shutil.rmtree(job.table / ".taken-back")
    before = sorted(job.table.rglob("*"))
    with pytest.raises(SinkTransactionLost, match=r"taken back since.*checkpoint=2-job1-0, checkpoint=3-job1-0.*backup"):
        job.attempt(newest, 3)
    assert sorted(job.table.rglob("*")) == before
    with pytest.raises(SinkTransactionLost):
        job.attempt(later, 2)
    job.attempt(earlier, 1)
    assert job.rows() == ["1"]


def test_a_ledger_that_cannot_be_read_is_refused(job: Job) -> None:
    sink = job.attempt(None)
    transactions = committed(job, sink, 1, "1")
    committed(job, sink, 3, "2")
    job.attempt(transactions, 1)
    (job.table / ".ledgers" / "delays-0.json").write_text("{")
    with pytest.raises(SinkError, match=r"delays-0\.json .*cannot be read"):
        job.attempt(transactions, 1)


@pytest.mark.parametrize("at_new_start", ["keep", "replace"])
def test_a_savepoint_restored_under_a_new_job_id_is_no_new_start(tmp_path: Path, at_new_start: str) -> None:
    job = Job(tmp_path, at_new_start)
    sink = job.attempt(None)
    checkpoint = committed(job, sink, 1, "1")
    job.write(sink, "2")
    transactions, files = job.savepoint(sink, 2)
    job.attempt(checkpoint, 1)  # aborts the savepoint's transaction
    restored = job.attempt(transactions, None, files, job_id=2)
    assert job.rows() == ["1", "2"]
    job.attempt(transactions, None, files, job_id=2)  # again, after a crash before its first checkpoint
    assert job.rows() == ["1", "2"]
    committed(job, restored, 3, "3")
    assert job.rows() == ["1", "2", "3"]
    anew = job.attempt(None, job_id=3)
    committed(job, anew, 1, "0")
    assert job.rows() == (["0", "1", "2", "3"] if at_new_start == "keep" else ["0"])


def test_a_savepoint_taken_before_the_first_checkpoint_is_on_a_separate_branch(job: Job) -> None:
    sink = job.attempt(None)
    job.write(sink, "1")
    transactions, files = job.savepoint(sink, 1)
    sink = job.attempt(None)
    job.write(sink, "1", "2")
    others = job.savepoint(sink, 2)
    for _ in range(2):
        job.attempt(transactions, 1, files)
        assert job.rows() == ["1"]
        job.attempt(others[0], 2, others[1])
        assert job.rows() == ["1", "2"]


def test_a_new_start_that_replaces_removes_the_taken_back_rows_of_earlier_jobs(tmp_path: Path) -> None:
    job = Job(tmp_path, "replace")
    sink = job.attempt(None)
    earlier = committed(job, sink, 1, "1")
    committed(job, sink, 2, "2")
    job.attempt(earlier, 1).pre_commit(3)
    assert list(json.loads((job.table / ".ledgers" / "delays-0.json").read_text())["jobs"]) == ["1"]
    job.attempt(None, job_id=2)
    assert {entry.name for entry in job.table.iterdir()} == {".sink.json", ".staging", ".taken-back", ".commits", ".ledgers"}
    assert not [*(job.table / ".taken-back").iterdir(), *(job.table / ".commits").iterdir()]
    assert json.loads((job.table / ".ledgers" / "delays-0.json").read_text())["jobs"] == {}


def test_a_partly_deleted_transaction_is_restored_completely(job: Job) -> None:
    sink = job.attempt(None)
    for row in ("1", "2", "3"):
        job.write(sink, row)
    transactions, files = job.savepoint(sink, 1)
    staging = staged_folder(job, transactions[0])
    sorted(staging.iterdir())[0].unlink()  # the process that aborted it was killed here
    job.attempt(transactions, 1, files)
    assert job.rows() == ["1", "2", "3"]


def test_files_may_be_deleted_after_the_sink_is_open(job: Job, tmp_path: Path) -> None:
    sink = job.attempt(None)
    job.write(sink, "1")
    transactions, files = job.savepoint(sink, 1)
    sink._sink.abort(transactions[0])
    job.attempt(transactions, 1, files)
    shutil.rmtree(tmp_path / "savepoint-1")
    assert job.rows() == ["1"]


def test_other_rows_where_a_savepoints_rows_belong_are_a_conflict(job: Job) -> None:
    sink = job.attempt(None)
    job.write(sink, "1")
    transactions, files = job.savepoint(sink, 1)
    sink._sink.abort(transactions[0])
    target = job.table / "checkpoint=1-job1-0"
    target.mkdir()
    pq.write_table(pa.table({"row": ["x"]}), target / "part-other.parquet")
    with pytest.raises(
        SinkTransactionConflict, match=r"checkpoint=1-job1-0 .*00000-e0-a1-000000\.parquet.*other files \(part-other"
    ):
        job.attempt(transactions, 1, files)
    assert job.rows() == ["x"]


def test_a_transaction_without_its_files_cannot_be_put_into_a_savepoint(job: Job) -> None:
    sink = job.attempt(None)
    job.write(sink, "1")
    transactions = sink.pre_commit(1)
    shutil.rmtree(staged_folder(job, transactions[0]))
    with pytest.raises(SinkTransactionLost, match=r"found no \.staging"):
        sink.pin_transactions(job.folder / "pins")


def test_pinned_files_outlive_the_commit_and_no_files_make_no_folder(job: Job) -> None:
    sink = job.attempt(None)
    pins = job.folder / "pins"
    assert sink.pre_commit(1) == () and sink.pin_transactions(pins) == {}
    assert not pins.exists()
    job.write(sink, "1")
    sink.pre_commit(2)
    pinned = sink.pin_transactions(pins)
    sink.commit_up_to(2)
    assert [rows_in(file) for file in pinned[0].values()] == [["1"]]
    assert sink.pin_transactions(pins) == {}


def test_pins_are_copies_where_links_are_impossible(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = job.attempt(None)
    job.write(sink, "1")
    sink.pre_commit(2)

    def other_device(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_device)
    pinned = sink.pin_transactions(job.folder / "pins")
    assert [rows_in(file) for file in pinned[0].values()] == [["1"]]


class Rows(TwoPhaseCommitSink):
    """A sink whose transactions are not files, or have invalid names."""

    def __init__(self, files: Mapping[str, Path] | None = None) -> None:
        self.files = files
        self.committed: list[str] = []

    def open(self, context: SinkContext) -> None: ...
    def write(self, batch: Any, files: Sequence[str], batch_id: int) -> None: ...
    def pre_commit(self, checkpoint_id: int) -> str:
        return f"t{checkpoint_id}"

    def commit(self, transaction: str) -> None:
        self.committed.append(transaction)

    def abort(self, transaction: str) -> None: ...
    def recover(self, committed: Sequence[str], *, restored: int | None = None) -> None:
        for transaction in committed:
            self.commit(transaction)

    def start_new(self) -> None: ...
    def close(self) -> None: ...
    def transaction_files(self, transaction: str) -> Mapping[str, Path]:
        return super().transaction_files(transaction) if self.files is None else self.files


def test_a_sink_without_files_needs_neither_method(tmp_path: Path) -> None:
    unused: Any = None
    rows = Rows()
    sink = TaskSink(rows, SinkContext("p", "s", "0", 0, 1, 1, "a"), unused, unused, tmp_path)
    sink.open((), None)
    assert sink.pre_commit(1) == ("t1",)
    assert sink.pin_transactions(tmp_path / "pins") == {}
    again = TaskSink(rows, SinkContext("p", "s", "0", 0, 1, 1, "b"), unused, unused, tmp_path)
    again.open(("t1",), 1, {0: {"file": tmp_path}})
    assert rows.committed == ["t1"]


@pytest.mark.parametrize("name", ["a/b", "..", "", ".hidden", "ä"])
def test_names_that_cannot_be_paths_are_refused(tmp_path: Path, name: str) -> None:
    unused: Any = None
    sink = TaskSink(Rows({name: tmp_path}), SinkContext("p", "s", "0", 0, 1, 1, "a"), unused, unused, tmp_path)
    sink.open(None)
    sink.pre_commit(1)
    with pytest.raises(SinkError, match="name files by letters"):
        sink.pin_transactions(tmp_path / "pins")


@pytest.mark.parametrize(
    ("went", "restored", "way"),
    [
        ([], 5, [1, 2, 3, 4, 5]),
        ([(3, 6)], 8, [1, 2, 3, 6, 7, 8]),
        ([(3, 6)], 5, [1, 2, 3, 4, 5]),
        ([(3, 6), (7, 9)], 9, [1, 2, 3, 6, 7, 9]),
        ([(3, 6), (4, 9)], 9, [1, 2, 3, 4, 9]),
        ([(3, 6), (4, 9)], 8, [1, 2, 3, 6, 7, 8]),
        ([(0, 4)], 5, [4, 5]),
        ([(3, 4)], 5, [1, 2, 3, 4, 5]),
        ([(3, 6), (2, 6)], 7, [1, 2, 6, 7]),  # id 6 is used again: no checkpoint with it was ever completed
    ],
)
def test_which_checkpoints_are_ancestors_of_another(went: list[tuple[int, int]], restored: int, way: list[int]) -> None:
    branches = Branches()
    for origin, first in went:
        branches = branches.begun(origin, first)
    assert [n for n in range(1, 12) if branches.is_ancestor(n, restored)] == way
