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
    SinkFenced,
    SinkHoldsEarlierRows,
    SinkNotOpen,
    SinkPathInUse,
    SinkTransactionConflict,
    SinkTransactionLost,
    UnreadableSinkTransaction,
)
from dagster_checkpoints.sinks.engine import SinkLife
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


def test_an_aborted_transaction_is_gone(folder: Folder) -> None:
    sink = folder.opened()
    transaction = folder.staged(sink, 1, numbers(1))
    sink.abort(transaction)
    sink.abort(transaction)
    assert folder.hidden == []
    with pytest.raises(SinkTransactionLost, match=r"checkpoint 1, instance 0"):
        sink.commit(transaction)


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


def test_closing_keeps_what_is_pre_committed(folder: Folder) -> None:
    sink = folder.opened()
    transaction = folder.staged(sink, 1, numbers(1))
    sink.write(BATCH, [folder.file(numbers(2))], 1)
    sink.close()
    sink.close()
    assert len(folder.hidden) == 1
    for call in (lambda: sink.write(BATCH, [], 2), lambda: sink.commit(transaction)):
        with pytest.raises(SinkNotOpen):
            call()
    folder.opened(as_=context(epoch=2), new=False).commit(transaction)
    assert folder.numbers() == [1]


def test_a_process_whose_open_transaction_a_later_one_has_deleted_pre_commits_nothing_of_it(folder: Folder) -> None:
    late = folder.opened(as_=context(epoch=0))  # without owners
    late.write(BATCH, [folder.file(numbers(1))], 1)
    folder.opened(as_=context(epoch=1))
    assert folder.hidden == []
    with pytest.raises(SinkTransactionLost):
        late.commit(folder.staged(late, 2, numbers(2)))
    assert folder.numbers() == []


@pytest.mark.parametrize(
    "text", ["", "{", "{}", '{"sink": "kafka"}', '{"sink":"files","transaction":"../x","files":1,"rows":1,"bytes":1}']
)
def test_a_text_that_is_not_a_transaction_is_refused(folder: Folder, text: str) -> None:
    sink = folder.opened()
    for action in (sink.commit, sink.abort):
        with pytest.raises(UnreadableSinkTransaction, match="kind of sink"):
            action(text)


def test_instances_recover_apart(folder: Folder) -> None:
    sinks = [folder.opened(as_=context(index=index, parallelism=3)) for index in range(3)]
    transactions = [folder.staged(sink, 1, numbers(index)) for index, sink in enumerate(sinks)]
    folder.opened(as_=context(index=0, parallelism=3, epoch=2), new=False).recover(transactions[:1])
    assert folder.numbers() == [0] and len(folder.hidden) == 2
    with pytest.raises(UnreadableSinkTransaction, match=r"instance 1 .*of instance 2"):
        sinks[1].commit(transactions[2])
    for sink, transaction in zip(sinks[1:], transactions[1:], strict=True):
        sink.commit(transaction)
    assert folder.numbers() == [0, 1, 2]


def test_another_transaction_of_a_committed_checkpoint_is_refused(folder: Folder) -> None:
    sink = folder.opened()
    folder.commit(sink, 1, numbers(1))
    with pytest.raises(SinkTransactionConflict, match="no other transaction for checkpoint 1"):
        sink.commit(folder.staged(sink, 1, numbers(1, 2)))
    assert folder.numbers() == [1]


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


