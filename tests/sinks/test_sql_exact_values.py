"""What a SqlSink writes reads back equal, or is refused: types that are too narrow by their column, values by themselves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import create_engine, text

from bench.postgresql import PostgresqlServer
from dagster_checkpoints.sinks import SinkColumnsMismatch, SinkContext, SinkRowsRefused, SqlSink

NTZ, TZ = pa.timestamp("us"), pa.timestamp("us", "UTC")
MILLIS = datetime(2024, 2, 29, 23, 59, 59, 123_000)
MICROS = datetime(2024, 2, 29, 23, 59, 59, 123_456)
YEAR_10000 = pa.scalar(253_402_300_800_000_000, pa.int64())
YEAR_0 = pa.scalar(-62_135_596_800_000_001, pa.int64())
INVALID = b"ok\xff"


class Refused(str):
    """What the refusal of a value says."""


class TooNarrow(str):
    """What the refusal of the column's type says."""


SECONDS, LENGTH, UTF8 = Refused("digits of a second"), Refused("at most 2 characters"), Refused("UTF-8")
YEARS = Refused("of the years 1 to 9999")

# Column of the table, type of the stage's column, value, and what a reader gets.
POSTGRESQL: list[tuple[str, pa.DataType, Any, Any]] = [
    ("TIMESTAMP(3)", NTZ, MILLIS, MILLIS),
    ("TIMESTAMP(3)", NTZ, MICROS, SECONDS),
    ("TIMESTAMP(0)", NTZ, MILLIS, SECONDS),
    ("TIMESTAMP(0)", NTZ, datetime(1969, 12, 31, 23, 59, 58), datetime(1969, 12, 31, 23, 59, 58)),
    ("TIMESTAMP(0)", NTZ, datetime(1969, 12, 31, 23, 59, 58, 1), SECONDS),
    ("TIMESTAMPTZ(3)", TZ, MICROS.replace(tzinfo=UTC), SECONDS),
    ("TIMESTAMPTZ(3)", TZ, MILLIS.replace(tzinfo=UTC), MILLIS.replace(tzinfo=UTC)),
    ("TIMESTAMP(6)", NTZ, MICROS, MICROS),
    ("TIMESTAMP", NTZ, YEAR_0, YEARS),
    ("TIMESTAMP", NTZ, YEAR_10000, YEARS),
    ("DATE", pa.date32(), pa.scalar(2_932_897, pa.int32()), YEARS),
    ("DATE", pa.date32(), date(9999, 12, 31), date(9999, 12, 31)),
    ("VARCHAR(2)", pa.string(), "ab", "ab"),
    ("VARCHAR(2)", pa.string(), "abc", LENGTH),
    ("VARCHAR(2)", pa.string(), "ab  ", LENGTH),
    ("VARCHAR(2)", pa.string(), "€😀", "€😀"),
    ("NAME", pa.string(), "a" * 64, TooNarrow("VARCHAR")),
    ('"char"', pa.string(), "ab", TooNarrow("VARCHAR")),
    ("TEXT", pa.string(), INVALID, UTF8),
    ("TEXT", pa.string(), "a\0b", Refused("U+0000")),
    ("JSONB", pa.string(), '{"a": [1.50, null]}', {"a": [1.5, None]}),
    ("NUMERIC(5, -2)", pa.int16(), 12_345, TooNarrow("NUMERIC")),
    ("NUMERIC(3, 5)", pa.decimal128(5, 5), Decimal("0.12345"), TooNarrow("NUMERIC")),
    ("NUMERIC", pa.decimal128(38, 18), Decimal("1E-18"), Decimal("1E-18")),
    ("DOUBLE PRECISION", pa.float32(), 0.1, 0.10000000149011612),
    ("REAL", pa.float32(), 16777217.0, 16777216.0),
    ("REAL", pa.float64(), 0.1, TooNarrow("REAL")),
    ("INTEGER", pa.int64(), 1, TooNarrow("INTEGER")),
    ("TIMESTAMP", pa.date32(), date(2024, 1, 1), TooNarrow("TIMESTAMP")),
]
SQLITE: list[tuple[str, pa.DataType, Any, Any]] = [
    ("NUMERIC(5, 2)", pa.decimal128(5, 3), Decimal("1.125"), TooNarrow("NUMERIC")),
    ("NUMERIC(5, 2)", pa.decimal128(5, 2), Decimal("1.12"), 1.12),
    ("NUMERIC(5, 2)", pa.decimal128(6, 2), Decimal("1234.12"), TooNarrow("NUMERIC")),
    ("NUMERIC", pa.decimal128(15, 2), Decimal("1234567890123.12"), 1234567890123.12),
    ("NUMERIC(30, 2)", pa.decimal128(30, 2), Decimal(1), TooNarrow("NUMERIC")),
    ("TEXT", pa.decimal128(38, 2), Decimal("123456789012345678901234567890.12"), "123456789012345678901234567890.12"),
    ("TIMESTAMP", NTZ, YEAR_0, YEARS),
    ("TIMESTAMP", NTZ, YEAR_10000, YEARS),
    ("TIMESTAMP", TZ, MICROS.replace(tzinfo=UTC), "2024-02-29 23:59:59.123456"),
    ("DATE", pa.date32(), pa.scalar(2_932_897, pa.int32()), YEARS),
    ("TEXT", pa.string(), INVALID, UTF8),
    ("VARCHAR(2)", pa.string(), "abc", "abc"),
    ("REAL", pa.float64(), math.nan, Refused("NaN")),
    ("REAL", pa.float64(), math.inf, math.inf),
    ("BIGINT", pa.int64(), 2**63 - 1, 2**63 - 1),
    ("INTEGER", pa.float64(), 1.5, TooNarrow("INTEGER")),
    ("STRING", pa.string(), "007", TooNarrow("NUMERIC")),
]


