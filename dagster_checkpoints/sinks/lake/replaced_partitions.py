"""Rows that replace the rows of their partitions: other rows of a partition vanish with the job's first commit to it.

The job's later commits to the partition add rows. Which partitions the job has written to is known from its committed
transactions, those of all instances, and also those that a restore has taken back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagster_checkpoints.sinks.engine import SinkScope
from dagster_checkpoints.sinks.lake.earlier_jobs import transactions_of
from dagster_checkpoints.sinks.lake.ledger import committed_of
from dagster_checkpoints.sinks.lake.names import TransactionName
from dagster_checkpoints.sinks.lake.placement import FilesOf, Placement
from dagster_checkpoints.sinks.lake.table_log import DataFile, TableLog


class JobPartitions:
    """The partitions that a job has written to.

    Args:
        log: the table.
        scope: an instance of the job.
        files_of: returns the data files of a transaction.
    """

    def __init__(self, log: TableLog, scope: SinkScope, files_of: FilesOf) -> None:
        self._log = log
        self._scope = scope
        self._files_of = files_of
        self._known: dict[TransactionName, frozenset[tuple[str | None, ...]]] = {}

    def written(self) -> set[tuple[str | None, ...]]:
        """The values of the partitions' columns, for the table as it was read last."""
        of_job = [name for name in transactions_of(self._log, self._scope) if name.job == self._scope.job]
        partitions: set[tuple[str | None, ...]] = set()
        for name in committed_of(of_job, self._log.number):
            if name not in self._known:
                self._known[name] = frozenset(_values(file.partition) for file in self._files_of(name))
            partitions |= self._known[name]
        return partitions


class ReplacedPartitions:
    """The rows of one transaction, which replace the rows of the partitions that the job has not written to before.

    Args:
        log: the table.
        files: the transaction's data files.
        job: the partitions that the job has written to.
    """

    def __init__(self, log: TableLog, files: Sequence[DataFile], job: JobPartitions) -> None:
        self._log = log
        self._files = files
        self._job = job

    def plan(self) -> Placement:
        first = {_values(file.partition) for file in self._files} - self._job.written()
        return Placement(self._files, [file for file in self._log.active() if _values(file.partition) in first])

    def committed(self) -> None:
        pass


def _values(partition: Mapping[str, str | None]) -> tuple[str | None, ...]:
    return tuple(partition[name] for name in sorted(partition))
