"""The transactions of a ParquetSink: their text in a checkpoint, and their directories, staged and committed.

::

    <path>/.staging/<stage>-<index>/<transaction>/      staged: written or pre-committed
    <path>/checkpoint=42-job1-0/*.parquet               committed

Must not know which transaction is current, and which owner may change what.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import msgspec

from dagster_checkpoints.files.durable import place, sizes, sync
from dagster_checkpoints.sinks.base import SinkCommit
from dagster_checkpoints.sinks.parquet.taken_back import COMMITTED
from dagster_checkpoints.systems.errors import SinkTransactionConflict, SinkTransactionLost, UnreadableSinkTransaction, few

STAGING = ".staging"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
"""A name that can be a directory's."""


class ParquetTransaction(msgspec.Struct, frozen=True, tag="parquet", tag_field="sink"):
    """A transaction's text in a checkpoint, decoded; both paths are relative to the sink's directory.

    `rows` and `bytes` are None in a text of an earlier version of this package.
    """

    staging: str
    target: str
    files: int
    version: int = 1
    rows: int | None = None
    bytes: int | None = None


# Created at import: two threads that decode a type for the first time at the same moment crash msgspec.
_TRANSACTIONS = msgspec.json.Decoder(ParquetTransaction)


class TransactionDirectories:
    """The directories of a sink's transactions.

    Args:
        path: the sink's directory.
        sink: the sink as errors name it.
    """

    def __init__(self, path: Path, sink: str) -> None:
        self._path = path
        self._sink = sink

    def pre_commit(self, staging: Path, target: str, rows: int) -> str:
        """Make a staged directory durable. Returns the transaction's text.

        Args:
            staging: the transaction's staged directory.
            target: the name of its committed directory.
            rows: the number of its rows.
        """
        sync(staging)
        sync(staging.parent)
        found = sizes(staging)
        transaction = ParquetTransaction(
            staging=staging.relative_to(self._path).as_posix(),
            target=target,
            files=len(found),
            rows=rows,
            bytes=sum(found.values()),
        )
        return msgspec.json.encode(transaction).decode()

    def commit(self, transaction: str) -> SinkCommit:
        """Rename the staged directory to its target; see ``ParquetSink.commit``."""
        decoded = self.decode(transaction)
        self._show(decoded)
        return SinkCommit(rows=decoded.rows, bytes=decoded.bytes, files=decoded.files)

    def _show(self, decoded: ParquetTransaction) -> None:
        staging, target = self._path / decoded.staging, self._path / decoded.target
        if target.exists():
            if staging.exists() and sizes(staging) != sizes(target):
                raise SinkTransactionConflict(
                    f"{self._sink}: expected no directory {target} before transaction {decoded.staging} is "
                    "committed to it, found one with other files. Was the pipeline restored from a checkpoint older than "
                    "the newest? Its later rows are committed already: remove the directories of the later "
                    "checkpoints, or start the job without restoring"
                )
            shutil.rmtree(staging, ignore_errors=True)  # the restore of a savepoint staged rows that are already committed
            return
        try:
            os.rename(staging, target)
        except FileNotFoundError:
            if target.exists():  # another process has committed it in this moment
                return
            raise SinkTransactionLost(
                f"{self._sink}: expected the {decoded.files} files of a pre-committed transaction in {staging}, or "
                f"committed in {target}, found neither: another program has deleted them. This sink has lost the rows of that "
                "checkpoint; restore the directory from a backup, or start the job without restoring"
            ) from None
        sync(self._path)

    def abort(self, transaction: str) -> None:
        """Delete the staged directory."""
        shutil.rmtree(self._directories(transaction)[1], ignore_errors=True)

    def files(self, transaction: str) -> dict[str, Path]:
        """The staged files by name, none if they are committed. Raises SinkTransactionLost."""
        decoded, staging, target = self._directories(transaction)
        files = {file.name: file for file in sorted(staging.iterdir())} if staging.exists() else {}
        if len(files) != decoded.files and not target.exists():
            raise SinkTransactionLost(
                f"{self._sink}: expected the {decoded.files} files of a pre-committed transaction in {staging}, found "
                f"{len(files)}: another program deletes files there. The job writes the rows again if it restarts from its "
                "latest checkpoint"
            )
        return files

    def restore(self, transaction: str, files: Mapping[str, Path], prefix: str) -> None:
        """Create the staged directory again from a savepoint's files; see ``ParquetSink.restore_transaction``.

        Args:
            transaction: the transaction's text.
            files: the savepoint's files, by name.
            prefix: the prefix of the names of the owner's staged directories.
        """
        _, staging, target = self._directories(transaction)
        wanted = {name: file.stat().st_size for name, file in files.items()}
        if target.exists():
            found = sizes(target)
            if found != wanted:
                raise SinkTransactionConflict(
                    f"{self._sink}: expected in {target} the {len(wanted)} files that the savepoint holds ({few(wanted)}), or no "
                    f"such directory, found {len(found)} others ({few(found)}). The savepoint's rows cannot be committed to "
                    "that directory: if they are to replace its rows, move it away and restore again"
                )
            shutil.rmtree(staging, ignore_errors=True)
            return
        if staging.exists() and sizes(staging) == wanted:
            return
        staging.parent.mkdir(parents=True, exist_ok=True)
        complete = staging.with_name(f"{prefix}restoring-{uuid4().hex}")
        complete.mkdir()
        for name, file in files.items():
            place(file, complete / name)
        sync(complete)
        shutil.rmtree(staging, ignore_errors=True)  # an incomplete directory: a crash has interrupted its deletion
        os.rename(complete, staging)
        sync(staging.parent)

    def decode(self, transaction: str) -> ParquetTransaction:
        """The transaction that a text names. Raises UnreadableSinkTransaction."""
        try:
            decoded = _TRANSACTIONS.decode(transaction)
        except msgspec.DecodeError as error:
            raise UnreadableSinkTransaction(
                f"{self._sink}: expected the text of one of its transactions, found {transaction!r}: {error}. Did "
                "the stage have another kind of sink when the checkpoint was taken? Restore with that kind of sink, "
                "or start the job without restoring"
            ) from error
        parts = decoded.staging.split("/")
        if (
            len(parts) != 3
            or parts[0] != STAGING
            or not all(NAME.fullmatch(part) for part in parts[1:])
            or not COMMITTED.fullmatch(decoded.target)
        ):
            raise UnreadableSinkTransaction(
                f"{self._sink}: expected a transaction below {STAGING}, found {transaction!r}. The checkpoint's "
                "metadata was not written by this sink"
            )
        return decoded

    def _directories(self, transaction: str) -> tuple[ParquetTransaction, Path, Path]:
        decoded = self.decode(transaction)
        return decoded, self._path / decoded.staging, self._path / decoded.target


def parquet_rows(file: Path) -> int:
    """The number of rows that a Parquet file's footer counts."""
    import pyarrow.parquet as pq  # the command line reads transactions without it

    return int(pq.read_metadata(file).num_rows)
