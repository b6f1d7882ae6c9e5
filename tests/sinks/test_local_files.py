"""What FileSink and ParquetSink promise of a local directory, beside the suite that every sink has to pass."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.sinks import (
    FileSink,
    InvalidSinkPath,
    ParquetSink,
    SinkCommit,
    SinkError,
    SinkHoldsEarlierRows,
    SinkPathInUse,
    SinkTransactionLost,
)
from tests.sinks.staged_files import BATCH, Folder, context, numbers


@pytest.fixture(params=[FileSink, ParquetSink])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return Folder(tmp_path, request.param)


# Transactions


def test_the_constructor_touches_nothing(folder: Folder) -> None:
    sink = folder.sink()
    copy = pickle.loads(pickle.dumps(sink))
    assert (copy.location, copy.at_new_start) == (sink.location, "refuse") and not folder.path.exists()


def test_a_commit_counts_what_becomes_visible_and_once_repeated_does_nothing(folder: Folder) -> None:
    sink = folder.opened()
    sink.write(BATCH, [folder.file(numbers())], 0)
    assert sink.pre_commit(1) is None
    batches = [(1, [numbers(9)]), (2, [numbers(8)]), (1, [numbers(1, 2), numbers(), numbers(3)]), (2, [numbers()])]
    for batch_id, files in batches:
        sink.write(BATCH, [f"file://{folder.file(rows)}" for rows in files], batch_id)
    transaction = sink.pre_commit(2)
    assert transaction is not None and folder.visible == [] and sink.pre_commit(3) is None
    done = sink.commit(transaction)
    assert done == SinkCommit(rows=3, files=2, bytes=sum(file.stat().st_size for file in folder.visible))
    other = folder.opened(as_=context(epoch=2), new=False)
    assert other.commit(transaction) == done and folder.numbers() == [1, 2, 3] and folder.hidden == []


def test_files_are_linked_and_copied_where_that_is_impossible(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = folder.opened()
    file = folder.file(numbers(1))
    sink.write(BATCH, [file], 0)
    sink.commit(str(sink.pre_commit(1)))
    assert os.path.samefile(file, folder.visible[0])

    def other_device(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_device)
    folder.commit(sink, 2, numbers(2))
    assert folder.numbers() == [1, 2]


def test_a_transaction_whose_files_were_deleted_is_lost(folder: Folder) -> None:
    sink = folder.opened()
    folder.commit(sink, 1, numbers(0))
    transaction = folder.staged(sink, 2, numbers(1), numbers(2))
    file = folder.hidden[1]
    for spoil in (lambda: file.write_bytes(b"cut"), file.unlink):
        spoil()
        for call in (sink.transaction_files, sink.commit):
            with pytest.raises(SinkTransactionLost, match=r"checkpoint 2.*e1\.h1-a1-000001"):
                call(transaction)
    folder.opened(as_=context(epoch=2), new=False).recover([], restored=1)
    assert folder.hidden == [] and folder.numbers() == [0]


def test_a_partly_deleted_transaction_is_restored_completely(folder: Folder, tmp_path: Path) -> None:
    sink = folder.opened()
    transaction = folder.staged(sink, 1, numbers(1), numbers(2), numbers(3))
    saved = {name: Path(shutil.copy(file, tmp_path / name)) for name, file in sink.transaction_files(transaction).items()}
    one = folder.hidden[0]  # the process that aborted it was killed here, and another file is there
    one.rename(one.with_name(f"00009{one.name[5:]}"))
    for file in folder.path.rglob("transaction"):
        file.unlink()
    again = folder.opened(as_=context(epoch=2), new=False)
    for _ in range(2):
        again.restore_transaction(transaction, saved)
    again.recover([transaction], restored=1)
    assert folder.numbers() == [1, 2, 3] and again.transaction_files(transaction) == {}
    again.restore_transaction(transaction, saved)
    assert folder.hidden == []


def test_a_process_whose_open_transaction_a_later_one_has_deleted_pre_commits_nothing_of_it(folder: Folder) -> None:
    late = folder.opened(as_=context(epoch=0))  # without owners
    late.write(BATCH, [folder.file(numbers(1))], 1)
    folder.opened(as_=context(epoch=1))
    assert folder.hidden == []
    with pytest.raises(SinkTransactionLost):
        late.commit(folder.staged(late, 2, numbers(2)))
    assert folder.numbers() == []


# Interrupted commits


def test_two_processes_that_commit_the_same_transaction_at_the_same_time(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = folder.opened()
    transaction = folder.staged(sink, 1, numbers(1))
    rename = os.rename

    def overtaken(source: Path, target: Path) -> None:
        rename(source, target)  # another program's
        rename(source, target)

    monkeypatch.setattr(os, "rename", overtaken)
    sink.commit(transaction)
    assert folder.numbers() == [1]


@pytest.mark.parametrize("after", [False, True])
def test_a_commit_that_was_interrupted_is_completed_or_hidden_whole(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    sink = folder.opened()
    folder.commit(sink, 1, numbers(1))
    transaction = folder.staged(sink, 2, numbers(2), numbers(3))
    rename = os.rename

    def failing(source: Any, target: Any) -> None:
        last = folder.whole or str(source).endswith("00001.staged")
        if after or not last:
            rename(source, target)
        if last:
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing)
        with pytest.raises((SinkError, OSError), match="Input/output error"):
            sink.commit(transaction)
    assert folder.numbers() == ([1, 2, 3] if after else [1] if folder.whole else [1, 2])
    sink.abort(transaction)  # its checkpoint is complete
    folder.opened(as_=context(epoch=2), new=False).recover([], restored=1)
    assert folder.numbers() == [1]
    folder.opened(as_=context(epoch=3), new=False).recover([], restored=2)
    assert folder.numbers() == [1, 2, 3]
    folder.opened(as_=context(epoch=4), new=False).recover([], restored=1)
    folder.opened(as_=context(epoch=5, job=2), new=False).recover([transaction])  # a savepoint that another job goes on from
    assert folder.numbers() == [1, 2, 3]


# New starts


def _rows_of(job: int) -> Callable[[Folder], None]:
    return lambda folder: folder.commit(folder.opened(as_=context(job=job)), 1, numbers(1))


def _other_files(folder: Folder) -> None:
    for name in ("part-0.parquet", "day=1/x.parquet", "_SUCCESS", ".crc"):
        (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.path / name).touch()


@pytest.mark.parametrize(
    ("found", "choice", "error", "expected"),
    [
        (lambda folder: None, "refuse", None, []),
        (lambda folder: folder.path.mkdir(), "refuse", None, []),
        (lambda folder: folder.staged(folder.opened(), 1, numbers(1)), "refuse", None, []),
        (_rows_of(1), "refuse", SinkHoldsEarlierRows, [
            "Sink('{path}'", "stage 'delays' of pipeline 'flights'", "found rows that job 1 has committed",
            "'refuse' (the default) stops", "'keep' leaves", "'replace' removes", "restore_from"]),
        (_rows_of(1), "keep", None, []),
        (_rows_of(1), "replace", None, []),
        (_rows_of(2), "keep", SinkPathInUse, ["begins job 2", "{path}", "counts its jobs from 1 again"]),
        (_rows_of(2), "replace", SinkPathInUse, ["begins job 2"]),
        (_other_files, "refuse", SinkPathInUse, ["{path}", "other ones (day=1", ", part-0.parquet)", "'keep'", "never removes"]),
        (_other_files, "replace", SinkPathInUse, ["found other ones"]),
        (_other_files, "keep", None, []),
        (lambda folder: folder.path.write_text(""), "keep", InvalidSinkPath, ["{path} to be a directory", "found a file"]),
        (lambda folder: folder.opened(as_=context(stage="arrivals")), "keep", SinkPathInUse, ["stage 'arrivals' of pipeline"]),
    ],
)  # fmt: skip
def test_the_check_before_a_new_start(
    folder: Folder, found: Callable[[Folder], Any], choice: Any, error: type[Exception] | None, expected: Sequence[str]
) -> None:
    found(folder)
    before = sorted(folder.path.rglob("*"))
    sink = folder.sink(at_new_start=choice)
    if error is None:
        sink.check_new_start(context(job=2))
    else:
        with pytest.raises(error) as caught:
            sink.check_new_start(context(job=2))
        for part in expected:
            assert part.format(path=folder.path) in str(caught.value), caught.value
    assert sorted(folder.path.rglob("*")) == before, "the check changes nothing"


def test_a_new_start_keeps_its_own_rows_and_the_files_of_other_programs(folder: Folder) -> None:
    _other_files(folder)
    others = folder.everything()
    folder.commit(folder.opened(as_=context(parallelism=2), at_new_start="replace"), 1, numbers(1))
    folder.opened(as_=context(index=1, parallelism=2), at_new_start="replace")  # a little later
    assert others.items() <= folder.everything().items()
    for name in others:
        (folder.path / name).unlink()
    assert folder.numbers() == [1]


def test_a_new_start_with_fewer_instances_replaces_the_rows_of_all(folder: Folder) -> None:
    for index in range(3):
        sink = folder.opened(as_=context(index=index, parallelism=3))
        folder.commit(sink, 1, numbers(index))
        folder.commit(sink, 2, numbers(10 + index))
        folder.opened(as_=context(index=index, parallelism=3, epoch=2), new=False).recover([], restored=1)
    assert folder.numbers() == [0, 1, 2] and len(folder.hidden) == 3
    new = folder.opened(as_=context(index=1, parallelism=2, job=2, epoch=3), at_new_start="replace")
    assert folder.numbers() == []
    folder.commit(new, 1, numbers(21))
    folder.opened(as_=context(index=0, parallelism=2, job=2, epoch=3), at_new_start="replace")
    assert folder.numbers() == [21] and folder.hidden == []
    folder.sink(at_new_start="keep").check_new_start(context(job=3))
    with pytest.raises(SinkHoldsEarlierRows, match="job 2 has"):
        folder.sink().check_new_start(context(job=3))


@pytest.mark.parametrize("other", [{"stage": "other"}, {"stage": "arrivals", "index": 1}])
def test_the_place_of_another_stage_is_refused(folder: Folder, other: Any) -> None:
    folder.opened()
    before = folder.everything()
    for call in (folder.sink().check_new_start, folder.sink().open):
        with pytest.raises(SinkPathInUse, match=rf"{folder.path} .*stage 'delays' of pipeline 'flights' writes there"):
            call(context(**other))
    assert folder.everything() == before
    (folder.path / folder.sink().new_target().mark).write_text("{")
    with pytest.raises(SinkPathInUse, match="cannot be read"):
        folder.opened()


def test_a_ledger_that_cannot_be_read_says_what_to_do(folder: Folder) -> None:
    folder.opened()
    (ledger,) = (file for file in folder.path.rglob("*") if file.is_file() and '"version":1' in file.read_text()[-20:])
    ledger.write_text("{")
    with pytest.raises(SinkPathInUse, match=rf"{ledger.name}.*cannot be read.*delete it"):
        folder.opened(as_=context(epoch=2))


# Restores


def test_only_later_rows_of_the_own_job_and_instance_are_taken_back(folder: Folder) -> None:
    folder.commit(folder.opened(as_=context(job=1)), 9, numbers(100))
    sinks = [folder.opened(as_=context(job=2, index=index, parallelism=2), at_new_start="keep") for index in (0, 1)]
    for number in (1, 2, 3):
        for index, sink in enumerate(sinks):
            folder.commit(sink, number, numbers(10 * index + number))
    for epoch in (2, 3):
        folder.opened(as_=context(job=2, parallelism=2, epoch=epoch), new=False).recover([], restored=1)
        assert folder.numbers() == [1, 11, 12, 13, 100]


def test_rows_that_were_taken_back_and_deleted_are_lost(folder: Folder) -> None:
    sink = folder.opened()
    for checkpoint_id in (1, 2, 3, 4):
        folder.commit(sink, checkpoint_id, numbers(checkpoint_id))
    folder.opened(as_=context(epoch=2), new=False).recover([], restored=1)
    for file in folder.hidden:
        if "2-job1" not in str(file):
            shutil.rmtree(file.parent)
    (kept,) = folder.hidden
    with pytest.raises(SinkTransactionLost, match=r"taken back since.* found no .*3-job1.*4-job1.*backup"):
        folder.opened(as_=context(epoch=3), new=False).recover([], restored=4)
    assert (folder.numbers(), list(folder.hidden)) == ([1], [kept])  # a refusal changes nothing
    folder.opened(as_=context(epoch=4), new=False).recover([], restored=1)
    assert folder.numbers() == [1]
