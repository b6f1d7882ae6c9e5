"""What a SqlSink's ledger holds: its tables, and the values in them.

Must not know in which order they are read and written: see :mod:`ledger`.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from sqlalchemy import BigInteger, Boolean, Column, Integer, MetaData, Table, Text

from dagster_checkpoints.sinks.base import SinkContext

SINKS = "_dagster_checkpoints_sinks"
INSTANCES = "_dagster_checkpoints_instances"
STAGED = "_dagster_checkpoints_staged"
COMMITS = "_dagster_checkpoints_commits"


class SqlTransaction(msgspec.Struct, frozen=True, tag="sql", tag_field="sink"):
    """A transaction's text in a checkpoint, decoded. `job` and `index` are those of the instance that wrote the rows."""

    table: str
    token: str
    job: str
    index: int
    checkpoint: int
    rows: int
    epoch: int = 0
    attempt: str = ""
    version: int = 1


# Created at import: two threads that decode a type for the first time at the same moment crash msgspec.
TRANSACTIONS = msgspec.json.Decoder(SqlTransaction)


@dataclass(frozen=True, slots=True)
class SqlClaim:
    """The stage that writes to a target.

    Args:
        pipeline: the pipeline's name.
        stage: the stage's name.
        history: random id of the checkpoint storage whose jobs wrote first.
        owns_rows: whether the table was created or found empty by the sink; otherwise it held rows of other programs.
        replaced_by: the job that has removed the rows of earlier jobs; empty if none has.
    """

    pipeline: str
    stage: str
    history: str
    owns_rows: bool
    replaced_by: str = ""

    def job_name(self, context: SinkContext) -> str:
        """The job's name in the ledger: each checkpoint storage counts its jobs from 1."""
        own = self.history in ("", context.history)
        return str(context.job_id) if own else f"{context.job_id}.{context.history}"


@dataclass(frozen=True, slots=True)
class CommittedTransaction:
    """A row of the ledger.

    Args:
        checkpoint_id: id of the checkpoint for which the transaction was pre-committed.
        token: the transaction's name.
        sequence: the place of the commit among the commits of the instance, from 1.
        rows: number of rows.
        marked: whether each row of the target names its checkpoint.
        taken_back: number of rows that a restore has hidden; None if they are visible.
    """

    checkpoint_id: int
    token: str
    sequence: int
    rows: int
    marked: bool
    taken_back: int | None


def ledger_tables(metadata: MetaData) -> tuple[Table, Table, Table, Table]:
    """The four tables: sinks, instances, staged transactions, commits."""

    def key(name: str, kind: type[Text] | type[Integer] | type[BigInteger] = Text) -> Column[object]:
        return Column(name, kind(), primary_key=True, autoincrement=False)

    sinks = Table(
        SINKS,
        metadata,
        key("target"),
        Column("format", Integer, nullable=False),
        Column("pipeline", Text, nullable=False),
        Column("stage", Text, nullable=False),
        Column("history", Text, nullable=False),
        Column("owns_rows", Boolean, nullable=False),
        Column("replaced_by", Text, nullable=False),
    )
    instances = Table(
        INSTANCES,
        metadata,
        key("target"),
        key("instance_index", Integer),
        Column("epoch", BigInteger, nullable=False),
        Column("history", Text, nullable=False),
        Column("commits", BigInteger, nullable=False),
        Column("branches", Text, nullable=False),
    )
    staged = Table(
        STAGED,
        metadata,
        key("target"),
        key("token"),
        Column("instance_index", Integer, nullable=False),
        Column("epoch", BigInteger, nullable=False),
        Column("history", Text, nullable=False),
        Column("attempt", Text, nullable=False),
        Column("job_id", BigInteger, nullable=False),
        Column("staging", Text, nullable=False),
    )
    commits = Table(
        COMMITS,
        metadata,
        key("target"),
        key("job"),
        key("instance_index", Integer),
        key("checkpoint_id", BigInteger),
        Column("token", Text, nullable=False),
        Column("sequence", BigInteger, nullable=False),
        Column("row_count", BigInteger, nullable=False),
        Column("marked", Boolean, nullable=False),
        Column("taken_back", BigInteger),
    )
    return sinks, instances, staged, commits