def test_a_new_job_completes_the_commit_of_the_one_before(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = folder.opened()
    transaction = folder.staged(sink, 1, numbers(1), numbers(2))

    def away(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", away)
        with pytest.raises((SinkError, OSError)):
            sink.commit(transaction)
    folder.opened(as_=context(job=2, epoch=2), at_new_start="keep")
    assert folder.numbers() == [1, 2]


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


@pytest.mark.parametrize("at_new_start", ["keep", "replace"])
def test_another_checkpoint_storage_counts_its_jobs_from_1(folder: Folder, at_new_start: Any) -> None:
    """Its job 1 is not the job 1 of these rows: the sink neither treats them as its own, nor overwrites them."""
    for epoch, history in enumerate(("aaaa1111", "bbbb2222"), 1):
        sink = folder.opened(as_=context(history=history, epoch=epoch), at_new_start=at_new_start)
        folder.commit(sink, 1, numbers(epoch))
    seen = [1, 2] if at_new_start == "keep" else [2]
    assert folder.numbers() == seen
    folder.opened(as_=context(history="bbbb2222", epoch=3), at_new_start=at_new_start)  # the same job begins again
    assert folder.numbers() == seen


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
    for checkpoint_id in (1, 2):
        folder.commit(sink, checkpoint_id, numbers(checkpoint_id))
    folder.opened(as_=context(epoch=2), new=False).recover([], restored=1)
    (file,) = folder.hidden
    shutil.rmtree(file.parent)
    with pytest.raises(SinkTransactionLost, match=r"taken back since.* found no .*2-job1.*backup"):
        folder.opened(as_=context(epoch=3), new=False).recover([], restored=2)
    folder.opened(as_=context(epoch=4), new=False).recover([], restored=1)
    assert folder.numbers() == [1]


def test_a_savepoint_of_another_job_shows_its_transaction_again(folder: Folder) -> None:
    sink = folder.opened()
    folder.commit(sink, 1, numbers(1))
    transaction = folder.staged(sink, 2, numbers(2))
    sink.commit(transaction)
    folder.opened(as_=context(epoch=2), new=False).recover([], restored=1)
    assert folder.numbers() == [1]
    for _ in range(2):
        folder.opened(as_=context(job=2, epoch=3), new=False).recover([transaction])
        assert folder.numbers() == [1, 2] and folder.hidden == []


@pytest.mark.parametrize("at_new_start", ["keep", "replace"])
def test_a_savepoint_restored_under_a_new_job_is_no_new_start(folder: Folder, tmp_path: Path, at_new_start: Any) -> None:
    sink = folder.opened()
    folder.commit(sink, 1, numbers(1))
    transaction = folder.staged(sink, 2, numbers(2))
    saved = {name: Path(shutil.copy(file, tmp_path / name)) for name, file in sink.transaction_files(transaction).items()}
    folder.opened(as_=context(epoch=2), new=False).recover([], restored=1)  # aborts it
    for epoch in (3, 4):  # again, after a crash before its first checkpoint
        new = folder.opened(as_=context(job=2, epoch=epoch), new=False, at_new_start=at_new_start)
        new.restore_transaction(transaction, saved)
        new.recover([transaction])
        assert folder.numbers() == [1, 2]
    folder.commit(new, 3, numbers(3))
    assert folder.numbers() == [1, 2, 3]
    folder.opened(as_=context(job=3, epoch=5), at_new_start=at_new_start)
    assert folder.numbers() == ([1, 2, 3] if at_new_start == "keep" else [])


# Owners

LATE: list[Callable[[FileSink], object]] = [
    lambda sink: sink.recover([]),
    lambda sink: sink.recover([], restored=4),
    lambda sink: sink.start_new(),
]


@pytest.mark.parametrize("act", LATE, ids=["recover", "go back", "new start"])
@pytest.mark.parametrize("at_new_start", ["keep", "replace"])
def test_a_late_owner_neither_aborts_nor_takes_back(folder: Folder, act: Any, at_new_start: Any) -> None:
    late = folder.opened(as_=context(epoch=6), new=False, at_new_start=at_new_start)
    held = folder.staged(late, 4, numbers(4))
    newer = folder.opened(as_=context(epoch=7), new=False)
    newer.recover([])
    folder.commit(newer, 5, numbers(1, 2))
    waiting = folder.staged(newer, 6, numbers(3))
    before = folder.everything()
    for refused in (lambda: act(late), lambda: late.commit(held), lambda: folder.opened(as_=context(epoch=6))):
        with pytest.raises(SinkFenced, match=r"epoch 6.*epoch 7.*changes nothing"):
            refused()
    assert folder.everything() == before
    newer.commit(waiting)
    assert folder.numbers() == [1, 2, 3]


@pytest.mark.parametrize("act", LATE, ids=["recover", "go back", "new start"])
def test_what_a_newer_owner_stages_after_the_check_is_not_aborted(
    folder: Folder, act: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, newer = (folder.opened(as_=context(epoch=epoch), new=False) for epoch in (6, 7))
    waiting = folder.staged(newer, 6, numbers(3))
    monkeypatch.setattr(SinkLife, "check_owner", lambda self, ledger: None)  # the check was before the newer owner's
    act(late)
    newer.commit(waiting)
    assert folder.numbers() == [3]


def test_a_late_owner_records_no_branch(folder: Folder) -> None:
    late = folder.opened(as_=context(epoch=6), new=False)
    late.recover([], restored=4)
    newer = folder.opened(as_=context(epoch=7), new=False)
    newer.recover([], restored=2)
    folder.commit(newer, 5, numbers(1))
    before = folder.everything()
    with pytest.raises(SinkFenced):
        folder.staged(late, 6, numbers(9))
    assert {name: data for name, data in folder.everything().items() if "e6" not in name} == before


def test_a_newer_owner_aborts_what_an_older_one_has_left(folder: Folder) -> None:
    old = folder.opened(as_=context(epoch=6))
    kept, lost = folder.staged(old, 5, numbers(1)), folder.staged(old, 6, numbers(2))
    newer = folder.opened(as_=context(epoch=7), new=False)
    newer.recover([kept])
    assert folder.numbers() == [1] and folder.hidden == []
    for sink, error in ((old, SinkFenced), (newer, SinkTransactionLost)):
        with pytest.raises(error):
            sink.commit(lost)


def test_epochs_of_another_storage_do_not_count(folder: Folder) -> None:
    folder.staged(folder.opened(as_=context(epoch=9)), 5, numbers(1))
    sink = folder.opened(as_=context(epoch=1, history="h2"))
    assert folder.hidden == []
    folder.commit(sink, 1, numbers(7))
    assert folder.numbers() == [7]
