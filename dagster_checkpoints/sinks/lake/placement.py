"""What becomes of a table's rows when a transaction's rows join them: the files to add and the files to remove.

Rows are added; or they replace the rows of their partitions, which vanish with the job's first commit to a partition; or those
with their keys (see :mod:`replaced_rows`). Must not know conflicts, nor which transaction is current.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dagster_checkpoints.sinks.engine import SinkScope
from dagster_checkpoints.sinks.lake.ledger import committed_of
from dagster_checkpoints.sinks.lake.names import TransactionName
from dagster_checkpoints.sinks.lake.stage_rows import transactions_of
from dagster_checkpoints.sinks.lake.table_log import ActiveFile, DataFile, TableLog


@dataclass(frozen=True, slots=True)
class Replacement:
    """What the rows of a stage replace; nothing by default.

    Args:
        key: the columns by which a row replaces an earlier one; empty if rows do not replace rows.
        partitions: whether the rows of a job replace those of the partitions that they are in.
    """

    key: tuple[str, ...] = ()
    partitions: bool = False

    def __bool__(self) -> bool:
        return bool(self.key) or self.partitions


@dataclass(frozen=True, slots=True)
class Placement:
    """The files of one commit.

    Args:
        add: files whose rows become visible.
        remove: files whose rows vanish.
    """

    add: Sequence[DataFile]
    remove: Sequence[ActiveFile] = ()


class RowPlacement:
    """How the rows of one transaction join those of the table: they are added.

    Args:
        files: the transaction's data files, in the order in which their rows were written.
    """

    def __init__(self, files: Sequence[DataFile]) -> None:
        self._files = files

    def plan(self) -> Placement:
        """The files of the commit, for the table as it was read last. Called again after a conflict."""
        return Placement(self._files)

    def committed(self) -> None:
        """The commit has succeeded: delete what it did not use."""


FilesOf = Callable[[TransactionName], Sequence[DataFile]]
"""Returns the data files of a transaction whose file exists."""


class JobPartitions:
    """The partitions that a job has written to.

    They are those of its committed transactions, of all instances, also of those that a restore has taken back.

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


class ReplacedPartitions(RowPlacement):
    """The rows of one transaction, which replace the rows of the partitions that the job has not written to before.

    Args:
        files: the transaction's data files.
        log: the table.
        job: the partitions that the job has written to.
    """

    def __init__(self, files: Sequence[DataFile], log: TableLog, job: JobPartitions) -> None:
        super().__init__(files)
        self._log = log
        self._job = job

    def plan(self) -> Placement:
        first = {_values(file.partition) for file in self._files} - self._job.written()
        return Placement(self._files, [file for file in self._log.active() if _values(file.partition) in first])


def _values(partition: Mapping[str, str | None]) -> tuple[str | None, ...]:
    return tuple(partition[name] for name in sorted(partition))
