"""Rows of a lake table that leave it, and come back: for restores of older checkpoints, and for new starts.

Data files are not deleted, and the programs that clean a table keep removed files for some time. Files of other writers are never
touched.

Must not know why, nor what is recorded of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from dagster_checkpoints.sinks.lake.names import TransactionName, original_name, renewed_name
from dagster_checkpoints.sinks.lake.table_log import DataFile, TableLog
from dagster_checkpoints.sinks.lake.transactions import TransactionFiles
from dagster_checkpoints.systems.errors import SinkCannotTakeBack, SinkTransactionLost, few


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
        if self._log.names_return:
            return files
        copies = {file.path: renewed_name(file.path) for file in files}
        with TemporaryDirectory(prefix="lake-shown-again-") as scratch:
            sources = {file.path: present[file.path, file.size] for file in files}
            self._log.files.place_all(
                {copies[path]: self._log.files.on_this_machine(source, Path(scratch)) for path, source in sources.items()}
            )
        return [msgspec.structs.replace(file, path=copies[file.path]) for file in files]
