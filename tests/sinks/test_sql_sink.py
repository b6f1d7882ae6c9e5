"""SqlSink on SQLite and on a PostgreSQL server: exact values, upserts, tables that do not fit, failures of the database."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import re
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import dagster as dg
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import MetaData, Table, create_engine, select, text

from bench.postgresql import PASSWORD, PostgresqlServer
from dagster_checkpoints.pipeline import Pipeline, PipelineDefinitionError, bounded_source, stage
from dagster_checkpoints.pipeline.errors import InvalidDurationError
from dagster_checkpoints.sinks import (
    InvalidSinkDatabase,
    ReservedSinkColumn,
    SinkCannotTakeBack,
    SinkColumnsMismatch,
    SinkCommit,
    SinkContext,
    SinkError,
    SinkFenced,
    SinkHoldsEarlierRows,
    SinkLibraryMissing,
    SinkPathInUse,
    SinkRowsRefused,
    SinkTargetChanged,
    SinkTransactionLost,
    SinkUnavailable,
    SqlSink,
)
from dagster_checkpoints.sinks.sql.table import SinkTable
from dagster_checkpoints.sinks.temporary_folder import TransactionCopies
from dagster_checkpoints.systems.sql_address import sql_address
from dagster_checkpoints.systems.sql_database import DatabaseFailure, failure_of
from tests.sinks.sink_instance import BATCH, context


@dataclass
class Database:
    """An empty database, and a sink that writes to its table ``t``."""

    kind: str
    url: str
    folder: Path

    def __post_init__(self) -> None:
        self.engine = create_engine(self.url.replace("postgresql://", "postgresql+psycopg://"))
        self._numbers = itertools.count()

    def run(self, *statements: str) -> None:
        with self.engine.begin() as connection:
            for statement in statements:
                connection.execute(text(statement))

    def rows(self, query: str = "SELECT * FROM t ORDER BY 1") -> list[tuple[Any, ...]]:
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(query))]

    def tables(self) -> list[str]:
        metadata = MetaData()
        metadata.reflect(self.engine)
        return sorted(metadata.tables)

    def reflected(self, name: str = "t") -> Table:
        return Table(name, MetaData(), autoload_with=self.engine)

    def sink(self, **settings: Any) -> SqlSink:
        return SqlSink(self.url, settings.pop("table", "t"), **settings)

    def opened(self, for_: SinkContext | None = None, **settings: Any) -> SqlSink:
        sink = self.sink(**settings)
        sink.open(for_ or context())
        return sink

    def write(self, sink: SqlSink, table: pa.Table, batch_id: int = 0) -> None:
        file = self.folder / f"{next(self._numbers)}.parquet"
        pq.write_table(table, file)
        sink.write(BATCH, [str(file)], batch_id)
        file.unlink()

    def staged(self, sink: SqlSink, checkpoint_id: int, *numbers: int) -> str:
        self.write(sink, _numbers(*numbers), checkpoint_id)
        transaction = sink.pre_commit(checkpoint_id)
        assert transaction is not None
        return transaction


def _numbers(*numbers: int) -> pa.Table:
    return pa.table({"n": pa.array(numbers, pa.int64())})


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Database]:
    database = Database("sqlite", f"sqlite:///{tmp_path}/data.db", tmp_path)
    yield database
    database.engine.dispose()


@pytest.fixture
def server(postgresql: PostgresqlServer, tmp_path: Path) -> Iterator[Database]:
    database = Database("postgresql", postgresql.url(schema=f"s{uuid4().hex[:12]}"), tmp_path)
    yield database
    database.engine.dispose()


@pytest.fixture(params=["sqlite", "server"])
def database(request: pytest.FixtureRequest) -> Database:
    found: Database = request.getfixturevalue(request.param)
    return found


# Values

NAMES = ["select", "Group", "per%cent", 'a "quoted" name', "semi;colon", "über", "b:c", "(paren)", "back\\slash", "x.y"]
TEXTS = ["", " ", "\\N", "\\.", "a\nb\r\n\tc", "quote \" and ' and \\", "NULL", "€ 😀 \u2028", "{}", "1\n\\.\n2", "%s %(x)s ?"]
NEW_YORK = timezone(timedelta(hours=-5))
MOMENTS = [
    datetime(1, 1, 1, tzinfo=UTC),
    datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    datetime(2024, 2, 29, 7, 0, 0, 1, tzinfo=NEW_YORK),
    datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
]
VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "byte": (pa.int8(), [-128, 127]),
    "short": (pa.int16(), [-32768, 32767]),
    "integer": (pa.int32(), [-(2**31), 2**31 - 1]),
    "long": (pa.int64(), [-(2**63), 2**63 - 1, 0]),
    "single": (pa.float32(), [1.5, -0.0, 3.4028234663852886e38, math.inf]),
    "double": (pa.float64(), [0.1, 5e-324, 1.7976931348623157e308, -math.inf, 2.0**53 + 2]),
    "money": (pa.decimal128(12, 2), [Decimal("1234567890.10"), Decimal("-0.01"), Decimal("0.00")]),
    "exact": (pa.decimal128(38, 18), [Decimal("12345678901234567890.123456789012345678"), Decimal("1E-18")]),
    "flag": (pa.bool_(), [True, False]),
    "words": (pa.string(), TEXTS),
    "bytes": (pa.binary(), [b"", b"\x00\xff\\x", bytes(range(256))]),
    "day": (pa.date32(), [date(1, 1, 1), date(9999, 12, 31)]),
    "moment": (pa.timestamp("us", "UTC"), MOMENTS),
    "local": (pa.timestamp("us"), [moment.replace(tzinfo=None) for moment in MOMENTS]),
}


def test_every_value_comes_back_exactly(database: Database) -> None:
    count = max(len(values) for _, values in VALUES.values()) + 1
    columns = {name: [*values, *[None] * (count - len(values))] for name, (_, values) in VALUES.items()}
    rows = pa.table({"n": list(range(count)), **{name: pa.array(columns[name], kind) for name, (kind, _) in VALUES.items()}})
    sink = database.opened()
    database.write(sink, rows)
    sink.commit(sink.pre_commit(1) or "")
    table = database.reflected()
    with database.engine.connect() as connection:
        if database.kind == "postgresql":
            connection.execute(text("SET TIME ZONE 'UTC'"))  # Python has no year 0, where the year 1 begins in New York
        found = [row._mapping for row in connection.execute(select(table).order_by(table.c.n))]
    for name in VALUES:
        expected = columns[name]
        if name == "moment":
            expected = [value and (value.astimezone(UTC) if database.kind != "sqlite" else _utc(value)) for value in expected]
        actual = [row[name] for row in found]
        if name == "single":  # drivers read the shortest decimal
            actual = pa.array(actual, pa.float32()).to_pylist()
        if name == "exact":
            actual = [value if value is None else Decimal(value) for value in actual]
        assert actual == expected, name
        assert [type(value) for value in actual] == [type(value) for value in expected], name
    assert database.kind == "sqlite" or math.copysign(1, found[1]["single"]) == -1, "SQLite keeps no sign of zero"


def _utc(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(tzinfo=None)


def test_a_number_that_is_none(sqlite: Database, server: Database) -> None:
    rows = pa.table({"x": pa.array([1.0, math.nan, None])})
    sink = server.opened()
    server.write(sink, rows)
    sink.commit(sink.pre_commit(1) or "")
    assert [x is None or math.isnan(x) for (x,) in server.rows()] == [False, True, True]
    sink = sqlite.opened()
    with pytest.raises(SinkRowsRefused, match=r"NaN in column 'x'.*F\.nanvl\('x', F\.lit\(None\)\)"):
        sqlite.write(sink, rows)
    assert sink.pre_commit(1) is None


def test_any_name_is_quoted(database: Database) -> None:
    for table in ("Order", 'sel"ect %', "ü" * 31):
        sink = database.opened(table=table, key=[NAMES[0], "per%cent"], at_new_start="keep")
        for checkpoint_id, value in ((1, "a"), (2, "b")):
            database.write(sink, pa.table({name: ["k" if name in (NAMES[0], "per%cent") else value] for name in NAMES}))
            sink.commit(sink.pre_commit(checkpoint_id) or "")
        with database.engine.connect() as connection:
            (row,) = connection.execute(select(database.reflected(table)))
        assert dict(row._mapping) == {name: "k" if name in (NAMES[0], "per%cent") else "b" for name in NAMES}
        sink.close()


def test_a_schema(server: Database) -> None:
    server.run('CREATE SCHEMA "Ware house"')
    sink = server.opened(schema="Ware house", checkpoint_column="made by")
    sink.commit(server.staged(sink, 1, 1, 2))
    assert server.rows('SELECT * FROM "Ware house".t ORDER BY 1') == [(1, "1-job1-0"), (2, "1-job1-0")]
    assert server.tables() == []
    assert sink.table_name == "Ware house.t"
    older = server.opened(context(epoch=2), schema="Ware house", checkpoint_column="made by")
    older.recover([], restored=0)
    assert server.rows('SELECT * FROM "Ware house".t') == []
    server.run('DROP SCHEMA "Ware house" CASCADE')


# Upsert


def test_the_last_row_of_a_key_wins(database: Database) -> None:
    sink = database.opened(key=["a", "b"])

    def write(batch_id: int, *rows: tuple[int, str, str | None]) -> None:
        a, b, value = zip(*rows, strict=True)
        database.write(sink, pa.table({"a": a, "value": pa.array(value, pa.string()), "b": b}), batch_id)

    write(0, (1, "x", "first"), (1, "y", "kept"), (2, "x", "one"), (2, "x", "two"))
    write(1, (1, "x", "batch 1"))
    write(1, (1, "x", "batch 1 again"))
    sink.commit(sink.pre_commit(1) or "")
    query = "SELECT a, b, value FROM t ORDER BY 1, 2"
    assert database.rows(query) == [(1, "x", "batch 1 again"), (1, "y", "kept"), (2, "x", "two")]
    write(2, (1, "x", None), (3, "z", "new"))
    transaction = sink.pre_commit(2) or ""
    assert [sink.commit(transaction) for _ in range(2)] == [SinkCommit(rows=2)] * 2
    assert database.rows(query) == [(1, "x", None), (1, "y", "kept"), (2, "x", "two"), (3, "z", "new")]
    with pytest.raises(SinkRowsRefused, match=r"found NULL in column 'b' of the row with a = 1\. Filter"):
        database.write(sink, pa.table({"a": [1], "value": ["v"], "b": pa.array([None], pa.string())}))
    assert not sink.appends


def test_a_table_of_keys_alone(database: Database) -> None:
    sink = database.opened(key="n")
    for checkpoint_id in (1, 2):
        sink.commit(database.staged(sink, checkpoint_id, 1, 2, 2))
    assert database.rows() == [(1,), (2,)]


def test_output_modes_that_need_a_key(sqlite: Database) -> None:
    @bounded_source
    def flights(context: Any) -> Any: ...

    def counted(sink: SqlSink, output_mode: Any) -> Pipeline:
        @stage(sink=sink, output_mode=output_mode)
        def counts(flights: Any) -> Any: ...

        return Pipeline("p", [flights, counts])

    for mode in ("append", "update", "complete"):
        counted(sqlite.sink(key="n"), mode)
    for mode in ("update", "complete"):
        with pytest.raises(PipelineDefinitionError, match="SqlSink"):
            counted(sqlite.sink(), mode)


# Tables that exist


def test_an_existing_table_with_more_columns(database: Database) -> None:
    number = "NUMERIC(30, 0)" if database.kind == "postgresql" else "INTEGER"
    database.run(f"CREATE TABLE t (extra TEXT, made TIMESTAMP DEFAULT CURRENT_TIMESTAMP NOT NULL, n {number}, w VARCHAR(9))")
    sink = database.opened()
    database.write(sink, pa.table({"w": ["a"], "n": pa.array([2**62], pa.int64())}))
    sink.commit(sink.pre_commit(1) or "")
    assert database.rows("SELECT extra, n, w FROM t WHERE made IS NOT NULL") == [(None, 2**62, "a")]


MISFITS: list[tuple[str, pa.DataType, dict[str, Any], str]] = [
    ("CREATE TABLE t (m BIGINT)", pa.int64(), {}, r"column 'n' of type BIGINT.*found m.*ADD COLUMN"),
    ("CREATE TABLE t (n TEXT)", pa.int64(), {}, r"'n' to have the type BIGINT.*int64, found TEXT"),
    ("CREATE TABLE t (n BIGINT, m TEXT NOT NULL)", pa.int64(), {}, r"column 'm'.*NOT NULL and has no default"),
    ("CREATE VIEW t AS SELECT 1 AS n", pa.int64(), {}, "found a view"),
    ("CREATE TABLE t (n BIGINT)", pa.int64(), {"key": "n"}, r"unique index of the columns n.*CREATE UNIQUE INDEX"),
    ("CREATE TABLE t (n BIGINT)", pa.int64(), {"checkpoint_column": "c"}, r"column 'c' of type TEXT"),
    ("CREATE TABLE t (n BOOLEAN)", pa.int8(), {}, "found BOOLEAN"),
    ("CREATE TABLE t (n BIGINT)", pa.bool_(), {}, "found BIGINT"),
    ("CREATE TABLE t (n DATE)", pa.timestamp("us"), {}, "found DATE"),
    ("CREATE TABLE t (n TEXT)", pa.binary(), {}, "found TEXT"),
    ("CREATE TABLE t (n CHAR(3))", pa.string(), {}, r"found CHAR\(3\)"),
    ("CREATE TABLE t (m BIGINT, n BIGINT GENERATED ALWAYS AS (1) STORED)", pa.int64(), {}, "database computes it"),
]
SERVER_MISFITS: list[tuple[str, pa.DataType, dict[str, Any], str]] = [
    ("CREATE TABLE t (n SMALLINT)", pa.int32(), {}, "found SMALLINT"),
    ("CREATE TABLE t (n NUMERIC(10, 2))", pa.decimal128(10, 3), {}, r"found NUMERIC\(10, 2\)"),
    ("CREATE TABLE t (n NUMERIC(10, 3))", pa.decimal128(10, 2), {}, r"found NUMERIC\(10, 3\)"),
    ("CREATE TABLE t (n TIMESTAMP)", pa.timestamp("us", "UTC"), {}, "found TIMESTAMP"),
    ("CREATE TABLE t (n TIMESTAMPTZ)", pa.timestamp("us"), {}, "found TIMESTAMP"),
    ("CREATE TABLE t (n BIGINT); CREATE UNIQUE INDEX i ON t (n) WHERE n > 0", pa.int64(), {"key": "n"}, "unique index"),
]


@pytest.mark.parametrize(("statement", "kind", "settings", "message"), MISFITS, ids=[each[3][:30] for each in MISFITS])
def test_a_table_that_does_not_fit(
    database: Database, statement: str, kind: pa.DataType, settings: dict[str, Any], message: str
) -> None:
    database.run(statement)
    sink = database.opened(**settings)
    with pytest.raises(SinkColumnsMismatch, match=message):
        database.write(sink, pa.table({"n": pa.array([None], kind)}))
    assert not [name for name in database.tables() if "staging" in name]


@pytest.mark.parametrize(("statement", "kind", "settings", "message"), SERVER_MISFITS, ids=[each[0] for each in SERVER_MISFITS])
def test_a_table_of_postgresql_that_does_not_fit(
    server: Database, statement: str, kind: pa.DataType, settings: dict[str, Any], message: str
) -> None:
    server.run(*statement.split(";"))
    with pytest.raises(SinkColumnsMismatch, match=message):
        server.write(server.opened(**settings), pa.table({"n": pa.array([None], kind)}))


def test_rows_that_no_table_can_hold(database: Database, server: Database) -> None:
    sink = database.opened(checkpoint_column="c")
    with pytest.raises(SinkColumnsMismatch, match=r"'n' of type list.*F\.to_json\('n'\)"):
        database.write(sink, pa.table({"n": [[1]]}))
    with pytest.raises(ReservedSinkColumn, match=r"'C'"):
        database.write(sink, pa.table({"C": [1]}))
    with pytest.raises(SinkColumnsMismatch, match=r"key's columns x.*without x"):
        database.write(database.opened(table="u", key="x"), _numbers(1))
    fields = json.dumps({"fields": [{"name": "n", "type": "interval day to second"}]})
    interval = _numbers(1).replace_schema_metadata({"org.apache.spark.sql.parquet.row.metadata": fields})
    with pytest.raises(SinkColumnsMismatch, match="interval day to second"):
        database.write(sink, interval)
    file = database.folder / "interval.parquet"
    pq.write_table(interval, file)
    with pytest.raises(SinkColumnsMismatch, match="interval day to second"):
        database.sink().check_target(context(), file)
    with pytest.raises(SinkRowsRefused, match=r"U\+0000.*'w'"):
        server.write(server.opened(table="v"), pa.table({"w": ["a\0b"]}))
    server.run("CREATE TABLE short (w VARCHAR(2))")
    with pytest.raises(SinkRowsRefused, match=r"at most 2 characters, found 'abc' in column 'w'"):
        server.write(server.opened(table="short"), pa.table({"w": ["abc"]}))


def test_names_that_sqlite_cannot_distinguish(sqlite: Database) -> None:
    with pytest.raises(SinkColumnsMismatch, match="'a' and 'A'"):
        sqlite.write(sqlite.opened(), pa.table({"a": [1], "A": [2]}))


# Commits


def test_an_older_owner_stages_nothing_and_no_staging_table_stays(database: Database) -> None:
    late = database.opened(context(epoch=6))
    held = database.staged(late, 1, 1, 2)
    files = {name: path.rename(database.folder / name) for name, path in late.transaction_files(held).items()}
    newer = database.opened(context(epoch=7, attempt="newer"))
    newer.recover([])
    assert database.rows() == []
    without = [name for name in database.tables() if name != "t"]
    for act in (lambda: database.write(late, _numbers(3), 2), lambda: late.restore_transaction(held, files)):
        with pytest.raises(SinkFenced, match=r"epoch 6.*epoch 7"):
            act()
        assert [name for name in database.tables() if name != "t"] == without
    newer.commit(database.staged(newer, 2, 4))
    newer.abort(database.staged(newer, 3, 5))
    database.write(newer, _numbers(6), 4)
    newer.close()
    database.opened(context(epoch=8, attempt="newest")).recover([])
    assert ([name for name in database.tables() if name != "t"], database.rows()) == (without, [(4,)])


def test_a_commit_of_unknown_outcome(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is lost after the server has committed: the second try finds the commit."""
    for call in ("write", "commit", "restore"):
        sink = database.opened(context(attempt=call), table=f"t_{call}")
        transaction = "" if call == "write" else database.staged(sink, 1, 1, 2)
        files: dict[str, Path] = {}
        if call == "restore":
            files = {name: path.rename(database.folder / name) for name, path in sink.transaction_files(transaction).items()}
            sink.abort(transaction)
        assert sink._instance is not None
        dialect: Any = sink._instance.target.database._engine.dialect
        _lose_connection_after_the_next_commit(dialect, monkeypatch)
        if call == "write":
            transaction = database.staged(sink, 1, 1, 2)
        if call == "restore":
            sink.restore_transaction(transaction, files)
            _lose_connection_after_the_next_commit(dialect, monkeypatch)
        sink.commit(transaction)
        assert database.rows(f"SELECT * FROM t_{call} ORDER BY 1") == [(1,), (2,)]


