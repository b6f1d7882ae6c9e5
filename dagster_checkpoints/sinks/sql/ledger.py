"""A SqlSink's own tables beside its target: which stage writes, the ledger of each instance, staged and committed transactions.

::

    _dagster_checkpoints_targets         a row per target: the pipeline and the stage that write to it
    _dagster_checkpoints_ledgers         a row per instance: its ledger (see :mod:`dagster_checkpoints.sinks.ledger`), as JSON
    _dagster_checkpoints_transactions    a row per staged transaction, with the name of its staging table
    _dagster_checkpoints_committed       a row per committed transaction, written in the transaction that commits its rows

They live in the target's schema. Every change runs in a transaction that holds the instance's row (:meth:`SqlLedger.lock`). Must
not know the target's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from dagster_checkpoints.sinks.engine import SinkScope
from dagster_checkpoints.sinks.ledger import Commit, Ledger, Staged, encode_ledger, stored_ledger
from dagster_checkpoints.systems.errors import SinkPathInUse

TARGETS = "_dagster_checkpoints_targets"
LEDGERS_TABLE = "_dagster_checkpoints_ledgers"
TRANSACTIONS = "_dagster_checkpoints_transactions"
COMMITS = "_dagster_checkpoints_committed"
_FORMER = "_dagster_checkpoints_sinks"
"""The table of targets in the format of earlier releases."""


@dataclass(frozen=True, slots=True)
class SqlClaim:
    """The stage that writes to a target.

    Args:
        pipeline: the pipeline's name.
        stage: the stage's uid.
        history: random id of the checkpoint storage whose jobs wrote first.
        owns_rows: whether the table was created or found empty by the sink; otherwise it held rows of other programs.
        replaced_by: the job that has removed the rows of earlier jobs; empty if none has.
    """

    pipeline: str
    stage: str
    history: str
    owns_rows: bool
    replaced_by: str = ""


@dataclass(frozen=True, slots=True)
class CommittedRows:
    """A row of the table of commits.

    Args:
        rows: number of rows.
        marked: whether each row of the target names its checkpoint.
        taken_back: number of rows that a restore has hidden; None if they are visible.
    """

    rows: int
    marked: bool
    taken_back: int | None


class SqlLedger:
    """The tables of one target.

    Args:
        target: the target's name.
        schema: the schema of the target and of these tables; None for the database's default.
        sink: the sink as errors name it.
    """

    def __init__(self, target: str, schema: str | None, sink: str) -> None:
        self._target = target
        self._schema = schema
        self._sink = sink
        self._metadata = sa.MetaData(schema=schema)

        def key(name: str, kind: type[sa.Text] | type[sa.Integer] | type[sa.BigInteger] = sa.Text) -> sa.Column[object]:
            return sa.Column(name, kind(), primary_key=True, autoincrement=False)

        def table(name: str, *columns: sa.Column[object]) -> sa.Table:
            return sa.Table(name, self._metadata, key("target"), *columns)

        def needed(name: str, kind: type[sa.Text | sa.Integer | sa.BigInteger | sa.Boolean]) -> sa.Column[object]:
            return sa.Column(name, kind(), nullable=False)

        self._targets = table(
            TARGETS, *(needed(name, sa.Text) for name in ("pipeline", "stage", "history")), needed("owns_rows", sa.Boolean),
            needed("replaced_by", sa.Text),
        )  # fmt: skip
        self._ledgers = table(LEDGERS_TABLE, key("instance_index", sa.Integer), needed("ledger", sa.Text))
        self._staged = table(TRANSACTIONS, key("name"), needed("instance_index", sa.Integer), needed("staging", sa.Text))
        self._commits = table(
            COMMITS, key("job"), key("instance_index", sa.Integer), key("checkpoint_id", sa.BigInteger), needed("name", sa.Text),
            needed("row_count", sa.BigInteger), needed("marked", sa.Boolean), sa.Column("taken_back", sa.BigInteger),
        )  # fmt: skip

    def create(self, connection: sa.Connection) -> None:
        """Create the tables where they are missing."""
        self.serialize(connection)
        self._metadata.create_all(connection)

    def serialize(self, connection: sa.Connection) -> None:
        """Let one transaction at a time create tables in the ledger's schema: PostgreSQL's CREATE … IF NOT EXISTS can collide."""
        if connection.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtext(f"{self._schema or ''}/{TARGETS}"))))

    def exists(self, connection: sa.Connection) -> bool:
        return sa.inspect(connection).has_table(TARGETS, schema=self._schema)

    # The target's stage

    def claim(self, connection: sa.Connection, scope: SinkScope) -> SqlClaim | None:
        """The stage that writes to the target; None before the first.

        Raises:
            SinkPathInUse: it is another stage or pipeline; or an earlier release has written to the target.
        """
        self._check_format(connection)
        if not self.exists(connection):
            return None
        columns = self._targets.c
        row = connection.execute(
            sa.select(columns.pipeline, columns.stage, columns.history, columns.owns_rows, columns.replaced_by)
            .where(columns.target == self._target)
            .with_for_update()
        ).one_or_none()
        if row is None:
            return None
        found = SqlClaim(*row)
        if (found.pipeline, found.stage) != (scope.pipeline, scope.stage):
            raise SinkPathInUse(
                f"{self._sink}: expected the table to belong to stage {scope.stage!r} of pipeline {scope.pipeline!r}, "
                f"found in {TARGETS} that stage {found.stage!r} of pipeline {found.pipeline!r} writes to it. Give each sink its "
                "own table; if the stage was renamed, correct that row"
            )
        return found

    def _check_format(self, connection: sa.Connection) -> None:
        if not sa.inspect(connection).has_table(_FORMER, schema=self._schema):
            return
        former = sa.Table(_FORMER, sa.MetaData(), sa.Column("target", sa.Text), schema=self._schema)
        if connection.execute(sa.select(former.c.target).where(former.c.target == self._target)).first() is not None:
            raise SinkPathInUse(
                f"{self._sink}: expected no record of an earlier release of dagster-checkpoints for this table, found one in "
                f"{_FORMER}, whose format this release does not read: what it says of committed rows would be lost. Let that "
                "release drain the pipeline, and give the new job another table; or delete the table and its row there"
            )

    def take(self, connection: sa.Connection, scope: SinkScope, owns_rows: bool) -> SqlClaim:
        """Record the stage as the target's."""
        claim = SqlClaim(scope.pipeline, scope.stage, scope.owner.history, owns_rows)
        connection.execute(
            sa.insert(self._targets).values(
                target=self._target,
                pipeline=claim.pipeline,
                stage=claim.stage,
                history=claim.history,
                owns_rows=owns_rows,
                replaced_by="",
            )
        )
        return claim

    def record_replacement(self, connection: sa.Connection, job: str) -> None:
        """Record that the job has removed the rows of earlier jobs, and forget the commits of those rows."""
        connection.execute(sa.delete(self._commits).where(self._commits.c.target == self._target, self._commits.c.job != job))
        connection.execute(sa.update(self._targets).where(self._targets.c.target == self._target).values(replaced_by=job))

    # The instance's ledger

    def lock(self, connection: sa.Connection, index: int) -> Ledger:
        """Hold the instance's row until the end of the transaction. Returns its ledger."""
        row = connection.execute(self._select(index).with_for_update()).scalar_one_or_none()
        if row is None:
            values = {"target": self._target, "instance_index": index, "ledger": _encoded(Ledger())}
            connection.execute(sa.insert(self._ledgers).values(values))
        return Ledger() if row is None else self._decoded(row, index)

    def read(self, connection: sa.Connection, index: int) -> Ledger:
        row = connection.execute(self._select(index)).scalar_one_or_none()
        return Ledger() if row is None else self._decoded(row, index)

    def put(self, connection: sa.Connection, index: int, ledger: Ledger) -> None:
        mine = (self._ledgers.c.target == self._target, self._ledgers.c.instance_index == index)
        connection.execute(sa.update(self._ledgers).where(*mine).values(ledger=_encoded(ledger)))

    def _select(self, index: int) -> Any:
        columns = self._ledgers.c
        return sa.select(columns.ledger).where(columns.target == self._target, columns.instance_index == index)

    def _decoded(self, value: str, index: int) -> Ledger:
        return stored_ledger(value, f"the row of {self._target!r}, instance {index}, in {LEDGERS_TABLE}")

    # Staged transactions

    def stage(self, connection: sa.Connection, index: int, name: str, staging: str) -> None:
        """Record a staged transaction and the name of its staging table."""
        connection.execute(sa.insert(self._staged).values(target=self._target, name=name, instance_index=index, staging=staging))

    def staging_table(self, connection: sa.Connection, name: str) -> str | None:
        """The name of a staged transaction's table; None if the transaction is not staged."""
        mine = (self._staged.c.target == self._target, self._staged.c.name == name)
        return connection.execute(sa.select(self._staged.c.staging).where(*mine)).scalar_one_or_none()

    def staged(self, connection: sa.Connection, index: int) -> list[str]:
        """The names of the instance's staged transactions."""
        mine = (self._staged.c.target == self._target, self._staged.c.instance_index == index)
        return list(connection.execute(sa.select(self._staged.c.name).where(*mine)).scalars())

    def unstage(self, connection: sa.Connection, name: str) -> None:
        connection.execute(sa.delete(self._staged).where(self._staged.c.target == self._target, self._staged.c.name == name))

    # Commits

    def commits(self, connection: sa.Connection, job: str, index: int) -> list[int]:
        """The ids of the checkpoints that an instance has committed in a job."""
        columns = self._commits.c
        mine = (columns.target == self._target, columns.job == job, columns.instance_index == index)
        return list(connection.execute(sa.select(columns.checkpoint_id).where(*mine)).scalars())

    def rows_of(self, connection: sa.Connection, commit: Commit) -> CommittedRows:
        columns = self._commits.c
        found = sa.select(columns.row_count, columns.marked, columns.taken_back).where(*self._is(commit))
        return CommittedRows(*connection.execute(found).one())

    def jobs(self, connection: sa.Connection) -> list[str]:
        """The jobs that have committed rows to the target."""
        found = connection.execute(sa.select(self._commits.c.job).where(self._commits.c.target == self._target).distinct())
        return sorted(found.scalars())

    def marks_all(self, connection: sa.Connection) -> bool:
        """Whether the rows of all commits name their checkpoint."""
        columns = self._commits.c
        unmarked = sa.select(columns.job).where(columns.target == self._target, sa.not_(columns.marked)).limit(1)
        return connection.execute(unmarked).first() is None

    def marked(self, connection: sa.Connection) -> list[Commit]:
        """The commits whose rows name their checkpoint."""
        columns = self._commits.c
        found = sa.select(columns.job, columns.instance_index, columns.checkpoint_id)
        rows = connection.execute(found.where(columns.target == self._target, columns.marked))
        return [Commit(job, index, checkpoint_id) for job, index, checkpoint_id in rows]

    def record_commit(self, connection: sa.Connection, staged: Staged, marked: bool) -> None:
        commit = staged.commit
        connection.execute(
            sa.insert(self._commits).values(
                target=self._target,
                job=commit.job,
                instance_index=commit.index,
                checkpoint_id=commit.checkpoint,
                name=staged.name,
                row_count=staged.rows,
                marked=marked,
                taken_back=None,
            )
        )

    def record_visibility(self, connection: sa.Connection, commit: Commit, taken_back: int | None) -> None:
        """Record that the rows of a commit were taken back (their number), or are visible again (None)."""
        connection.execute(sa.update(self._commits).where(*self._is(commit)).values(taken_back=taken_back))

    def _is(self, commit: Commit) -> Sequence[Any]:
        columns = self._commits.c
        return (
            columns.target == self._target,
            columns.job == commit.job,
            columns.instance_index == commit.index,
            columns.checkpoint_id == commit.checkpoint,
        )


def _encoded(ledger: Ledger) -> str:
    return encode_ledger(ledger).decode()
