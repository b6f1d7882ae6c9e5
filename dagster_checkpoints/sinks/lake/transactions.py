"""The files of transactions below a lake table's location.

::

    _dagster_checkpoints/…/transactions/1.h1/42-since-0-….json    the transaction: its data files, with statistics
    dagster-checkpoints/…/000003/part-000012-0000.parquet         its data files

The transaction's file stays after the commit: a restore of an older checkpoint needs it (see :mod:`placement`).

Must not know which transactions are committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dagster_checkpoints.sinks.lake.names import TransactionName
from dagster_checkpoints.sinks.lake.table_log import DataFile, StagedTransaction, TableLog
from dagster_checkpoints.systems.errors import SinkTransactionLost, UnreadableSinkTransaction, few

_FILE_IN_SAVEPOINT = "transaction.json"

# Created at import: two threads that decode a type for the first time at the same moment crash msgspec.
_STAGED = msgspec.json.Decoder(StagedTransaction)


class TransactionFiles:
    """The files of the transactions of a table.

    Args:
        log: the table.
        sink: the sink as errors name it.
    """

    def __init__(self, log: TableLog, sink: str) -> None:
        self._log = log
        self._sink = sink

    def put(self, name: TransactionName, staged: StagedTransaction) -> None:
        """Make a transaction durable whose data files are."""
        self._log.files.put(name.file, msgspec.json.encode(staged))

    def delete(self, name: TransactionName) -> None:
        """Delete a transaction; the file that names the data goes last, so that a crash leaves no data."""
        self._log.files.delete(self._log.files.sizes(name.data))
        self._log.files.delete([name.file])

    def data_files(self, name: TransactionName) -> Sequence[DataFile]:
        """The data files that a transaction's file names. Raises SinkTransactionLost."""
        return self.content(name).files

    def complete(self, name: TransactionName) -> StagedTransaction:
        """A transaction that is not committed, all of whose files exist. Raises SinkTransactionLost."""
        staged = self.content(name)
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

    def saved(self, name: TransactionName, scratch: Path) -> dict[str, Path]:
        """The files of a transaction that is not committed, by their names in a savepoint. Raises SinkTransactionLost.

        Args:
            name: the transaction.
            scratch: an empty directory for copies.
        """
        names = {_FILE_IN_SAVEPOINT: name.file} | {_saved(file): file.path for file in self.complete(name).files}
        return {saved: self._log.files.on_this_machine(stored, scratch) for saved, stored in names.items()}

    def from_savepoint(self, files: Mapping[str, Path]) -> StagedTransaction:
        """The transaction that files of a savepoint are. Raises UnreadableSinkTransaction."""
        try:
            return _STAGED.decode(files[_FILE_IN_SAVEPOINT].read_bytes())
        except (KeyError, msgspec.DecodeError) as error:
            raise UnreadableSinkTransaction(
                f"{self._sink}: expected the files of one of its transactions in the savepoint, with {_FILE_IN_SAVEPOINT}, which "
                f"names the data files, found {few(sorted(files))}: {error}. Was the savepoint's folder changed, or did the "
                "stage have another kind of sink? Copy the savepoint again, or restore with that kind of sink"
            ) from error

    def restore(self, name: TransactionName, staged: StagedTransaction, files: Mapping[str, Path]) -> None:
        """Create a transaction's files again from a savepoint's, unless they are there."""
        present = self._log.files.sizes(name.data)
        missing = {file.path: files[_saved(file)] for file in staged.files if present.get(file.path) != file.size}
        self._log.files.delete(path for path in missing if path in present)  # incomplete: a crash has interrupted an upload
        self._log.files.place_all(missing)
        if missing or not self._log.files.exists(name.file):
            self.put(name, msgspec.structs.replace(staged, table=self._log.shape().table))

    def content(self, name: TransactionName) -> StagedTransaction:
        """What a transaction's file says. Raises SinkTransactionLost."""
        data = self._log.files.read(name.file)
        if data is None:
            raise SinkTransactionLost(
                f"{self._sink}: expected the file of a transaction, {name.file}, found none: a run from an older checkpoint has "
                f"discarded it, or another program has deleted it. This sink has lost track of the rows of checkpoint "
                f"{name.checkpoint_id}: restore another checkpoint or a savepoint, restore the file from a backup, or start the "
                "job without restoring"
            )
        try:
            return _STAGED.decode(data)
        except msgspec.DecodeError as error:
            raise SinkTransactionLost(
                f"{self._sink}: expected {name.file} to name the data files of a transaction, found a file that cannot be read: "
                f"{error}. Restore it from a backup"
            ) from error


def _saved(file: DataFile) -> str:
    """A data file's name in a savepoint."""
    return file.path.rpartition("/")[2]
