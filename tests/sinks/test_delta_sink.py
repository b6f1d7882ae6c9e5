"""DeltaSink: rows become visible exactly once, in a table that other programs may write to."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from dagster_checkpoints.sinks import (
    DeltaSink,
    InvalidSinkPath,
    SinkCannotTakeBack,
    SinkColumnsMismatch,
    SinkLibraryMissing,
    SinkTargetChanged,
)
from dagster_checkpoints.sinks.delta.log import DeltaLog
from dagster_checkpoints.sinks.lake.table_log import LakeChange
from tests.sinks.delta_lake import Table
from tests.sinks.sink_instance import BATCH, context


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


def test_a_table_for_new_rows_only_takes_nothing_back(table: Table) -> None:
    sink = table.opened()
    for checkpoint_id in (1, 2):
        sink.commit(table.staged(sink, checkpoint_id, checkpoint_id))
    DeltaTable(table.path).alter.set_table_properties({"delta.appendOnly": "true"})
    sink.commit(table.staged(sink, 3, 3))
    with pytest.raises(SinkCannotTakeBack, match="appendOnly"):
        table.opened(attempt="a2").recover([], restored=1)
    assert table.rows() == [1, 2, 3]


_DELETED = {"storageType": "i", "pathOrInlineDv": "^Bg9^0rr910000000000iXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L"}
"""A deletion vector of the rows 3, 4, 7, 11, 18 and 29. Source: Delta's protocol, "JSON Example 2"."""


def _delete_rows(table: Table, add: dict[str, Any], *others: dict[str, Any]) -> None:
    """Another program deletes rows of a file."""
    of_file = {name: add[name] for name in ("path", "partitionValues", "size")}
    remove = {"remove": {**of_file, "deletionTimestamp": add["modificationTime"], "dataChange": True}}
    marked = {"add": {**add, "deletionVector": {**_DELETED, "sizeInBytes": 44, "cardinality": 6}}}
    log = table.path / f"_delta_log/{table.table.version() + 1:020}.json"
    log.write_text("\n".join(map(json.dumps, (*others, remove, marked))))


def _added(table: Table) -> dict[str, Any]:
    log = table.path / f"_delta_log/{table.table.version():020}.json"
    (found,) = (action["add"] for action in map(json.loads, log.read_text().splitlines()) if "add" in action)
    return dict(found)


@pytest.mark.parametrize("deleted", ["other", "kept", "taken back"])
@pytest.mark.parametrize("new_start", [False, True])
def test_files_of_which_rows_were_deleted_by_a_vector_are_not_taken_back(table: Table, deleted: str, new_start: bool) -> None:
    configuration = {"delta.enableDeletionVectors": "true"}
    DeltaTable.create(table.path, pa.schema([("n", pa.int64())]), configuration=configuration)
    files = {}
    write_deltalake(table.path, pa.table({"n": pa.array(range(40), pa.int64())}), mode="append")
    files["other"] = _added(table)
    sink = table.opened()
    for checkpoint_id, name in ((1, "kept"), (2, "taken back")):
        sink.commit(table.staged(sink, checkpoint_id, *range(100 * checkpoint_id, 100 * checkpoint_id + 40)))
        files[name] = _added(table)
    _delete_rows(table, files[deleted])
    before = table.table.file_uris()
    changes: dict[str, Any] = {"job_id": 2} if new_start else {}
    again = table.opened(attempt="a2", settings={"at_new_start": "replace"}, epoch=2, **changes)
    begin = again.start_new if new_start else lambda: again.recover([], restored=1)
    if deleted == "taken back" or (new_start and deleted == "kept"):
        with pytest.raises(SinkCannotTakeBack, match="another program has rewritten or deleted their rows"):
            begin()
        assert sorted(table.table.file_uris()) == sorted(before)
    else:
        begin()
        left = {"other"} if new_start else {"other", "kept"}
        assert sorted(table.table.file_uris()) == sorted(uri for uri in before if any(files[n]["path"] in uri for n in left))


