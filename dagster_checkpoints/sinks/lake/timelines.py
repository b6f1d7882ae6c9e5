"""Restores of older checkpoints: the rows of later checkpoints leave the table, and come back if a later savepoint is restored.

One commit removes and adds the files, and records which rows readers see from then on (see :mod:`ledger`); data files are not
deleted, and the programs that clean a table keep removed files for some time. Files of other writers are never touched.

Must not know how rows are staged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from dagster_checkpoints.sinks.branches import check_not_overwritten, settlement
from dagster_checkpoints.sinks.lake.ledger import LakeJobLedger, commit_order, committed_of, describe, read_ledger
from dagster_checkpoints.sinks.lake.names import InstanceNames, TransactionName, original_name, renewed_name
from dagster_checkpoints.sinks.lake.table_log import DataFile, LakeChange, TableLog
from dagster_checkpoints.sinks.lake.transactions import Transactions
from dagster_checkpoints.systems.errors import SinkCannotTakeBack, SinkTransactionLost, few


class Timelines:
    """The rows of one instance of one job, as readers see them after restores.

    Args:
        log: the table, which exists.
        transactions: the transactions of the instance that acts.
        sink: the sink as errors name it.
    """

    def __init__(self, log: TableLog, transactions: Transactions, sink: str) -> None:
        self._log = log
        self._transactions = transactions
        self._sink = sink

    def settle(self, instance: InstanceNames, job: str, restored: int, names: Sequence[TransactionName]) -> None:
        """Show exactly the rows on the way to a checkpoint.

        Args:
            instance: the instance whose rows they are.
            job: the job's name.
            restored: id of the checkpoint or savepoint; 0: none of the job's rows.
            names: the transactions of that instance and job whose files exist.

        Raises:
            SinkCannotTakeBack: another program has rewritten rows that have to vanish, or the table only takes new rows.
            SinkTransactionLost: rows that are needed again have been deleted.
        """

        def plan() -> LakeChange | None:
            owner = self._transactions.owner_numbers()
            ledger = read_ledger(instance, job, self._log.number)
            committed = committed_of(names, self._log.number)
            visible = [name for name in committed if ledger.sees(name.checkpoint_id)]
            hidden = [name for name in committed if name not in visible]
            moves = settlement(ledger.branches, restored, visible, hidden, lambda name: name.checkpoint_id)
            if not moves.hide and not moves.show and ledger.sees(restored):
                return None  # otherwise rows that the restore commits would count as hidden
            if moves.hide:
                self._log.check_may_remove()
            active = {original_name(path): path for path in self._log.active_files()}
            numbers = ledger.showing(restored)
            return LakeChange(
                add=[file for name in _in_order(moves.show) for file in self._to_show(name, active)],
                remove=[file for name in _in_order(moves.hide) for file in self._to_hide(name, active, restored)],
                numbers={**numbers, **owner},
                note={"pipeline": instance.pipeline, "stage": instance.stage, **describe(numbers)},
            )

        self._log.commit(plan)

    def check_order(self, instance: InstanceNames, job: str, restored: int, names: Sequence[TransactionName]) -> None:
        """Check that the rows on the way to a checkpoint are the newest of their keys; where rows replace others by key.

        Args:
            instance: the instance whose rows they are.
            job: the job's name.
            restored: id of the checkpoint or savepoint.
            names: the transactions of that instance and job whose files exist.

        Raises:
            SinkCannotTakeBack: some may have been replaced by older ones.
        """
        self._log.refresh()
        committed = committed_of(names, self._log.number)
        order = commit_order(instance, job, committed, self._log.number)
        check_not_overwritten(read_ledger(instance, job, self._log.number).branches, restored, order, self._sink)

    def begin_branch(self, ledger: LakeJobLedger, restored: int, first: int) -> LakeJobLedger:
        """Record the restore from a checkpoint, and the job's first checkpoint after it. Durable when this returns.

        Args:
            ledger: what the log said when the instance was opened.
            restored: id of the restored checkpoint or savepoint; 0 for the job's beginning.
            first: id of the first checkpoint after the restore.
        """
        begun, numbers = ledger.begun(restored, first)
        if not numbers:
            return begun

        def plan() -> LakeChange | None:
            owner = self._transactions.owner_numbers()
            if all(self._log.number(name) == number for name, number in numbers.items()):
                return None
            return LakeChange(numbers={**numbers, **owner}, note=describe(numbers))

        self._log.commit(plan)
        return begun

    def _to_hide(self, name: TransactionName, active: Mapping[str, str], restored: int) -> Sequence[DataFile]:
        files = self._transactions.files_of(name)
        gone = [file.path for file in files if file.path not in active]
        if gone:
            raise SinkCannotTakeBack(
                f"{self._sink}: expected the {len(files)} files that checkpoint {name.checkpoint_id} has committed in the table, "
                f"found that {len(gone)} are not there any more ({few(gone)}): another program has rewritten or deleted their "
                f"rows ({self._log.format.rewriting}), so this sink cannot remove them to restore checkpoint {restored}. Nothing "
                "was changed. Restore the newest checkpoint instead; or restore the table to a version before that program ran; "
                f"or delete the checkpoint's rows yourself and then {name.file}"
            )
        return [msgspec.structs.replace(file, path=active[file.path]) for file in files]

    def _to_show(self, name: TransactionName, active: Mapping[str, str]) -> Sequence[DataFile]:
        files = [file for file in self._transactions.files_of(name) if file.path not in active]
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


def _in_order(names: frozenset[TransactionName]) -> list[TransactionName]:
    return sorted(names, key=lambda name: name.checkpoint_id)
