"""Tables of SQLite and of a PostgreSQL server: exact values in splits, and what cannot be read is refused by name."""

from __future__ import annotations

import datetime as dt
import inspect
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from bench.postgresql import PASSWORD, PostgresqlServer
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.sources import InvalidSource, SourceLibraryMissing, SourceUnavailable, read_sql_table
from dagster_checkpoints.sources.sql.rows import SqlTable
from dagster_checkpoints.sources.sql.splits import SplitOffset
from dagster_checkpoints.spark.query.plan_fingerprint import stream_text
from dagster_checkpoints.systems.sql_address import sql_address

MOMENT = dt.datetime(2024, 2, 29, 23, 59, 59, 999_999)
BIG = 2**62 + 1
UUID_ = UUID("12345678-1234-5678-1234-567812345678")
POSTGRESQL = {
    "flag": ("boolean", True, "boolean", True),
    "tiny": ("smallint", -5, "smallint", -5),
    "whole": ("integer", 2**31 - 1, "int", 2**31 - 1),
    "big": ("bigint", BIG, "bigint", BIG),
    "single": ("real", 0.5, "float", 0.5),
    "double": ("double precision", float("inf"), "double", float("inf")),
    "price": ("numeric(10, 2)", Decimal("-1.50"), "decimal(10,2)", Decimal("-1.50")),
    "any_number": ("numeric", Decimal("7.125"), "decimal(38,18)", Decimal("7.125")),
    "words": ("text", "Zoë ' \" \\", "string", "Zoë ' \" \\"),
    "short_words": ("varchar(9)", "", "string", ""),
    "bytes": ("bytea", b"\0\xff", "binary", b"\0\xff"),
    "day": ("date", dt.date(2024, 2, 29), "date", dt.date(2024, 2, 29)),
    "wall": ("timestamp", MOMENT, "timestamp_ntz", MOMENT),
    "moment": ("timestamptz", MOMENT.replace(tzinfo=dt.UTC), "timestamp", MOMENT.replace(tzinfo=dt.UTC)),
    "document": ("jsonb", '{"a": [1, null]}', "string", '{"a": [1, null]}'),
    "code": ("uuid", UUID_, "string", str(UUID_)),
    "Mood": ("mood", "glad", "string", "glad"),
}
SQLITE = {
    "flag": ("boolean", 1, "boolean", True),
    "whole": ("integer", BIG, "bigint", BIG),
    "small": ("smallint", 5, "bigint", 5),
    "double": ("real", 0.1, "double", 0.1),
    "price": ("numeric(10, 2)", -1.5, "decimal(10,2)", Decimal("-1.50")),
    "words": ("text", "Zoë ' \" \\", "string", "Zoë ' \" \\"),
    "bytes": ("blob", b"\0\xff", "binary", b"\0\xff"),
    "day": ("date", "2024-02-29", "date", dt.date(2024, 2, 29)),
    "wall": ("timestamp", "2024-02-29 23:59:59.999999", "timestamp_ntz", MOMENT),
}


def test_every_type_of_postgresql(postgresql: PostgresqlServer) -> None:
    schema = f"s{uuid4().hex[:8]}"
    url = postgresql.url(schema=schema)
    with postgresql.connect() as connection:
        connection.execute(f'SET search_path TO "{schema}"')  # type: ignore[call-overload]
        connection.execute("CREATE TYPE mood AS ENUM ('glad', 'sad')")
        _fill(lambda text, *values: connection.execute(text, *values), POSTGRESQL, "%s")  # type: ignore[call-overload]
        connection.execute("CREATE VIEW of_t AS SELECT whole + 1 AS next, price FROM t")
    _check(SqlTable(sql_address(url), "t", schema), POSTGRESQL)
    view = SqlTable(sql_address(url), "of_t", None)
    assert [(each.name, each.type.simpleString()) for each in view.columns(None)] == [("next", "int"), ("price", "decimal(10,2)")]


def test_every_type_of_sqlite(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "db")) as connection:
        _fill(connection.execute, SQLITE, "?")
        connection.commit()
    _check(SqlTable(sql_address(f"sqlite:///{tmp_path / 'db'}"), "t", None), SQLITE)


