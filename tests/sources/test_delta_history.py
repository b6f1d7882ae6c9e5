"""The log of a Delta table as a source reads it, and which tables are refused by name. Tables are written by `deltalake`."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from datetime import date
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.sources import (
    InvalidSource,
    SourceColumnsChanged,
    SourceColumnsUnreadable,
    SourceLibraryMissing,
    SourceRowsChanged,
    SourceRowsLost,
    read_delta_table,
)
from dagster_checkpoints.sources.delta.commits import other_columns, unreadable_columns
from dagster_checkpoints.sources.delta.history import DeltaHistory


def opened(table: Path, changed_rows: Any = "refuse") -> DeltaHistory:
    history = DeltaHistory(str(table), {}, changed_rows)
    history.open()
    return history


def rows_of(files: Any) -> list[dict[str, Any]]:
    """The rows in some files, without the partition columns."""
    import pyarrow.parquet as pq

    return [row for file in files for row in pq.ParquetFile(file.path.removeprefix("file:")).read().to_pylist()]


def test_a_version_has_all_rows_and_a_later_one_those_that_it_adds(tmp_path: Path) -> None:
    for number in range(4):
        write_deltalake(tmp_path, pa.table({"n": [number]}), mode="append")
    history = opened(tmp_path)
    assert history.newest() == 3
    assert rows_of(history.files(3)) == [{"n": n} for n in range(4)]
    assert rows_of(history.files(1)) == [{"n": 0}, {"n": 1}]
    assert rows_of(history.added(2)) == [{"n": 2}]
    assert history.after(3) is None
    DeltaTable(tmp_path).optimize.compact()
    DeltaTable(tmp_path).alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})
    write_deltalake(tmp_path, pa.table({"n": [4]}), mode="append")
    assert [history.after(version) for version in (3, 4, 5, 6)] == [4, 5, 6, None]
    assert [rows_of(history.added(version)) for version in (4, 5, 6)] == [[], [], [{"n": 4}]]
    assert history.newest() == 6 and len(history.files(6)) == 2


def test_partition_values_come_from_the_log(tmp_path: Path) -> None:
    values = {
        "text": ["a/b c%=", "ü", "", None],
        "day": [date(2024, 2, 29), None, date(1, 1, 1), None],
        "whole": [1, -2, None, None],
        "flag": [True, False, None, None],
        "price": [Decimal("1.50"), Decimal("12.25"), None, None],
    }
    types = [pa.string(), pa.date32(), pa.int32(), pa.bool_(), pa.decimal128(5, 2)]
    table = pa.table({**dict(zip(values, map(pa.array, values.values(), types), strict=True)), "n": [0, 1, 2, 3]})
    write_deltalake(tmp_path, table, partition_by=list(values))
    history = opened(tmp_path)
    expected = {
        0: ("a/b c%=", "2024-02-29", "1", "true", "1.50"),
        1: ("ü", None, "-2", "false", "12.25"),
        2: (None, "0001-01-01", None, None, None),
        3: (None, None, None, None, None),
    }
    for files in (history.files(0), history.added(0)):
        assert {row["n"]: file.partition for file in files for row in rows_of([file])} == expected


@pytest.mark.parametrize("separator", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"])
def test_a_commit_whose_texts_hold_separators_of_lines(tmp_path: Path, separator: str) -> None:
    """Statistics and partition values are in the commit as they are."""
    text = f"one{separator}two"
    for _ in range(2):
        write_deltalake(tmp_path, pa.table({"text": [text], "part": [text]}), partition_by=["part"], mode="append")
    (file,) = opened(tmp_path).added(1)
    assert file.partition == (text,)
    assert rows_of([file]) == [{"text": text}]


def test_deleted_and_changed_rows(tmp_path: Path) -> None:
    write_deltalake(tmp_path, pa.table({"n": [1, 2, 3]}))
    DeltaTable(tmp_path).delete("n = 1")
    DeltaTable(tmp_path).update({"n": "9"}, predicate="n = 3")
    write_deltalake(tmp_path, pa.table({"n": [4]}), mode="append")
    history, skipping = opened(tmp_path), opened(tmp_path, "skip")
    for version in (1, 2):
        with pytest.raises(SourceRowsChanged, match=f"version {version} deletes or changes rows"):
            history.added(version)
        assert skipping.added(version) == []
    assert rows_of(history.added(3)) == [{"n": 4}]


def test_columns_that_the_run_does_not_know(tmp_path: Path) -> None:
    write_deltalake(tmp_path, pa.table({"n": [1]}))
    history = opened(tmp_path)
    for colour in ("red", "blue"):
        write_deltalake(tmp_path, pa.table({"n": [2], colour: ["x"]}), mode="append", schema_mode="merge")
    with pytest.raises(SourceColumnsChanged, match="version 1 has added or changed red") as raised:
        history.added(1)
    assert not raised.value.repeats
    assert [len(opened(tmp_path).added(version)) for version in (1, 2)] == [1, 1]
    history.check_columns()
    history.open()  # by a query, whose plan was made before
    with pytest.raises(SourceColumnsChanged, match="version 2 has added or changed red, blue"):
        history.check_columns()


def schema(**types: Any) -> str:
    """Columns as Delta writes them."""
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in types.items()]
    return json.dumps({"type": "struct", "fields": fields})


def struct(**types: Any) -> Any:
    return json.loads(schema(**types))


def array(kind: Any) -> Any:
    return {"type": "array", "elementType": kind, "containsNull": True}


def mapped_to(kind: Any) -> Any:
    return {"type": "map", "keyType": "string", "valueType": kind, "valueContainsNull": True}


@pytest.mark.parametrize(
    ("there", "now", "others", "unreadable"),
    [
        ({"n": "integer"}, {"n": "integer", "m": "string"}, [], []),
        ({"n": "integer", "m": "string"}, {"n": "integer"}, ["m"], []),
        ({"n": "integer"}, {"n": "long"}, ["n"], []),
        ({"n": "byte"}, {"n": "double"}, ["n"], []),
        ({"n": "long"}, {"n": "integer"}, ["n"], ["n (long there, integer now)"]),
        ({"n": "long"}, {"n": "double"}, ["n"], ["n (long there, double now)"]),
        ({"n": "date"}, {"n": "timestamp_ntz"}, ["n"], []),
        ({"n": "date"}, {"n": "timestamp"}, ["n"], ["n (date there, timestamp now)"]),
        ({"n": "string"}, {"n": "integer"}, ["n"], ["n (string there, integer now)"]),
        ({"n": "decimal(5,2)"}, {"n": "decimal(9,4)"}, ["n"], []),
        ({"n": "decimal(5,2)"}, {"n": "decimal(6,4)"}, ["n"], ["n (decimal(5,2) there, decimal(6,4) now)"]),
        ({"n": "integer"}, {"n": "decimal(11,1)"}, ["n"], []),
        ({"n": "integer"}, {"n": "decimal(9,0)"}, ["n"], ["n (integer there, decimal(9,0) now)"]),
        ({"s": struct(a="integer")}, {"s": struct(a="long", b="string")}, ["s.a"], []),
        ({"s": struct(a="string")}, {"s": struct(a="long")}, ["s.a"], ["s.a (string there, long now)"]),
        ({"s": struct(a="string")}, {"s": "string"}, ["s"], ["s (struct there, string now)"]),
        ({"s": array("integer")}, {"s": array(struct(a="long"))}, ["s.element"], ["s.element (integer there, struct now)"]),
        ({"s": mapped_to("integer")}, {"s": mapped_to("long")}, ["s.value"], []),
    ],
)
def test_columns_of_older_and_newer_versions(there: Any, now: Any, others: list[str], unreadable: list[str]) -> None:
    assert other_columns(schema(**now), schema(**there)) == others
    assert unreadable_columns(schema(**there), schema(**now)) == unreadable
    assert other_columns(schema(**now), schema(**now).replace('"nullable": true', '"nullable": false')) == []


def test_the_backlog_in_older_columns(tmp_path: Path) -> None:
    """Read up to version 0; then come rows in the old columns, a change of columns, and rows in the new ones."""
    for rows in ({"n": [1], "s": [{"x": 1}]}, {"n": [2], "s": [{"x": 2}]}, {"n": [3], "s": [{"x": 3, "y": "y"}], "m": ["m"]}):
        write_deltalake(tmp_path, pa.table(rows), mode="append", schema_mode="merge")
    history = opened(tmp_path)
    assert [len(history.added(version)) for version in (0, 1, 2)] == [1, 1, 1]
    assert len(history.files(0)) == 1


@pytest.mark.parametrize(
    ("rows", "partition_by", "text"),
    [
        (
            {"n": ["text"], "k": ["a"]},
            [],
            r"version 1, which are read next, have others: n \(long there, string now\)\. Make a new",
        ),
        ({"n": [2], "k": ["a"]}, ["k"], r"have others: the partitioning by k\. .* with version=1 in another stage"),
    ],
)
def test_a_backlog_that_cannot_be_read_in_the_columns_of_now(
    tmp_path: Path, rows: Any, partition_by: list[str], text: str
) -> None:
    for number in range(2):
        write_deltalake(tmp_path, pa.table({"n": [number], "k": ["b"]}), mode="append")
    write_deltalake(tmp_path, pa.table(rows), mode="overwrite", schema_mode="overwrite", partition_by=partition_by)
    history = opened(tmp_path, "skip")
    assert list(history.partition_by) == partition_by
    for call in (lambda: history.added(1), lambda: history.files(1)):
        with pytest.raises(SourceColumnsUnreadable, match=text) as raised:
            call()
        assert raised.value.repeats
    only = DeltaHistory(str(tmp_path), {}, "refuse", 1)
    only.open()
    assert only.partition_by == () and only.schema["fields"][0]["type"] == "long" and len(only.files(1)) == 2


def test_a_log_that_was_cleaned_up(tmp_path: Path) -> None:
    for number in range(4):
        write_deltalake(tmp_path, pa.table({"n": [number]}), mode="append")
    DeltaTable(tmp_path).create_checkpoint()
    for version in (0, 1):
        (tmp_path / f"_delta_log/{version:020}.json").unlink()
    history = opened(tmp_path)
    for call in (lambda: history.after(0), lambda: history.added(1), lambda: history.files(1)):
        with pytest.raises(SourceRowsLost, match=r"version 1.*make a new start, which reads the whole table"):
            call()
    assert len(history.files(3)) == 4


@pytest.mark.parametrize("versions", [0, 1, 3, 4, 6])
def test_a_table_that_is_created_again_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: int) -> None:
    """It may have fewer versions than were read, as many or more; its first rows were in none of those that follow."""
    for number in range(3):
        write_deltalake(tmp_path, pa.table({"n": [number]}), mode="append")
    history = opened(tmp_path)
    assert len(history.files(2)) == 3 and history.after(2) is None
    write_deltalake(tmp_path, pa.table({"n": [3]}), mode="append")
    assert history.after(2) == 3 and rows_of(history.added(3)) == [{"n": 3}]
    shutil.rmtree(tmp_path)
    for number in range(versions):
        write_deltalake(tmp_path, pa.table({"n": [100 + number]}), mode="append")
    history._same_until = 0.0  # seconds later
    expected = (SourceRowsLost, "it was created again") if versions else (InvalidSource, "expected a Delta table, found none")
    with pytest.raises(expected[0], match=expected[1]):
        history.after(3)


def test_a_log_that_is_cleaned_up_while_the_table_is_read(tmp_path: Path) -> None:
    for number in range(2):
        write_deltalake(tmp_path, pa.table({"n": [number]}), mode="append")
    history = opened(tmp_path)
    assert len(history.files(1)) == 2 and history.after(1) is None
    write_deltalake(tmp_path, pa.table({"n": [2]}), mode="append")
    DeltaTable(tmp_path).create_checkpoint()
    for version in (0, 1):
        (tmp_path / f"_delta_log/{version:020}.json").unlink()
    assert history.after(1) == 2 and rows_of(history.added(2)) == [{"n": 2}]


def feature(name: str) -> dict[str, Any]:
    return {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": [name], "writerFeatures": [name]}}


def commit(table: Path, *actions: dict[str, Any]) -> None:
    """Add a commit of another program."""
    version = DeltaTable(table).version() + 1
    (table / f"_delta_log/{version:020}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))


def add(path: str, **fields: Any) -> dict[str, Any]:
    return {"add": {"path": path, "partitionValues": {}, "size": 1, "modificationTime": 1, "dataChange": True, **fields}}


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (feature("variantType"), "found the feature variantType"),
        (add("a.parquet", deletionVector={"storageType": "i", "pathOrInlineDv": "x"}), "found deletion vectors in version 1"),
        (add("s3://other/a.parquet"), "data files below its directory, found s3://other/a.parquet"),
    ],
)
def test_commits_of_other_programs_that_cannot_be_read(tmp_path: Path, action: dict[str, Any], text: str) -> None:
    write_deltalake(tmp_path, pa.table({"n": [1]}))
    history = opened(tmp_path)
    commit(tmp_path, action)
    with pytest.raises(InvalidSource, match=text):
        history.added(1)


def mapped(table: Path) -> None:
    write_deltalake(table, pa.table({"n": [1]}))
    log = table / "_delta_log/00000000000000000000.json"
    log.write_text(log.read_text().replace('"configuration":{}', '"configuration":{"delta.columnMapping.mode":"name"}'))


def by_time(table: Path) -> None:
    write_deltalake(table, pa.table({"n": [1], "at": pa.array([1], pa.timestamp("us", "UTC"))}), partition_by=["at"])


def plain(table: Path) -> None:
    write_deltalake(table, pa.table({"n": [1]}))


@pytest.mark.parametrize(
    ("make", "arguments", "text"),
    [
        (lambda table: None, {}, r"expected a Delta table, found none"),
        (mapped, {}, r"expected a table whose data files are plain Parquet files, found delta\.columnMapping\.mode = name"),
        (by_time, {}, r"expected partition columns of type string, .*, found at \(timestamp\)"),
        (plain, {"version": 1}, r"expected a version from 0 to 0, found 1"),
        (plain, {"files_per_trigger": 0}, r"expected files_per_trigger of at least 1, found 0"),
        (plain, {"changed_rows": "ignore"}, r"expected changed_rows 'refuse' or 'skip', found 'ignore'"),
        (plain, {"table": "gs://bucket/table"}, r"read_delta_table: expected .* a Delta table.*found a URL of the kind gs:"),
        (plain, {"table": ""}, r"read_delta_table: expected the path or the URL of a Delta table"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(tmp_path: Path, make: Any, arguments: dict[str, Any], text: str) -> None:
    make(tmp_path / "t")
    with pytest.raises(InvalidSource, match=text) as raised:
        read_delta_table(None, **{"table": tmp_path / "t", **arguments})  # type: ignore[arg-type]
    assert raised.value.repeats


def test_a_machine_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagster_checkpoints.sources.delta.table.find_spec", lambda name: None)
    with pytest.raises(SourceLibraryMissing, match=r"pip install 'dagster-checkpoints\[delta\]'"):
        read_delta_table(None, tmp_path)  # type: ignore[arg-type]


def test_the_page_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/sources/delta.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "docs/sources/delta.md", "exec"), names)
    events, history = Pipeline("shop", [names["events"], names["history"]]).stages
    monkeypatch.chdir(tmp_path)
    for source in (events, history):
        with pytest.raises(InvalidSource, match="expected a Delta table, found none"):
            source.transform(SimpleNamespace(spark=None))  # type: ignore[arg-type]
    arguments = set(re.findall(r"^\| `(\w+)` \|", page.split("## How it is read")[0], re.MULTILINE))
    assert arguments == set(inspect.signature(read_delta_table).parameters)
