"""DeltaSink: rows become visible exactly once, in a table that other programs may write to."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Field, Schema, Transaction, write_deltalake
from deltalake.schema import PrimitiveType

from dagster_checkpoints.sinks import (
    DeltaSink,
    InvalidSinkPath,
    SinkCannotTakeBack,
    SinkColumnsMismatch,
    SinkLibraryMissing,
    SinkNotOpen,
    SinkRowsRefused,
    SinkTargetChanged,
    SinkTransactionLost,
)
from dagster_checkpoints.sinks.delta.log import DeltaLog
from dagster_checkpoints.sinks.lake.table_log import LakeChange
from tests.sinks.delta_lake import Table
from tests.sinks.sink_instance import BATCH, context


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


# What readers see


def test_the_constructor_touches_nothing(table: Table) -> None:
    sink = DeltaSink(table.path, partition_by="day", at_new_start="keep", storage_options={"AWS_SECRET_ACCESS_KEY": "hidden"})
    copy = pickle.loads(pickle.dumps(sink)).new_instance()
    assert (copy.table, copy.partition_by, copy.at_new_start) == (str(table.path), ("day",), "keep")
    assert copy.uri == table.path.as_uri()
    assert "hidden" not in repr(sink)
    assert not table.path.exists()
    with pytest.raises(SinkNotOpen):
        copy.pre_commit(1)


def test_rows_are_visible_after_the_commit_and_not_before(table: Table) -> None:
    sink = table.opened()
    sink.start_new()
    sink.write(BATCH, [table.segment(1, 2), table.segment(3)], 0)
    sink.write(BATCH, ["file://" + table.segment(4)], 1)
    transaction = sink.pre_commit(42)
    assert transaction is not None
    sink.write(BATCH, [table.segment(5)], 2)
    assert table.rows() == []
    done = sink.commit(transaction)
    assert table.rows() == [1, 2, 3, 4]
    sizes = sum(file.stat().st_size for file in table.data_files()[:3])
    assert (done.rows, done.files, done.bytes, done.version) == (4, 3, sizes, str(table.version()))
    second = sink.pre_commit(43)
    assert second is not None
    sink.commit(second)
    assert table.rows() == [1, 2, 3, 4, 5]


def test_a_batch_that_fits_is_linked_and_not_written_again(table: Table) -> None:
    sink = table.opened()
    file = Path(table.segment(1, 2))
    sink.write(BATCH, [str(file)], 0)
    [staged] = table.data_files()
    assert (table.path / staged).samefile(file)
    file.unlink()
    transaction = sink.pre_commit(1)
    assert transaction is not None
    sink.commit(transaction)
    assert table.rows() == [1, 2]


def test_a_repeated_commit_does_nothing_in_any_process_and_order(table: Table) -> None:
    sink = table.opened()
    first, second = table.staged(sink, 1, 1), table.staged(sink, 2, 2)
    assert sink.commit(first).version == str(table.version())
    sink.commit(second)
    version = table.version()
    for repeated in (second, first, second):
        again = table.opened(attempt="a2")
        assert again.commit(repeated).rows == 1
    assert (table.rows(), table.version()) == ([1, 2], version)


def test_a_commit_is_not_repeated_after_another_program_has_compacted_the_table(table: Table) -> None:
    sink = table.opened()
    texts = [table.staged(sink, 1, 1), table.staged(sink, 2, 2)]
    for text in texts:
        sink.commit(text)
    DeltaTable(table.path).optimize.compact()
    DeltaTable(table.path).create_checkpoint()
    table.opened(attempt="a2").recover([texts[1]], restored=2)
    assert table.rows() == [1, 2]


def test_other_writers_of_the_table_neither_conflict_nor_lose_rows(table: Table) -> None:
    sink = table.opened()
    first = table.staged(sink, 1, 1)
    write_deltalake(table.path, pa.table({"n": [100]}), mode="append")
    sink.commit(first)
    second = table.staged(sink, 2, 2)
    DeltaTable(table.path).delete("n = 100")
    sink.commit(second)
    third = table.staged(sink, 3, 3)
    DeltaTable(table.path).alter.add_columns([Field("note", PrimitiveType("string"))])
    sink.commit(third)
    write_deltalake(table.path, pa.table({"n": [200], "note": ["x"]}), mode="append")
    assert table.rows() == [1, 2, 3, 200]
    restored = table.opened(attempt="a2")
    restored.recover([], restored=1)
    assert table.rows() == [1, 200]


# Restores


def test_rows_that_another_program_has_rewritten_cannot_be_taken_back(table: Table) -> None:
    sink = table.opened()
    for checkpoint_id in (1, 2):
        sink.commit(table.staged(sink, checkpoint_id, checkpoint_id))
    DeltaTable(table.path).optimize.compact()
    with pytest.raises(SinkCannotTakeBack, match=r"checkpoint 2 has committed.*OPTIMIZE.*restore checkpoint 1"):
        table.opened(attempt="a2").recover([], restored=1)
    assert table.rows() == [1, 2]


def test_a_table_for_new_rows_only_takes_nothing_back(table: Table) -> None:
    sink = table.opened()
    for checkpoint_id in (1, 2):
        sink.commit(table.staged(sink, checkpoint_id, checkpoint_id))
    DeltaTable(table.path).alter.set_table_properties({"delta.appendOnly": "true"})
    sink.commit(table.staged(sink, 3, 3))
    with pytest.raises(SinkCannotTakeBack, match="appendOnly"):
        table.opened(attempt="a2").recover([], restored=1)
    assert table.rows() == [1, 2, 3]


def test_vacuum_keeps_the_sinks_own_files_and_its_damage_is_named(table: Table) -> None:
    sink = table.opened()
    for checkpoint_id in (1, 2):
        sink.commit(table.staged(sink, checkpoint_id, checkpoint_id))
    back = table.opened(attempt="a2")
    back.recover([], restored=1)
    pending = table.staged(back, 3, 3)
    DeltaTable(table.path).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True)
    assert table.rows() == [1]
    with pytest.raises(SinkTransactionLost, match="VACUUM"):
        back.commit(pending)
    with pytest.raises(SinkTransactionLost, match=r"checkpoint 2 has committed.*VACUUM"):
        table.opened(attempt="a3").recover([], restored=2)
    assert table.rows() == [1]


# Owners


# New starts


# Tables and rows that do not fit


def test_columns_that_do_not_fit_are_refused_by_name(table: Table) -> None:
    write_deltalake(table.path, pa.table({"n": pa.array([1], pa.int64()), "Day": ["x"], "z": [1.5]}))
    sink = table.opened()
    stage = {"n": pa.array(["1"]), "day": pa.array(["y"]), "extra": pa.array([1])}
    with pytest.raises(SinkColumnsMismatch) as refused:
        sink.write(BATCH, [table.segment(**stage)], 0)
    for text in (
        "'n': expected type long, found string",
        "'day': expected its name as the table has it, 'Day'",
        "'extra'",
        "'z'",
    ):
        assert text in str(refused.value)
    assert table.data_files() == []


def test_new_columns_are_added_if_the_sink_may(table: Table) -> None:
    write_deltalake(table.path, pa.table({"n": pa.array([1], pa.int64()), "old": ["x"]}))
    sink = table.opened(settings={"schema_evolution": "add"})
    sink.write(BATCH, [table.segment(n=pa.array([2], pa.int64()), new=pa.array([date(2024, 1, 2)]))], 0)
    transaction = sink.pre_commit(1)
    assert transaction is not None
    sink.commit(transaction)
    rows = DeltaTable(table.path).to_pyarrow_table().sort_by("n").to_pylist()
    assert rows == [{"n": 1, "old": "x", "new": None}, {"n": 2, "old": None, "new": date(2024, 1, 2)}]


def test_a_table_whose_rules_the_sink_does_not_check_is_refused(table: Table) -> None:
    write_deltalake(table.path, pa.table({"n": pa.array([1], pa.int64())}))
    DeltaTable(table.path).alter.add_constraint({"positive": "n > 0"})
    for act in (lambda: table.opened(), lambda: DeltaSink(table.path).check_new_start(context())):
        with pytest.raises(SinkColumnsMismatch, match=r"delta\.constraints\.positive"):
            act()
    with pytest.raises(SinkColumnsMismatch, match=r"partition columns \['n'\]"):
        DeltaSink(table.path, partition_by="n").check_new_start(context())


def test_nulls_where_the_table_holds_none_are_refused(table: Table) -> None:
    DeltaTable.create(table.path, Schema([Field("n", PrimitiveType("long"), nullable=False)]))
    sink = table.opened()
    sink.commit(table.staged(sink, 1, 1))
    with pytest.raises(SinkRowsRefused, match="'n'"):
        sink.write(BATCH, [table.segment(n=pa.array([1, None], pa.int64()))], 5)
    assert table.rows() == [1]


def test_types_that_delta_does_not_have_are_refused(table: Table) -> None:
    with pytest.raises(SinkColumnsMismatch, match="Cast the column"):
        table.opened().write(BATCH, [table.segment(t=pa.array([1], pa.time64("us")))], 0)
    assert not table.path.exists()


def test_a_table_that_is_dropped_or_replaced_is_named(table: Table, tmp_path: Path) -> None:
    sink = table.opened()
    sink.commit(table.staged(sink, 1, 1))
    text = table.staged(sink, 2, 2)
    write_deltalake(table.path, pa.table({"n": [5]}), mode="append")
    (table.path / "_delta_log").rename(tmp_path / "dropped")
    with pytest.raises(SinkTargetChanged, match="no table"):
        sink.commit(text)
    write_deltalake(table.path, pa.table({"n": pa.array([9], pa.int64())}))
    with pytest.raises(SinkTargetChanged, match="another one"):
        sink.commit(text)
    with pytest.raises(SinkTargetChanged, match="dropped and created again"):
        table.opened(attempt="a2").recover([text])
    assert table.rows() == [9]


def test_settings_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("", "hdfs://name/table", "s3://key:secret@bucket/t", "s3:///t", "file://host/t"):
        with pytest.raises(InvalidSinkPath) as refused:
            DeltaSink(table)
        assert "secret" not in str(refused.value)
    for settings in ({"at_new_start": "append"}, {"schema_evolution": "merge"}):
        with pytest.raises(ValueError, match="expected DeltaSink"):
            DeltaSink("/t", **settings)  # type: ignore[arg-type]
    assert DeltaSink("s3a://bucket/t/").location == DeltaSink("s3://bucket/t").location == "s3://bucket/t"
    monkeypatch.setattr("dagster_checkpoints.sinks.delta.sink.find_spec", lambda name: None)
    with pytest.raises(SinkLibraryMissing, match=r"pip install 'dagster-checkpoints\[delta\]'"):
        DeltaSink("/t")


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
}


@pytest.fixture(params=["as it is", "nanoseconds", "INT96"])
def values(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The same rows with timestamps as different programs write them."""
    columns = {**VALUES}
    if request.param == "nanoseconds":
        columns |= {name: columns[name].cast(pa.timestamp("ns", columns[name].type.tz)) for name in ("moment", "wall")}
    if request.param == "INT96":
        del columns["wall"]
    file = tmp_path / "values.parquet"
    pq.write_table(pa.table(columns), file, use_deprecated_int96_timestamps=request.param == "INT96")
    yield file