def arrow_of(kind: pa.DataType, value: Any) -> pa.Array:
    if isinstance(value, pa.Scalar):
        return pa.array([value.as_py(), None], value.type).cast(kind)
    if isinstance(value, bytes):
        return pa.array([value, None], pa.binary()).view(kind)
    return pa.array([value, None], kind)


def check(url: str, folder: Path, declared: str, kind: pa.DataType, value: Any, expected: Any) -> None:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    table = f"t{uuid4().hex[:8]}"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE {table} (n INTEGER, v {declared})"))
    sink = SqlSink(url, table)
    sink.open(SinkContext("flights", "delays", "0", 0, 1, 1, "a1", "h1", 1))
    file = folder / f"{table}.parquet"
    pq.write_table(pa.table({"n": pa.array([1, 2], pa.int32()), "v": arrow_of(kind, value)}), file)
    try:
        if isinstance(expected, TooNarrow):
            with pytest.raises(SinkColumnsMismatch, match=f"expected column 'v'.*found {expected}"):
                sink.write(SimpleNamespace(), [str(file)], 0)
            return
        if isinstance(expected, Refused):
            with pytest.raises(SinkRowsRefused) as raised:
                sink.write(SimpleNamespace(), [str(file)], 0)
            assert expected in str(raised.value) and "column 'v'" in str(raised.value), raised.value
            assert sink.pre_commit(1) is None
            return
        sink.write(SimpleNamespace(), [str(file)], 0)
        sink.commit(sink.pre_commit(1) or "")
        with engine.connect() as connection:
            found = [row.v for row in connection.execute(text(f"SELECT v FROM {table} ORDER BY n"))]
        assert found == [expected, None]
    finally:
        sink.close()
        engine.dispose()


@pytest.fixture(scope="module")
def server(postgresql: PostgresqlServer) -> Iterator[str]:
    yield postgresql.url(schema=f"s{uuid4().hex[:12]}")


def named(rows: list[Any]) -> list[Any]:
    number = itertools.count()
    return [pytest.param(*row, id=f"{next(number)} {row[0]} from {row[1]}") for row in rows]


@pytest.mark.parametrize(("declared", "kind", "value", "expected"), named(POSTGRESQL))
def test_values_in_postgresql(server: str, tmp_path: Path, declared: str, kind: pa.DataType, value: Any, expected: Any) -> None:
    check(server, tmp_path, declared, kind, value, expected)


@pytest.mark.parametrize(("declared", "kind", "value", "expected"), named(SQLITE))
def test_values_in_sqlite(tmp_path: Path, declared: str, kind: pa.DataType, value: Any, expected: Any) -> None:
    check(f"sqlite:///{tmp_path}/data.db", tmp_path, declared, kind, value, expected)
