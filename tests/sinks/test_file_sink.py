"""FileSink: what is in its files, and its settings. What it promises beside: `test_local_files.py`."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import re
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import duckdb
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow import orc

from dagster_checkpoints.errors import AlreadyExists, NotFound
from dagster_checkpoints.files import durable
from dagster_checkpoints.sinks import (
    FileSink,
    InvalidSinkPath,
    SinkCannotTakeBack,
    SinkColumnsMismatch,
    SinkPathInUse,
    SinkRowsRefused,
    SinkUnavailable,
    UnreadableSinkTransaction,
)
from dagster_checkpoints.sinks.files import hdfs_files, part_files, target_files
from dagster_checkpoints.sinks.files.web_hdfs import HdfsEntry
from dagster_checkpoints.sinks.text import csv_header, csv_lines, json_lines
from tests.sinks.staged_files import BATCH, Folder, context, numbers

AT = datetime(2024, 2, 29, 23, 59, 59, 1, tzinfo=UTC)
INTERVAL = {"type": "struct", "fields": [{"name": "n", "type": "interval year to month", "nullable": True, "metadata": {}}]}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


# Files


VALUES = pa.table(
    {
        "n": pa.array([1, 2, None], pa.int64()),
        "small": pa.array([-1, None, 3], pa.int8()),
        "text": ['a "b", c\\d\n', "", None],
        "amount": pa.array([Decimal("0.10"), Decimal("-99999999.99"), None], pa.decimal128(10, 2)),
        "share": [0.1, float("nan"), float("-inf")],
        "at": pa.array([AT, None, AT], pa.timestamp("us", "UTC")),
        "wall": pa.array([AT.replace(tzinfo=None)] * 2 + [None], pa.timestamp("us")),
        "day": [date(2024, 2, 29), None, date(1, 1, 1)],
        "yes": [True, None, False],
    }
)


def test_orc_keeps_every_value(folder: Folder) -> None:
    items = pa.array([[{"a": 1, "b": None}], None, []], pa.list_(pa.struct({"a": pa.int32(), "b": pa.string()})))
    days = pa.array([date(2024, 2, 29), None, date(1582, 10, 15)])
    rows = (
        VALUES.set_column(VALUES.column_names.index("day"), "day", days)
        .append_column("items", items)
        .append_column("raw", pa.array([b"\x00\xff", None, b""]))
    )
    rows = rows.append_column("named", pa.array([{"a": 1.5}, None, {}], pa.map_(pa.string(), pa.float64())))
    folder.commit(folder.opened("orc"), 1, rows)
    (file,) = folder.visible
    found = orc.read_table(file)
    assert repr(found.cast(rows.schema).to_pylist()) == repr(rows.to_pylist())


def test_csv_has_a_header_and_quoted_texts(folder: Folder) -> None:
    sink = folder.opened("csv")
    folder.commit(sink, 1, VALUES.slice(0, 1), VALUES.slice(1))
    (file,) = folder.visible
    lines = file.read_text().split("\n")
    assert lines[0] == '"n","small","text","amount","share","at","wall","day","yes"'
    rest = "2024-02-29T23:59:59.000001Z,2024-02-29T23:59:59.000001,2024-02-29,true"
    assert lines[1:3] == ['1,-1,"a ""b"", c\\d', f'",0.10,0.1,{rest}']
    assert lines[3:] == [
        '2,,"",-99999999.99,NaN,,2024-02-29T23:59:59.000001,,',
        ",3,,,-Inf,2024-02-29T23:59:59.000001Z,,0001-01-01,false",
        "",
    ]
    options = pa_csv.ConvertOptions(column_types=VALUES.schema, strings_can_be_null=True, quoted_strings_can_be_null=False)
    found = pa_csv.read_csv(file, parse_options=pa_csv.ParseOptions(newlines_in_values=True), convert_options=options)
    assert found.drop_columns(["share"]).to_pylist() == VALUES.drop_columns(["share"]).to_pylist()


def test_json_has_an_object_per_line(folder: Folder) -> None:
    nested = pa.array(
        [[{"f": float("inf"), "t": AT}], None, []], pa.list_(pa.struct({"f": pa.float64(), "t": pa.timestamp("us", "UTC")}))
    )
    rows = VALUES.append_column("raw", pa.array([b"\x00\xff", None, b""])).append_column("items", nested)
    rows = rows.append_column("named", pa.array([{"a": 1}, None, {}], pa.map_(pa.string(), pa.int64())))
    folder.commit(folder.opened("json"), 1, rows)
    (file,) = folder.visible
    found = [json.loads(line, parse_float=Decimal) for line in file.read_text().splitlines()]
    moment = "2024-02-29T23:59:59.000001"
    assert found[0] == {
        **{"n": 1, "small": -1, "text": 'a "b", c\\d\n', "amount": Decimal("0.10"), "share": Decimal("0.1"), "at": f"{moment}Z"},
        **{"wall": moment, "day": "2024-02-29", "yes": True, "raw": "AP8=", "named": {"a": 1}},
        "items": [{"f": "Infinity", "t": f"{moment}Z"}],
    }
    assert [row["share"] for row in found[1:]] == ["NaN", "-Infinity"]
    assert found[2] | {"share": None, "at": None} == dict.fromkeys(found[2]) | {
        **{"small": 3, "day": "0001-01-01", "yes": False, "raw": "", "items": [], "named": {}}
    }


def test_a_batch_that_is_written_again_replaces_its_rows_in_a_file_with_others(folder: Folder) -> None:
    sink = folder.opened("json", rows_per_file=2)
    for batch_id, rows in ((0, numbers(1, 2, 3)), (1, numbers(9)), (1, numbers(4, 5)), (2, numbers(6)), (1, numbers())):
        sink.write(BATCH, [folder.file(rows)], batch_id)
    transaction = sink.pre_commit(1)
    assert transaction is not None
    sink.commit(transaction)
    assert [file.read_text() for file in folder.visible] == ['{"n":1}\n{"n":2}\n', '{"n":3}\n{"n":6}\n']
    assert not list(folder.path.rglob("writing-*")) and not list(folder.path.rglob("*.staged"))


@given(st.lists(st.tuples(st.none() | st.text(), st.none() | st.floats(allow_nan=False, allow_infinity=False)), min_size=1))
@example([('\x00\n\r"\\\x1f\u2028\U0001f600', 1e22), (None, -0.0), ("", 5e-324)])
def test_any_text_and_number_is_read_back(rows: list[tuple[str | None, float | None]]) -> None:
    columns = {'the "text"': [text for text, _ in rows], "number": [number for _, number in rows]}
    whole = pa.record_batch(columns, pa.schema({'the "text"': pa.string(), "number": pa.float64()}))
    for batch in (whole, whole.slice(len(rows) // 2)):
        found = [json.loads(line) for line in bytes(json_lines(batch)).split(b"\n")[:-1]]
        assert found == batch.to_pylist()
        assert _signs(found) == _signs(batch.to_pylist())  # the integer -0 would be read as 0
        text = csv_header(batch.schema.names) + bytes(csv_lines(batch))
        assert list(csv.reader(io.StringIO(text.decode(), newline=""))) == [
            list(columns),
            *(["" if value is None else str(value) if isinstance(value, str) else _plain(value) for value in row.values()]
              for row in batch.to_pylist()),
        ]  # fmt: skip


def _signs(rows: list[dict[str, Any]]) -> list[float]:
    return [math.copysign(1, row["number"]) for row in rows if row["number"] is not None]


def _plain(value: float) -> str:
    text = str(pa.scalar(value).cast(pa.string()).as_py())
    return "-0.0" if text == "-0" else text


# Partitions and sizes


def test_partitions_are_hives(folder: Folder) -> None:
    days = [date(2024, 1, 1), date(2024, 1, 2), date(2024, 1, 1), None]
    shops = ["a/b=c%d é", "a/b=c%d é", "", "x"]
    rows = pa.table({"n": [1, 2, 3, 4], "day": days, "shop": shops})
    sink = folder.opened(partition_by=["day", "shop"])
    folder.commit(sink, 1, rows.slice(0, 2), rows.slice(2))
    folder.commit(sink, 2, rows)
    null = "__HIVE_DEFAULT_PARTITION__"
    found = sorted(str(file.parent.relative_to(folder.path)) for file in folder.visible)
    expected = [f"day={day or null}/shop={shop or null}" for day, shop in zip(days, shops, strict=True)]
    assert [unquote(name) for name in found] == sorted([*expected, *expected])
    assert sum("shop=a%2Fb%3Dc%25d é" in name for name in found) == 4
    assert {*pq.read_schema(folder.visible[0]).names} == {"n"}
    table = ds.dataset(folder.path, partitioning="hive").to_table()
    assert sorted(zip(*(table[name].to_pylist() for name in ("n", "shop")), strict=True), key=repr) == sorted(
        [(n, shop or None) for n, shop in zip(range(1, 5), shops, strict=True)] * 2, key=repr
    )


def test_more_partitions_than_files_may_be_open(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_files, "_MOST_OPEN", 3)
    rows = pa.table({"n": range(40), "key": [n % 10 for n in range(40)]})
    folder.commit(folder.opened("csv", partition_by="key"), 1, rows.slice(0, 20), rows.slice(20))
    assert len({file.parent for file in folder.visible}) == 10 < len(folder.visible)
    assert folder.numbers("csv") == list(range(40))


@pytest.mark.parametrize("format", ["parquet", "orc", "csv", "json"])
def test_files_have_the_size_that_is_asked_for(folder: Folder, format: str) -> None:
    rows = pa.table({"n": range(40_000), "text": [os.urandom(16).hex() for _ in range(40_000)]})
    sink = folder.opened(format, bytes_per_file=200_000)
    folder.commit(sink, 1, *(rows.slice(begin, 1000) for begin in range(0, 40_000, 1000)))
    sizes = [file.stat().st_size for file in folder.visible]
    assert len(sizes) > 3 and folder.numbers(format) == list(range(40_000))
    # Less, too: groups of ORC and Parquet are compressed when a file is closed.
    assert all(120_000 < size < 330_000 for size in sizes[:-1]), sizes


def test_small_batches_become_one_file_and_large_ones_several(folder: Folder) -> None:
    sink = folder.opened(rows_per_file=100)
    folder.commit(sink, 1, *(numbers(*range(n, n + 10)) for n in range(0, 90, 10)))
    folder.commit(sink, 2, numbers(*range(90, 340)))
    assert [pq.read_metadata(file).num_rows for file in folder.visible] == [90, 100, 100, 50]
    assert [pq.read_metadata(file).num_row_groups for file in folder.visible] == [1, 1, 1, 1]


# Columns


@pytest.mark.parametrize(
    ("format", "rows", "found"),
    [
        ("csv", pa.table({"n": [1], "items": [[1]]}), r"CSV.*'items' of type list"),
        ("csv", pa.table({"raw": [b"a"]}), r"'raw' of type binary"),
        ("json", pa.table({"m": pa.array([{1: 2}], pa.map_(pa.int64(), pa.int64()))}), r"JSON.*'m' of type map"),
        ("orc", pa.table({"o": [{"t": None}]}).cast(pa.schema({"o": pa.struct({"t": pa.time64("us")})})), r"ORC.*'o'"),
        ("orc", pa.table({"n": pa.array([1], pa.int32())}).replace_schema_metadata(
            {"org.apache.spark.sql.parquet.row.metadata": json.dumps(INTERVAL)}), "'n' of type interval year to month"),
    ],
)  # fmt: skip
def test_a_type_that_the_format_does_not_have_is_named(folder: Folder, format: str, rows: pa.Table, found: str) -> None:
    sink = folder.opened(format)
    with pytest.raises(SinkColumnsMismatch, match=found):
        sink.write(BATCH, [folder.file(rows)], 0)
    if format != "csv":
        folder.commit(folder.opened("parquet", as_=context(epoch=2)), 1, rows)  # which has every type


def test_other_columns_than_those_of_the_files_are_named(folder: Folder) -> None:
    sink = folder.opened("csv")
    folder.commit(sink, 1, pa.table({"n": [1], "shop": ["a"]}))
    for rows, found in (
        (pa.table({"n": [1], "shop": [2]}), r"column 'shop': expected type string, found int64"),
        (pa.table({"n": [1]}), r"column 'shop': expected it in the rows, found none"),
        (pa.table({"n": [1], "shop": ["a"], "at": [AT]}), r"column 'at': expected none"),
        (pa.table({"shop": ["a"], "n": [1]}), r"expected the order \['n', 'shop'\], found \['shop', 'n'\]"),
    ):
        again = folder.opened("csv", as_=context(epoch=2), new=False)
        with pytest.raises(SinkColumnsMismatch, match=f"{found}.*{folder.path}"):
            again.write(BATCH, [folder.file(rows)], 0)
    (folder.path / "_dagster_checkpoints/columns").unlink()
    folder.commit(folder.opened("csv", as_=context(epoch=3), new=False), 2, pa.table({"n": [1]}))


def test_another_format_or_other_partitions_are_refused_before_the_start(folder: Folder) -> None:
    folder.commit(folder.opened("json", partition_by="key", manifest=True), 1, pa.table({"n": [1], "key": [1]}))
    for settings in ({"partition_by": "key"}, {"format": "json"}):
        with pytest.raises(SinkColumnsMismatch, match=r"format='json', partition_by=\['key'\]"):
            FileSink(folder.path, at_new_start="keep", **settings).check_new_start(context(job=2))
    other = FileSink(folder.path, at_new_start="replace")
    other.check_new_start(context(job=2))
    sink = folder.opened(as_=context(job=2, epoch=2), at_new_start="replace")
    folder.commit(sink, 2, numbers(7))
    assert folder.numbers() == [7]
    assert not list(folder.path.glob("key=*")) and not list(folder.path.glob("_manifests/*"))


@pytest.mark.parametrize(
    ("by", "found"),
    [
        (["shop"], "partition column 'shop': expected a column of the rows, found n, at"),
        (["at"], r"partition column 'at': expected type string, integer, boolean or date, found timestamp"),
        (["n", "at"], "expected at least one column that is not a partition column"),
    ],
)
def test_partition_columns_that_do_not_fit_are_named(folder: Folder, by: list[str], found: str) -> None:
    with pytest.raises(SinkColumnsMismatch, match=found):
        folder.opened(partition_by=by).write(BATCH, [folder.file(pa.table({"n": [1], "at": [AT]}))], 0)


def test_a_map_with_one_key_twice_is_refused_by_name_in_json(folder: Folder) -> None:
    """Files that Spark has not written may hold such a map, and Spark reads it as it is."""
    twice = pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))
    with pytest.raises(SinkRowsRefused, match=r"JSON files can hold.*duplicate key was 'a'"):
        folder.commit(folder.opened("json"), 1, pa.table({"named": twice}))


@pytest.mark.parametrize("partitioned", [False, True])
def test_no_row_of_a_csv_file_is_an_empty_line(folder: Folder, partitioned: bool) -> None:
    settings = {"partition_by": "day"} if partitioned else {}
    days = {"day": ["a", "a", "b"]} if partitioned else {}
    sink = folder.opened("csv", **settings)
    folder.commit(sink, 1, pa.table({"text": ["", " ", "x"], **days}))
    lines = [line for file in folder.visible for line in file.read_bytes().splitlines()[1:]]
    assert sorted(lines) == [b'" "', b'""', b'"x"']
    with pytest.raises(SinkRowsRefused, match=r"only one of a CSV file.*found NULL in column 'text'\. Filter"):
        sink.write(BATCH, [folder.file(pa.table({"text": ["x", None, "y"], **days}))], 20)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("é" * 130, r"'shop'.*255 bytes"),
        ("x._COPYING_", r"'shop'.*found 'shop=x\._COPYING_'.*skip"),
        ("__HIVE_DEFAULT_PARTITION__", r"'shop'.*the text '__HIVE_DEFAULT_PARTITION__', which stands for null"),
    ],
)
def test_a_value_that_cannot_be_a_directorys_name_is_refused(folder: Folder, value: str, found: str) -> None:
    rows = pa.table({"n": [1], "shop": [value]})
    with pytest.raises(SinkRowsRefused, match=found):
        folder.opened(partition_by="shop").write(BATCH, [folder.file(rows)], 0)


# Links


def linked(folder: Folder, name: str) -> Path:
    """Move a directory of the location away, and leave a link in its place. Returns its new path."""
    away = folder.path.parent / "away" / name
    away.parent.mkdir(parents=True)
    (folder.path / name).rename(away)
    (folder.path / name).symlink_to(away)
    return away


LINKED = ["day=1", "day=1/shop=a"]


@pytest.mark.parametrize("name", LINKED)
def test_a_new_start_does_not_leave_rows_behind_a_link(folder: Folder, name: str) -> None:
    """A listing does not follow links: the rows of an earlier job would stay, and come twice."""
    rows = pa.table({"n": [1, 2], "day": [1, 2], "shop": ["a", "a"]})
    settings: dict[str, Any] = {"partition_by": ["day", "shop"], "at_new_start": "replace"}
    sink = folder.opened(**settings)
    folder.commit(sink, 1, rows)
    sink.close()
    away = linked(folder, name)
    refused = rf"found that {name} is a symbolic link to {away}: .*Move that directory back"
    with pytest.raises(InvalidSinkPath, match=refused):
        folder.sink(**settings).check_new_start(context(job=2, epoch=2))
    with pytest.raises(InvalidSinkPath, match=refused):
        folder.opened(as_=context(job=2, epoch=2), **settings)
    (folder.path / name).unlink()
    away.rename(folder.path / name)
    folder.sink(**settings).check_new_start(context(job=2, epoch=2))
    again = folder.opened(as_=context(job=2, epoch=2), **settings)
    folder.commit(again, 2, rows)
    assert folder.numbers() == [1, 2]


@pytest.mark.parametrize("name", LINKED)
def test_no_row_is_committed_behind_a_link(folder: Folder, name: str) -> None:
    settings: dict[str, Any] = {"partition_by": ["day", "shop"]}
    sink = folder.opened(**settings)
    rows = pa.table({"n": [1], "day": [1], "shop": ["a"]})
    folder.commit(sink, 1, rows)
    away = linked(folder, name)
    waiting = folder.staged(sink, 2, rows)
    with pytest.raises(InvalidSinkPath, match=f"{name} is a symbolic link"):
        sink.commit(waiting)
    (folder.path / name).unlink()
    away.rename(folder.path / name)
    sink.commit(waiting)
    assert folder.numbers() == [1, 1]


def test_links_that_readers_skip_and_a_location_that_is_a_link(folder: Folder) -> None:
    real = folder.path.parent / "real"
    real.mkdir()
    folder.path.symlink_to(real)
    (real / ".snapshot").symlink_to(real)
    rows = pa.table({"n": [1], "day": [1]})
    folder.sink(partition_by="day").check_new_start(context())
    sink = folder.opened(partition_by="day", at_new_start="replace")
    folder.commit(sink, 1, rows)
    assert folder.numbers() == [1]


# Starts


def test_a_directory_that_another_instance_removes_is_made_again(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = folder.opened(partition_by="day")
    transaction = folder.staged(sink, 1, pa.table({"n": [1], "day": [1]}))
    rename, removed = os.rename, []

    def disturbed(source: Any, target: Any) -> None:
        if not removed:
            Path(target).parent.rmdir()
            removed.append(target)
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(target_files.os, "rename", disturbed)
        sink.commit(transaction)
    assert folder.numbers() == [1] and len(removed) == 1


# Restores


def test_a_restore_that_was_interrupted_is_completed(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = folder.opened(manifest=True)
    for checkpoint_id in (1, 2, 3):
        folder.commit(sink, checkpoint_id, numbers(10 * checkpoint_id), numbers(10 * checkpoint_id + 1))
    moved: list[str] = []
    rename = os.rename

    def failing(source: Any, target: Any) -> None:
        moved.append(str(target))
        if len(moved) == 2:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(target_files.os, "rename", failing)
        with pytest.raises(SinkUnavailable, match="Input/output error"):
            folder.opened(as_=context(epoch=2), new=False).recover([], restored=1)
    assert len(folder.numbers()) == 5
    # The job continues from another checkpoint than the one that was tried first.
    folder.opened(as_=context(epoch=3), new=False, manifest=True).recover([], restored=2)
    assert folder.numbers() == [10, 11, 20, 21] and len(list(folder.path.glob("_manifests/*"))) == 2
    folder.opened(as_=context(epoch=4), new=False, manifest=True).recover([], restored=3)
    assert folder.numbers() == [10, 11, 20, 21, 30, 31] and len(list(folder.path.glob("_manifests/*"))) == 3


def test_rows_that_another_program_has_rewritten_cannot_be_taken_back(folder: Folder) -> None:
    sink = folder.opened()
    folder.commit(sink, 1, numbers(1))
    folder.commit(sink, 2, numbers(2))
    folder.visible[1].unlink()
    again = folder.opened(as_=context(epoch=2), new=False)
    before = sorted(folder.path.rglob("*"))
    with pytest.raises(SinkCannotTakeBack, match=r"1 are not there.*Nothing was changed.*commits/1\.h1/2-job1"):
        again.recover([], restored=1)
    assert sorted(folder.path.rglob("*")) == before and folder.numbers() == [1]


@pytest.mark.parametrize("partitioned", [False, True])
def test_rows_of_which_the_record_was_deleted_cannot_be_taken_back_or_shown_again(folder: Folder, partitioned: bool) -> None:
    settings: dict[str, Any] = {"partition_by": "day"} if partitioned else {}
    sink = folder.opened(**settings)
    for checkpoint in (1, 2, 3):
        folder.commit(sink, checkpoint, numbers(checkpoint).append_column("day", pa.array([f"d{checkpoint}"])))

    def record(checkpoint: int) -> Path:
        (found,) = folder.path.glob(f"_dagster_checkpoints/0/commits/*/{checkpoint}-*")
        return found

    def restored(checkpoint: int, epoch: int) -> None:
        folder.opened(as_=context(epoch=epoch), new=False, **settings).recover([], restored=checkpoint)

    middle, last = record(2), record(3)
    content, other = middle.read_bytes(), last.read_bytes()
    for gone in (middle, last):
        gone.unlink()
    restored(3, epoch=2)  # nothing moves
    with pytest.raises(SinkCannotTakeBack, match=r"found rows of checkpoint 3, and no record that names their files.*or delete"):
        restored(1, epoch=3)
    assert len(folder.visible) == 3
    last.write_bytes(other)
    with pytest.raises(SinkCannotTakeBack, match=r"found rows of checkpoint 2.*or restore checkpoint 2 or a later one"):
        restored(1, epoch=4)
    assert len(folder.visible) == 3
    restored(2, epoch=5)
    assert len(folder.visible) == 2
    middle.write_bytes(content)
    restored(1, epoch=6)
    middle.unlink()
    with pytest.raises(SinkCannotTakeBack, match=r"found rows of checkpoint 2.*or restore another checkpoint or savepoint"):
        restored(2, epoch=7)
    assert len(folder.visible) == 1
    middle.write_bytes(content)
    restored(3, epoch=8)
    assert len(folder.visible) == 3


# Faults


def test_a_savepoint_without_its_list_of_files_is_refused(folder: Folder) -> None:
    sink = folder.opened()
    transaction = folder.staged(sink, 1, numbers(1))
    saved = {name: file for name, file in sink.transaction_files(transaction).items() if name != "transaction.json"}
    sink.abort(transaction)
    with pytest.raises(UnreadableSinkTransaction, match=r"holds no transaction\.json"):
        sink.restore_transaction(transaction, saved)


def test_records_of_an_earlier_release_are_refused_by_name_also_those_of_hdfs(folder: Folder) -> None:
    file = folder.path / "_dagster_checkpoints/0/owner.3"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    for call in (FileSink(folder.path).check_new_start, FileSink(folder.path).open):
        with pytest.raises(SinkPathInUse, match=r"record of an earlier release.*0/owner\.3"):
            call(context())


class _LocalHdfs:
    """What `WebHdfs` does, in a directory."""

    url = "webhdfs://namenode:9870/lake"

    def __init__(self, root: Path) -> None:
        self._root = root
        self.killed_at = ""

    def stream(self, path: str) -> Iterator[bytes]:
        if not (self._root / path).is_file():
            raise NotFound(path)
        yield (self._root / path).read_bytes()

    def write(self, path: str, data: Any) -> None:
        self.make_folder(path.rpartition("/")[0])
        (self._root / path).write_bytes(data if isinstance(data, bytes) else data.read())

    def rename(self, path: str, new: str, *, overwrite: bool) -> None:
        if new.endswith(self.killed_at or "\0"):
            raise KeyboardInterrupt
        if (self._root / new).exists() and not overwrite:
            raise AlreadyExists(new)
        try:
            os.replace(self._root / path, self._root / new)
        except FileNotFoundError:
            raise NotFound(path) from None

    def make_folder(self, path: str) -> None:
        (self._root / path).mkdir(parents=True, exist_ok=True)

    def delete(self, path: str) -> bool:
        place = self._root / path
        if not place.exists() or (place.is_dir() and any(place.iterdir())):
            return False
        place.rmdir() if place.is_dir() else place.unlink()
        return True

    def status(self, path: str) -> HdfsEntry | None:
        place = self._root / path
        return HdfsEntry(place.name, place.stat().st_size, place.is_dir()) if place.exists() else None

    def entries(self, path: str) -> list[HdfsEntry]:
        place = self._root / path
        found = [self.status(f"{path}/{each.name}".lstrip("/")) for each in place.iterdir()] if place.is_dir() else []
        return sorted((each for each in found if each is not None), key=lambda each: each.name)


@pytest.mark.parametrize("killed_at", [".staged", "/transaction"])
@pytest.mark.parametrize("restored", [False, True])
def test_what_a_killed_run_has_left_in_hdfs_is_deleted(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, killed_at: str, restored: bool
) -> None:
    hdfs = _LocalHdfs(folder.path)
    monkeypatch.setattr(hdfs_files, "WebHdfs", lambda url, user: hdfs)

    def opened(epoch: int) -> FileSink:
        sink = FileSink(hdfs.url, "json")
        sink.open(context(epoch=epoch))
        return sink

    sink = opened(1)
    sink.start_new()
    folder.commit(sink, 1, numbers(1))
    hdfs.killed_at = killed_at
    with pytest.raises(KeyboardInterrupt):
        folder.staged(sink, 2, numbers(2))
    hdfs.killed_at = ""
    left = [name for name in folder.everything() if "/staged/" in name]
    assert any("/.~" in name for name in left)
    again = opened(2)
    again.recover([], restored=1) if restored else again.start_new()
    assert [name for name in folder.everything() if "/staged/" in name or ".~" in name] == []
    assert folder.numbers("json") == [1]
    folder.commit(again, 3, numbers(3))
    assert folder.numbers("json") == [1, 3]


def test_a_full_disk_and_a_path_that_is_not_a_directory(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = folder.opened("csv")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "place", full)
        sink.write(BATCH, [folder.file(numbers(1))], 0)
        with pytest.raises(SinkUnavailable, match=rf"{folder.path}.*found: No space left.*Free space there") as failed:
            sink.pre_commit(1)
    assert not failed.value.repeats
    sink.close()
    assert not list(folder.path.rglob("writing-*"))
    file = folder.path / "_dagster_checkpoints/stage"
    with pytest.raises(InvalidSinkPath, match="found a file"):
        FileSink(file).check_new_start(context())
    with pytest.raises(InvalidSinkPath, match="A part of the path is a file, not a directory"):
        FileSink(file).open(context())


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "found"),
    [
        (("hdfs://host/rows",), {}, InvalidSinkPath, r"kind hdfs:.*mount"),
        (("s3://key:secret@bucket/rows",), {}, InvalidSinkPath, "with credentials"),
        (("",), {}, InvalidSinkPath, "empty"),
        (("rows", "avro"), {}, ValueError, "parquet, orc, csv, json, found 'avro'"),
        (("rows",), {"at_new_start": "append"}, ValueError, "'refuse', 'keep' or 'replace'"),
        (("rows",), {"rows_per_file": 0}, ValueError, "rows_per_file"),
        (("rows",), {"bytes_per_file": -1}, ValueError, "bytes_per_file"),
        (("rows",), {"partition_by": ["a", "a"]}, ValueError, "once"),
        (("rows",), {"partition_by": "_day"}, ValueError, "readers skip"),
        (("s3://b/rows",), {"storage_options": {"aws_secret_access_key": "hidden"}}, ValueError, "found aws_secret_access_key"),
    ],
)
def test_settings_that_are_not_allowed(arguments: Any, settings: Any, error: type[Exception], found: str) -> None:
    with pytest.raises(error, match=found) as failed:
        FileSink(*arguments, **settings)
    assert not re.search(r"secret@|hidden", str(failed.value))


def test_the_page_s_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/sinks/files.md").read_text(encoding="utf-8")
    definition, reading = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(definition, "docs/sinks/files.md", "exec"), names)
    sink = names["sales"].sink
    assert isinstance(sink, FileSink) and (sink.format, sink.partition_by) == ("json", ("shop",))
    folder = Folder(tmp_path)
    listed = folder.opened(manifest=True)
    folder.commit(listed, 1, numbers(1), numbers(2))
    (folder.path / "unlisted.parquet").touch()
    exec(compile(reading, "docs/sinks/files.md", "exec"), names)
    assert sorted(ds.dataset(names["committed_files"](folder.path)).to_table()["n"].to_pylist()) == [1, 2]


# Readers


@pytest.mark.parametrize("format", ["parquet", "orc", "csv", "json"])
@pytest.mark.parametrize("settings", [{}, {"partition_by": "day"}, {"rows_per_file": 2}], ids=str)
def test_only_names_of_committed_files_end_with_the_formats_name(folder: Folder, format: str, settings: dict[str, Any]) -> None:
    sink = folder.opened(format, **settings)
    rows = numbers(1, 2, 3).append_column("day", pa.array(["a", "b", "a"]))
    for batch_id in (0, 1, 1):
        sink.write(BATCH, [folder.file(rows)], batch_id)
        assert not list(folder.path.rglob(f"*.{format}"))
    transaction = sink.pre_commit(1) or ""
    assert not list(folder.path.rglob(f"*.{format}"))
    sink.commit(transaction)
    assert folder.numbers(format) == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("format", "reader"),
    [("parquet", "read_parquet"), ("csv", "read_csv"), ("json", "read_json")],
)
def test_duckdb_reads_by_pattern_what_is_committed(folder: Folder, format: str, reader: str) -> None:
    sink = folder.opened(format, partition_by="day", manifest=True)
    rows = VALUES.drop_columns(["at", "share"])  # without the type that it would find as text, and NaN
    for checkpoint_id in (1, 2):
        folder.commit(sink, checkpoint_id, rows)
    folder.staged(sink, 3, rows)
    sink.write(BATCH, [folder.file(rows)], 40)
    options = {"csv": ", allow_quoted_nulls=false"}.get(format, "")
    query = f"SELECT n, text, amount, yes, day FROM {reader}('{folder.path}/**/*.{format}', hive_partitioning=true{options})"
    found = duckdb.sql(query).fetchall()
    wanted = [(row["n"], row["text"], row["amount"], row["yes"], row["day"]) for row in rows.to_pylist()]
    assert sorted(((*row[:2], float(row[2] or 0), *row[3:4], str(row[4])) for row in found), key=repr) == sorted(
        [(*row[:2], float(row[2] or 0), *row[3:4], str(row[4])) for row in wanted * 2], key=repr
    )
