"""What a restore of an older checkpoint does with the rows that later checkpoints have committed to a SqlSink's table.

- With ``checkpoint_column`` they are moved to ``<table>__taken_back``, and back if a later savepoint is restored.
- With ``key`` they stay: the job writes them again. A restore is refused where it would not.
- Otherwise such a restore is refused: rows of different checkpoints cannot be distinguished.

The rule is :mod:`branches`. Everything happens in one transaction, with the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection

from dagster_checkpoints.sinks.branches import Branches, check_not_overwritten, settlement
from dagster_checkpoints.sinks.sql.ledger import SqlLedger
from dagster_checkpoints.sinks.sql.ledger_tables import COMMITS, CommittedTransaction
from dagster_checkpoints.sinks.sql.target import SqlTarget
from dagster_checkpoints.systems.errors import SinkCannotTakeBack, SinkTransactionLost


class SqlTakenBack:
    """The rows of one instance of one job, by checkpoint.

    Args:
        ledger: the target's ledger.
        target: the target.
        job: the job's name in the ledger.
        index: the instance's index.
        upserts: whether rows are replaced by key.
        marks: whether the target has a checkpoint column.
        sink: the sink as errors name it.
    """

    def __init__(
        self, ledger: SqlLedger, target: SqlTarget, job: str, index: int, *, upserts: bool, marks: bool, sink: str
    ) -> None:
        self._ledger = ledger
        self._target = target
        self._job = job
        self._index = index
        self._upserts = upserts
        self._marks = marks
        self._sink = sink

    def settle(self, connection: Connection, branches: Branches, restored: int) -> None:
        """Show exactly the rows on the way to the restored checkpoint, as far as the table allows it.

        Args:
            connection: the transaction, which holds the instance's row.
            branches: the job's restores.
            restored: id of the checkpoint or savepoint.

        Raises:
            SinkCannotTakeBack: the table does not allow it.
            SinkTransactionLost: rows that were taken back are needed again, and they have been deleted.
        """
        commits = self._ledger.commits(connection, self._job, self._index)
        if self._upserts:
            check_not_overwritten(branches, restored, [commit.checkpoint_id for commit in commits], self._sink)
            return
        visible = [commit for commit in commits if commit.taken_back is None]
        hidden = [commit for commit in commits if commit.taken_back is not None]
        moves = settlement(branches, restored, visible, hidden, lambda commit: commit.checkpoint_id)
        if not moves.hide and not moves.show:
            return
        if not self._marks or not all(commit.marked for commit in moves.hide | moves.show):
            raise self._indistinguishable(restored, moves.hide | moves.show)
        for commit in sorted(moves.hide, key=_by_checkpoint):
            moved = self._target.take_back(connection, mark(commit.checkpoint_id, self._job, self._index))
            self._ledger.record_visibility(connection, self._job, self._index, [commit.checkpoint_id], moved)
        for commit in sorted(moves.show, key=_by_checkpoint):
            moved = self._target.show_again(connection, mark(commit.checkpoint_id, self._job, self._index))
            if moved != commit.taken_back:
                raise SinkTransactionLost(
                    f"{self._sink}: expected {commit.taken_back} rows of checkpoint {commit.checkpoint_id}, which were committed "
                    f"before checkpoint {restored} and taken back since, in {self._target.taken_back_name}, found {moved}: they "
                    "have been deleted. Restore that table from a backup, or restore another checkpoint or savepoint"
                )
            self._ledger.record_visibility(connection, self._job, self._index, [commit.checkpoint_id], None)

    def _indistinguishable(self, restored: int, commits: frozenset[CommittedTransaction]) -> SinkCannotTakeBack:
        rows = sum(commit.rows for commit in commits)
        return SinkCannotTakeBack(
            f"{self._sink}: the job is restored from checkpoint {restored} and will write the rows of later checkpoints again; "
            f"expected a way to find the rows of {_few(commit.checkpoint_id for commit in commits)} ({rows} rows), found that "
            "the table does not name each row's checkpoint. Nothing was changed. Restore the newest checkpoint; or begin a new "
            f"job; or delete these rows yourself, and their rows in {COMMITS} (job {self._job!r}, instance_index "
            f"{self._index}). For the future: SqlSink(key=...) writes rows again without doubling them, "
            "SqlSink(checkpoint_column=...) makes rows distinguishable"
        )


def mark(checkpoint_id: int, job: str, index: int) -> str:
    """The value of the checkpoint's column in the rows of one commit."""
    return f"{checkpoint_id}-job{job}-{index}"


def _by_checkpoint(commit: CommittedTransaction) -> int:
    return commit.checkpoint_id


def _few(checkpoints: Iterable[int], at_most: int = 5) -> str:
    found = sorted(checkpoints)
    shown = ", ".join(map(str, found[:at_most])) + (", …" if len(found) > at_most else "")
    return f"checkpoint {shown}" if len(found) == 1 else f"checkpoints {shown}"