def _lose_connection_after_the_next_commit(dialect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = type(dialect).do_commit

    def commit(connection: Any) -> None:
        real(dialect, connection)
        monkeypatch.setattr(dialect, "do_commit", lambda connection: real(dialect, connection))
        if dialect.name == "postgresql":
            connection.driver_connection.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        error = sqlite3.OperationalError("database is locked")
        error.sqlite_errorname = "SQLITE_BUSY"  # type: ignore[misc]
        raise error

    monkeypatch.setattr(dialect, "do_commit", commit)


# Failures of the database


def test_a_table_that_is_dropped_while_rows_are_staged(database: Database) -> None:
    sink = database.opened(retry_for=0)
    transaction = database.staged(sink, 1, 1)
    database.run("DROP TABLE t")
    with pytest.raises(SinkTargetChanged, match=r"dropped or changed.*stay staged"):
        sink.commit(transaction)
    with pytest.raises(SinkTargetChanged, match="does not exist"):
        database.write(sink, _numbers(2))
    database.run("CREATE TABLE t (n BIGINT)")
    sink.commit(transaction)
    assert database.rows() == [(1,)]


@pytest.mark.parametrize(("statement", "found"), [("DROP TABLE {}", "no such table"), ("DELETE FROM {}", "0")])
def test_staged_rows_that_another_program_has_deleted_are_lost(database: Database, statement: str, found: str) -> None:
    sink = database.opened()
    sink.commit(database.staged(sink, 1, 1))
    transaction = database.staged(sink, 2, 2)
    (staging,) = (name.rpartition(".")[2] for name in database.tables() if "__staging_" in name)
    database.run(statement.format(staging))
    with pytest.raises(
        SinkTransactionLost, match=f"expected 1 staged rows in {staging}, found {found}.*restore another checkpoint"
    ):
        sink.commit(transaction)
    assert database.rows() == [(1,)]


def test_a_file_that_another_program_has_locked_is_waited_for_no_longer_than_was_said(
    sqlite: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[float] = []
    connect = sqlite3.connect

    def connecting(*arguments: Any, **settings: Any) -> sqlite3.Connection:
        timeouts.append(settings["timeout"])
        return connect(*arguments, **settings)

    with connect(sqlite.folder / "data.db", isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr(sqlite3.dbapi2, "connect", connecting)
        with pytest.raises(SinkUnavailable, match=r"within 0\.2 s, found: database is locked"):
            sqlite.opened(retry_for=0.2)
        other.execute("ROLLBACK")
    sqlite.opened(retry_for=600)
    assert timeouts == [0.2, 60]


def test_a_table_that_another_program_has_locked_is_waited_for_no_longer_than_was_said(server: Database) -> None:
    sink = server.opened(retry_for=0.3)
    transaction = server.staged(sink, 1, 1)
    with server.engine.begin() as other:
        other.execute(text("LOCK TABLE t IN SHARE MODE"))
        with pytest.raises(SinkUnavailable, match=r"within 0\.3 s, found: canceling statement due to lock timeout"):
            sink.commit(transaction)
    sink.commit(transaction)
    assert server.rows() == [(1,)]


FILE_CHANGES = {
    "deleted with its log": "No such file",
    "moved": "No such file",
    "folder moved": "No such file",
    "folder exchanged for a file": "Not a directory",
    "exchanged for a copy": "another file at its place",
}


@pytest.mark.parametrize("change", FILE_CHANGES)
@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_nothing_is_written_to_a_file_that_is_not_at_its_place(tmp_path: Path, mode: str, change: str) -> None:
    folder, away = tmp_path / "db", tmp_path / "away"
    folder.mkdir()
    file = folder / "data.db"
    database = Database("sqlite", f"sqlite:///{file}", tmp_path)
    database.run(f"PRAGMA journal_mode={mode}")
    sink = database.opened()
    sink.commit(database.staged(sink, 1, 1))
    waiting = database.staged(sink, 2, 2)
    database.engine.dispose()
    if change.startswith("folder"):
        folder.rename(away)
        if change == "folder exchanged for a file":
            folder.touch()
    elif change == "deleted with its log":
        for each in folder.iterdir():
            each.unlink()
    else:
        file.rename(away)
        if change == "exchanged for a copy":
            file.write_bytes(away.read_bytes())
    there = sorted(tmp_path.rglob("data.db"))
    for act in (lambda: sink.commit(waiting), lambda: database.staged(sink, 3, 3), lambda: sink.abort(waiting)):
        with pytest.raises(SinkTargetChanged, match=rf"data\.db: expected.*{FILE_CHANGES[change]}.*Put the file back"):
            act()
    assert sorted(tmp_path.rglob("data.db")) == there, "none was created"


def test_a_file_that_is_put_back_takes_the_rows(sqlite: Database) -> None:
    sqlite.run("PRAGMA journal_mode=wal")
    sink = sqlite.opened()
    waiting = sqlite.staged(sink, 1, 1)
    file, away = sqlite.folder / "data.db", sqlite.folder / "away.db"
    file.rename(away)
    with pytest.raises(SinkTargetChanged, match="No such file"):
        sink.commit(waiting)
    away.rename(file)
    sink.commit(waiting)
    assert sqlite.rows() == [(1,)]


ALTERED: list[tuple[str, pa.DataType, Any, list[str], bool]] = [
    ("sqlite", pa.string(), "0012", ["DROP TABLE t", "CREATE TABLE t (n BIGINT, v INTEGER, c TEXT)"], False),
    ("sqlite", pa.string(), "0012", ["DROP TABLE t", "CREATE TABLE t (n BIGINT, v VARCHAR(2), c TEXT)"], True),
    ("postgresql", pa.decimal128(10, 3), Decimal("1.234"), ["ALTER TABLE t ALTER v TYPE NUMERIC(10, 2)"], False),
    ("postgresql", pa.decimal128(10, 3), Decimal("1.230"), ["ALTER TABLE t ALTER v TYPE NUMERIC(12, 4)"], True),
    ("postgresql", pa.float64(), 0.1, ["ALTER TABLE t ALTER v TYPE REAL"], False),
    ("postgresql", pa.string(), "ab  ", ["ALTER TABLE t ALTER v TYPE VARCHAR(2)"], False),
    ("postgresql", pa.timestamp("us"), MOMENTS[1].replace(tzinfo=None), ["ALTER TABLE t ALTER v TYPE TIMESTAMP(0)"], False),
    ("postgresql", pa.timestamp("us", "UTC"), MOMENTS[1], ["ALTER TABLE t ALTER v TYPE TIMESTAMP"], False),
]


@pytest.mark.parametrize(("kind", "arrow", "value", "changes", "fits"), ALTERED, ids=[f"{e[0]}-{e[3][-1]}" for e in ALTERED])
def test_no_value_is_changed_by_a_table_that_is_altered_while_a_run_writes(
    request: pytest.FixtureRequest, kind: str, arrow: pa.DataType, value: Any, changes: list[str], fits: bool
) -> None:
    """Staged rows, rows that were taken back, and rows that come later: each keeps its value, or is refused and stays."""
    database: Database = request.getfixturevalue("sqlite" if kind == "sqlite" else "server")
    sink = database.opened(checkpoint_column="c")

    def written(number: int) -> str:
        database.write(sink, pa.table({"n": pa.array([number], pa.int64()), "v": pa.array([value], arrow)}), number)
        return sink.pre_commit(number) or ""

    sink.commit(written(1))
    sink.commit(written(2))
    sink = database.opened(context(epoch=2), checkpoint_column="c")
    sink.recover([], restored=1)
    waiting = written(3)
    database.run("DELETE FROM t")
    database.run(*changes)
    if fits:
        sink.commit(waiting)
        assert database.rows("SELECT n, v FROM t") == [(3, value)]
        return
    with pytest.raises(SinkTargetChanged, match=r"column 'v' of t to hold.*changes their values.*stay in t__staging"):
        sink.commit(waiting)
    with pytest.raises((SinkColumnsMismatch, SinkRowsRefused), match="column 'v'"):
        written(4)
    sink.close()
    forth = database.opened(context(epoch=3), checkpoint_column="c")
    with pytest.raises(SinkTargetChanged, match=r"column 'v' of t to hold.*stay in t__taken_back"):
        forth.recover([], restored=2)
    assert database.rows("SELECT n, v FROM t") == []
    assert [n for (n,) in database.rows("SELECT n FROM t__taken_back")] == [2]


def test_a_table_that_is_gone_when_the_job_resumes(database: Database) -> None:
    """A new one would hold the rows of later checkpoints only."""
    sink = database.opened()
    sink.start_new()
    sink.commit(database.staged(sink, 1, 1))
    sink.close()
    database.run("ALTER TABLE t RENAME TO former")
    with pytest.raises(SinkTargetChanged, match=r"to which job 1.* has committed rows .* dropped or renamed"):
        database.opened(context(attempt="a2"))
    assert "t" not in database.tables()
    database.sink().check_new_start(context(job_id=2, attempt=""))  # a new job may begin
    database.run("ALTER TABLE former RENAME TO t")
    again = database.opened(context(attempt="a3"))
    again.recover([], restored=1)
    again.commit(database.staged(again, 2, 2))
    assert database.rows() == [(1,), (2,)]


LEAVES_OUT = {
    "sqlite": ["CREATE TRIGGER g BEFORE INSERT ON t WHEN NEW.n = 2 BEGIN SELECT RAISE(IGNORE); END"],
    "postgresql": [
        "CREATE FUNCTION g() RETURNS trigger AS 'BEGIN IF NEW.n = 2 THEN RETURN NULL; END IF; RETURN NEW; END' LANGUAGE plpgsql",
        "CREATE TRIGGER g BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION g()",
    ],
}
TAKES_ALL = {"sqlite": "DROP TRIGGER g", "postgresql": "DROP TRIGGER g ON t"}


def test_rows_that_a_trigger_leaves_out_are_not_committed_in_part(database: Database) -> None:
    sink = database.opened(checkpoint_column="c")
    sink.start_new()
    sink.commit(database.staged(sink, 1, 1))
    sink.commit(database.staged(sink, 2, 2))
    text = database.staged(sink, 3, 3, 2)
    sink.recover([], restored=1)
    text = database.staged(sink, 3, 3, 2)
    database.run(*LEAVES_OUT[database.kind])
    with pytest.raises(SinkRowsRefused, match="takes each of 2 rows, found that the database has inserted 1: a trigger"):
        sink.commit(text)
    assert database.rows("SELECT n FROM t") == [(1,)]
    database.run(TAKES_ALL[database.kind])
    sink.commit(text)
    assert database.rows("SELECT n FROM t ORDER BY n") == [(1,), (2,), (3,)]


def test_a_constraint_that_refuses_the_commit(database: Database) -> None:
    database.run("CREATE TABLE t (n BIGINT CHECK (n < 10))")
    sink = database.opened()
    transaction = database.staged(sink, 1, 1, 11)
    with pytest.raises(SinkRowsRefused, match="stay staged"):
        sink.commit(transaction)
    assert database.rows() == []
    database.run("DROP TABLE t", "CREATE TABLE t (n BIGINT)")
    sink.commit(transaction)
    assert database.rows() == [(1,), (11,)]


def test_the_server_is_away_for_a_while(server: Database, postgresql: PostgresqlServer) -> None:
    sink = server.opened(retry_for=60)
    first = server.staged(sink, 1, 1)
    postgresql.stop()
    try:
        impatient = server.sink(retry_for=0.3)
        with pytest.raises(SinkUnavailable, match=r"(?s)within 0\.3 s.*Nothing was lost") as raised:
            impatient.open(context())
        assert not raised.value.repeats
        assert PASSWORD not in str(raised.value)
    finally:
        postgresql.start()
    for checkpoint_id, transaction in ((2, first), (3, None)):
        with postgresql.connect() as connection:  # the sink's connection is lost in the middle of an operation
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'dagster%'")
        sink.commit(transaction or server.staged(sink, checkpoint_id, checkpoint_id))
    assert server.rows() == [(1,), (3,)]


def test_wrong_access_is_told_at_once(postgresql: PostgresqlServer, sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "not the passw%rd"
    for url in (postgresql.url(password=wrong), postgresql.url(database="nowhere"), f"sqlite:///{sqlite.folder}/dir.db"):
        (sqlite.folder / "dir.db").mkdir(exist_ok=True)
        began = time.monotonic()
        with pytest.raises(InvalidSinkDatabase, match="expected access to the database") as raised:
            SqlSink(url, "t", retry_for=600).check_new_start(context())
        assert time.monotonic() - began < 300, "it is not repeated"
        assert raised.value.__cause__ is None and raised.value.__suppress_context__
        for secret in (wrong, PASSWORD):
            assert secret not in str(raised.value)


ERRORS = [
    (psycopg.errors.DiskFull, DatabaseFailure.NO_SPACE),
    (psycopg.errors.DeadlockDetected, DatabaseFailure.AWAY),
    (psycopg.errors.SerializationFailure, DatabaseFailure.AWAY),
    (psycopg.errors.AdminShutdown, DatabaseFailure.AWAY),
    (psycopg.errors.CannotConnectNow, DatabaseFailure.AWAY),
    (psycopg.errors.TooManyConnections, DatabaseFailure.AWAY),
    (psycopg.errors.ReadOnlySqlTransaction, DatabaseFailure.NO_SPACE),
    (psycopg.errors.InsufficientPrivilege, DatabaseFailure.NO_ACCESS),
    (psycopg.errors.UndefinedColumn, DatabaseFailure.TABLE),
    (psycopg.errors.NumericValueOutOfRange, DatabaseFailure.ROWS),
    (psycopg.errors.UniqueViolation, DatabaseFailure.ROWS),
    (psycopg.errors.ProgramLimitExceeded, DatabaseFailure.ROWS),
    (psycopg.errors.QueryCanceled, DatabaseFailure.OTHER),
    ("SQLITE_FULL", DatabaseFailure.NO_SPACE),
    ("SQLITE_IOERR_WRITE", DatabaseFailure.NO_SPACE),
    ("SQLITE_BUSY_SNAPSHOT", DatabaseFailure.AWAY),
    ("SQLITE_READONLY", DatabaseFailure.NO_ACCESS),
    ("SQLITE_READONLY_DBMOVED", DatabaseFailure.MOVED),
    ("SQLITE_CONSTRAINT_UNIQUE", DatabaseFailure.ROWS),
    ("SQLITE_ERROR", DatabaseFailure.OTHER),
]


@pytest.mark.parametrize(("error", "failure"), ERRORS, ids=str)
def test_what_an_error_of_the_driver_means(error: Any, failure: DatabaseFailure) -> None:
    if isinstance(error, str):
        raised: Exception = sqlite3.OperationalError("text")
        raised.sqlite_errorname = error  # type: ignore[attr-defined]
    else:
        raised = error("text")
    assert failure_of(raised) is failure


# New starts


def test_rows_that_the_sink_has_not_written(database: Database) -> None:
    database.run("CREATE TABLE t (n BIGINT)")
    database.sink().check_new_start(context())
    database.run("INSERT INTO t VALUES (7)")
    for choice in ("refuse", "replace"):
        with pytest.raises(SinkPathInUse, match="at_new_start='keep'"):
            database.sink(at_new_start=choice).check_new_start(context())
    sink = database.sink(at_new_start="keep")
    sink.check_new_start(context())
    sink.open(context())
    sink.start_new()
    sink.commit(database.staged(sink, 1, 1))
    assert database.rows() == [(1,), (7,)]
    with pytest.raises(SinkPathInUse, match="checkpoint_column"):
        database.sink(at_new_start="replace").check_new_start(context(job_id=2))


def test_a_new_start_replaces_only_the_rows_of_earlier_jobs(database: Database) -> None:
    database.run("CREATE TABLE t (n BIGINT, c TEXT)", "INSERT INTO t VALUES (7, NULL)")
    settings = {"checkpoint_column": "c", "at_new_start": "keep"}
    first = database.opened(**settings)
    first.commit(database.staged(first, 1, 1))
    settings["at_new_start"] = "replace"
    jobs = [context(job_id=2, epoch=2, index=index, parallelism=2) for index in (0, 1)]
    database.sink(**settings).check_new_start(jobs[0])
    second, other = (database.opened(job, **settings) for job in jobs)
    second.start_new()
    second.commit(database.staged(second, 2, 2))
    other.start_new()  # after the first instance has committed
    assert database.rows("SELECT n FROM t ORDER BY n") == [(2,), (7,)]


@pytest.mark.parametrize("marked", [(False,), (False, True), (True, False), (True, True)], ids=str)
def test_a_new_start_does_not_leave_rows_of_earlier_jobs_that_no_column_marks(
    database: Database, marked: tuple[bool, ...]
) -> None:
    database.run("CREATE TABLE t (n BIGINT, c TEXT)", "INSERT INTO t VALUES (7, NULL)")
    for number, column in enumerate(marked, 1):
        settings = {"checkpoint_column": "c"} if column else {}
        sink = database.opened(context(job_id=number, epoch=number), at_new_start="keep", **settings)
        sink.start_new()
        sink.commit(database.staged(sink, 1, number))
    job = context(job_id=9, epoch=9)
    new = database.sink(checkpoint_column="c", at_new_start="replace")
    if all(marked):
        new.check_new_start(job)
        new.open(job)
        new.start_new()
        assert database.rows("SELECT n FROM t") == [(7,)]
    else:
        with pytest.raises(SinkPathInUse, match="rows in t that were written without a checkpoint_column"):
            new.check_new_start(job)


def test_refused_new_starts(database: Database) -> None:
    sink = database.sink()
    sink.check_new_start(context())
    if database.kind == "sqlite":
        assert not (database.folder / "data.db").exists(), "the check changes nothing"
    sink.open(context())
    sink.start_new()
    sink.commit(database.staged(sink, 1, 1))
    with pytest.raises(SinkHoldsEarlierRows, match=r"job 1 .*'keep'.*'replace'"):
        sink.check_new_start(context(job_id=2))
    for changes in ({"stage": "other"}, {"pipeline": "other"}):
        with pytest.raises(SinkPathInUse, match="delays"):
            sink.check_new_start(context(job_id=2, **changes))
        with pytest.raises(SinkPathInUse, match="delays"):
            database.opened(context(**changes))
    database.run("DELETE FROM t")
    sink.check_new_start(context(job_id=2))


def test_jobs_of_another_storage_have_other_names(database: Database) -> None:
    first = database.opened(checkpoint_column="c")
    first.commit(database.staged(first, 1, 1))
    second = database.opened(context(history="h2", epoch=1), checkpoint_column="c", at_new_start="keep")
    second.start_new()
    second.commit(database.staged(second, 1, 2))
    assert database.rows() == [(1, "1-job1-0"), (2, "1-job1.h2-0")]


# Restores


def test_rows_that_were_taken_back_and_deleted(database: Database) -> None:
    sink = database.opened(checkpoint_column="c")
    for checkpoint_id in (1, 2):
        sink.commit(database.staged(sink, checkpoint_id, checkpoint_id))
    again = database.opened(context(epoch=2), checkpoint_column="c")
    again.recover([], restored=1)
    again.commit(database.staged(again, 3, 3))
    assert database.rows("SELECT n FROM t ORDER BY n") == [(1,), (3,)]
    database.run("DELETE FROM t__taken_back")
    with pytest.raises(SinkTransactionLost, match=r"expected 1 rows of checkpoint 2.*t__taken_back, found 0"):
        again.recover([], restored=2)
    assert database.rows("SELECT n FROM t ORDER BY n") == [(1,), (3,)]


def test_instances_that_take_rows_back_at_the_same_time(server: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one begins while the first has created the table of hidden rows, and has not committed yet."""
    settings = {"checkpoint_column": "c"}
    for index in (0, 1):
        sink = server.opened(context(index=index, parallelism=2), **settings)
        for checkpoint_id in (1, 2):
            sink.commit(server.staged(sink, checkpoint_id, 10 * checkpoint_id + index))
        sink.close()
    first, second = (server.opened(context(index=index, parallelism=2, epoch=2), **settings) for index in (0, 1))
    real = SinkTable.take_back
    failed: list[SinkError] = []

    def recover() -> None:
        try:
            second.recover([], restored=1)
        except SinkError as error:
            failed.append(error)

    other = threading.Thread(target=recover)

    def taken_back(table: SinkTable, connection: Any, mark: str) -> int:
        rows = real(table, connection, mark)
        if mark.endswith("-0"):
            other.start()
            deadline = time.monotonic() + 60
            while not server.rows("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        return rows

    monkeypatch.setattr(SinkTable, "take_back", taken_back)
    first.recover([], restored=1)
    other.join(60)
    assert failed == [] and server.rows("SELECT n FROM t ORDER BY n") == [(10,), (11,)]
    assert server.rows("SELECT n FROM t__taken_back ORDER BY n") == [(20,), (21,)]


REWRITTEN = ["DELETE FROM t WHERE n = 2", "UPDATE t SET c = NULL WHERE n = 20", "INSERT INTO t SELECT * FROM t WHERE n = 2"]


@pytest.mark.parametrize("statement", [*REWRITTEN, "ALTER TABLE t ADD COLUMN d TEXT"])
def test_rows_that_another_program_has_rewritten_cannot_be_taken_back(database: Database, statement: str) -> None:
    sink = database.opened(checkpoint_column="c")
    for checkpoint_id in (1, 2):
        sink.commit(database.staged(sink, checkpoint_id, checkpoint_id, 10 * checkpoint_id))
    database.run(statement)
    before = database.rows()
    renamed = "ADD COLUMN" in statement  # the sink's column has another name
    again = database.opened(context(epoch=2), checkpoint_column="d" if renamed else "c")
    with pytest.raises(SinkCannotTakeBack, match=r"expected 2 rows with . = '2-job1-0' in the table.*found [013]:"):
        again.recover([], restored=1)
    assert database.rows() == before and "t__taken_back" not in database.tables()


def test_rows_are_taken_back_and_come_back_although_the_table_was_altered_in_between(database: Database) -> None:
    """Every order of restores and of changes of the table: no row is lost, and none gets a value that no program gave it."""
    changes = ["ALTER TABLE t ADD COLUMN note TEXT", "ALTER TABLE t ADD COLUMN made INTEGER DEFAULT 5"]
    if database.kind == "postgresql":
        changes.append("ALTER TABLE t ALTER COLUMN v TYPE VARCHAR(20)")
    for order in itertools.permutations(changes):
        database.run(*(f"DROP TABLE IF EXISTS {name}" for name in ("t", "t__taken_back")))
        database.run("CREATE TABLE t (n BIGINT, v VARCHAR(9), c TEXT)")
        history, epochs = f"h{next(database._numbers)}", itertools.count(1)

        def restored(to: int, history: str = history, epochs: Iterator[int] = epochs) -> list[int]:
            sink = database.opened(context(history=history, epoch=next(epochs)), checkpoint_column="c", at_new_start="keep")
            sink.recover([], restored=to)
            sink.close()
            return [n for (n,) in database.rows("SELECT n FROM t ORDER BY n")]

        sink = database.opened(context(history=history, epoch=0), checkpoint_column="c", at_new_start="keep")
        for checkpoint_id in (1, 2, 3):
            sink.commit(database.staged(sink, checkpoint_id, checkpoint_id))
        sink.close()
        assert restored(2) == [1, 2]
        for change in order:
            database.run(change)
            assert restored(1) == [1]
            assert restored(3) == [1, 2, 3]
        if database.kind == "postgresql":
            database.run("UPDATE t SET v = 'twenty characters ok' WHERE n = 3")
        before = database.rows("SELECT n, v, note FROM t ORDER BY n")
        assert [note for _, _, note in before] == [None] * 3
        assert (restored(1), restored(3)) == ([1], [1, 2, 3])
        assert database.rows("SELECT n, v, note FROM t ORDER BY n") == before
    assert [each for each in database.tables() if "taken_back" in each] == ["t__taken_back"]


# The definition


def test_the_url_is_never_shown(postgresql: PostgresqlServer, monkeypatch: pytest.MonkeyPatch, server: Database) -> None:
    monkeypatch.setenv("WAREHOUSE", server.url)
    sinks = [server.sink(), SqlSink(dg.EnvVar("WAREHOUSE"), "t"), SqlSink(lambda: server.url, "t")]
    for sink in sinks:
        sink.open(context())
        shown = [repr(sink), sink.uri, sink.location, sink.table_name, server.staged(sink, 1, 1)]
        with pytest.raises(SinkError) as raised:
            server.write(sink, pa.table({"n": [None, "x"]}))
        sink.recover([])
        for each in (*shown, str(raised.value)):
            assert each is None or ("s3cret" not in each and "tester" not in each), each
        sink.close()
    assert [sinks[0].location, sinks[2].location] == [sinks[1].location, None]
    assert str(sinks[0].uri).startswith("postgresql://")
    monkeypatch.delenv("WAREHOUSE")
    assert sinks[1].location == "$WAREHOUSE//t"
    with pytest.raises(InvalidSinkDatabase, match="environment variable WAREHOUSE"):
        sinks[1].check_new_start(context())


def test_secrets_in_the_text_of_an_error_are_replaced() -> None:
    address = sql_address("postgresql://u:a%2Fb%20c@h:5433/d?connect_timeout=5&sslpassword=pq&host=/run/pg")
    text = "port 5433, host /run/pg, 5 s: a/b c, a%2Fb%20c, a%2Fb+c, pq"
    assert address.without_credentials(text) == "port 5433, host /run/pg, 5 s: ***, ***, ***, ***"
    assert not {"a/b", "pq", "u:"} & set(re.split(r"[^\w/:]", f"{address} {address.shown}"))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://u:s3cret@h/d", "'mysql'"),
        ("postgresql+psycopg2://u:s3cret@h/d", "postgresql.psycopg2"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("s3cret of a typing error", "not a URL"),
        (7, "type int"),
    ],
)
def test_urls_that_are_refused(url: Any, message: str) -> None:
    with pytest.raises(InvalidSinkDatabase, match=message) as raised:
        SqlSink(url, "t")
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"table": "a.b"},
        {"table": ""},
        {"table": "x" * 64},
        {"at_new_start": "append"},
        {"key": "n", "checkpoint_column": "c"},
        {"schema": "s"},
        {"retry_for": -1},
    ],
    ids=str,
)
def test_settings_that_are_refused(settings: dict[str, Any], sqlite: Database) -> None:
    with pytest.raises((ValueError, InvalidDurationError), match="expected"):
        sqlite.sink(**settings)


def test_one_table_has_one_sink(sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sqlite.folder)

    def sources(*tables: tuple[str, str]) -> list[Any]:
        return [bounded_source(name=f"s{n}", sink=SqlSink(*each))(lambda context: None) for n, each in enumerate(tables)]

    with pytest.raises(PipelineDefinitionError, match="separate locations"):
        Pipeline("p", sources((sqlite.url, "t"), ("sqlite:///data.db", "T")))
    Pipeline("p", sources((sqlite.url, "t"), (sqlite.url, "tt")))
    sqlite.run("CREATE TABLE T (n BIGINT)")
    with pytest.raises(SinkColumnsMismatch, match=r"a table 't', found 'T'\. Give the sink the table's name as it is"):
        sqlite.write(sqlite.opened(), _numbers(1))


def test_without_sqlalchemy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(SinkLibraryMissing, match=r"pip install 'dagster-checkpoints\[sql\]'"):
        SqlSink("sqlite:////tmp/x.db", "t")


def test_copies_of_a_process_that_was_killed_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    alive = TransactionCopies()
    abandoned = tmp_path / "dagster-checkpoints-transactions-x"
    abandoned.mkdir()
    (abandoned / "lock").touch()
    for folder in tmp_path.iterdir():
        os.utime(folder, (0, 0))
    TransactionCopies().close()
    assert list(tmp_path.iterdir()) == [alive._folder.path]
    alive.close()
    assert list(tmp_path.iterdir()) == []


def test_no_savepoint_is_taken_of_copies_that_another_program_has_deleted(sqlite: Database) -> None:
    sink = sqlite.opened()
    sqlite.write(sink, _numbers(1, 2), 0)
    transaction = sqlite.staged(sink, 1, 3)
    first, second = sink.transaction_files(transaction).values()
    for file, found in ((first, 1), (second, 0)):
        file.unlink()
        with pytest.raises(SinkUnavailable, match=rf"holds the 3 rows of transaction .* found {found}: another program"):
            sink.transaction_files(transaction)
    sink.commit(transaction)
    assert (sqlite.rows(), sink.transaction_files(transaction)) == ([(1,), (2,), (3,)], {})


def test_the_page_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs/sinks/sql.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "docs/sinks/sql.md", "exec"), names)
    pipeline = Pipeline("shop", [names["sales"], names["revenue"]])
    sales, revenue = (each.sink for each in pipeline.stages)
    assert (sales.location, revenue.location) == ("sqlite:////tmp/shop.db/main/sales", "$WAREHOUSE_URL/shop/revenue")
    assert revenue.supported_output_modes >= {"update", "complete"}
    settings = set(re.findall(r"^\| `(\w+)` \|", page.split("## What readers see")[0], re.MULTILINE))
    assert settings == set(inspect.signature(SqlSink).parameters)
