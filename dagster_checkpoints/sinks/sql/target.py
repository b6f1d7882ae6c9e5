"""The target of a SqlSink: every change is one transaction of the database, with the ledger.

::

    stage       rows go to a staging table of the transaction, in the same database; readers of the table do not see them
    transact    ONE database transaction: the instance's ledger is read and locked; rows move from staging tables to the table, or
                between the table and ``<table>__taken_back``; the ledger is replaced

An older owner is refused within the transaction. Rows of a later checkpoint that a restore takes back need a checkpoint column:
otherwise they cannot be told from others, and the restore is refused. Must not import Spark or Dagster.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import uuid4

import pyarrow.parquet as pq
from sqlalchemy import Connection

from dagster_checkpoints.sinks.engine import Plan, SinkScope
from dagster_checkpoints.sinks.exact_values import ColumnLimits, check_values
from dagster_checkpoints.sinks.ledger import Commit, Ledger, Moves, Staged
from dagster_checkpoints.sinks.parquet_files import parquet_rows
from dagster_checkpoints.sinks.sql.columns import SinkColumn, stage_columns
from dagster_checkpoints.sinks.sql.ledger import COMMITS, TRANSACTIONS, SqlClaim, SqlLedger
from dagster_checkpoints.sinks.sql.rows import read_batches
from dagster_checkpoints.sinks.sql.table import SinkTable
from dagster_checkpoints.sinks.target import AtomicTarget, Batch, Guard, Sealed
from dagster_checkpoints.sinks.temporary_folder import TransactionCopies
from dagster_checkpoints.sinks.unwritable import try_directory
from dagster_checkpoints.systems.errors import SinkCannotTakeBack, SinkTargetChanged, SinkTransactionLost, SinkUnavailable
from dagster_checkpoints.systems.sql_address import SqlAddress
from dagster_checkpoints.systems.sql_database import SqlDatabase


class SqlTarget(AtomicTarget):
    """A table of a database, for one instance.

    Args:
        address: the database.
        table: the table's name.
        schema: the table's schema; None for the database's default.
        key: names of the columns by which rows are replaced; empty if rows are added.
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
        checkpoint_column: str | None,
        retry_for: float,
        sink: str,
    ) -> None:
        self.database = SqlDatabase(address, sink, retry_for)
        self._name = f"{schema}.{table}" if schema else table
        self._key = tuple(key)
        self._checkpoint_column = checkpoint_column
        self._sink = sink
        self._ledger = SqlLedger(table, schema, sink)
        self._table = SinkTable(table, schema, address.kind, key, checkpoint_column, sink)
        self._copies = TransactionCopies()
        self._columns: tuple[SinkColumn, ...] = ()
        self._limits: Mapping[str, ColumnLimits] = {}
        self._open: dict[str, _StagedBatches] = {}
        self._claim: SqlClaim | None = None
        self._index = 0

    @property
    def place(self) -> str:
        return self._name

    @property
    def is_missing_file(self) -> bool:
        """Whether the database is a file that does not exist yet: to open it would create it."""
        address = self.database.address
        return address.kind == "sqlite" and not Path(str(address.url.database)).exists()

    # Before a run

    def jobs(self, scope: SinkScope) -> list[str]:
        def work(connection: Connection) -> list[str]:
            self._claim = self._ledger.claim(connection, scope)
            jobs = self._ledger.jobs(connection) if self._claim is not None else []
            return jobs if scope.job in jobs or self._has_rows(connection) else []

        return [] if self.is_missing_file else self.database.read(work)

    def foreign(self) -> list[str]:
        """The table, if it holds rows that no job has written, or may hold them, and no column tells these from the others."""

        def work(connection: Connection) -> bool:
            jobs = self._ledger.jobs(connection) if self._claim is not None else []
            owns = self._claim is not None and self._claim.owns_rows and bool(jobs)
            tells_apart = self._checkpoint_column is not None and bool(jobs) and self._ledger.marks_all(connection)
            return not owns and not tells_apart and self._has_rows(connection)

        found = not self.is_missing_file and self.database.read(work)
        return [f"rows in {self._name} that were written without a checkpoint_column"] if found else []

    def _has_rows(self, connection: Connection) -> bool:
        return self._table.exists(connection) and self._table.has_rows(connection)

    def check_columns(self, scope: SinkScope, file: Path) -> None:
        """Check that rows could be written; changes nothing. See ``SqlSink.check_target``.

        Args:
            scope: an instance of the stage.
            file: a Parquet file with the stage's columns, without rows.
        """
        kind = self.database.address.kind
        columns = stage_columns(pq.read_schema(file), kind, self._checkpoint_column, self._key, self._sink)
        if kind == "sqlite":
            try_directory(Path(str(self.database.address.url.database)).parent, self._sink)
        if self.is_missing_file:
            return

        def work(connection: Connection) -> None:
            self._ledger.claim(connection, scope)
            self._ledger.create(connection)
            self._table.prepare(connection, columns)
            staging = self._table.staging_name(f"check_{uuid4().hex[:8]}")
            self._table.create_staging(connection, staging, [each.name for each in columns])
            self._table.move(connection, staging, 0, None if self._checkpoint_column is None else "")

        self.database.attempt(work)

    # A run

    def open(self, scope: SinkScope, guard: Guard) -> None:
        def work(connection: Connection) -> SqlClaim:
            claim = self._ledger.claim(connection, scope)
            self._ledger.create(connection)
            if claim is None:
                claim = self._ledger.claim(connection, scope)  # another instance may have been first
            if scope.job in self._ledger.jobs(connection) and not self._table.exists(connection):
                raise SinkTargetChanged(
                    f"{self._sink}: expected the table, to which job {scope.job} has committed rows as {COMMITS} says, found "
                    "that it does not exist: it was dropped or renamed. Restore it, or rename it back; or begin a new job; or, "
                    "to go on without these rows, create an empty table of this name, and start the run again"
                )
            return claim or self._ledger.take(connection, scope, not self._has_rows(connection))

        self._claim = self.database.write(work)
        self._scope, self._index, self._guard = scope, scope.index, guard

    def close(self) -> None:
        self.database.close()
        self._copies.close()

    def read_ledger(self) -> Ledger:
        return self.database.read(lambda connection: self._ledger.read(connection, self._index))

    def committed(self, job: str) -> list[Commit]:
        found = self.database.read(lambda connection: self._ledger.commits(connection, job, self._index))
        return [Commit(job, self._index, checkpoint) for checkpoint in found]

    # Staged rows

    def stage(self, name: str, batch: Batch) -> None:
        one = self._open.setdefault(name, _StagedBatches())
        if batch.files:
            self._prepare(batch.files[0])
        rows, former = sum(map(parquet_rows, batch.files)), one.batches.get(batch.id, range(0))
        if not rows and not former:
            return
        first, repeated = one.end, False

        def work(connection: Connection) -> None:
            nonlocal repeated
            staging = self._ledger.staging_table(connection, name)
            if staging is None:
                staging = self._create_staging(connection, name)
            elif repeated:  # the outcome of the first try may be unknown
                self._table.unstage(connection, staging, first, first + rows)
            repeated = True
            if former:
                self._table.unstage(connection, staging, former.start, former.stop)
            self._insert(connection, staging, batch.files, first)

        self.database.write(work)
        one.batches[batch.id] = range(first, first + rows)
        one.end += rows
        self._copies.keep(name, batch.id, batch.files)

    def seal(self, name: str, commit: Commit) -> Sealed | None:
        rows = sum(map(len, self._open.pop(name, _StagedBatches()).batches.values()))
        return Sealed(rows) if rows else None

    def staged(self) -> list[str]:
        return self.database.read(lambda connection: self._ledger.staged(connection, self._index))

    def discard(self, names: Sequence[str]) -> None:
        def work(connection: Connection) -> None:
            self._guard(self._ledger.lock(connection, self._index))
            for name in names:
                staging = self._ledger.staging_table(connection, name)
                if staging is not None:
                    self._table.drop_staging(connection, staging)
                    self._ledger.unstage(connection, name)

        self.database.write(work)
        for name in names:
            self._copies.drop(name)

    def copies(self, staged: Staged) -> dict[str, Path]:
        """The batches' files, as Spark wrote them. Raises SinkUnavailable if another program has deleted some."""
        files = self._copies.files(staged.name)
        found = sum(map(parquet_rows, files.values()))
        if found != staged.rows:
            raise SinkUnavailable(
                f"{self._sink}: expected that {self._copies.path}, in the directory for temporary files, holds the {staged.rows} "
                f"rows of transaction {staged.name} for the savepoint, found {found}: another program has deleted files there. "
                "Exclude the directory from cleaning (tmpreaper, systemd-tmpfiles). Another attempt writes these rows again"
            )
        return files

    def restage(self, staged: Staged, files: Mapping[str, Path]) -> None:
        ordered = [files[name] for name in sorted(files)]
        self._prepare(ordered[0])

        def work(connection: Connection) -> None:
            if self._ledger.staging_table(connection, staged.name) is None:
                self._insert(connection, self._create_staging(connection, staged.name), ordered, 0)

        self.database.write(work)

    def _prepare(self, file: Path) -> None:
        """Create the table for the rows, or check that it holds them; once."""
        schema = pq.read_schema(file)
        if self._columns and [(each.name, each.arrow) for each in self._columns] == [(f.name, f.type) for f in schema]:
            return
        columns = stage_columns(schema, self.database.address.kind, self._checkpoint_column, self._key, self._sink)

        def work(connection: Connection) -> dict[str, ColumnLimits]:
            self._ledger.serialize(connection)
            return self._table.prepare(connection, columns)

        self._limits = self.database.write(work)
        self._columns = columns

    def _create_staging(self, connection: Connection, name: str) -> str:
        self._guard(self._ledger.lock(connection, self._index))
        staging = self._table.staging_name(hashlib.sha256(name.encode()).hexdigest()[:16])
        self._table.create_staging(connection, staging, [each.name for each in self._columns])
        self._limits = self._table.prepare(connection, self._columns)  # it may have been altered since the last transaction
        self._ledger.stage(connection, self._index, name, staging)
        return staging

    def _insert(self, connection: Connection, staging: str, files: Sequence[Path], first: int) -> None:
        for batch in read_batches(files):
            check_values(batch, self._limits, self._key, self._sink)
            self._table.stage(connection, staging, batch, first)
            first += batch.num_rows

    # Changes

    def transact(self, plan: Plan) -> None:
        moved = Moves()

        def work(connection: Connection) -> None:
            nonlocal moved
            change = plan(self._ledger.lock(connection, self._index))
            if change is None:
                return
            moved = change.moves
            if change.alone:
                self._remove_other_jobs(connection, change.job)
            self._take_back(connection, moved)
            for staged in moved.publish:
                self._publish(connection, staged)
            self._ledger.put(connection, self._index, change.ledger)

        self.database.write(work)
        for staged in moved.publish:
            self._copies.drop(staged.name)

    def _publish(self, connection: Connection, staged: Staged) -> None:
        staging = self._ledger.staging_table(connection, staged.name)
        if staging is None:
            raise SinkTransactionLost(
                f"{self._sink}: expected the {staged.rows} rows of a pre-committed transaction (checkpoint "
                f"{staged.commit.checkpoint}) in {TRANSACTIONS}, or its commit in {COMMITS}, found neither: a run from an older "
                "checkpoint has discarded them, another program has deleted them, or the database was restored from a backup. "
                "This sink has lost the rows of that checkpoint: restore another checkpoint or a savepoint, restore the "
                "database from a newer backup, or start the job without restoring"
            )
        marked = self._checkpoint_column is not None
        self._table.move(connection, staging, staged.rows, self._mark(staged.commit) if marked else None)
        self._ledger.unstage(connection, staged.name)
        self._ledger.record_commit(connection, staged, marked)

    def _take_back(self, connection: Connection, moves: Moves) -> None:
        rows = {commit: self._ledger.rows_of(connection, commit) for commit in (*moves.hide, *moves.show)}
        if self._checkpoint_column is None or not all(found.marked for found in rows.values()):
            if rows:
                raise self._indistinguishable(list(rows), sum(found.rows for found in rows.values()))
            return
        if rows:
            self._ledger.serialize(connection)  # all instances are restored at once, and one creates the table of hidden rows
        for commit in moves.hide:
            moved = self._table.take_back(connection, self._mark(commit))
            if moved != rows[commit].rows:
                raise self._rewritten(commit, rows[commit].rows, moved)
            self._ledger.record_visibility(connection, commit, moved)
        for commit in moves.show:
            moved = self._table.show_again(connection, self._mark(commit))
            if moved != rows[commit].taken_back:
                raise SinkTransactionLost(
                    f"{self._sink}: expected {rows[commit].taken_back} rows of checkpoint {commit.checkpoint}, which belong to "
                    f"the restored checkpoint and were taken back since, in {self._table.taken_back_name}, found {moved}: they "
                    "have been deleted. Restore that table from a backup, or restore another checkpoint or savepoint"
                )
            self._ledger.record_visibility(connection, commit, None)

    def _remove_other_jobs(self, connection: Connection, job: str) -> None:
        """Once for all instances of the job: the first one that comes here removes the rows of all."""
        claim = self._ledger.claim(connection, self._scope)
        if claim is None or claim.replaced_by == job:  # by another instance, or before a crash
            return
        if self._table.exists(connection):
            if claim.owns_rows:
                self._table.empty(connection)
            else:
                others = [self._mark(commit) for commit in self._ledger.marked(connection) if commit.job != job]
                self._table.delete_marked(connection, others)
        self._ledger.record_replacement(connection, job)

    def _mark(self, commit: Commit) -> str:
        """The value of the checkpoint column in the rows of one commit; without the history of the target's first job."""
        assert self._claim is not None
        job = commit.job.removesuffix(f".{self._claim.history}")
        return f"{commit.checkpoint}-job{job}-{commit.index}"

    def _rewritten(self, commit: Commit, rows: int, found: int) -> SinkCannotTakeBack:
        return SinkCannotTakeBack(
            f"{self._sink}: the job is restored from an older checkpoint and will write the rows of later ones again; expected "
            f"{rows} rows with {self._checkpoint_column} = {self._mark(commit)!r} in the table, which checkpoint "
            f"{commit.checkpoint} has committed, found {found}: another program has deleted or changed them, or the sink's "
            "checkpoint_column had another name. Nothing was changed. Restore the newest checkpoint; or correct the sink; or, if "
            f"these rows are really gone, delete what is left of them, and their row in {COMMITS} (job {commit.job!r}, "
            f"instance_index {commit.index}, checkpoint_id {commit.checkpoint})"
        )

    def _indistinguishable(self, commits: Sequence[Commit], rows: int) -> SinkCannotTakeBack:
        numbers = sorted(commit.checkpoint for commit in commits)
        shown = ", ".join(map(str, numbers[:5])) + (", …" if len(numbers) > 5 else "")
        return SinkCannotTakeBack(
            f"{self._sink}: the job is restored from an older checkpoint and will write the rows of later ones again; expected a "
            f"way to find the rows of checkpoint{'s' if len(numbers) > 1 else ''} {shown} ({rows} rows), found that the table "
            "does not name each row's checkpoint. Nothing was changed. Restore the newest checkpoint; or begin a new job; or "
            f"delete these rows yourself, and their rows in {COMMITS} (job {commits[0].job!r}, instance_index "
            f"{commits[0].index}). For the future: SqlSink(key=...) writes rows again without doubling them, "
            "SqlSink(checkpoint_column=...) makes rows distinguishable"
        )


class _StagedBatches:
    """The numbers of the rows of each batch, and the number of the next row."""

    def __init__(self) -> None:
        self.batches: dict[int, range] = {}
        self.end = 0