def test_values_of_all_types_come_back_and_statistics_do_not_hide_rows(table: Table, values: Path) -> None:
    sink = table.opened()
    sink.write(BATCH, [str(values)], 0)
    transaction = sink.pre_commit(1)
    assert transaction is not None
    sink.commit(transaction)
    read = DeltaTable(table.path)
    expected = pa.table(VALUES)
    found = read.to_pyarrow_table()
    for name in found.column_names:
        if name != "ratio":
            assert found[name].to_pylist() == expected[name].to_pylist(), name
    for predicate, count in (
        ("n >= 2", 1),
        ("moment = '2024-03-01T12:30:45.123456Z'", 2),
        ("day > '9999-01-01'", 1),
        ("amount < 0", 1),
        ("text > 'b'", 1),
        ("n > 100", 0),
    ):
        assert len(pa.table(read.scan(columns=["n"], predicate=predicate).read_all())) == count, predicate
    statistics = read.get_add_actions(flatten=True)
    assert [statistics[f"{bound}.n"].to_pylist() for bound in ("min", "max", "null_count")] == [[1], [2], [1]]


def test_partitions_are_values_in_the_log_and_not_columns_in_the_files(table: Table) -> None:
    sink = table.opened(settings={"partition_by": ["day", "kind"]})
    sink.start_new()
    day = pa.array([date(2024, 1, 2), date(2024, 1, 1), None, date(2024, 1, 2)])
    kind = pa.array(["a b/ü=", "x", None, "a b/ü="])
    sink.write(BATCH, [table.segment(n=pa.array([1, 2, 3, 4], pa.int64()), day=day, kind=kind)], 0)
    transaction = sink.pre_commit(1)
    assert transaction is not None
    sink.commit(transaction)
    assert table.rows() == [1, 2, 3, 4]
    read = DeltaTable(table.path)
    assert read.metadata().partition_columns == ["day", "kind"]
    assert len(read.file_uris()) == 3
    rows = read.to_pyarrow_table(filters=[("kind", "=", "a b/ü=")]).sort_by("n").to_pylist()
    assert rows == [{"n": n, "day": date(2024, 1, 2), "kind": "a b/ü="} for n in (1, 4)]
    back = table.opened(attempt="a2")
    back.commit(table_partition(table, back))
    assert table.rows() == [1, 2, 3, 4, 5]
    again = table.opened(attempt="a3")
    again.recover([], restored=1)
    assert table.rows() == [1, 2, 3, 4]


