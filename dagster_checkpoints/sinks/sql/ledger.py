"""A SqlSink's own tables beside its target: which stage writes, its newest owner, staged transactions, committed ones.

::

    _dagster_checkpoints_sinks        a row per target: the pipeline and the stage that write to it
    _dagster_checkpoints_instances    a row per instance: the newest owner's epoch (the fence), the job's restores
    _dagster_checkpoints_staged       a row per staged transaction, with the name of its staging table
    _dagster_checkpoints_commits      a row per committed transaction; written in the transaction that commits its rows

They live in the target's schema. Every change runs in a transaction that holds the instance's row (:meth:`SqlLedger.lock`), so
that an older owner can change nothing after a newer one has opened the sink. Must not know the target's rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import (
    Connection,
    MetaData,
    delete,
    func,
    insert,
    inspect,
    select,
    update,
)

from dagster_checkpoints.sinks.base import SinkContext
from dagster_checkpoints.sinks.branches import Branches
from dagster_checkpoints.sinks.sql.ledger_tables import (
    INSTANCES,
    SINKS,
    CommittedTransaction,
    SqlClaim,
    SqlTransaction,
    ledger_tables,
)
from dagster_checkpoints.sinks.transactions import stages_for_newer_owner
from dagster_checkpoints.systems.errors import SinkFenced, SinkPathInUse

# Created at import: two threads that decode a type for the first time at the same moment crash msgspec.
_BRANCHES = msgspec.json.Decoder(Branches)


class SqlLedger:
    """The ledger of one target.

    Args:
        target: the target's name.
        schema: the schema of the target and of the ledger; None for the database's default.
        sink: the sink as errors name it.
    """

    def __init__(self, target: str, schema: str | None, sink: str) -> None:
        self._target = target
        self._schema = schema
        self._sink = sink
        self._metadata = MetaData(schema=schema)
        self._sinks, self._instances, self._staged, self._commits = ledger_tables(self._metadata)

    def create(self, connection: Connection) -> None:
        """Create the ledger's tables where they are missing."""
        self.serialize(connection)
        self._metadata.create_all(connection)

    def serialize(self, connection: Connection) -> None:
        """Let one transaction at a time create tables in the ledger's schema: PostgreSQL's CREATE … IF NOT EXISTS can collide."""
        if connection.dialect.name == "postgresql":
            connection.execute(select(func.pg_advisory_xact_lock(func.hashtext(f"{self._schema or ''}/{SINKS}"))))

    def exists(self, connection: Connection) -> bool:
        return inspect(connection).has_table(SINKS, schema=self._schema)

    # The target's stage

    def claim(self, connection: Connection, context: SinkContext) -> SqlClaim | None:
        """The stage that writes to the target; None before the first.

        Raises:
            SinkPathInUse: it is another stage or pipeline.
        """
        row = connection.execute(
            select(
                self._sinks.c.pipeline,
                self._sinks.c.stage,
                self._sinks.c.history,
                self._sinks.c.owns_rows,
                self._sinks.c.replaced_by,
            )
            .where(self._sinks.c.target == self._target)
            .with_for_update()
        ).one_or_none()
        if row is None:
            return None
        found = SqlClaim(*row)
        if (found.pipeline, found.stage) != (context.pipeline, context.stage):
            raise SinkPathInUse(
                f"{self._sink}: expected the table to belong to stage {context.stage!r} of pipeline {context.pipeline!r}, "
                f"found in {SINKS} that stage {found.stage!r} of pipeline {found.pipeline!r} writes to it. Give each sink its "
                "own table; if the stage was renamed, correct that row"
            )
        return found

    def take(self, connection: Connection, context: SinkContext, owns_rows: bool) -> SqlClaim:
        """Record the stage as the target's, if no stage is."""
        claim = SqlClaim(context.pipeline, context.stage, context.history, owns_rows)
        connection.execute(
            insert(self._sinks).values(
                target=self._target,
                format=1,
                pipeline=claim.pipeline,
                stage=claim.stage,
                history=claim.history,
                owns_rows=owns_rows,
                replaced_by="",
            )
        )
        return claim

    def record_replacement(self, connection: Connection, job: str) -> None:
        """Record that the job has removed the rows of earlier jobs, and forget the commits of those rows."""
        connection.execute(delete(self._commits).where(self._commits.c.target == self._target, self._commits.c.job != job))
        connection.execute(update(self._sinks).where(self._sinks.c.target == self._target).values(replaced_by=job))

    # The fence

    def lock(self, connection: Connection, context: SinkContext, take: bool = False) -> Branches:
        """Hold the instance's row until the end of the transaction, and refuse an older owner.

        Args:
            connection: the transaction.
            context: the instance and its owner.
            take: record this owner as the newest one.

        Returns:
            The restores of the job that the row records.

        Raises:
            SinkFenced: a newer owner has opened the sink.
        """
        mine = (self._instances.c.target == self._target, self._instances.c.instance_index == context.index)
        row = connection.execute(
            select(self._instances.c.epoch, self._instances.c.history, self._instances.c.branches).where(*mine).with_for_update()
        ).one_or_none()
        if row is None:
            self._add_instance(connection, context)
            return Branches()
        epoch, history, branches = row
        if context.epoch and history == context.history and stages_for_newer_owner(context.epoch, epoch):
            raise SinkFenced(
                f"{self._sink}: expected no newer run than this one (epoch {context.epoch}) to write to this table, found in "
                f"{INSTANCES} that a run of epoch {epoch} does: that run has taken the pipeline over while this run was "
                "suspended or cut off. This run stops and changes nothing"
            )
        if take and context.epoch and (epoch, history) != (context.epoch, context.history):
            connection.execute(update(self._instances).where(*mine).values(epoch=context.epoch, history=context.history))
        return _BRANCHES.decode(branches)

    def _add_instance(self, connection: Connection, context: SinkContext) -> None:
        connection.execute(
            insert(self._instances).values(
                target=self._target,
                instance_index=context.index,
                epoch=context.epoch,
                history=context.history,
                commits=0,
                branches=msgspec.json.encode(Branches()).decode(),
            )
        )

    def record_branches(self, connection: Connection, context: SinkContext, branches: Branches) -> None:
        connection.execute(
            update(self._instances)
            .where(self._instances.c.target == self._target, self._instances.c.instance_index == context.index)
            .values(branches=msgspec.json.encode(branches).decode())
        )

    # Staged transactions

    def stage(self, connection: Connection, context: SinkContext, token: str, staging: str) -> None:
        """Record a staged transaction and the name of its staging table."""
        connection.execute(
            insert(self._staged).values(
                target=self._target,
                token=token,
                instance_index=context.index,
                epoch=context.epoch,
                history=context.history,
                attempt=context.attempt,
                job_id=context.job_id,
                staging=staging,
            )
        )

    def staging_table(self, connection: Connection, token: str) -> str | None:
        """The name of a staged transaction's table; None if the transaction is not staged."""
        of_token = (self._staged.c.target == self._target, self._staged.c.token == token)
        return connection.execute(select(self._staged.c.staging).where(*of_token)).scalar_one_or_none()

    def staged_before(self, connection: Connection, context: SinkContext) -> list[tuple[str, str]]:
        """Token and staging table of the instance's staged transactions, without those of newer owners."""
        rows = connection.execute(
            select(self._staged.c.token, self._staged.c.staging, self._staged.c.epoch, self._staged.c.history).where(
                self._staged.c.target == self._target, self._staged.c.instance_index == context.index
            )
        )
        return [
            (token, staging)
            for token, staging, epoch, history in rows
            if not (history == context.history and stages_for_newer_owner(context.epoch, epoch))
        ]

    def unstage(self, connection: Connection, token: str) -> None:
        connection.execute(delete(self._staged).where(self._staged.c.target == self._target, self._staged.c.token == token))

    # Committed transactions

    def commits(self, connection: Connection, job: str, index: int) -> list[CommittedTransaction]:
        """The transactions that an instance of a job has committed, in the order of their commits."""
        columns = self._commits.c
        return [
            CommittedTransaction(*row)
            for row in connection.execute(
                select(
                    columns.checkpoint_id, columns.token, columns.sequence, columns.row_count, columns.marked, columns.taken_back
                )
                .where(columns.target == self._target, columns.job == job, columns.instance_index == index)
                .order_by(columns.sequence)
            )
        ]

    def committed_token(self, connection: Connection, transaction: SqlTransaction) -> str | None:
        """The token of the transaction that was committed with this one's job, instance and checkpoint."""
        columns = self._commits.c
        return connection.execute(
            select(columns.token).where(
                columns.target == self._target,
                columns.job == transaction.job,
                columns.instance_index == transaction.index,
                columns.checkpoint_id == transaction.checkpoint,
            )
        ).scalar_one_or_none()

    def has_visible_commits(self, connection: Connection, job: str, index: int) -> bool:
        """Whether readers see rows that an instance of a job has committed."""
        columns = self._commits.c
        found = connection.execute(
            select(columns.token)
            .where(
                columns.target == self._target,
                columns.job == job,
                columns.instance_index == index,
                columns.taken_back.is_(None),
            )
            .limit(1)
        )
        return found.first() is not None

    def jobs(self, connection: Connection) -> list[str]:
        """The jobs that have committed rows to the target."""
        found = connection.execute(select(self._commits.c.job).where(self._commits.c.target == self._target).distinct())
        return sorted(found.scalars())

    def marks(self, connection: Connection) -> list[tuple[int, str, int]]:
        """Checkpoint id, job and index of every committed transaction whose rows name their checkpoint."""
        columns = self._commits.c
        rows = connection.execute(
            select(columns.checkpoint_id, columns.job, columns.instance_index).where(
                columns.target == self._target, columns.marked
            )
        )
        return [(checkpoint_id, job, index) for checkpoint_id, job, index in rows]

    def record_commit(self, connection: Connection, context: SinkContext, transaction: SqlTransaction, marked: bool) -> None:
        """Record a commit; its sequence number is counted in the locked row of the instance."""
        mine = (self._instances.c.target == self._target, self._instances.c.instance_index == context.index)
        sequence = connection.execute(select(self._instances.c.commits).where(*mine)).scalar_one() + 1
        connection.execute(update(self._instances).where(*mine).values(commits=sequence))
        connection.execute(
            insert(self._commits).values(
                target=self._target,
                job=transaction.job,
                instance_index=transaction.index,
                checkpoint_id=transaction.checkpoint,
                token=transaction.token,
                sequence=sequence,
                row_count=transaction.rows,
                marked=marked,
                taken_back=None,
            )
        )

    def record_visibility(
        self, connection: Connection, job: str, index: int, checkpoint_ids: Sequence[int], taken_back: int | None
    ) -> None:
        """Record that the rows of these commits were taken back (their number), or are visible again (None)."""
        columns = self._commits.c
        connection.execute(
            update(self._commits)
            .where(
                columns.target == self._target,
                columns.job == job,
                columns.instance_index == index,
                columns.checkpoint_id.in_(checkpoint_ids),
            )
            .values(taken_back=taken_back)
        )
