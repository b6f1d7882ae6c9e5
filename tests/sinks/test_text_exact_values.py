"""Values in text formats, messages and a lake table's log: exact, or refused by column and value."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from datetime import UTC, date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_checkpoints.sinks import FileSink, SinkContext, SinkRowsRefused
from dagster_checkpoints.sinks.delta.data_files import described, file_columns, partition_text
from dagster_checkpoints.sinks.kafka.messages import MessageFormat
from dagster_checkpoints.sinks.parquet_files import partitions

YEAR_10000, YEAR_0 = 253_402_300_800_000_000, -62_135_596_800_000_001
NOT_TEXT = pa.array([b"ok", b"ok\xff"], pa.binary()).view(pa.string())
REFUSED: dict[str, tuple[pa.Array, str]] = {
    "text": (NOT_TEXT, r"expected text in UTF-8, found b'ok\\xff' in column 'v'"),
    "time": (pa.array([0, YEAR_10000]).cast(pa.timestamp("us", "UTC")), r"years 1 to 9999, found 10000-01-01 .* in column 'v'"),
    "local time": (pa.array([0, YEAR_0]).cast(pa.timestamp("us")), r"years 1 to 9999, found 0000-12-31 .* in column 'v'"),
    "date": (pa.array([0, 2_932_897], pa.int32()).cast(pa.date32()), r"years 1 to 9999, found 10000-01-01 in column 'v'"),
}


@pytest.mark.parametrize("format", ["csv", "json"])
@pytest.mark.parametrize("name", REFUSED)
def test_files_of_text(tmp_path: Path, format: Any, name: str) -> None:
    column, found = REFUSED[name]
    sink = FileSink(tmp_path / "rows", format=format)
    sink.open(SinkContext("flights", "delays", "0", 0, 1, 1, "a1", "h1", 1))
    pq.write_table(pa.table({"v": column}), tmp_path / "file.parquet")
    with pytest.raises(SinkRowsRefused, match=found):
        sink.write(SimpleNamespace(), [str(tmp_path / "file.parquet")], 0)  # type: ignore[arg-type]


def days(*values: int | None) -> pa.Array:
    return pa.array(values, pa.int32()).cast(pa.date32())


def moments(*values: int | None, zone: str | None = "UTC") -> pa.Array:
    return pa.array(values, pa.int64()).view(pa.timestamp("us", zone))


GREGORIAN = -141_427
OF_ARCHIVES: dict[str, tuple[pa.Array, str | None]] = {
    "first days": (days(GREGORIAN, None, 0), None),
    "first moments": (moments(GREGORIAN * 86_400_000_000, -1_000_000, 1, None), None),
    "a day": (days(0, GREGORIAN - 1), r"dates and times since 1582-10-15.* found 1582-10-14 in column 'v'"),
    "a moment": (
        moments(GREGORIAN * 86_400_000_000 - 1_000_000),
        r"since 1582-10-15.* found 1582-10-14 23:59:59.* in column 'v'",
    ),
    "a fraction": (moments(0, -1), r"whole seconds before 1970.* found 1969-12-31 23:59:59.999999 in column 'v'"),
    "a local fraction": (moments(-1_500_000, zone=None), r"whole seconds before 1970.* found 1969-12-31 23:59:58.500000 in"),
    "in a structure": (pa.array([{"a": [date(1, 1, 1)]}]), r"since 1582-10-15.* found 0001-01-01 in column 'v'"),
    "in a map": (pa.array([[], [("a", date(1, 1, 1))]], pa.map_(pa.string(), pa.date32())), r"found 0001-01-01 in column 'v'"),
    "outside of a slice": (pa.array([[date(1, 1, 1)], [date(2024, 1, 1)]]).slice(1), None),
}


@pytest.mark.parametrize("name", OF_ARCHIVES)
def test_times_in_orc_files_that_spark_would_not_read_back(tmp_path: Path, name: str) -> None:
    column, found = OF_ARCHIVES[name]
    sink = FileSink(tmp_path / "rows", format="orc")
    sink.open(SinkContext("flights", "delays", "0", 0, 1, 1, "a1", "h1", 1))
    pq.write_table(pa.table({"v": column}), tmp_path / "file.parquet")
    with pytest.raises(SinkRowsRefused, match=found) if found else nullcontext():
        sink.write(SimpleNamespace(), [str(tmp_path / "file.parquet")], 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{}, {"value": "v"}, {"key": "v"}, {"headers": ("v",)}], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_messages(name: str, settings: dict[str, Any]) -> None:
    column, found = REFUSED[name]
    format = MessageFormat(**{"key": None, "value": None, "headers": (), "sink": "KafkaSink", **settings})
    with pytest.raises(SinkRowsRefused, match=found):
        format.encoded(pa.record_batch({"v": column, "n": pa.array([1, 2])}))


def test_partitions_of_a_delta_table() -> None:
    """Delta's serialization of partition values, in its protocol: years have four digits."""
    early = datetime(1, 2, 3, 4, 5, 6, 7)
    assert partition_text(early) == "0001-02-03 04:05:06.000007"
    assert partition_text(early.replace(tzinfo=UTC)) == "0001-02-03T04:05:06.000007Z"