def table_partition(table: Table, sink: DeltaSink) -> str:
    sink.write(BATCH, [table.segment(n=pa.array([5], pa.int64()), day=pa.array([date(2024, 1, 1)]), kind=pa.array([""]))], 1)
    transaction = sink.pre_commit(2)
    assert transaction is not None
    return transaction


def test_the_log_says_who_committed_what(table: Table) -> None:
    sink = table.opened()
    sink.commit(table.staged(sink, 42, 1))
    newest = DeltaTable(table.path).history(1)[0]
    assert (newest["pipeline"], newest["stage"]) == ("flights", "delays")
    assert newest["dagster-checkpoints/flights/delays/0/job-1.h1/since-0"] == "42"
    assert DeltaTable(table.path).transaction_version("dagster-checkpoints/flights/delays/0/job-1.h1/since-0") == 42


def test_a_conflict_on_the_sinks_numbers_is_planned_again(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = table.opened()
    text = table.staged(sink, 1, 1)
    real = DeltaTable.create_write_transaction

    def disturbed(self: DeltaTable, *arguments: Any, **keywords: Any) -> None:
        monkeypatch.setattr(DeltaTable, "create_write_transaction", real)
        other = CommitProperties(app_transactions=[Transaction("dagster-checkpoints/flights/delays/0/owner@h1", 1)])
        write_deltalake(table.path, pa.table({"n": [50]}), mode="append", commit_properties=other)
        real(self, *arguments, **keywords)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", disturbed)
    sink.commit(text)
    assert table.rows() == [1, 50]


def test_a_number_that_another_program_records_during_a_commit_is_seen(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    write_deltalake(table.path, pa.table({"n": [1]}))
    log = DeltaLog(str(table.path), {}, "sink")
    assert log.find() and log.number("theirs") is None and log.number("ours") is None
    real = DeltaTable.create_write_transaction

    def overtaken(*arguments: Any, **keywords: Any) -> None:
        monkeypatch.setattr(DeltaTable, "create_write_transaction", real)
        theirs = CommitProperties(app_transactions=[Transaction("theirs", 7)])
        write_deltalake(table.path, pa.table({"n": [2]}), mode="append", commit_properties=theirs)
        real(*arguments, **keywords)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", overtaken)
    assert log.commit(lambda: LakeChange(numbers={"ours": 3})) == 2
    assert (log.number("theirs"), log.number("ours")) == (7, 3)
    assert log.commit(lambda: LakeChange(numbers={"ours": 4})) == 3
    assert (log.number("theirs"), log.number("ours")) == (7, 4)


# The page


def test_the_page_declares_a_sink_that_writes_its_rows(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/sinks/delta.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(table.path.parent)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "docs/sinks/delta.md", "exec"), names)
    sink = names["sales"].sink.new_instance()
    sink.open(context())
    sink.start_new()
    sink.write(BATCH, [table.segment(shop=pa.array(["north"]), amount=pa.array([1.5]))], 0)
    sink.commit(sink.pre_commit(1))
    assert DeltaTable("lake/sales").to_pyarrow_table().to_pylist() == [{"shop": "north", "amount": 1.5}]
