"""A sink that writes rows to a table of a SQL database, visible exactly once: its settings; :mod:`target` has the transactions.

Must not import Spark or Dagster; imports SQLAlchemy when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_checkpoints.pipeline.setting_values import check_seconds
from dagster_checkpoints.sinks.base import AtNewStart, SinkContext
from dagster_checkpoints.sinks.target_sink import TargetSink, scope_of
from dagster_checkpoints.systems.sql_address import IDENTIFIER_BYTES, is_known_now, sql_address, variable_name

if TYPE_CHECKING:
    from sqlalchemy import URL

    from dagster_checkpoints.sinks.sql.target import SqlTarget


class SqlSink(TargetSink):
    """Commits a stage's rows to a table of a SQLite or PostgreSQL database.

    Args:
        url: the database, as SQLAlchemy writes it (``postgresql+psycopg://user:password@host/database``,
            ``sqlite:////path/of/file.db``); or ``dg.EnvVar("NAME")``; or a function without arguments that returns the URL. The
            last two are asked when a run begins. Errors, logs and checkpoints never contain it.
        table: the table's name, without its schema. It is created if it does not exist. Only one stage of one pipeline may write
            to it.
        key: name or names of the columns by which a row replaces an earlier one (upsert); None to add every row.
        schema: the schema of the table and of the sink's own tables; None for the database's default. PostgreSQL only.
        at_new_start: what a new start, not a resumption, does with rows that an earlier job has committed: ``refuse`` (default)
            stops the run before Spark starts, ``keep`` leaves them, ``replace`` removes them when the new job begins.
        checkpoint_column: name of a text column that the sink adds, with each row's checkpoint: then a restore of an older
            checkpoint can take back the rows of later ones. None (default): such a restore is refused. Not with ``key``.
        retry_for: how long a transaction is repeated while the server is away, in seconds.

    Raises:
        InvalidSinkDatabase: the URL cannot be read, or names a database that is not supported.
        SinkLibraryMissing: SQLAlchemy or the database's driver is not installed.
        ValueError: a setting has a value that is not allowed.

    Examples:
        >>> sink = SqlSink("sqlite:////data/shop.db", "daily_sales", key=["day", "shop"])
    """

    kind = "sql"
    noun = "table"

    def __init__(
        self,
        url: str | URL | Callable[[], str | URL],
        table: str,
        *,
        key: str | Sequence[str] | None = None,
        schema: str | None = None,
        at_new_start: AtNewStart = "refuse",
        checkpoint_column: str | None = None,
        retry_for: float = 60.0,
    ) -> None:
        super().__init__(at_new_start)
        self._url = url
        self.table = table
        self.key: tuple[str, ...] = (key,) if isinstance(key, str) else tuple(key or ())
        self.schema = schema
        self.checkpoint_column = checkpoint_column
        self.retry_for = retry_for
        _check_settings(self)
        if is_known_now(url) and sql_address(url).kind == "sqlite" and schema is not None:
            raise ValueError(f"expected no schema for a SQLite database, found schema={schema!r}")

    def __repr__(self) -> str:
        options = [f"{name}={value!r}" for name in ("schema", "checkpoint_column") if (value := getattr(self, name))]
        key = [f"key={list(self.key)}"] if self.key else []
        return f"SqlSink({', '.join([self._shown_url(), repr(self.table), *key, *options])})"

    def _shown_url(self) -> str:
        name = variable_name(self._url)
        if name is not None:
            return f"EnvVar({name!r})"
        return getattr(self._url, "__name__", "function") if callable(self._url) else repr(sql_address(self._url).shown)

    @property
    def location(self) -> str | None:
        """The database, the schema and the table; None if only a run knows the database."""
        if is_known_now(self._url):
            address = sql_address(self._url)
            if address.kind == "sqlite":
                return f"{address.shown}/main/{self.table.lower()}"  # SQLite does not distinguish capital letters
            return f"{address.shown}/{self.schema or 'public'}/{self.table}"
        name = variable_name(self._url)
        return None if name is None else f"${name}/{self.schema or ''}/{self.table}"

    @property
    def uri(self) -> str | None:
        """The database's URL without user and password; None if only a run knows the database."""
        if self._instance is not None:
            return sql_address(self._url).shown
        return sql_address(self._url).shown if is_known_now(self._url) else None

    @property
    def table_name(self) -> str:
        """The table with its schema."""
        return f"{self.schema}.{self.table}" if self.schema else self.table

    @property
    def replaces_by_key(self) -> bool:
        return bool(self.key)

    def check_target(self, context: SinkContext, rows: Path) -> None:
        """Check the access to the database, and that the stage's columns fit the table, in a transaction that is rolled back.

        The transaction creates the table if there is none, stages no rows and moves them: it shows what the run may do.

        Raises:
            SinkPathInUse: the table belongs to another stage or pipeline.
            SinkColumnsMismatch, ReservedSinkColumn: the table does not fit the rows, or no table can.
            InvalidSinkDatabase, InvalidSinkPath: there is no access to the database, or its file cannot be written.
            SinkUnavailable: the database does not answer.
        """
        with closing(self.new_target(retry_for=1.0)) as target:  # a run may write to a SQLite file at this moment
            target.check_columns(scope_of(context), rows)

    def new_target(self, retry_for: float | None = None) -> SqlTarget:
        address = sql_address(self._url)
        from dagster_checkpoints.sinks.sql.target import SqlTarget  # needs SQLAlchemy

        return SqlTarget(
            address,
            self.table,
            self.schema,
            key=self.key,
            checkpoint_column=self.checkpoint_column,
            retry_for=self.retry_for if retry_for is None else retry_for,
            sink=str(self),
        )


def _check_settings(sink: SqlSink) -> None:
    if not sink.table or "." in sink.table:
        raise ValueError(f"expected the name of a table, found {sink.table!r}; the schema is a setting: SqlSink(schema=...)")
    for what, name in (("table", sink.table), ("schema", sink.schema or ""), ("column", sink.checkpoint_column or "")):
        if len(name.encode()) > IDENTIFIER_BYTES:
            raise ValueError(f"expected the name of a {what} of at most {IDENTIFIER_BYTES} bytes, found {name!r}")
    if sink.key and sink.checkpoint_column:
        raise ValueError(
            "expected key or checkpoint_column, found both: with a key, a restore of an older checkpoint takes nothing back, "
            "since the job writes the rows again"
        )
    check_seconds("SqlSink", least=0, retry_for=sink.retry_for)
