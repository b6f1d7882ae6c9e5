"""What DeltaSink and IcebergSink promise, beside the suite that every sink has to pass."""

from __future__ import annotations

import pickle
import re
import shutil
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_checkpoints.sinks import (
    SinkCannotTakeBack,
    SinkColumnsMismatch,
    SinkFenced,
    SinkHoldsEarlierRows,
    SinkNotOpen,
    SinkPathInUse,
    SinkRowsRefused,
    SinkTargetChanged,
    SinkTransactionLost,
)
from dagster_checkpoints.systems import table_files
from tests.sinks.delta_lake import Table
from tests.sinks.iceberg_lake import Lake
from tests.sinks.lake_rows import LakeRows
from tests.sinks.sink_instance import BATCH, context


@pytest.fixture(params=[Table, Lake])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> LakeRows[Any]:
    return request.param(tmp_path)  # type: ignore[no-any-return]


# What readers see


def test_the_constructor_touches_nothing(lake: LakeRows[Any]) -> None:
    sink = lake.sink(partition_by="day", at_new_start="keep")
    copy = pickle.loads(pickle.dumps(sink)).new_instance()
    assert (copy.partition_by, copy.at_new_start) == (("day",), "keep")
    assert (copy.location, copy.uri) == (str(lake.directory), lake.directory.as_uri())
    copy.check_new_start(context())
    assert not lake.path.exists()
    with pytest.raises(SinkNotOpen):
        copy.pre_commit(1)


def test_files_that_fit_are_linked_and_a_commit_says_what_it_has_made_visible(lake: LakeRows[Any]) -> None:
    sink = lake.opened()
    sink.start_new()
    segments = [lake.segment(1, 2), lake.segment(3)]
    sink.write(BATCH, segments, 0)
    sink.write(BATCH, ["file://" + lake.segment(4)], 1)
    assert [file.samefile(segment) for file, segment in zip(lake.data_files(), segments, strict=False)] == [True, True]
    transaction = sink.pre_commit(42)
    sink.write(BATCH, [lake.segment(5)], 2)
    assert lake.rows() == []
    done = sink.commit(transaction)
    sizes = sum(file.stat().st_size for file in lake.data_files()[:3])
    assert (done.rows, done.files, done.bytes, done.version) == (4, 3, sizes, lake.version())
    assert lake.rows() == [1, 2, 3, 4]


def test_a_repeated_commit_does_nothing_also_after_other_programs_have_changed_the_table(lake: LakeRows[Any]) -> None:
    sink = lake.opened()
    first, second = lake.staged(sink, 1, 1), lake.staged(sink, 2, 2)
    for text in (first, second):
        sink.commit(text)
    lake.append(3)
    lake.rewrite()
    lake.forget()
    version = lake.version()
    for repeated in (second, first, second):
        assert lake.opened(attempt="a2").commit(repeated).rows == 1
    lake.opened(attempt="a3").recover([second], restored=2)
    assert (lake.rows(), lake.version()) == ([1, 2, 3], version)


