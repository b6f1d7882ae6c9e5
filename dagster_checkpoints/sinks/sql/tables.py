"""The transactions of an opened SqlSink: each method is one transaction of the database, or a few that can be repeated.

Must not know which transaction is current, nor in which order a start performs its steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pyarrow.parquet as pq
from sqlalchemy import Connection

from dagster_checkpoints.sinks.base import AtNewStart, SinkContext
from dagster_checkpoints.sinks.exact_values import ColumnLimits, check_values
from dagster_checkpoints.sinks.parquet.transactions import parquet_rows
from dagster_checkpoints.sinks.sql.columns import SinkColumn, stage_columns
from dagster_checkpoints.sinks.sql.ledger import SqlLedger
from dagster_checkpoints.sinks.sql.ledger_tables import COMMITS, STAGED, TRANSACTIONS, SqlTransaction
from dagster_checkpoints.sinks.sql.new_start import SqlNewStart
from dagster_checkpoints.sinks.sql.rows import read_batches
from dagster_checkpoints.sinks.sql.taken_back import SqlTakenBack, mark
from dagster_checkpoints.sinks.sql.target import SqlTarget
from dagster_checkpoints.sinks.transaction_copies import TransactionCopies
from dagster_checkpoints.sinks.unwritable import try_directory
from dagster_checkpoints.systems.errors import SinkTransactionConflict, SinkTransactionLost, UnreadableSinkTransaction
from dagster_checkpoints.systems.sql_address import SqlAddress
from dagster_checkpoints.systems.sql_database import SqlDatabase


class SqlTables:
    """A SqlSink's table and its ledger, in an opened database.

    Args:
        address: the database.
        table: the table's name.
        schema: the table's schema; None for the database's default.
        key: names of the columns by which rows are replaced; empty if rows are added.
        at_new_start: what a new start does with earlier rows.
        checkpoint_column: name of the column that names each row's checkpoint; None without one.
        retry_for: how long a transaction is repeated while the server is away, in seconds.
        sink: the sink as errors name it.
    """

    def __init__(
        self,
        address: SqlAddress,
        table: str,
        schema: str | None,
        *,
        key: Sequence[str],
        at_new_start: AtNewStart,
        checkpoint_column: str | None,
        retry_for: float,
        sink: str,
    ) -> None:
        self.database = SqlDatabase(address, sink, retry_for)
        self.copies = TransactionCopies()
        self._name = f"{schema}.{table}" if schema else table
        self._key = tuple(key)
        self._at_new_start = at_new_start
        self._checkpoint_column = checkpoint_column
        self._sink = sink
        self._ledger = SqlLedger(table, schema, sink)
        self._target = SqlTarget(table, schema, address.kind, key, checkpoint_column, sink)
        self._job = ""
        self._columns: tuple[SinkColumn, ...] = ()
        self._limits: Mapping[str, ColumnLimits] = {}

    def is_missing_file(self) -> bool:
        """Whether the database is a file that does not exist yet: to open it would create it."""
        address = self.database.address
        return address.kind == "sqlite" and not Path(str(address.url.database)).exists()

    def close(self) -> None:
        self.database.close()
        self.copies.close()

    # Beginning

    def claim(self, context: SinkContext) -> None:
        """Mark the table as the stage's, or check that it is; refuse older owners from now on."""

        def work(connection: Connection) -> str:
            self._ledger.create(connection)
            claim = self._ledger.claim(connection, context)
            if claim is None:
                owns_rows = not self._target.exists(connection) or not self._target.has_rows(connection)
                claim = self._ledger.take(connection, context, owns_rows)
            self._ledger.lock(connection, context, take=True)
            return claim.job_name(context)

        self._job = self.database.write(work)

    def check_target(self, context: SinkContext, file: Path) -> None:
        """Check that rows could be written; changes nothing. See ``SqlSink.check_target``.

        Args:
            context: an instance of the stage.
            file: a Parquet file with the stage's columns, without rows.
        """
        kind = self.database.address.kind
        schema = pq.read_schema(file)
        columns = stage_columns(schema, None, kind, self._checkpoint_column, self._key, self._sink)
        if kind == "sqlite":
            try_directory(Path(str(self.database.address.url.database)).parent, self._sink)
        if self.is_missing_file():
            return

        def work(connection: Connection) -> None:
            if self._ledger.exists(connection):
                self._ledger.claim(connection, context)
            self._ledger.create(connection)
            self._target.prepare(connection, columns)
            staging = self._target.staging_name(f"check_{uuid4().hex[:8]}")
            self._target.create_staging(connection, staging, [each.name for each in columns])
            self._target.move(connection, staging, 0, None if self._checkpoint_column is None else "")

        self.database.attempt(work)

    def take_fence(self, context: SinkContext) -> None:
        self.database.write(lambda connection: self._ledger.lock(connection, context, take=True))

    def new_start(self, context: SinkContext) -> SqlNewStart:
        marks = self._checkpoint_column is not None
        return SqlNewStart(self._ledger, self._target, context, self._at_new_start, marks, self._sink)

    def replace_earlier_rows(self, context: SinkContext) -> None:
        """Remove the rows of earlier jobs."""

        def work(connection: Connection) -> None:
            self._ledger.lock(connection, context)
            self.new_start(context).replace(connection, self._job)

        self.database.write(work)

    def settle(self, context: SinkContext, restored: int) -> None:
        """Show exactly the rows on the way to the restored checkpoint."""

        def work(connection: Connection) -> None:
            branches = self._ledger.lock(connection, context)
            self._taken_back(context).settle(connection, branches, restored)

        self.database.write(work)

    def beginning(self, context: SinkContext) -> int | None:
        """The origin of a job that continues from no checkpoint of this job: 0, the job's beginning.

        None if the instance has committed rows of this job already: a savepoint may have completed before a crash, after
        which the job begins a second time.
        """
        has_rows = self.database.read(lambda connection: self._ledger.has_visible_commits(connection, self._job, context.index))
        return None if has_rows else 0

    def begin_branch(self, context: SinkContext, restored: int, first: int) -> None:
        """Record the restore from a checkpoint, and the job's first checkpoint after it."""

        def work(connection: Connection) -> None:
            branches = self._ledger.lock(connection, context)
            begun = branches.begun(restored, first)
            if begun != branches:
                self._ledger.record_branches(connection, context, begun)

        self.database.write(work)

    def _taken_back(self, context: SinkContext) -> SqlTakenBack:
        return SqlTakenBack(
            self._ledger,
            self._target,
            self._job,
            context.index,
            upserts=bool(self._key),
            marks=self._checkpoint_column is not None,
            sink=self._sink,
        )

    # Writing

    def prepare(self, batch: Any, file: Path) -> None:
        """Create the table for the rows, or check that it holds them; once."""
        schema = pq.read_schema(file)
        if self._columns and [(each.name, each.arrow) for each in self._columns] == [(f.name, f.type) for f in schema]:
            return
        kind = self.database.address.kind
        columns = stage_columns(schema, batch, kind, self._checkpoint_column, self._key, self._sink)

        def work(connection: Connection) -> dict[str, ColumnLimits]:
            self._ledger.serialize(connection)
            return self._target.prepare(connection, columns)

        self._limits = self.database.write(work)
        self._columns = columns

    @staticmethod
    def count(files: Sequence[Path]) -> int:
        """The number of rows in files."""
        return sum(parquet_rows(file) for file in files)

    def stage(self, context: SinkContext, token: str, files: Sequence[Path], first: int, former: range) -> None:
        """Add the rows of files to a transaction's staging table, which is created if there is none.

        Args:
            context: the instance.
            token: the transaction's name.
            files: Parquet files.
            first: number of the first row.
            former: the numbers of the rows that these rows replace.
        """
        staging = self._target.staging_name(token)
        repeated = False

        def work(connection: Connection) -> None:
            nonlocal repeated
            if self._ledger.staging_table(connection, token) is None:
                self._create_staging(connection, context, token)
            elif repeated:  # the outcome of the first try may be unknown
                self._target.unstage(connection, staging, first, first + self.count(files))
            repeated = True
            if former:
                self._target.unstage(connection, staging, former.start, former.stop)
            self._insert(connection, staging, files, first)

        self.database.write(work)

    def _create_staging(self, connection: Connection, context: SinkContext, token: str) -> None:
        self._ledger.lock(connection, context)
        staging = self._target.staging_name(token)
        self._target.create_staging(connection, staging, [each.name for each in self._columns])
        self._ledger.stage(connection, context, token, staging)

    def _insert(self, connection: Connection, staging: str, files: Sequence[Path], first: int) -> None:
        for batch in read_batches([str(file) for file in files]):
            check_values(batch, self._limits, self._key, self._sink)
            self._target.stage(connection, staging, batch, first)
            first += batch.num_rows

    # Transactions

    def transaction_text(self, context: SinkContext, token: str, checkpoint_id: int, rows: int) -> str:
        """The text of a transaction whose rows are all staged."""
        transaction = SqlTransaction(
            table=self._name,
            token=token,
            job=self._job,
            index=context.index,
            checkpoint=checkpoint_id,
            rows=rows,
            epoch=context.epoch,
            attempt=context.attempt,
        )
        return msgspec.json.encode(transaction).decode()

    def decoded(self, text: str) -> SqlTransaction:
        """The transaction that a text names.

        Raises:
            UnreadableSinkTransaction: it is not one of this sink's.
        """
        try:
            decoded = TRANSACTIONS.decode(text)
        except msgspec.DecodeError as error:
            raise UnreadableSinkTransaction(
                f"{self._sink}: expected the text of one of its transactions, found {text!r}: {error}. Did the stage have "
                "another kind of sink when the checkpoint was taken? Restore with that kind of sink, or start the job without "
                "restoring"
            ) from error
        if decoded.table != self._name:
            raise UnreadableSinkTransaction(
                f"{self._sink}: expected a transaction for table {self._name!r}, found one for {decoded.table!r}: the stage's "
                "sink had another table when the checkpoint was taken. Restore with that table, or start the job without "
                "restoring"
            )
        return decoded

    def commit(self, context: SinkContext, transaction: SqlTransaction) -> None:
        """Move a transaction's rows to the table; does nothing if it is committed."""

        def work(connection: Connection) -> None:
            self._ledger.lock(connection, context)
            if self._is_committed(connection, transaction):
                return
            staging = self._ledger.staging_table(connection, transaction.token)
            if staging is None:
                raise SinkTransactionLost(
                    f"{self._sink}: expected the {transaction.rows} rows of a pre-committed transaction (checkpoint "
                    f"{transaction.checkpoint}) in {STAGED}, or its commit in {COMMITS}, found neither: another program has "
                    "deleted them, or the database was restored from a backup. This sink has lost the rows of that checkpoint; "
                    "restore the database from a newer backup, or start the job without restoring"
                )
            marked = self._checkpoint_column is not None
            value = mark(transaction.checkpoint, transaction.job, transaction.index) if marked else None
            self._target.move(connection, staging, transaction.rows, value)
            self._ledger.unstage(connection, transaction.token)
            self._ledger.record_commit(connection, context, transaction, marked)

        self.database.write(work)
        self.copies.drop(transaction.token)

    def _is_committed(self, connection: Connection, transaction: SqlTransaction) -> bool:
        token = self._ledger.committed_token(connection, transaction)
        if token not in (None, transaction.token):
            raise SinkTransactionConflict(
                f"{self._sink}: expected no other commit of checkpoint {transaction.checkpoint} of job {transaction.job!r} by "
                f"instance {transaction.index} in {COMMITS}, found one. The rows of that checkpoint are committed already: start "
                "the job without restoring, or restore a newer checkpoint"
            )
        return token is not None

    def abort(self, context: SinkContext, token: str) -> None:
        """Delete a staged transaction."""

        def work(connection: Connection) -> None:
            self._ledger.lock(connection, context)
            staging = self._ledger.staging_table(connection, token)
            if staging is not None:
                self._target.drop_staging(connection, staging)
                self._ledger.unstage(connection, token)

        self.database.write(work)
        self.copies.drop(token)

    def abort_rest(self, context: SinkContext) -> None:
        """Delete all staged transactions of the instance but those of newer owners."""

        def work(connection: Connection) -> None:
            self._ledger.lock(connection, context)
            for token, staging in self._ledger.staged_before(connection, context):
                self._target.drop_staging(connection, staging)
                self._ledger.unstage(connection, token)

        self.database.write(work)

    def restore(self, context: SinkContext, transaction: SqlTransaction, files: Sequence[Path]) -> None:
        """Stage a transaction's rows again, if they are neither staged nor committed."""
        self.prepare(None, files[0])

        def work(connection: Connection) -> None:
            self._ledger.lock(connection, context)
            if self._is_committed(connection, transaction):
                return
            if self._ledger.staging_table(connection, transaction.token) is None:
                self._create_staging(connection, context, transaction.token)
                self._insert(connection, self._target.staging_name(transaction.token), files, 0)

        self.database.write(work)