def _fill(execute: Callable[..., Any], columns: dict[str, Any], mark: str) -> None:
    described = [f'"{name}" {each[0]}' for name, each in columns.items()]
    execute(f"CREATE TABLE t (n integer, {', '.join(described)})")
    values = [each[1] for each in columns.values()]
    execute(f"INSERT INTO t VALUES ({', '.join([mark] * (len(values) + 1))})", [1, *values])
    execute("INSERT INTO t (n) VALUES (2)")


def _check(table: SqlTable, columns: dict[str, Any]) -> None:
    """The types, a row with values and one without, and the same rows from splits of every column that allows them."""
    found = table.columns(None)
    assert {each.name: each.type.simpleString() for each in found if each.name != "n"} == {k: v[2] for k, v in columns.items()}
    expected = {1: {name: each[3] for name, each in columns.items()}, 2: dict.fromkeys(columns)}
    divided = [each for each in found if each.unit is not None]
    assert len(divided) >= 5
    for by in divided:
        lower, upper = table.bounds(by)
        offset = SplitOffset.at_start(lower, upper, 3)
        rows = [
            row
            for split in range(offset.splits)
            for batch in table.rows(found, by, offset.range_of(split))
            for row in batch.to_pylist()
        ]
        assert {row.pop("n"): row for row in rows} == expected and len(rows) == 2, by.name


