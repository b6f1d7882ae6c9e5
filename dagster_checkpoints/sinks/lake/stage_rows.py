"""The rows of a stage in a lake table: those that readers see, and those that leave it and come back.

Rows leave for restores of older checkpoints, and for new starts. Data files are not deleted, and the programs that clean a table
keep removed files for some time. Files of other writers are never touched. Must not know what is recorded of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

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
