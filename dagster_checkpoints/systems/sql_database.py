"""A SqlSink's connection to its database: transactions that are repeated when the server is away, and errors by their cause.

Must not know the sink's tables.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, create_engine, event, exc

from dagster_checkpoints.systems.errors import (
    InvalidSinkDatabase,
    SinkError,
    SinkRowsRefused,
    SinkTargetChanged,
    SinkUnavailable,
)
from dagster_checkpoints.systems.sql_address import SqlAddress

T = TypeVar("T")

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_LONGEST_LOCK = 60.0
_READING = "dagster_checkpoints_reading"


class DatabaseFailure(Enum):
    """What an error of the driver means for the sink."""

    AWAY = "the server is away, or another transaction is in the way: repeat"
    NO_SPACE = "the server cannot work now: another attempt may succeed"
    NO_ACCESS = "wrong credentials, no such database, missing rights"
    ROWS = "a value or a row does not fit the table"
    TABLE = "a table or a column is missing, or changed"
    MOVED = "the database's file is not at its place any more"
    OTHER = "another failure"


_PREFIXES = (
    # Source: https://www.postgresql.org/docs/current/errcodes-appendix.html
    (DatabaseFailure.AWAY, ("08", "40001", "40P01", "55P03", "53300", "57P01", "57P02", "57P03", "57P05")),
    (DatabaseFailure.NO_SPACE, ("53", "58", "25006")),
    (DatabaseFailure.NO_ACCESS, ("28", "3D000", "3F000", "42501")),
    (DatabaseFailure.ROWS, ("22", "23", "44", "54")),  # 54: among others a key that is too long for its index
    (DatabaseFailure.TABLE, ("42",)),
    # Source: https://www.sqlite.org/rescode.html
    (DatabaseFailure.MOVED, ("SQLITE_READONLY_DBMOVED",)),
    (DatabaseFailure.AWAY, ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_SCHEMA")),
    (DatabaseFailure.NO_SPACE, ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_NOMEM")),
    (DatabaseFailure.NO_ACCESS, ("SQLITE_CANTOPEN", "SQLITE_NOTADB", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")),
    (DatabaseFailure.ROWS, ("SQLITE_CONSTRAINT", "SQLITE_MISMATCH", "SQLITE_TOOBIG")),
    (DatabaseFailure.NO_ACCESS, ("SQLITE_CORRUPT",)),
)
_FULL = re.compile(r"\bfull\b|no space|quota", re.IGNORECASE)
_REFUSED_FOR_NOW = re.compile(r"starting up|shutting down|recovery|too many|remaining connection slots|not yet accepting")


def failure_of(error: Exception) -> DatabaseFailure:
    """The meaning of an error that SQLAlchemy or the driver has raised."""
    driver = error.orig if isinstance(error, exc.DBAPIError) else error
    code = getattr(driver, "sqlstate", None) or getattr(driver, "sqlite_errorname", None)
    if code == "SQLITE_ERROR" and re.search(r"no such|has no column|values for|does not match", str(driver)):
        return DatabaseFailure.TABLE
    for failure, prefixes in _PREFIXES:
        if code is not None and code.startswith(prefixes):
            return failure
    if code is None and isinstance(error, exc.TimeoutError):
        return DatabaseFailure.AWAY
    if code is None and type(driver).__name__ in ("OperationalError", "ConnectionTimeout"):
        # libpq gives no code for a connection that could not be opened. FATAL is the server's own answer.
        text = str(driver)
        refused = ("FATAL:" in text and not _REFUSED_FOR_NOW.search(text)) or "no password supplied" in text
        return DatabaseFailure.NO_ACCESS if refused else DatabaseFailure.AWAY
    return DatabaseFailure.OTHER


class _Undone(Exception):
    """The work of a transaction is done, and must not be committed."""


class SqlDatabase:
    """Transactions in one database.

    Args:
        address: the database.
        sink: the sink as errors name it.
        retry_for: how long a transaction is repeated while the server is away, in seconds.
    """

    def __init__(self, address: SqlAddress, sink: str, retry_for: float) -> None:
        self.address = address
        self._sink = sink
        self._retry_for = retry_for
        self._engine = _engine(address, retry_for)
        self._file: tuple[int, int] | None = None
        self._driver_errors: tuple[type[Exception], ...] = (exc.DBAPIError, exc.TimeoutError, self._engine.dialect.dbapi.Error)

    def write(self, work: Callable[[Connection], T]) -> T:
        """Perform the work in one transaction, which may be repeated: the work must be right after a commit of unknown outcome.

        Raises:
            SinkUnavailable: the server did not answer within the time; or it has no space.
            InvalidSinkDatabase: the credentials are wrong, or rights are missing.
            SinkRowsRefused: a row does not fit the table.
            SinkTargetChanged: a table or a column does not exist, or SQLite's file is not at its place any more.
        """
        return self._repeated(work, reading=False)

    def read(self, work: Callable[[Connection], T]) -> T:
        """Like :meth:`write`, for work that changes nothing."""
        return self._repeated(work, reading=True)

    def attempt(self, work: Callable[[Connection], object]) -> None:
        """Like :meth:`write`, and the transaction is rolled back: the work changes nothing."""

        def undone(connection: Connection) -> None:
            work(connection)
            raise _Undone

        with suppress(_Undone):
            self._repeated(undone, reading=False)

    def close(self) -> None:
        self._engine.dispose()

    def _repeated(self, work: Callable[[Connection], T], reading: bool) -> T:
        deadline, pause = time.monotonic() + self._retry_for, _FIRST_PAUSE
        while True:
            if self._file is not None:
                self._check_file()  # a new connection would create the file
            elif not reading and self.address.kind == "sqlite":
                Path(str(self.address.url.database)).parent.mkdir(parents=True, exist_ok=True)
            try:
                with self._engine.connect().execution_options(**{_READING: reading}) as connection, connection.begin():
                    if self.address.kind == "sqlite":
                        self._check_file()
                    return work(connection)
            except self._driver_errors as error:
                failure = failure_of(error)
                if failure is not DatabaseFailure.AWAY or time.monotonic() + pause > deadline:
                    raise self._translated(error, failure) from None  # the driver's error may show credentials
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _check_file(self) -> None:
        """Refuse a SQLite file that is not the one that was opened first.

        With a write-ahead log SQLite commits to a file that was moved or deleted, where readers do not find the rows.

        Source: https://www.sqlite.org/howtocorrupt.html, "Unlinking or renaming a database file while in use".
        """
        try:
            at_place = os.stat(str(self.address.url.database))
            found = (at_place.st_dev, at_place.st_ino)
        except OSError as error:
            raise self._moved(f"found: {error.strerror}") from error
        if self._file is None:
            self._file = found
        elif found != self._file:
            raise self._moved("found another file at its place")

    def _moved(self, found: str) -> SinkTargetChanged:
        return SinkTargetChanged(
            f"{self._sink} in {self.address.shown}: expected the database's file that was opened when the run began, {found}: it "
            "was moved, deleted or exchanged. This transaction has changed nothing. Put the file back, with its -wal file if "
            "there is one, or restore it from a backup, and start the run again"
        )

    def _translated(self, error: Exception, failure: DatabaseFailure) -> SinkError:
        driver = error.orig if isinstance(error, exc.DBAPIError) else error
        found = self.address.without_credentials(str(driver)).strip()
        where = f"{self._sink} in {self.address.shown}"
        match failure:
            case DatabaseFailure.AWAY:
                return SinkUnavailable(
                    f"{where}: expected the database to answer within {self._retry_for:g} s, found: {found}. Nothing was lost: "
                    "the job continues from its latest checkpoint when the database is back"
                )
            case DatabaseFailure.NO_SPACE | DatabaseFailure.OTHER:
                full = failure is DatabaseFailure.NO_SPACE and _FULL.search(found)
                advice = "Free space there, or enlarge its file system" if full else "Look into the server's log"
                return SinkUnavailable(
                    f"{where}: expected the database to perform a transaction, found: {found}. {advice}. Nothing is lost: the "
                    "job continues from its latest checkpoint, and another attempt may succeed"
                )
            case DatabaseFailure.NO_ACCESS:
                return InvalidSinkDatabase(
                    f"{where}: expected access to the database, with the rights to create tables in the sink's schema and to "
                    f"change its table, found: {found}"
                )
            case DatabaseFailure.MOVED:
                return self._moved(f"found: {found}")
            case DatabaseFailure.ROWS:
                return SinkRowsRefused(
                    f"{where}: expected the table to accept the stage's rows, found: {found}. Rows that a checkpoint holds stay "
                    "staged: correct the table's constraints or the rows that are in the way, and start the run again; it "
                    "continues from the checkpoint"
                )
            case DatabaseFailure.TABLE:
                return SinkTargetChanged(
                    f"{where}: expected the sink's tables as they were when the job began, found: {found}. The table was dropped "
                    "or changed. Rows that a checkpoint holds stay staged: restore the table, and start the run again"
                )


def _engine(address: SqlAddress, retry_for: float) -> Any:
    given = address.url.query
    if address.kind == "sqlite":
        arguments: dict[str, Any] = {} if "timeout" in given else {"timeout": min(_LONGEST_LOCK, retry_for)}
        arguments["check_same_thread"] = False
        engine = create_engine(address.url, hide_parameters=True, pool_size=1, connect_args=arguments)
        event.listen(engine, "connect", _without_implicit_transactions)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    defaults = {"connect_timeout": "10", "application_name": "dagster-checkpoints"}
    arguments = {name: value for name, value in defaults.items() if name not in given}
    arguments |= {"client_encoding": "utf8", "prepare_threshold": None}  # servers behind a pool know no prepared statements
    engine = create_engine(
        address.url,
        hide_parameters=True,
        pool_size=1,
        pool_pre_ping=True,
        isolation_level="READ COMMITTED",
        connect_args=arguments,
    )
    event.listen(engine, "connect", _with_durable_commits)
    event.listen(engine, "connect", _without_endless_locks(min(_LONGEST_LOCK, retry_for)))
    return engine


def _without_implicit_transactions(connection: Any, record: Any) -> None:
    # Source: https://docs.sqlalchemy.org/en/20/dialects/sqlite.html, "Serializable isolation / Savepoints / Transactional DDL"
    connection.isolation_level = None


def _begin_sqlite(connection: Connection) -> None:
    # IMMEDIATE: what the transaction reads first, the fence, is true until its end.
    reading = connection.get_execution_options().get(_READING)
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def _without_endless_locks(seconds: float) -> Callable[[Any, Any], None]:
    # PostgreSQL waits for ever by default: a table that another program has locked would hold the job up without a word.
    def limit(connection: Any, record: Any) -> None:
        setting = f"SELECT set_config('lock_timeout', '{max(1, round(seconds * 1000))}', false)"
        with connection.cursor() as cursor:
            cursor.execute(f"{setting} WHERE current_setting('lock_timeout') = '0'")
        connection.commit()

    return limit


def _with_durable_commits(connection: Any, record: Any) -> None:
    # A database may be set to forget the newest commits when its machine fails: staged rows would be lost.
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'")
    connection.commit()
