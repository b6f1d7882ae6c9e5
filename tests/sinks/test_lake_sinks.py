"""What DeltaSink and IcebergSink promise, beside the suite that every sink has to pass."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.sinks import SinkFenced, SinkHoldsEarlierRows, SinkPathInUse, SinkTransactionLost
from tests.sinks.delta_lake import Table
from tests.sinks.iceberg_lake import Lake
from tests.sinks.lake_rows import LakeRows
from tests.sinks.sink_instance import BATCH, context


@pytest.fixture(params=[Table, Lake])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> LakeRows[Any]:
    return request.param(tmp_path)  # type: ignore[no-any-return]


def test_the_same_batch_a_second_time_replaces_its_rows(lake: LakeRows[Any]) -> None:
    sink = lake.opened()
    assert sink.pre_commit(1) is None
    sink.write(BATCH, [lake.segment()], 6)
    assert sink.pre_commit(2) is None and lake.rows() == []
    sink.write(BATCH, [lake.segment(1), lake.segment(2)], 7)
    sink.write(BATCH, [lake.segment(3)], 8)
    sink.write(BATCH, [lake.segment()], 9)
    sink.write(BATCH, [lake.segment(4)], 7)
    transaction = sink.pre_commit(3)
    assert transaction is not None
    sink.commit(transaction)
    assert (lake.rows(), len(lake.data_files())) == ([3, 4], 2)


# Restores


def test_a_restore_commits_its_transactions_and_aborts_all_others(lake: LakeRows[Any]) -> None:
    sink = lake.opened()
    kept, lost = lake.staged(sink, 1, 1), lake.staged(sink, 2, 2)
    sink.write(BATCH, [lake.segment(3)], 9)
    restored = lake.opened(attempt="a2")
    restored.recover([kept])
    assert (lake.rows(), len(lake.data_files())) == ([1], 1)
    with pytest.raises(SinkTransactionLost, match=r"2-since-0.*another program has deleted"):
        restored.commit(lost)
    left = [file.name for file in lake.path.rglob("_dagster_checkpoints/**/*.json")]
    assert left == ["1-since-0-job1-e1.h1-a1-000000.json"]


def test_rows_of_later_checkpoints_are_taken_back_and_shown_again(lake: LakeRows[Any]) -> None:
    sink = lake.opened()
    for checkpoint_id in range(1, 5):
        sink.commit(lake.staged(sink, checkpoint_id, checkpoint_id))
    lake.append(100)
    back = lake.opened(attempt="a2")
    back.recover([], restored=2)
    assert lake.rows() == [1, 2, 100]
    back.commit(lake.staged(back, 5, 30))
    assert lake.rows() == [1, 2, 30, 100]
    forth = lake.opened(attempt="a3")
    forth.recover([], restored=3)  # a savepoint of the first branch
    assert lake.rows() == [1, 2, 3, 100]
    forth.commit(lake.staged(forth, 6, 40))
    lake.opened(attempt="a4").recover([], restored=5)
    assert lake.rows() == [1, 2, 30, 100]
    version = lake.version()
    lake.opened(attempt="a5").recover([], restored=5)
    assert lake.version() == version


def test_a_savepoint_brings_its_own_files_also_to_a_place_without_the_table(lake: LakeRows[Any], tmp_path: Path) -> None:
    sink = lake.opened()
    sink.commit(lake.staged(sink, 1, 1))
    text = lake.staged(sink, 2, 2)
    files = {name: Path(shutil.copy(file, tmp_path / name)) for name, file in sink.transaction_files(text).items()}
    lake.opened(attempt="a2").recover([], restored=1)
    assert len(lake.data_files()) == 1
    back = lake.opened(attempt="a3")
    for _ in range(2):
        back.restore_transaction(text, files)
    back.recover([text], restored=2)
    assert lake.rows() == [1, 2]
    assert back.transaction_files(text) == {}
    elsewhere = type(lake)(tmp_path / "elsewhere")
    moved = elsewhere.opened(job_id=2)
    moved.restore_transaction(text, files)
    moved.recover([text])
    assert elsewhere.rows() == [2]


# Owners


def test_a_late_owner_changes_nothing(lake: LakeRows[Any]) -> None:
    late = lake.opened(epoch=6, attempt="late")
    waiting = lake.staged(late, 1, 1)
    newer = lake.opened(epoch=7, attempt="newer")
    newer.recover([])
    newer.commit(lake.staged(newer, 1, 2))
    staged = lake.staged(newer, 2, 3)
    version = lake.version()
    for act in (
        lambda: late.recover([]),
        lambda: late.recover([], restored=0),
        late.start_new,
        lambda: late.commit(waiting.replace("1-since", "9-since")),
        lambda: late.abort(staged),
        lambda: lake.opened(epoch=6),
    ):
        with pytest.raises(SinkFenced, match=r"epoch 6.*epoch 7.*changes nothing"):
            act()
    assert lake.version() == version
    newer.commit(staged)
    assert lake.rows() == [2, 3]


def test_a_newer_owner_between_check_and_commit_wins(lake: LakeRows[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    late = lake.opened(epoch=6, attempt="late")
    text = lake.staged(late, 1, 1)
    lake.overtake(monkeypatch, lambda: lake.opened(epoch=7, attempt="newer").recover([]))
    with pytest.raises(SinkFenced, match=r"epoch 6.*epoch 7"):
        late.commit(text)
    assert lake.rows() == []


def test_two_processes_that_commit_the_same_transaction_commit_it_once(
    lake: LakeRows[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = lake.staged(lake.opened(epoch=0), 1, 1)
    lake.overtake(monkeypatch, lambda: lake.opened(epoch=0, attempt="a3").commit(text))
    done = lake.opened(epoch=0, attempt="a2").commit(text)
    assert (done.rows, done.version, lake.rows()) == (1, None, [1])


# New starts


def test_a_new_start_refuses_keeps_or_replaces_rows_of_earlier_jobs(lake: LakeRows[Any]) -> None:
    for index in (0, 1):
        sink = lake.opened(index=index, parallelism=2)
        sink.start_new()
        sink.commit(lake.staged(sink, 1, index))
    lake.append(100)
    with pytest.raises(SinkHoldsEarlierRows, match=rf"job 1 has committed.*{type(lake.sink()).__name__}\(at_new_start"):
        lake.sink().check_new_start(context(job_id=2))
    with pytest.raises(SinkPathInUse, match="counts its jobs from 1 again"):
        lake.sink(at_new_start="keep").check_new_start(context(job_id=1))
    lake.sink().check_new_start(context(job_id=1, stage="other"))
    for job, at_new_start, expected in ((2, "keep", [0, 1, 2, 100]), (3, "replace", [3, 100])):
        settings = {"at_new_start": at_new_start}
        lake.sink(**settings).check_new_start(context(job_id=job))
        sink = lake.opened(settings=settings, job_id=job, attempt=f"job{job}")
        sink.start_new()
        sink.commit(lake.staged(sink, 1, job))
        assert lake.rows() == expected
        lake.opened(settings=settings, job_id=job, attempt=f"again{job}").start_new()
        assert lake.rows() == expected