def test_other_writers_of_the_table_neither_conflict_nor_lose_rows(lake: LakeRows[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sink = lake.opened()
    first = lake.staged(sink, 1, 1)
    lake.overtake(monkeypatch, lambda: lake.append(100))
    sink.commit(first)
    second = lake.staged(sink, 2, 2)
    lake.overtake(monkeypatch, lambda: lake.delete("n = 100"))
    sink.commit(second)
    third = lake.staged(sink, 3, 3)
    lake.add_column("note")
    sink.commit(third)
    lake.append(n=pa.array([200], pa.int64()), note=pa.array([1], pa.int64()))
    assert lake.rows() == [1, 2, 3, 200]
    versions = set()
    for attempt in ("a2", "a3"):
        lake.opened(attempt=attempt).recover([], restored=1)
        versions.add(lake.version())
    assert lake.rows() == [1, 200] and len(versions) == 1


def test_rows_that_are_written_again_wait_in_a_folder_that_a_later_process_deletes(
    lake: LakeRows[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    real = table_files.place_all
    locked: list[bool] = []

    def placed(sources: dict[str, Path], root: Path) -> None:
        locked.extend((source.parent / "lock").exists() for source in sources.values())  # see TemporaryFolder
        real(sources, root)

    monkeypatch.setattr(table_files, "place_all", placed)
    sink = lake.opened(settings={"partition_by": "day", "key": "n"})
    for checkpoint_id, numbers in ((1, [1, 2]), (2, [2])):
        sink.commit(lake.staged(sink, checkpoint_id, n=pa.array(numbers, pa.int64()), day=pa.array(["a"] * len(numbers))))
    assert lake.remainders() and locked == [True] * 3
    assert list(temporary.iterdir()) == [] and lake.rows() == [1, 2]


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


def test_rows_that_another_program_has_rewritten_cannot_be_taken_back(lake: LakeRows[Any]) -> None:
    sink = lake.opened()
    for checkpoint_id in (1, 2):
        sink.commit(lake.staged(sink, checkpoint_id, checkpoint_id))
    lake.rewrite()
    found = r"checkpoint 2 has committed.*(OPTIMIZE|rewrite_data_files).*restore checkpoint 1"
    with pytest.raises(SinkCannotTakeBack, match=found):
        lake.opened(attempt="a2").recover([], restored=1)
    assert lake.rows() == [1, 2]


def test_files_that_another_program_has_deleted_are_named(lake: LakeRows[Any]) -> None:
    """A program that cleans the table keeps what the sink has recorded beside it."""
    sink = lake.opened()
    for checkpoint_id in (1, 2):
        sink.commit(lake.staged(sink, checkpoint_id, checkpoint_id))
    back = lake.opened(attempt="a2")
    back.recover([], restored=1)
    pending = lake.staged(back, 3, 3)
    lake.clean()
    with pytest.raises(SinkTransactionLost, match=r"VACUUM|orphan files"):
        back.commit(pending)
    with pytest.raises(SinkTransactionLost, match=r"checkpoint 2 has committed.*(VACUUM|orphan files)"):
        lake.opened(attempt="a3").recover([], restored=2)
    assert lake.rows() == [1]


@pytest.mark.parametrize("restored", [2, 1])
def test_rows_whose_transaction_is_not_recorded_any_more_are_neither_deleted_nor_written_again(
    lake: LakeRows[Any], restored: int
) -> None:
    """Their files look like those of a transaction that was open when its run ended."""
    sink = lake.opened()
    for checkpoint_id in (1, 2):
        sink.commit(lake.staged(sink, checkpoint_id, checkpoint_id))
    [record] = lake.path.rglob("2-since-0-*.json")
    kept = record.read_bytes()
    record.unlink()
    with pytest.raises(SinkTransactionLost, match=r"1 data files of the table .*Restore that folder"):
        lake.opened(attempt="a2").recover([], restored=restored)
    assert lake.rows() == [1, 2]
    record.write_bytes(kept)
    lake.opened(attempt="a3").recover([], restored=restored)
    assert lake.rows() == [1, 2][:restored]


# Owners


def test_a_newer_owner_between_check_and_commit_wins(lake: LakeRows[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    late = lake.opened(epoch=6, attempt="late")
    text = lake.staged(late, 1, 1)
    newer = lake.opened(epoch=7, attempt="newer")
    lake.overtake(monkeypatch, lambda: newer.recover([]))
    with pytest.raises(SinkFenced, match=r"epoch 6.*epoch 7"):
        late.commit(text)
    assert lake.rows() == []
    newer.commit(lake.staged(newer, 1, 2))
    version = lake.version()
    for act in (lambda: late.commit(text), lambda: late.recover([text]), lambda: late.abort(text)):
        with pytest.raises(SinkFenced, match=r"epoch 6.*epoch 7"):
            act()
    assert (lake.version(), lake.rows()) == (version, [2])


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


# Tables and rows that do not fit


def test_columns_that_do_not_fit_are_refused_by_name(lake: LakeRows[Any]) -> None:
    lake.append(n=pa.array([1], pa.int64()), Day=["x"], z=[1.5])
    sink = lake.opened()
    with pytest.raises(SinkColumnsMismatch) as refused:
        sink.write(BATCH, [lake.segment(n=pa.array(["1"]), day=pa.array(["y"]), extra=pa.array([1]))], 0)
    name = "'day': expected its name as the table has it, 'Day'"
    for text in ("'n': expected type long, found string", name, "'extra'", "'z'"):
        assert text in str(refused.value)
    assert lake.data_files() == []
    with pytest.raises(SinkColumnsMismatch, match=r"partition columns \['n'\], found \[\]"):
        lake.sink(partition_by="n").check_new_start(context())


def test_new_columns_are_added_if_the_sink_may(lake: LakeRows[Any]) -> None:
    lake.append(n=pa.array([1], pa.int64()), old=["x"])
    sink = lake.opened(settings={"schema_evolution": "add"})
    kind = pa.list_(pa.struct({"day": pa.date32()}))
    for checkpoint_id, value in ((2, [{"day": date(2024, 1, 2)}]), (3, [{"day": None}])):
        sink.commit(lake.staged(sink, checkpoint_id, n=pa.array([checkpoint_id], pa.int64()), new=pa.array([value], kind)))
    assert lake.sorted_rows("n", "old", "new") == [
        (1, "x", None),
        (2, None, [{"day": date(2024, 1, 2)}]),
        (3, None, [{"day": None}]),
    ]


def test_nulls_where_the_table_holds_none_are_refused(lake: LakeRows[Any]) -> None:
    lake.create(pa.schema([pa.field("n", pa.int64(), nullable=False)]))
    sink = lake.opened()
    sink.commit(lake.staged(sink, 1, 1))
    with pytest.raises(SinkRowsRefused, match="'n'"):
        sink.write(BATCH, [lake.segment(n=pa.array([1, None], pa.int64()))], 5)
    assert lake.rows() == [1]


@pytest.mark.parametrize("statistics", [True, False])
def test_a_column_without_nulls_is_taken_also_where_no_statistics_count_them(lake: LakeRows[Any], statistics: bool) -> None:
    """Delta counts those of the first 32 columns; Spark's footers have nothing of a column with a very long value."""
    sink = lake.opened(settings={"key": "k"})

    def segment(*keys: int | None) -> str:
        file = lake.segment(**{f"c{at}": pa.array(keys, pa.int64()) for at in range(32)}, k=pa.array(keys, pa.int64()))
        pq.write_table(pq.read_table(file), file, write_statistics=statistics)
        return file

    sink.write(BATCH, [segment(1, 2)], 1)
    sink.commit(sink.pre_commit(1))
    with pytest.raises(SinkRowsRefused, match="'k'"):
        sink.write(BATCH, [segment(3, None)], 2)
    assert lake.sorted_rows("k") == [(1,), (2,)]


def test_types_that_the_format_does_not_have_are_refused(lake: LakeRows[Any]) -> None:
    with pytest.raises(SinkColumnsMismatch, match=r"(?i)duration.*Cast the column"):
        lake.opened().write(BATCH, [lake.segment(t=pa.array([[1]], pa.list_(pa.duration("us"))))], 0)
    assert not lake.path.exists()


def test_a_table_that_is_dropped_or_replaced_is_named(lake: LakeRows[Any]) -> None:
    sink = lake.opened()
    sink.commit(lake.staged(sink, 1, 1))
    text = lake.staged(sink, 2, 2)
    lake.append(5)
    lake.drop()
    with pytest.raises(SinkTargetChanged, match="no table"):
        sink.commit(text)
    lake.append(9)
    with pytest.raises(SinkTargetChanged, match="another one"):
        sink.commit(text)
    with pytest.raises(SinkTargetChanged, match=r"to which job 1\.h1 has written .* up to checkpoint 2, found one with id"):
        lake.opened(attempt="a2").recover([text])
    assert lake.rows() == [9]


def test_a_table_that_is_created_again_between_two_runs_is_named(lake: LakeRows[Any]) -> None:
    """Also if all rows were committed, so that a new table would hold the later ones only."""
    sink = lake.opened()
    for checkpoint_id in (1, 2):
        sink.commit(lake.staged(sink, checkpoint_id, checkpoint_id))
    sink.close()
    lake.append(5)
    lake.opened(attempt="a2").recover([], restored=2)
    lake.drop()
    lake.append(9)
    with pytest.raises(
        SinkTargetChanged, match=r"to which job 1\.h1 has written .* up to checkpoint 2, found one with id"
    ) as raised:
        lake.opened(attempt="a3")
    lake.sink().check_new_start(context(job_id=2, attempt=""))  # a new job may begin
    folder = re.findall(r"delete (\S+) below", str(raised.value))[0]
    shutil.rmtree(lake.directory / folder)
    forth = lake.opened(attempt="a4", epoch=2)
    forth.recover([], restored=2)
    forth.commit(lake.staged(forth, 3, 3))
    assert lake.rows() == [3, 9]


# Values

MOMENT = datetime(2024, 3, 1, 12, 30, 45, 123456, tzinfo=UTC)
VALUES: dict[str, Any] = {
    "n": pa.array([1, 2, None], pa.int32()),
    "text": pa.array(["a", None, "é" * 100]),
    "flag": pa.array([True, None, False]),
    "ratio": pa.array([0.5, float("nan"), None]),
    "amount": pa.array([Decimal("1.50"), None, Decimal("-2.25")], pa.decimal128(10, 2)),
    "day": pa.array([date(1, 1, 1), date(9999, 12, 31), None]),
    "moment": pa.array([MOMENT, None, MOMENT], pa.timestamp("us", "UTC")),
    "wall": pa.array([MOMENT.replace(tzinfo=None), None, None], pa.timestamp("us")),
    "nested": pa.array([{"a": 1, "b": [1, 2]}, None, {"a": None, "b": None}]),
    "counts": pa.array([[("x", 1)], None, []], pa.map_(pa.string(), pa.int64())),
}


@pytest.mark.parametrize("times", ["as they are", "nanoseconds", "another zone", "INT96"])
def test_values_of_all_types_come_back_and_statistics_do_not_hide_rows(lake: LakeRows[Any], times: str, tmp_path: Path) -> None:
    """Timestamps as different programs write them."""
    columns = {**VALUES}
    if times == "nanoseconds":
        columns |= {name: columns[name].cast(pa.timestamp("ns", columns[name].type.tz)) for name in ("moment", "wall")}
    if times == "another zone":
        columns["moment"] = columns["moment"].cast(pa.timestamp("us", "Europe/Berlin"))
    if times == "INT96":
        del columns["wall"]
    file = tmp_path / "values.parquet"
    pq.write_table(pa.table(columns), file, use_deprecated_int96_timestamps=times == "INT96")
    sink = lake.opened()
    sink.write(BATCH, [str(file)], 0)
    sink.commit(sink.pre_commit(1))
    found = lake.found()
    assert found is not None
    for name in {*columns} - {"ratio"}:
        assert found[name].to_pylist() == VALUES[name].to_pylist(), name
    for predicate, count in (
        ("n >= 2", 1),
        ("moment = '2024-03-01T12:30:45.123456+00:00'", 2),
        ("day > '9999-01-01'", 1),
        ("amount < 0", 1),
        ("text > 'b'", 1),
        ("n > 100", 0),
    ):
        assert lake.matching(predicate) == count, predicate
    assert lake.statistics("n") == (1, 2, 1)