def test_bounds_of_a_delta_table_do_not_hide_nan(tmp_path: Path) -> None:
    """NaN is larger than each number: a reader that looks for x > 5 must open the file."""
    nan = math.nan
    rows = pa.table(
        {"day": ["a"] * 4, "x": [1.0, 2.0, 3.0, nan], "y": pa.array([1.0, nan, 2.0, 3.0], pa.float32()), "z": [1.0] * 4}
    )
    file = tmp_path / "file.parquet"
    pq.write_table(rows, file, row_group_size=2)
    statistics = json.loads(described(file, pq.read_metadata(file), file_columns(file), {}).statistics)
    assert {"x", "y"}.isdisjoint(statistics["minValues"]) and {"x", "y"}.isdisjoint(statistics["maxValues"])
    assert (statistics["minValues"]["z"], statistics["maxValues"]["z"], statistics["nullCount"]["x"]) == (1.0, 1.0, 0)


def test_the_last_moment_of_the_year_9999_has_no_bounds_in_delta(tmp_path: Path) -> None:
    file = tmp_path / "last.parquet"
    last = 253_402_300_799_999_999
    pq.write_table(pa.table({"t": pa.array([last], pa.int64()).cast(pa.timestamp("us", "UTC"))}), file)
    statistics = json.loads(described(file, pq.read_metadata(file), file_columns(file), {}).statistics)
    assert (statistics["numRecords"], statistics["minValues"], statistics["maxValues"]) == (1, {}, {})


@pytest.mark.parametrize("struct_last", [False, True])
def test_a_column_with_a_dot_has_its_own_bounds_in_delta_beside_a_struct(tmp_path: Path, struct_last: bool) -> None:
    columns = {"a.b": pa.array([1.0, 2.0]), "a": pa.array([{"b": 50.0}, {"b": float("nan")}])}
    file = tmp_path / "both.parquet"
    pq.write_table(pa.table({name: columns[name] for name in (("a.b", "a") if struct_last else ("a", "a.b"))}), file)
    statistics = json.loads(described(file, pq.read_metadata(file), file_columns(file), {}).statistics)
    assert (statistics["minValues"], statistics["maxValues"]) == ({"a.b": 1.0}, {"a.b": 2.0})


@pytest.mark.parametrize("name", [".day", "[0]", "a.b", "a[0]", "day.x", "`day`"])
def test_rows_are_divided_by_the_partition_column_whatever_its_name(name: str) -> None:
    rows = pa.table({name: ["q", "p", "q"], "day": ["A", "A", "B"], "v": [1, 2, 3]})
    found = [(values, part.to_pydict()) for values, part in partitions(rows, [name])]
    assert found == [
        ({name: "p"}, {name: ["p"], "day": ["A"], "v": [2]}),
        ({name: "q"}, {name: ["q", "q"], "day": ["A", "B"], "v": [1, 3]}),
    ]
    both = [values for values, _ in partitions(rows, ["day", name])]
    assert both == [{"day": "A", name: "p"}, {"day": "A", name: "q"}, {"day": "B", name: "q"}]