@pytest.mark.parametrize("server", ["postgresql", "sqlite"])
def test_splits_hold_each_row_once(server: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Also rows without a value, and rows that were added outside of the range after the division was made."""
    rows = [(n, dt.date(2024, 1, 1) + dt.timedelta(n // 7)) for n in range(100)]
    if server == "postgresql":
        postgresql: PostgresqlServer = request.getfixturevalue("postgresql")
        url = postgresql.url(schema=(schema := f"s{uuid4().hex[:8]}"))
        connection: Any = postgresql.connect()
        connection.execute(f'SET search_path TO "{schema}"')
        mark = "%s"
    else:
        url, mark = f"sqlite:///{tmp_path / 'db'}", "?"
        connection = sqlite3.connect(tmp_path / "db", isolation_level=None)
    with closing(connection):
        connection.execute("CREATE TABLE t (n bigint, day date)")

        def put(n: int | None, day: dt.date | None) -> None:
            connection.execute(f"INSERT INTO t VALUES ({mark}, {mark})", (n, None if day is None else day.isoformat()))

        for row in rows:
            put(*row)
        table = SqlTable(sql_address(url), "t", None)
        columns = table.columns(None)
        for by in columns:
            offset = SplitOffset.at_start(*table.bounds(by), 8)
            assert offset.splits == 8
            if by.name == "day":
                put(200, None)
                put(201, dt.date(2023, 1, 1))
                put(202, dt.date(2030, 1, 1))
            splits = [
                [row["n"] for batch in table.rows(columns, by, offset.range_of(split)) for row in batch.to_pylist()]
                for split in range(8)
            ]
            assert all(splits)
        assert sorted(n for split in splits for n in split) == [*range(100), 200, 201, 202]
        assert {200, 201} <= set(splits[0]) and 202 in splits[-1]


# What is refused. The session is not used before the checks have passed.

ARGUMENTS = {"split_by": "n", "splits": 4}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with closing(sqlite3.connect(tmp_path / "db")) as connection:
        connection.execute("CREATE TABLE t (n integer, words text, clock time)")
        connection.execute("CREATE TABLE wrong (n integer)")
        connection.execute("INSERT INTO wrong VALUES ('three')")
        connection.commit()
    return tmp_path / "db"


class Options(dict[str, str]):
    """The options of a source in a plan of Spark's."""

    def containsKey(self, name: str) -> bool:
        return name in self


class Reader:
    """Spark's `readStream`."""

    def __init__(self) -> None:
        self.given = Options()

    def format(self, name: str) -> Reader:
        return self

    def option(self, name: str, value: str) -> Reader:
        return self.options(**{name: value})

    def options(self, **given: str) -> Reader:
        self.given.update(given)
        return self

    def load(self) -> Reader:
        return self


def test_a_checkpoint_names_the_table_and_the_column_of_its_division(file: Path) -> None:
    """What a restore compares: the splits of one column say nothing of those of another one."""

    def description(**arguments: Any) -> str:
        reader = Reader()
        spark: Any = SimpleNamespace(dataSource=SimpleNamespace(register=lambda source: None), readStream=reader)
        read_sql_table(
            spark, f"sqlite:///{file}", **{"table": "numbers", "split_by": "n", "splits": 4, "columns": ["n"], **arguments}
        )
        none = SimpleNamespace(isDefined=lambda: False)
        return stream_text(
            SimpleNamespace(
                nodeName=lambda: "StreamingRelationV2",
                extraOptions=lambda: reader.given,
                sourceName=lambda: "sql_table",
                identifier=lambda: none,
            ),
            spark,
        )

    with closing(sqlite3.connect(file)) as connection:
        for name in ("numbers", "others"):
            connection.execute(f"CREATE TABLE {name} (n integer, m integer)")
    tables = [{"table": table, "split_by": by} for table in ("numbers", "others") for by in ("n", "m")]
    assert len({description(**table) for table in tables}) == len(tables)
    same: list[dict[str, Any]] = [{"splits": 9}, {"splits_per_trigger": 2}, {"columns": ["m"]}, {"columns": None}]
    assert {description(**each) for each in same} == {"sql_table dbtable numbers split_by n"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"table": "T2"}, r"read_sql_table\('T2'\) in sqlite:///.*/db: expected a table or a view of this name, found none"),
        ({"columns": ["n", "price"]}, r"expected the columns price, found only n, words, clock"),
        ({}, r"expected columns whose type Spark has, found clock \(TIME\(\)\)"),
        ({"columns": ["n"], "split_by": "words"}, r"whole numbers, decimals, dates or timestamps, found 'words' of type string"),
        ({"splits": 0}, r"expected splits of at least 1, found 0"),
        ({"splits_per_trigger": True}, r"expected splits_per_trigger of at least 1, found True"),
        ({"url": "mysql://u:secret@h/d"}, r"^read_sql_table: expected postgresql\+psycopg.*found a URL of 'mysql'"),
        ({"url": "sqlite:////nowhere/at/all.db"}, r"expected the database's file, found none"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(file: Path, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidSource, match=text) as raised:
        read_sql_table(None, **{"url": f"sqlite:///{file}", "table": "t", **ARGUMENTS, **arguments})  # type: ignore[arg-type]
    assert "secret" not in str(raised.value)
    assert raised.value.repeats


def test_values_that_do_not_have_their_columns_type_are_refused(file: Path) -> None:
    table = SqlTable(sql_address(f"sqlite:///{file}"), "wrong", None)
    (by,) = table.columns(None)
    with pytest.raises(InvalidSource, match=r"expected values of 'n' that fit bigint exactly, found 'three'.*smallest or"):
        table.bounds(by)
    with pytest.raises(InvalidSource, match=r"expected values of 'n' that fit bigint exactly, found 'three'.*row with n"):
        list(table.rows([by], by, SplitOffset.at_start(None, None, 1).range_of(0)))


def test_errors_of_a_server_show_no_password(postgresql: PostgresqlServer) -> None:
    with pytest.raises(InvalidSource, match="password authentication failed") as raised:
        SqlTable(sql_address(postgresql.url(password="other")), "t", None).columns(None)
    assert PASSWORD not in str(raised.value) and "other" not in str(raised.value)
    table = SqlTable(sql_address("postgresql://tester:hidden@localhost:9/nothing"), "t", None)
    with pytest.raises(SourceUnavailable, match=r"read_sql_table\('t'\) in postgresql://localhost:9/nothing") as away:
        table.columns(None)
    assert "hidden" not in str(away.value) and not away.value.repeats
    assert "hidden" not in repr(table)


def test_an_older_spark_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.__version__", "4.1.4")
    with pytest.raises(SourceLibraryMissing, match=r"expected Spark 4\.2 or later, found 4\.1\.4"):
        read_sql_table(None, "sqlite:////db", "t", **ARGUMENTS)  # type: ignore[arg-type]


def test_the_page_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs/sources/sql.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "docs/sources/sql.md", "exec"), names)
    (orders,) = Pipeline("shop", [names["orders"]]).stages
    with pytest.raises(InvalidSource, match="in the environment variable SHOP_URL, found that it is not set"):
        orders.transform(SimpleNamespace(spark=None))  # type: ignore[arg-type]
    arguments = set(re.findall(r"^\| `(\w+)` \|", page.split("## How it is read")[0], re.MULTILINE))
    assert arguments == set(inspect.signature(read_sql_table).parameters)
