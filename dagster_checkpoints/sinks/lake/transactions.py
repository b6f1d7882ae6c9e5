"""The transactions of a sink of a lake table: their text in a checkpoint, their file beside the data files, and their commit.

::

    _dagster_checkpoints/…/transactions/1.h1/42-since-0-….json    the transaction: its data files, with statistics
    dagster-checkpoints/…/000003/part-000012-0000.parquet         its data files

The transaction's file stays after the commit: a restore of an older checkpoint needs it (see :mod:`timelines`).

Must not know which transaction is current.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from dagster_checkpoints.sinks.base import SinkCommit, SinkContext
from dagster_checkpoints.sinks.lake.columns import added, differences
from dagster_checkpoints.sinks.lake.fitting import FileFitting
from dagster_checkpoints.sinks.lake.ledger import committing, describe, is_committed, newest, owner_number
from dagster_checkpoints.sinks.lake.names import TransactionName, is_newer_owners, parse_transaction
from dagster_checkpoints.sinks.lake.placement import RowPlacement
from dagster_checkpoints.sinks.lake.table_log import DataFile, LakeChange, StagedTransaction, TableLog
from dagster_checkpoints.systems.errors import (
    SinkColumnsMismatch,
    SinkFenced,
    SinkTargetChanged,
    SinkTransactionLost,
    UnreadableSinkTransaction,
    few,
)

_FILE_IN_SAVEPOINT = "transaction.json"


class LakeTransaction(msgspec.Struct, frozen=True):
    """A transaction's text in a checkpoint, decoded.

    Args:
        sink: the table's format, see ``TableFormat``.
        transaction: the name of its file.
        files: the number of its data files.
        rows: the number of its rows.
        bytes: the size of its data files.
    """

    sink: str
    transaction: str
    files: int
    rows: int
    bytes: int
    version: int = 1


# Created at import: two threads that decode a type for the first time at the same moment crash msgspec.
_TEXTS = msgspec.json.Decoder(LakeTransaction)
_STAGED = msgspec.json.Decoder(StagedTransaction)


class Transactions:
    """The transactions of one instance.

    Args:
        log: the table.
        context: the instance.
        fitting: fits the stage's files to the table.
        sink: the sink as errors name it.
    """

    def __init__(self, log: TableLog, context: SinkContext, fitting: FileFitting, sink: str) -> None:
        self._log = log
        self._context = context
        self._sink = sink
        self._replaces = bool(fitting.replacement)
        self._place = fitting.placement(context, self.files_of)
        self._copies: TemporaryDirectory[str] | None = None

    def owner_numbers(self) -> dict[str, int]:
        """The number to record with every change, by which a commit of an older owner conflicts.

        Raises:
            SinkFenced: a newer owner has changed the table.
        """
        if not self._context.epoch:
            return {}
        name = owner_number(self._context)
        found = self._log.number(name)
        if found is not None and found > self._context.epoch:
            raise SinkFenced(
                f"{self._sink}: expected no newer run than this one (epoch {self._context.epoch}) to write to this table, found "
                f"in its log that a run of epoch {found} does: that run has taken the pipeline over while this run was "
                "suspended or cut off. This run stops and changes nothing"
            )
        return {name: self._context.epoch}

    def pre_commit(self, name: TransactionName, staged: StagedTransaction) -> str:
        """Make a transaction durable. Returns its text."""
        self._log.files.put(name.file, msgspec.json.encode(staged))
        text = LakeTransaction(
            self._log.format.tag,
            name.file,
            len(staged.files),
            sum(file.rows for file in staged.files),
            sum(file.size for file in staged.files),
        )
        return msgspec.json.encode(text).decode()

    def commit(self, text: str) -> SinkCommit:
        """Make the transaction's files part of the table; see ``LakeSink.commit``."""
        decoded, name = self.decode(text)
        staged: StagedTransaction | None = None
        if not self._log.exists and not self._log.find():
            staged = self._staged(name)
            self._log.create(staged.schema, staged.partition_by, self.owner_numbers())
        placement: RowPlacement | None = None

        def plan() -> LakeChange | None:
            nonlocal staged, placement
            if is_committed(name, self._log.number):
                return None
            owner = self.owner_numbers()
            staged = staged or self._staged(name)
            self._check_table(staged)
            placement = placement or self._place(name, staged)
            files = placement.plan()
            return LakeChange(
                add=files.add,
                remove=files.remove,
                numbers={**committing(name, self._log.number), **owner},
                note={**self._described(name), **describe(newest(name))},
                read_rows=self._replaces,
            )

        version = self._log.commit(plan)
        if placement is not None:
            placement.committed()
        return SinkCommit(decoded.rows, decoded.bytes, decoded.files, None if version is None else str(version))

    def abort(self, names: Iterable[TransactionName]) -> None:
        """Delete transactions that are not committed; the file that names the data goes last, so that a crash leaves no data."""
        for name in names:
            if self._log.exists:
                self._log.refresh()
                self.owner_numbers()  # right before each deletion: an object store has no fenced deletion
            if is_committed(name, self._log.number) or is_newer_owners(name.attempt, self._context):
                continue
            self._log.files.delete(self._log.files.sizes(name.data))
            self._log.files.delete([name.file])

    def savepoint_files(self, text: str) -> dict[str, Path]:
        """The files of a transaction by name, none if it is committed. Raises SinkTransactionLost."""
        _, name = self.decode(text)
        if self._log.exists:
            self._log.refresh()
        if is_committed(name, self._log.number):
            return {}
        staged = self._staged(name)
        self.drop_copies()
        self._copies = TemporaryDirectory(prefix="lake-savepoint-")
        scratch = Path(self._copies.name)
        names = {_FILE_IN_SAVEPOINT: name.file} | {_saved(file): file.path for file in staged.files}
        return {saved: self._log.files.on_this_machine(stored, scratch) for saved, stored in names.items()}

    def drop_copies(self) -> None:
        """Delete the copies that a savepoint was taken from."""
        if self._copies is not None:
            self._copies.cleanup()
            self._copies = None

    def restore(self, text: str, files: Mapping[str, Path]) -> None:
        """Create the transaction's files again from a savepoint's; see ``LakeSink.restore_transaction``."""
        _, name = self.decode(text)
        if _FILE_IN_SAVEPOINT not in files:
            raise self._unreadable(text, f"its savepoint holds no {_FILE_IN_SAVEPOINT}")
        staged = _STAGED.decode(files[_FILE_IN_SAVEPOINT].read_bytes())
        if not self._log.exists and not self._log.find():
            self._log.create(staged.schema, staged.partition_by, self.owner_numbers())
        present = self._log.files.sizes(name.data)
        missing = {file.path: files[_saved(file)] for file in staged.files if present.get(file.path) != file.size}
        self._log.files.delete(path for path in missing if path in present)  # incomplete: a crash has interrupted an upload
        self._log.files.place_all(missing)
        if missing or not self._log.files.exists(name.file):
            table = self._log.shape().table if self._log.exists else ""
            self._log.files.put(name.file, msgspec.json.encode(msgspec.structs.replace(staged, table=table)))

    def files_of(self, name: TransactionName) -> Sequence[DataFile]:
        """The data files that a transaction's file names."""
        return self._read(name).files

    def decode(self, text: str) -> tuple[LakeTransaction, TransactionName]:
        """The transaction that a text names. Raises UnreadableSinkTransaction."""
        try:
            decoded = _TEXTS.decode(text)
        except msgspec.DecodeError as error:
            raise self._unreadable(text, str(error)) from error
        if decoded.sink != self._log.format.tag:
            raise self._unreadable(text, f"the kind of its sink is {decoded.sink!r}")
        name = parse_transaction(decoded.transaction)
        if name is None:
            raise self._unreadable(text, "no name of a transaction's file")
        return decoded, name

    def _described(self, name: TransactionName) -> dict[str, str]:
        """A transaction, for people."""
        return {
            "pipeline": name.instance.pipeline,
            "stage": name.instance.stage,
            "instance": str(name.instance.index),
            "job": name.job,
            "checkpoint": str(name.checkpoint_id),
            "epoch": str(self._context.epoch),
        }

    def _staged(self, name: TransactionName) -> StagedTransaction:
        """A transaction that is not committed, all of whose files exist. Raises SinkTransactionLost."""
        staged = self._read(name)
        present = self._log.files.sizes(name.data)
        lost = [file.path for file in staged.files if present.get(file.path) != file.size]
        if lost:
            raise SinkTransactionLost(
                f"{self._sink}: expected the {len(staged.files)} data files of a pre-committed transaction in {name.data}, found "
                f"that {len(lost)} are missing or have another size ({few(lost)}): another program has deleted them. "
                f"{self._log.format.cleaning}. Restore them from a backup, or start the job from a savepoint, or without "
                "restoring"
            )
        return staged

    def _read(self, name: TransactionName) -> StagedTransaction:
        data = self._log.files.read(name.file)
        if data is None:
            raise SinkTransactionLost(
                f"{self._sink}: expected the file of a transaction, {name.file}, found none: another program has deleted it. "
                f"This sink has lost track of the rows of checkpoint {name.checkpoint_id}; restore the file from a backup, or "
                "start the job without restoring"
            )
        try:
            return _STAGED.decode(data)
        except msgspec.DecodeError as error:
            raise SinkTransactionLost(
                f"{self._sink}: expected {name.file} to name the data files of a transaction, found a file that cannot be read: "
                f"{error}. Restore it from a backup"
            ) from error

    def _check_table(self, staged: StagedTransaction) -> None:
        """Whether the table is still the one that the files were made for."""
        shape = self._log.shape()
        if staged.table and shape.table != staged.table:
            raise SinkTargetChanged(
                f"{self._sink}: expected the table with id {staged.table}, found one with id {shape.table}: it was dropped and "
                "created again after the rows were written. Restore the table, or begin a new job that writes all rows again"
            )
        stage = self._log.columns_of(staged.schema)
        problems = differences(shape.columns, stage, shape.required, "add")
        problems += [
            f"column {column.name!r}: expected a column of the table, found that it was dropped"
            for column in added(shape.columns, stage)
        ]
        if shape.partition_by != staged.partition_by:
            problems.append(f"expected partition columns {list(staged.partition_by)}, found {list(shape.partition_by)}")
        if problems:
            raise SinkColumnsMismatch(
                f"{self._sink}: the table was changed after the rows of this transaction were written: {'; '.join(problems)}. "
                "Undo the change and start the run again"
            )

    def _unreadable(self, text: str, why: str) -> UnreadableSinkTransaction:
        return UnreadableSinkTransaction(
            f"{self._sink}: expected the text of one of its transactions, found {text!r}: {why}. Did the stage have another "
            "kind of sink when the checkpoint was taken? Restore with that kind of sink, or start the job without restoring"
        )


def _saved(file: DataFile) -> str:
    """A data file's name in a savepoint."""
    return file.path.rpartition("/")[2]
