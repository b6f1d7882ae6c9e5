"""Values of a database in Spark: exactly the same value, or refused by the column's name. No value is narrowed in silence."""

from __future__ import annotations

import datetime as dt
import sqlite3
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from bench.postgresql import PostgresqlServer
from dagster_checkpoints.sources import InvalidSource
from dagster_checkpoints.sources.sql.rows import SqlTable
from dagster_checkpoints.sources.sql.splits import SplitRange
from dagster_checkpoints.systems.sql_address import sql_address

MIDNIGHT = dt.datetime(2024, 2, 29)
MOMENT = dt.datetime(2024, 2, 29, 23, 59, 59, 999_999)
NOON = dt.datetime(2024, 7, 1, 12, tzinfo=dt.UTC)


class Refused(str):
    """What the refusal says of the value."""


OTHER_TYPE, DIGITS, ZONE = Refused("another type"), Refused("digits behind the point"), Refused("has a time zone")
WHOLE, RANGE, FORM = Refused("not a whole number"), Refused("outside of the type's range"), Refused("of the form YYYY-MM-DD")

# By declared type: the value in SQL, and the value in Spark. SQLite's columns hold values of any type.
SQLITE: dict[str, dict[str, Any]] = {
    "INTEGER": {
        "1.5": WHOLE,
        "'three'": OTHER_TYPE,
        "x'01'": OTHER_TYPE,
        "1e300": RANGE,
        "9223372036854775807": 2**63 - 1,
        "9223372036854775808": RANGE,
        "2.0": 2,
        "9e999": WHOLE,
        "-9223372036854775808": -(2**63),
        "'7'": 7,
    },
    "TINYINT": {
        "300": 300,
    },
    "UNSIGNED BIG INT": {
        "18446744073709551615": RANGE,
    },
    "BIGINT": {
        "-1.25": WHOLE,
    },
    "BOOLEAN": {
        "0": False,
        "1": True,
        "2": Refused("neither 0 nor 1"),
        "0.5": OTHER_TYPE,
        "'true'": OTHER_TYPE,
        "-1": Refused("neither 0 nor 1"),
    },
    "NUMERIC(10,2)": {
        "0.125": DIGITS,
        "0.12": Decimal("0.12"),
        "-7": Decimal("-7.00"),
        "123456789.25": Refused("before the point"),
        "12345678.25": Decimal("12345678.25"),
        "0.1 + 0.2": DIGITS,
        "'many'": OTHER_TYPE,
        "1e20": Refused("before"),
        "9e999": Refused("finite"),
        "1e5": Decimal(100_000),
        "1e-9": DIGITS,
    },
    "DECIMAL(3,3)": {
        "0.999": Decimal("0.999"),
    },
    "DECIMAL(5)": {
        "1.5": DIGITS,
        "99999": Decimal(99999),
    },
    "REAL": {
        "0.1": 0.1,
        "9e999": float("inf"),
        "'one'": OTHER_TYPE,
    },
    "DOUBLE": {
        "5e-324": 5e-324,
    },
    "FLOAT": {
        "3": 3.0,
    },
    "TEXT": {
        "'a' || char(0) || 'b'": "a\0b",
        "CAST(x'61ff' AS TEXT)": Refused("not UTF-8"),
        "x'61'": OTHER_TYPE,
        "5": "5",
        "'€😀'": "€😀",
    },
    "VARCHAR(2)": {
        "'longer'": "longer",
    },
    "BLOB": {
        "x'00ff'": b"\0\xff",
        "'text'": OTHER_TYPE,
        "1": OTHER_TYPE,
    },
    "DATE": {
        "'2024-02-29'": MIDNIGHT.date(),
        "'2024-02-29 10:00:00'": FORM,
        "'2023-02-29'": Refused("day"),
        "'2024-2-29'": FORM,
        "2460370.5": OTHER_TYPE,
        "'10000-01-01'": FORM,
        "'0001-01-01'": dt.date(1, 1, 1),
        "'0000-01-01'": Refused("year"),
        "'2024-W09-4'": FORM,
        "'9999-12-31'": dt.date(9999, 12, 31),
    },
    "TIMESTAMP": {
        "'2024-02-29 23:59:59.999999'": MOMENT,
        "'2024-02-29T23:59:59.999999Z'": ZONE,
        "'2024-02-29 23:59:59.999999+00:00'": ZONE,
        "'2024-02-29 23:59:59-05'": ZONE,
        "'2024-02-29 00:00'": MIDNIGHT,
        "1709164800": OTHER_TYPE,
        "'now'": FORM,
        "'2024-02-29 24:00:00'": Refused("hour"),
        "'9999-12-31 23:59:59'": dt.datetime(9999, 12, 31, 23, 59, 59),
    },
    "DATETIME": {
        "'2024-02-29T23:59:59.999999'": MOMENT,
        "'2024-02-29 23:59:59.999999000'": MOMENT,
        "'2024-02-29 23:59:59.9999991'": Refused("microseconds"),
        "'2024-02-29'": MIDNIGHT,
    },
    "JSON": {
        "'{\"a\": 1}'": '{"a": 1}',
        "x'61'": OTHER_TYPE,
        "'1.10'": "1.1",
        "'12'": "12",
    },
}