@pytest.mark.parametrize("settings", [{"key": "n"}, {"partition_by": "day", "overwrite_partitions": True}], ids=str)
def test_files_of_which_rows_are_deleted_by_a_vector_before_the_commit_are_not_replaced(
    table: Table, settings: dict[str, Any]
) -> None:
    columns = {"n": pa.array(range(40), pa.int64()), "day": pa.array(["a"] * 40)}
    write_deltalake(table.path, pa.table(columns), partition_by=settings.get("partition_by"))
    file = _added(table)
    sink = table.opened(settings=settings)
    transaction = table.staged(sink, 1, **columns)
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    _delete_rows(table, file, {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}})
    version = table.version()
    with pytest.raises(SinkColumnsMismatch, match=r"found deletion vectors.*DROP FEATURE"):
        sink.commit(transaction)
    assert table.version() == version


# Tables and rows that do not fit


def test_a_table_whose_rules_the_sink_does_not_check_is_refused(table: Table) -> None:
    write_deltalake(table.path, pa.table({"n": pa.array([1], pa.int64())}))
    DeltaTable(table.path).alter.add_constraint({"positive": "n > 0"})
    for act in (lambda: table.opened(), lambda: DeltaSink(table.path).check_new_start(context())):
        with pytest.raises(SinkColumnsMismatch, match=r"delta\.constraints\.positive"):
            act()


@pytest.mark.parametrize("feature", ["rowTracking", "clustering"])
def test_a_table_that_the_library_cannot_write_to_is_refused(table: Table, feature: str) -> None:
    write_deltalake(table.path, pa.table({"n": pa.array([1], pa.int64())}))
    protocol = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": [feature, "domainMetadata"]}
    (table.path / f"_delta_log/{1:020}.json").write_text(json.dumps({"protocol": protocol}))
    with pytest.raises(SinkColumnsMismatch, match=r"library deltalake can write to, found: .*DomainMetadata.*DROP FEATURE"):
        table.opened()
    assert table.version() == "1"


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


INTERVAL: Any = "interval year to month"


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        (INTERVAL, [1]),
        ({"type": "struct", "fields": [{"name": "a", "type": INTERVAL}]}, [{"a": 1}]),
        ({"type": "array", "elementType": INTERVAL, "containsNull": True}, [[1]]),
        ({"type": "map", "keyType": "string", "valueType": INTERVAL, "valueContainsNull": True}, [{"a": 1}]),
    ],
    ids=["column", "struct", "array", "map"],
)
def test_an_interval_is_refused_although_the_library_takes_it(table: Table, tmp_path: Path, kind: Any, column: list[Any]) -> None:
    recorded = {"type": "struct", "fields": [{"name": "n", "type": "long"}, {"name": "v", "type": kind}]}
    for field in (recorded["fields"][1], *(kind["fields"] if isinstance(kind, dict) and "fields" in kind else ())):
        field.update(nullable=True, metadata={})
    rows = pa.table({"n": [1], "v": column}, metadata={"org.apache.spark.sql.parquet.row.metadata": json.dumps(recorded)})
    pq.write_table(rows, tmp_path / "rows.parquet")
    with pytest.raises(SinkColumnsMismatch, match=r"types that Delta has, .*column 'v' with the type interval year to month"):
        table.opened().write(BATCH, [str(tmp_path / "rows.parquet")], 0)


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


def test_another_table_is_known_although_it_has_as_many_versions(table: Table) -> None:
    """Also if a later version has metadata, which the library takes over when it reads on from a version of the former table."""
    sink = table.opened()
    sink.commit(table.staged(sink, 1, 1))
    text = table.staged(sink, 2, 2)
    table.drop()
    for row in range(5):
        table.append(row)
    table.table.alter.set_table_properties({"delta.logRetentionDuration": "interval 1 days"})
    with pytest.raises(SinkTargetChanged, match="another one, with id"):
        sink.commit(text)
    assert table.rows() == [0, 1, 2, 3, 4]


def test_a_log_that_was_cleaned_is_the_same_table(table: Table) -> None:
    sink = table.opened()
    sink.commit(table.staged(sink, 1, 1))
    text = table.staged(sink, 2, 2)
    table.append(5)
    table.forget()
    for file in (table.path / "_delta_log").glob("*.json"):
        if file.stem != f"{table.table.version():020}":
            file.unlink()
    sink.commit(text)
    assert table.rows() == [1, 2, 5]


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
