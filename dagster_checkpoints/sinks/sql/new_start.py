"""What a new start does with the rows that a SqlSink's table holds.

A table that the sink has created, or found empty, is the sink's: ``replace`` empties it. In a table that held other rows, only
rows that name their checkpoint can be replaced.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection

from dagster_checkpoints.sinks.base import AtNewStart, SinkContext
from dagster_checkpoints.sinks.sql.ledger import SqlLedger
from dagster_checkpoints.sinks.sql.ledger_tables import COMMITS
from dagster_checkpoints.sinks.sql.taken_back import mark
from dagster_checkpoints.sinks.sql.target import SqlTarget
from dagster_checkpoints.systems.errors import SinkHoldsEarlierRows, SinkPathInUse


@dataclass(frozen=True, slots=True)
class SqlNewStart:
    """The choice at a new start, for one instance.

    Args:
        ledger: the target's ledger.
        target: the target.
        context: the instance; its job is the new one.
        at_new_start: the choice.
        marks: whether the target has a checkpoint column.
        sink: the sink as errors name it.
    """

    ledger: SqlLedger
    target: SqlTarget
    context: SinkContext
    at_new_start: AtNewStart
    marks: bool
    sink: str

    def check(self, connection: Connection) -> None:
        """Refuse the new start if the table holds rows that the job must not be mixed with; changes nothing.

        Raises:
            SinkHoldsEarlierRows: an earlier job has committed rows, and the choice is ``refuse``.
            SinkPathInUse: the table belongs to another stage; or holds rows that no SqlSink has written, and the choice is not
                ``keep``; or the ledger holds a job of the new job's number.
        """
        claim = self.ledger.claim(connection, self.context) if self.ledger.exists(connection) else None
        jobs = self.ledger.jobs(connection) if claim is not None else []
        if claim is not None and claim.job_name(self.context) in jobs:
            raise SinkPathInUse(
                f"{self._where}: this run begins job {self.context.job_id}, and expected no commits of a job of that number in "
                f"{COMMITS}, found some. The checkpoint storage counts its jobs from 1 again: was it emptied or exchanged? "
                "Rows of two jobs with one number cannot be distinguished: give the sink another table, or delete the table "
                f"and its rows in {COMMITS}"
            )
        if not self.target.exists(connection) or not self.target.has_rows(connection):
            return
        if not jobs or (claim is not None and not claim.owns_rows):
            self._check_other_rows(written=bool(jobs))
        if jobs and self.at_new_start == "refuse":
            raise SinkHoldsEarlierRows(
                f"{self._where}: this run is a new start, and expected no rows of an earlier job in the table, found rows that "
                f"job {', '.join(jobs)} has committed. Nothing was started. SqlSink(at_new_start=...) says what a new start "
                "does with them: 'refuse' (the default) stops the run; 'keep' leaves them and adds the new job's rows, or "
                "replaces them by key; 'replace' removes them when the new job begins. Choose 'keep' or 'replace', or another "
                "table; or continue the earlier job from one of its savepoints or checkpoints (restore_from), which is not a "
                "new start"
            )

    def replace(self, connection: Connection, job: str) -> None:
        """Remove the rows of earlier jobs, once for all instances of the job.

        Args:
            connection: the transaction, which holds the instance's row.
            job: the new job's name in the ledger.
        """
        claim = self.ledger.claim(connection, self.context)
        assert claim is not None
        if claim.replaced_by == job:  # by another instance, or before a crash
            return
        if self.target.exists(connection):
            if claim.owns_rows:
                self.target.empty(connection)
            elif self.marks:
                found = self.ledger.marks(connection)
                self.target.delete_marked(connection, [mark(*each) for each in found if each[1] != job])
            else:
                self._check_other_rows(written=True)
        self.ledger.record_replacement(connection, job)

    def _check_other_rows(self, written: bool) -> None:
        if self.at_new_start == "keep" or (written and (self.marks or self.at_new_start == "refuse")):
            return
        raise SinkPathInUse(
            f"{self._where}: expected a table that is empty, or holds only rows that the sink has committed, found other rows. "
            "The sink never removes rows that it has not written, and cannot distinguish them without a checkpoint_column. "
            "Give the sink a separate table, or delete these rows; if they belong there, choose at_new_start='keep'"
        )

    @property
    def _where(self) -> str:
        return f"{self.sink}: stage {self.context.stage!r} of pipeline {self.context.pipeline!r}"