POSTGRESQL: dict[str, dict[str, Any]] = {
    "smallint": {
        "-32768": -32768,
    },
    "integer": {
        "2147483647": 2**31 - 1,
    },
    "bigint": {
        "9223372036854775807": 2**63 - 1,
    },
    "real": {
        "0.1": 0.10000000149011612,
        "'infinity'": float("inf"),
        "3.4028235e38": 3.4028234663852886e38,
    },
    "double precision": {
        "0.1": 0.1,
    },
    "numeric(10,2)": {
        "'NaN'": Refused("finite"),
        "12345678.25": Decimal("12345678.25"),
    },
    "numeric": {
        "1e-18": Decimal("1e-18"),
        "1e-19": DIGITS,
        "1e20": Refused("before the point"),
        "'infinity'": Refused("finite"),
        "1.50": Decimal("1.50"),
    },
    "date": {
        "'infinity'": FORM,
        "'0044-03-15 BC'": FORM,
        "'10000-01-01'": FORM,
        "'0001-01-01'": dt.date(1, 1, 1),
    },
    "timestamp": {
        "'-infinity'": FORM,
        "'10000-01-01'": FORM,
        "'2024-02-29 23:59:59.999999'": MOMENT,
        "'0001-01-01'": dt.datetime(1, 1, 1),
    },
    "timestamp(0)": {
        "'2024-02-29 00:00:00'": MIDNIGHT,
    },
    "timestamptz": {
        "'2024-07-01 14:00+02'": NOON,
        "'infinity'": FORM,
        "'0044-03-15 BC'": FORM,
        "'9999-12-31 23:59:59.999999+00'": MOMENT.replace(9999, 12, 31, tzinfo=dt.UTC),
        "'10000-01-01+00'": FORM,
        "'0001-01-01+00'": dt.datetime(1, 1, 1, tzinfo=dt.UTC),
    },
    "json": {
        "'{\"a\":  1.0}'": '{"a":  1.0}',
    },
    "uuid": {
        "'12345678-1234-5678-1234-567812345678'": "12345678-1234-5678-1234-567812345678",
    },
    "char(3)": {
        "'a'": "a  ",
    },
    "boolean": {
        "true": True,
    },
    "bytea": {
        "'\\x00ff'": b"\0\xff",
    },
}


IN_BERLIN = "&options=-ctimezone%3DEurope/Berlin"


def flat(table: dict[str, dict[str, Any]]) -> list[Any]:
    return [
        pytest.param(kind, value, found, id=f"{kind} {value}")
        for kind, values in table.items()
        for value, found in values.items()
    ]


def rows_of(table: SqlTable) -> list[Any]:
    columns = {column.name: column for column in table.columns(None)}
    batches = table.rows([columns["v"]], columns["k"], SplitRange(None, None))
    return [row["v"] for batch in batches for row in batch.to_pylist()]


def check(table: SqlTable, expected: Any) -> None:
    """Three rows: a NULL, the value with the key 7, another NULL."""
    if not isinstance(expected, Refused):
        found = rows_of(table)
        assert found == [None, expected, None] and type(found[1]) is type(expected), found
        return
    with pytest.raises(InvalidSource) as raised:
        rows_of(table)
    text = str(raised.value)
    column = next(column for column in table.columns(None) if column.name == "v")
    assert expected in text.partition(" Correct ")[0], text
    assert f"expected values of 'v' that fit {column.type.simpleString()} exactly, found " in text
    assert "in a row with k = 7. Correct the row, or read a view " in text
    assert raised.value.repeats
    if column.unit is not None:
        with pytest.raises(InvalidSource, match="expected values of 'v' that fit"):
            table.bounds(column)


@pytest.mark.parametrize(("declared", "value", "expected"), flat(SQLITE))
def test_values_of_sqlite(tmp_path: Path, declared: str, value: str, expected: Any) -> None:
    with closing(sqlite3.connect(tmp_path / "db")) as connection:
        connection.execute(f"CREATE TABLE t (k INTEGER, v {declared})")
        connection.execute(f"INSERT INTO t VALUES (6, NULL), (7, {value}), (8, NULL)")
        connection.commit()
    check(SqlTable(sql_address(f"sqlite:///{tmp_path / 'db'}"), "t", None), expected)


@pytest.fixture(scope="module")
def schema(postgresql: PostgresqlServer) -> str:
    schema = f"s{uuid4().hex[:8]}"
    postgresql.url(schema=schema)
    with postgresql.connect() as connection:
        for number, (declared, value, _) in enumerate(each.values for each in flat(POSTGRESQL)):
            connection.execute(f'CREATE TABLE "{schema}".t{number} (k integer, v {declared})')  # type: ignore[call-overload]
            connection.execute(f'INSERT INTO "{schema}".t{number} VALUES (6, NULL), (7, {value}), (8, NULL)')  # type: ignore[call-overload]
    return schema


@pytest.mark.parametrize(("declared", "value", "expected"), flat(POSTGRESQL))
def test_values_of_postgresql(postgresql: PostgresqlServer, schema: str, declared: str, value: str, expected: Any) -> None:
    number = [each.values[:2] for each in flat(POSTGRESQL)].index((declared, value))
    check(SqlTable(sql_address(postgresql.url() + IN_BERLIN), f"t{number}", schema), expected)
