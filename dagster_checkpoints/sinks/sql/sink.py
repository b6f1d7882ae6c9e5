"""A sink that writes rows to a table of a SQL database, visible exactly once: one transaction per instance and checkpoint.

::

    write()         rows go to a staging table of the transaction, in the same database; readers of the table do not see them
    pre_commit()    the transaction's text goes into the checkpoint
    commit()        ONE database transaction: the fence is read and locked; rows move from the staging table to the table; the
                    ledger records the commit; the staging table is dropped

Of two commits of one transaction the second finds it in the ledger, also after a commit whose outcome is unknown. An older owner
is refused within the transaction. :mod:`tables` performs the transactions, :mod:`ledger` is the ledger,
:mod:`target` the table, :mod:`taken_back` the restore of an older checkpoint. Must not import Spark or Dagster; imports
SQLAlchemy when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from uuid import uuid4

from dagster_checkpoints.files.urls import local_path
from dagster_checkpoints.pipeline.durations import check_seconds
from dagster_checkpoints.sinks.base import AtNewStart, SinkCommit, SinkContext, TwoPhaseCommitSink
from dagster_checkpoints.sinks.transactions import (
    AbortRest,
    Commit,
    ContinueFrom,
    Settle,
    TakeFence,
    begins_timeline,
    new_start,
    recovery,
)
from dagster_checkpoints.systems.errors import (
    SinkNotOpen,
)
from dagster_checkpoints.systems.sql_address import IDENTIFIER_BYTES, is_known_now, sql_address, variable_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from sqlalchemy import URL

    from dagster_checkpoints.sinks.sql.tables import SqlTables


@dataclass
class _StagedRows:
    """The current transaction: the numbers of the rows of each batch."""

    token: str
    end: int = 0
    batches: dict[int, range] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(map(len, self.batches.values()))


class SqlSink(TwoPhaseCommitSink):
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
        self._url = url
        self.table = table
        self.key: tuple[str, ...] = (key,) if isinstance(key, str) else tuple(key or ())
        self.schema = schema
        self.at_new_start: AtNewStart = at_new_start
        self.checkpoint_column = checkpoint_column
        self.retry_for = retry_for
        _check_settings(self)
        if is_known_now(url) and sql_address(url).kind == "sqlite" and schema is not None:
            raise ValueError(f"expected no schema for a SQLite database, found schema={schema!r}")
        self._forget()

    def _forget(self) -> None:
        self._context: SinkContext | None = None
        self._tables: SqlTables | None = None
        self._current: _StagedRows | None = None
        self._origin: int | None = None

    def __repr__(self) -> str:
        options = [f"{name}={value!r}" for name in ("schema", "checkpoint_column") if (value := getattr(self, name))]
        key = [f"key={list(self.key)}"] if self.key else []
        return f"SqlSink({', '.join([self._shown_url(), repr(self.table), *key, *options])})"

    def _shown_url(self) -> str:
        name = variable_name(self._url)
        if name is not None:
            return f"EnvVar({name!r})"
        return getattr(self._url, "__name__", "function") if callable(self._url) else repr(sql_address(self._url).shown)

    def __getstate__(self) -> dict[str, Any]:
        # Configuration only: a copy in another instance or process is opened separately.
        opened = {"_context": None, "_tables": None, "_current": None, "_origin": None}
        return {**self.__dict__, **opened}

    @property
    def supported_output_modes(self) -> frozenset[str]:  # type: ignore[override]
        """With a key also ``update`` and ``complete``, whose rows replace earlier ones."""
        return frozenset({"append", "update", "complete"} if self.key else {"append"})

    @property
    def location(self) -> str | None:
        """The database, the schema and the table; None if only a run knows the database."""
        if is_known_now(self._url):
            address = sql_address(self._url)
            default = "public" if address.kind == "postgresql" else "main"
            return f"{address.shown}/{self.schema or default}/{self.table}"
        name = variable_name(self._url)
        return None if name is None else f"${name}/{self.schema or ''}/{self.table}"

    @property
    def uri(self) -> str | None:
        """The database's URL without user and password; None if only a run knows the database."""
        if self._tables is not None:
            return self._tables.database.address.shown
        return sql_address(self._url).shown if is_known_now(self._url) else None

    @property
    def table_name(self) -> str:
        """The table with its schema."""
        return f"{self.schema}.{self.table}" if self.schema else self.table

    @property
    def appends(self) -> bool:
        return not self.key

    def check_new_start(self, context: SinkContext) -> None:
        """Check whether a new job may write to the table; changes nothing.

        Raises:
            SinkHoldsEarlierRows: with ``at_new_start="refuse"``: an earlier job has committed rows to the table.
            SinkPathInUse: the table belongs to another stage or pipeline; or holds rows that no SqlSink has written (not with
                ``at_new_start="keep"``); or the ledger holds a job with the number that the new job will have.
            InvalidSinkDatabase: there is no access to the database.
            SinkUnavailable: the database does not answer.
        """
        tables = self._connected()
        try:
            if not tables.is_missing_file():
                tables.database.read(tables.new_start(context).check)
        finally:
            tables.close()

    def check_target(self, context: SinkContext, rows: Path) -> None:
        """Check the access to the database, and that the stage's columns fit the table, in a transaction that is rolled back.

        The transaction creates the table if there is none, stages no rows and moves them: it shows what the run may do.

        Raises:
            SinkPathInUse: the table belongs to another stage or pipeline.
            SinkColumnsMismatch, ReservedSinkColumn: the table does not fit the rows, or no table can.
            InvalidSinkDatabase, InvalidSinkPath: there is no access to the database, or its file cannot be written.
            SinkUnavailable: the database does not answer.
        """
        tables = self._connected(retry_for=0.0)
        try:
            tables.check_target(context, rows)
        finally:
            tables.close()

    def open(self, context: SinkContext) -> None:
        """Prepare for writing.

        Raises:
            SinkPathInUse: the table belongs to another stage or pipeline.
            SinkFenced: a newer run of the pipeline writes to it.
            InvalidSinkDatabase: there is no access to the database.
            SinkUnavailable: the database does not answer.
        """
        self.close()
        tables = self._connected()
        try:
            tables.claim(context)
        except BaseException:
            tables.close()
            raise
        self._context, self._tables = context, tables

    def write(self, batch: DataFrame, files: Sequence[str], batch_id: int) -> None:
        """Copy the batch's rows to the transaction's staging table, in one database transaction.

        Raises:
            SinkColumnsMismatch: the table does not fit the rows.
            SinkRowsRefused: the table cannot hold a value.
            ReservedSinkColumn: the rows have a column with a name that the sink uses.
            SinkTargetChanged: the table was dropped or changed.
            SinkUnavailable: the database does not answer, or has no space.
        """
        context, tables = self._opened()
        paths = [local_path(file) or Path(file) for file in files]
        if paths:
            tables.prepare(batch, paths[0])
        current = self._current or _StagedRows(uuid4().hex[:16])
        former = current.batches.get(batch_id, range(0))
        rows = tables.count(paths)
        if not rows and not former:
            return
        tables.stage(context, current.token, paths, current.end, former)
        current.batches[batch_id] = range(current.end, current.end + rows)
        current.end += rows
        tables.copies.keep(current.token, batch_id, paths)
        self._current = current

    def pre_commit(self, checkpoint_id: int) -> str | None:
        context, tables = self._opened()
        if self._origin is not None and begins_timeline(self._origin, checkpoint_id):
            tables.begin_branch(context, self._origin, checkpoint_id)
            self._origin = None
        current, self._current = self._current, None
        if current is None or not current.rows:
            return None
        return tables.transaction_text(context, current.token, checkpoint_id, current.rows)

    def commit(self, transaction: str) -> SinkCommit:
        """Move the transaction's rows to the table, where readers see them.

        Raises:
            SinkTransactionLost: the transaction is neither staged nor committed.
            SinkTransactionConflict: the ledger holds another transaction with the same checkpoint.
            UnreadableSinkTransaction: the text is not a transaction of a SqlSink for this table.
            SinkFenced: a newer run of the pipeline writes to the table.
            SinkRowsRefused: the table does not accept a row.
            SinkTargetChanged: the table was dropped or changed.
            SinkUnavailable: the database does not answer, or has no space.
        """
        context, tables = self._opened()
        decoded = tables.decoded(transaction)
        tables.commit(context, decoded)
        return SinkCommit(rows=decoded.rows)

    def abort(self, transaction: str) -> None:
        context, tables = self._opened()
        tables.abort(context, tables.decoded(transaction).token)

    def transaction_files(self, transaction: str) -> dict[str, Path]:
        """The batches' files of a transaction that is not committed yet, as Spark wrote them."""
        _, tables = self._opened()
        return tables.copies.files(tables.decoded(transaction).token)

    def restore_transaction(self, transaction: str, files: Mapping[str, Path]) -> None:
        """Stage the transaction's rows again from a savepoint's files.

        Raises:
            SinkTransactionConflict: the ledger holds another transaction with the same checkpoint.
            UnreadableSinkTransaction: the text is not a transaction of a SqlSink for this table.
        """
        context, tables = self._opened()
        if files:
            tables.restore(context, tables.decoded(transaction), [files[name] for name in sorted(files)])

    def recover(self, committed: Sequence[str], *, restored: int | None = None) -> None:
        self._perform(recovery(committed, restored))

    def start_new(self) -> None:
        context, tables = self._opened()
        self._perform(new_start())
        if self.at_new_start == "replace":
            tables.replace_earlier_rows(context)

    def _perform(self, steps: Sequence[TakeFence | Settle | Commit[str] | AbortRest | ContinueFrom]) -> None:
        context, tables = self._opened()
        for step in steps:
            match step:
                case TakeFence():
                    tables.take_fence(context)
                case Settle(restored):
                    tables.settle(context, restored)
                case Commit(transaction):
                    self.commit(transaction)
                case AbortRest():
                    tables.abort_rest(context)
                case ContinueFrom(restored):
                    self._origin = tables.beginning(context) if restored is None else restored

    def close(self) -> None:
        if self._tables is not None:
            self._tables.close()
        self._forget()

    def _opened(self) -> tuple[SinkContext, SqlTables]:
        if self._context is None or self._tables is None:
            raise SinkNotOpen(f"{self}: expected open(context) before any other call, found that the sink is not open")
        return self._context, self._tables

    def _connected(self, retry_for: float | None = None) -> SqlTables:
        address = sql_address(self._url)
        from dagster_checkpoints.sinks.sql.tables import SqlTables  # needs SQLAlchemy

        return SqlTables(
            address,
            self.table,
            self.schema,
            key=self.key,
            at_new_start=self.at_new_start,
            checkpoint_column=self.checkpoint_column,
            retry_for=self.retry_for if retry_for is None else retry_for,
            sink=str(self),
        )


def _check_settings(sink: SqlSink) -> None:
    if sink.at_new_start not in get_args(AtNewStart):
        raise ValueError(f"expected SqlSink(at_new_start='refuse', 'keep' or 'replace'), found {sink.at_new_start!r}")
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
