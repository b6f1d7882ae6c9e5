"""SqlSink passes the suite for sinks, on SQLite and on a PostgreSQL server."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import psycopg
import pytest
from sqlalchemy import make_url

from bench.postgresql import PostgresqlServer
from dagster_checkpoints.sinks import SqlSink
from dagster_checkpoints.testing import SinkConformance
from tests.sinks.suites import ReplacesByKey, TargetConformance

URL = "DAGSTER_CHECKPOINTS_TEST_POSTGRESQL"


def server_url() -> str:
    return os.environ[URL]


class SqliteRows(SinkConformance):
    settings: ClassVar[dict[str, Any]] = {}

    def make_sink(self, folder: Path) -> SqlSink:
        return SqlSink(f"sqlite:///{folder}/rows.db", "rows", **self.settings)

    def read(self, folder: Path) -> Sequence[int]:
        if not (folder / "rows.db").exists():
            return []
        connection = sqlite3.connect(folder / "rows.db", timeout=60)
        try:
            if not connection.execute("SELECT name FROM sqlite_master WHERE name = 'rows'").fetchone():
                return []
            return [n for (n,) in connection.execute("SELECT n FROM rows")]
        finally:
            connection.close()


class PostgresqlRows(SinkConformance):
    settings: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def server(self, postgresql: PostgresqlServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv(URL, postgresql.url())  # the processes of the crash test read it
        yield

    @staticmethod
    def table(folder: Path) -> str:
        return str(folder)[-60:]

    def make_sink(self, folder: Path) -> SqlSink:
        return SqlSink(server_url, self.table(folder), **self.settings)

    def read(self, folder: Path) -> Sequence[int]:
        url = make_url(server_url())
        table = self.table(folder).replace("%", "%%")
        host = str(url.query["host"])
        with psycopg.connect(host=host, user=url.username, password=str(url.password), dbname=url.database) as connection:
            if connection.execute("SELECT 1 FROM pg_class WHERE relname = %s", [self.table(folder)]).fetchone() is None:
                return []
            return [n for (n,) in connection.execute(f'SELECT n FROM "{table}"')]  # type: ignore[call-overload]


MARKED = {"checkpoint_column": "checkpoint"}


class TestSqlite(SqliteRows):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    crash_points = 3
    older_restore = "refuses"


class TestSqliteWithCheckpointColumn(TargetConformance, SqliteRows):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    crash_points = 1
    settings = MARKED


class TestSqliteByKey(ReplacesByKey, SqliteRows):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    crash_points = 1


class TestSqliteThatReplaces(SqliteRows):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    older_restore = "refuses"
    new_start = "replace"
    crash_points = 1
    settings: ClassVar[dict[str, Any]] = {"at_new_start": "replace"}


class TestPostgresql(PostgresqlRows):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    crash_points = 3
    older_restore = "refuses"


class TestPostgresqlWithCheckpointColumn(TargetConformance, PostgresqlRows):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    crash_points = 1
    settings = MARKED


class TestPostgresqlByKey(ReplacesByKey, PostgresqlRows):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    crash_points = 1
