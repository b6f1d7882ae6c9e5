"""What becomes of a table's rows when a transaction's rows join them: the files to add and the files to remove.

Rows are added; or they replace the rows of their partitions, which vanish with the job's first commit to a partition; or those
with their keys (see :mod:`replaced_rows`). Must not know conflicts, nor which transaction is current.

Rows of the stage leave the table for restores of older checkpoints, and for new starts, and come back. Data files are not
deleted, and the programs that clean a table keep removed files for some time. Files of other writers are never touched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dagster_checkpoints.sinks.engine import SinkScope
from dagster_checkpoints.sinks.lake.ledger import committed_of, read_job
from dagster_checkpoints.sinks.lake.names import (
    InstanceNames,
    TransactionName,
    origin_of,
    original_name,
    pipeline_folder,
    renewed_name,
    transactions_in,
)
from dagster_checkpoints.sinks.lake.table_log import ActiveFile, DataFile, TableLog
from dagster_checkpoints.sinks.lake.transactions import TransactionFiles
from dagster_checkpoints.sinks.ledger import JobLedger
from dagster_checkpoints.sinks.temporary_folder import temporary_folder
from dagster_checkpoints.systems.errors import SinkCannotTakeBack, SinkTransactionLost, few

JobOfInstance = tuple[InstanceNames, str]
"""An instance of the stage, and a job."""


def visible_rows(log: TableLog, scope: SinkScope, *, by_key: bool) -> dict[JobOfInstance, list[TransactionName]]:
    """The transactions of the stage whose rows readers see, of all its instances and jobs.

    Args:
        log: the table, as it was read last.
        scope: an instance of the stage.
        by_key: whether rows replace others by key: then a restore has taken nothing back.
    """
    found: dict[JobOfInstance, list[TransactionName]] = defaultdict(list)
    ledgers: dict[JobOfInstance, JobLedger] = {}
    for name in committed_of(transactions_of(log, scope), log.number):
        of = (name.instance, name.job)
        ledger = ledgers.get(of) or ledgers.setdefault(of, read_job(*of, log.number))
        if (by_key and ledger.shown is None) or ledger.sees(name.checkpoint_id):
            found[of].append(name)
    return found


def transactions_of(log: TableLog, scope: SinkScope) -> list[TransactionName]:
    """The transactions whose files exist, of all instances and jobs of the stage."""
    found = transactions_in(log.files.sizes(pipeline_folder(scope.pipeline)))
    return [name for name in found if name.instance.stage == scope.stage]


def files_of_other_jobs(log: TableLog, scope: SinkScope) -> tuple[list[ActiveFile], list[str]]:
    """In a table where rows replace others by key: the files with rows of the stage's other jobs only, and those that may hold
    rows of other programs.

    The transactions do not tell in which files these rows are, since files have been rewritten; the names of the files do.
    """
    files = [(file, origin_of(file.path, scope.pipeline, scope.stage)) for file in log.active()]
    return [file for file, job in files if job not in (None, scope.job)], [file.path for file, job in files if job is None]


class RowVisibility:
    """The rows of committed transactions, in the table as it was read last.

    Args:
        log: the table, which exists.
        transactions: its transactions.
        sink: the sink as errors name it.
    """

    def __init__(self, log: TableLog, transactions: TransactionFiles, sink: str) -> None:
        self._log = log
        self._transactions = transactions
        self._sink = sink
        self._active = {original_name(path): path for path in log.active_files()}

    def hidden(self, names: Sequence[TransactionName], why: str) -> list[DataFile]:
        """The files to remove so that readers do not see the rows of transactions.

        Args:
            names: the transactions.
            why: for what, in errors.

        Raises:
            SinkCannotTakeBack: another program has rewritten rows that have to vanish, or the table only takes new rows.
            SinkTransactionLost: a transaction's file has been deleted.
        """
        if names:
            self._log.check_may_remove()
        return [file for name in names for file in self._to_hide(name, why)]

    def shown(self, names: Sequence[TransactionName]) -> list[DataFile]:
        """The files to add so that readers see the rows of transactions again.

        Raises:
            SinkTransactionLost: rows that are needed again have been deleted.
        """
        return [file for name in names for file in self._to_show(name)]

    def _to_hide(self, name: TransactionName, why: str) -> list[DataFile]:
        files = self._transactions.data_files(name)
        gone = [file.path for file in files if file.path not in self._active]
        if gone:
            raise SinkCannotTakeBack(
                f"{self._sink}: expected the {len(files)} files that checkpoint {name.checkpoint_id} has committed in the table, "
                f"found that {len(gone)} are not there any more ({few(gone)}): another program has rewritten or deleted their "
                f"rows ({self._log.format.rewriting}), so this sink cannot remove them {why}. Nothing was changed. Restore the "
                "newest checkpoint instead; or restore the table to a version before that program ran; or delete the "
                f"checkpoint's rows yourself and then {name.file}"
            )
        return [msgspec.structs.replace(file, path=self._active[file.path]) for file in files]

    def _to_show(self, name: TransactionName) -> list[DataFile]:
        files = [file for file in self._transactions.data_files(name) if file.path not in self._active]
        present = {(original_name(path), size): path for path, size in self._log.files.sizes(name.data).items()}
        lost = [file.path for file in files if (file.path, file.size) not in present]
        if lost:
            raise SinkTransactionLost(
                f"{self._sink}: expected the rows that checkpoint {name.checkpoint_id} has committed, and that a restore has "
                f"taken back since, in {name.data}, found no {few(lost)}: they have been deleted. "
                f"{self._log.format.cleaning}. Restore them from a backup, or restore another checkpoint or savepoint"
            )
        if self._log.format.names_return:
            return files
        copies = {file.path: renewed_name(file.path) for file in files}
        with temporary_folder() as scratch:
            sources = {file.path: present[file.path, file.size] for file in files}
            self._log.files.place_all(
                {copies[path]: self._log.files.on_this_machine(source, scratch) for path, source in sources.items()}
            )
        return [msgspec.structs.replace(file, path=copies[file.path]) for file in files]


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
