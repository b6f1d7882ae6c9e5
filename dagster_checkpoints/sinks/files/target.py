"""The target of a FileSink: files that are moved between hidden and visible names, and a ledger that is stored beside them.

A transaction is a folder of staged files, and a file that lists them. When the rows are visible, that file becomes the commit's
record, by which a restore of an older checkpoint finds them. Each call can be repeated: a file that has its new name stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import ClassVar

import msgspec
import pyarrow.parquet as pq

from dagster_checkpoints.files.urls import is_hidden
from dagster_checkpoints.sinks.engine import SinkScope
from dagster_checkpoints.sinks.files.columns import (
    FileColumns,
    agree_on_columns,
    check_layout,
    check_partitions,
    check_types,
    read_columns,
)
from dagster_checkpoints.sinks.files.names import (
    COLUMNS,
    MANIFESTS,
    OWN,
    PARTS,
    STAGE_MARK,
    STAGED,
    FileCommitName,
    FileManifest,
    ManifestFile,
    StagedParts,
    commit_of_part,
    commits_folder,
    encoded_mark,
    former_owner,
    ledger_name,
    parse_commit,
    read_mark,
    staged_name,
    taken_back_folder,
    transaction_file,
    transactions_folder,
)
from dagster_checkpoints.sinks.files.open_transaction import EncodedTransaction, LinkedTransaction, OpenTransaction
from dagster_checkpoints.sinks.files.part_files import FileLayout
from dagster_checkpoints.sinks.files.target_files import TargetFiles
from dagster_checkpoints.sinks.ledger import Commit, Ledger, Moves, Staged, encode_ledger, stored_ledger
from dagster_checkpoints.sinks.parquet_files import arrow_schema, parquet_rows, spark_schema
from dagster_checkpoints.sinks.target import Batch, Guard, Sealed, SteppedTarget
from dagster_checkpoints.sinks.temporary_folder import TemporaryFolder
from dagster_checkpoints.systems.errors import (
    SinkCannotTakeBack,
    SinkError,
    SinkPathInUse,
    SinkTransactionLost,
    UnreadableSinkTransaction,
    few,
)

_IN_SAVEPOINT = "transaction.json"
_NAMED = 4


class FileTarget(SteppedTarget):
    """A location, for one instance.

    Args:
        files: the location.
        layout: how rows are divided into files.
        manifests: whether each commit writes a manifest.
        sink: the sink as errors name it.
    """

    mark: ClassVar[str] = STAGE_MARK
    """The file that names the stage."""
    ending: ClassVar[str] = STAGED
    """With what the names of linked files end, with the transaction's name."""

    def __init__(self, files: TargetFiles, layout: FileLayout, *, manifests: bool, sink: str) -> None:
        self._files = files
        self._layout = layout
        self._manifests = manifests
        self._sink = sink
        self._current: dict[str, OpenTransaction] = {}
        self._fitted = False
        self._copies: TemporaryFolder | None = None
        self._parts: dict[str, StagedParts] = {}
        self._history = ""

    @property
    def place(self) -> str:
        return ""  # a savepoint may be restored at another location

    # Before a run

    def jobs(self, scope: SinkScope) -> list[str]:
        self.check_stage(scope)
        indices = self._indices()
        self._check_format(indices)
        return sorted({job for index in indices for job in self._files.folders(f"{commits_folder(index)}/")})

    def foreign(self) -> list[str]:
        return list(islice((name for name, _ in self._files.sizes("") if _is_foreign(name)), _NAMED))

    def check_stage(self, scope: SinkScope) -> None:
        """Check that the location is the stage's, or has no stage yet.

        Raises:
            SinkPathInUse: it belongs to another stage or pipeline.
            InvalidSinkPath: a partition's directory is a link.
        """
        self._scope = scope
        data = self._files.read(self.mark)
        if data is not None:
            self._history = read_mark(data, scope, self._files.place, f"{self._files.place}/{self.mark}").history
        self._check_format([scope.index])
        if self._layout.partition_by:
            self._files.check_folders()

    def check_layout(self) -> None:
        """Check that the files there have this layout. Raises SinkColumnsMismatch."""
        found = read_columns(self._files)
        if found is not None:
            check_layout(found, self._layout.format, self._layout.partition_by, self._files)

    def columns_of(self, rows: Path, job: str) -> FileColumns:
        """The columns of the rows in a Parquet file.

        Args:
            rows: the file.
            job: the job that writes the rows.

        Raises:
            SinkColumnsMismatch: the format does not have a column's type, or a partition column is missing or has another type.
        """
        metadata, layout = pq.read_metadata(rows), self._layout
        schema = arrow_schema(metadata)
        check_partitions(schema, layout.partition_by, self._sink)
        if not layout.links:
            check_types(schema, spark_schema(metadata), layout.format, self._sink)
        columns = tuple((field.name, str(field.type)) for field in schema)
        return FileColumns(job, layout.format, layout.partition_by, columns)

    # A run

    def open(self, scope: SinkScope, guard: Guard) -> None:
        self._files.create(self.mark, encoded_mark(scope))
        self.check_stage(scope)
        self._guard = guard
        ledger, self._transactions = self._places(scope)
        self._ledger = self._files.ledger_file(ledger)

    def close(self) -> None:
        self._drop_copies()
        current, self._current = self._current, {}
        with suppress(SinkError, OSError):  # a later start deletes what is left
            for one in current.values():
                one.discard()

    def read_ledger(self) -> Ledger:
        data = self._ledger.read()
        return Ledger() if data is None else stored_ledger(data, self._ledger.place)

    def put_ledger(self, ledger: Ledger) -> None:
        self._ledger.replace(encode_ledger(ledger))

    def committed(self, job: str) -> list[Commit]:
        return [name.commit for name in self._records(job)]

    def unlisted(self, job: str) -> list[Commit]:
        visible = (commit_of_part(name) for name in self._files.names("") if not is_hidden(name))
        hidden = map(parse_commit, self._files.folders(f"{taken_back_folder(self._scope.index)}/"))
        found = {name.commit for name in (*visible, *hidden) if name is not None}.difference(self.committed(job))
        return [each for each in found if (each.job, each.index) == (job, self._scope.index)]

    # Staged files

    def stage(self, name: str, batch: Batch) -> None:
        sources = [(file, rows) for file in batch.files if (rows := parquet_rows(file))]
        if sources and not self._fitted:
            self._agree(self.columns_of(sources[0][0], self._scope.job))
            self._fitted = True
        if name not in self._current:
            if not sources:
                return
            folder = f"{self._transactions}/{name}"
            self._current[name] = (
                LinkedTransaction(self._files, folder, self.ending.format(name=name))
                if self._layout.links
                else EncodedTransaction(self._files, folder, self._layout, self._sink)
            )
        self._current[name].write(sources, batch.id)

    def seal(self, name: str, commit: Commit) -> Sealed | None:
        current = self._current.get(name)
        parts = current.close() if current is not None else []
        self._current.pop(name, None)
        if current is None or not parts:
            return None
        staged = StagedParts(self._layout.format, tuple(parts))
        self._list(FileCommitName(commit, name), staged, replaced=current.placed > len(parts))
        return Sealed(sum(part.rows for part in parts), sum(part.bytes for part in parts), len(parts))

    def staged(self) -> list[str]:
        return self._files.folders(f"{self._transactions}/")

    def discard(self, names: Sequence[str]) -> None:
        for name in names:
            self._guard(self.read_ledger())
            self._delete_staged(f"{self._transactions}/{name}")

    def copies(self, staged: Staged) -> dict[str, Path]:
        name, parts = self._transaction(staged)
        self._check_staged(name, parts)
        self._drop_copies()
        self._copies = TemporaryFolder()
        stored = {_IN_SAVEPOINT: name.transaction}
        stored |= {staged_name(part.number, STAGED): file for part, file in zip(parts.parts, parts.staged(name), strict=True)}
        return {saved: self._files.on_this_machine(file, self._copies.path) for saved, file in stored.items()}

    def restage(self, staged: Staged, files: Mapping[str, Path]) -> None:
        name = FileCommitName(staged.commit, staged.name)
        if self._read(name, name.transaction) is not None:
            return
        if _IN_SAVEPOINT not in files:
            raise UnreadableSinkTransaction(
                f"{self._sink}: expected a savepoint's file {_IN_SAVEPOINT}, which lists the files of transaction {staged.name}, "
                f"found that its savepoint holds no {_IN_SAVEPOINT}, but {few(files)}. Restore another savepoint"
            )
        data = files[_IN_SAVEPOINT].read_bytes()
        parts = PARTS.decode(data)
        self._delete_staged(name.staged)  # a crash has interrupted an earlier restore
        sources = [files[staged_name(part.number, STAGED)] for part in parts.parts]
        self._files.place_all(dict(zip(parts.staged(name), sources, strict=True)))
        self._files.put(name.transaction, data)

    # Moves

    def check_moves(self, moves: Moves) -> None:
        hide, show = ([self._committed_parts(commit) for commit in commits] for commits in (moves.hide, moves.show))
        gone = [file for name, parts in hide for file in self._lost_files(name, parts)]
        if gone:
            raise SinkCannotTakeBack(
                f"{self._sink}: expected the files that later checkpoints than the restored one have committed in "
                f"{self._files.place}, found that {len(gone)} are not there any more ({few(gone)}): another program has "
                "rewritten or deleted them, so this sink cannot hide their rows. Nothing was changed. Restore the newest "
                "checkpoint instead; or put the files back; or, if their rows are really gone, delete the records of these "
                f"commits: {few(name.record for name, _ in hide)}"
            )
        lost = [file for name, parts in show for file in self._lost_files(name, parts)]
        if lost:
            raise SinkTransactionLost(
                f"{self._sink}: expected the rows that the restored checkpoint holds, and that were taken back since, in "
                f"{self._files.place}, found no {few(lost)}: they have been deleted. Restore them from a backup, or restore "
                "another checkpoint or savepoint"
            )
        for staged in moves.publish:
            name, parts = self._transaction(staged)
            self._check_staged(name, parts)

    def publish(self, staged: Staged) -> None:
        name = FileCommitName(staged.commit, staged.name)
        listed = self._parts.pop(staged.name, None) or self._read(name, name.transaction)
        parts = listed or self._read(name, name.record)
        if parts is None:
            raise self._lost(name, [name.transaction])
        self._show(name, parts, parts.staged(name))
        if listed is not None and self._files.move([(name.transaction, name.record, len(msgspec.json.encode(listed)))]):
            self._files.put(name.record, msgspec.json.encode(listed))

    def hide(self, commit: Commit) -> None:
        name, parts = self._committed_parts(commit)
        self._files.delete([name.manifest])
        self._move(name, parts, parts.visible(name), parts.taken_back(name))

    def show(self, commit: Commit) -> None:
        name, parts = self._committed_parts(commit)
        self._show(name, parts, parts.taken_back(name))

    def other_jobs(self) -> list[str]:
        columns = read_columns(self._files)  # perhaps of a job that has committed nothing
        return sorted({*self.jobs(self._scope), *([columns.job] if columns is not None else ())} - {self._scope.job})

    def remove_jobs(self, jobs: Sequence[str]) -> None:
        """Several instances may do this at the same time, and again after a crash: what says that there are files goes last."""
        if not jobs:
            return
        indices = self._indices()
        records = [file for index in indices for file in self._files.names(f"{commits_folder(index)}/") if _job(file) in jobs]
        manifests = (name for name in self._files.names(f"{MANIFESTS}/") if _job(name.removesuffix(".manifest")) in jobs)
        self._files.delete(manifests)
        found = ((name, commit_of_part(name)) for name in self._files.names("") if not is_hidden(name))
        self._files.delete(name for name, part in found if part is not None and part.commit.job in jobs)
        for index in indices:
            hidden = self._files.names(f"{taken_back_folder(index)}/")
            self._files.delete(name for name in hidden if _job(name.rpartition("/")[0]) in jobs)
        columns = read_columns(self._files)
        if columns is not None and columns.job in jobs:
            self._files.delete([COLUMNS])
        self._files.delete(records)

    def _show(self, name: FileCommitName, parts: StagedParts, present: Sequence[str]) -> None:
        """Move files to their visible names, then write the manifest."""
        self._move(name, parts, present, parts.visible(name))
        if self._manifests:
            files = [
                ManifestFile(path, part.rows, part.bytes) for path, part in zip(parts.visible(name), parts.parts, strict=True)
            ]
            scope, commit = self._scope, name.commit
            manifest = FileManifest(commit.checkpoint, scope.pipeline, scope.stage, commit.index, tuple(files))
            self._files.put(name.manifest, msgspec.json.encode(manifest) + b"\n")

    def _move(self, name: FileCommitName, parts: StagedParts, present: Sequence[str], new: Sequence[str]) -> None:
        missing = self._files.move([(old, to, part.bytes) for old, to, part in zip(present, new, parts.parts, strict=True)])
        lost = self._files.missing([new[at] for at in missing])
        if lost:
            raise self._lost(name, lost)

    # What a target whose commits are whole directories has otherwise

    def _places(self, scope: SinkScope) -> tuple[str, str]:
        """The instance's ledger, and the folder of its staged transactions."""
        return ledger_name(scope.index), transactions_folder(scope.index)

    def _former(self, indices: Iterable[int]) -> list[str]:
        """Files by which the records of an earlier release are known."""
        return [name for index in indices for name in self._files.names(former_owner(index))]

    def _agree(self, own: FileColumns) -> None:
        """Refuse rows with other columns than the files that are there."""
        agree_on_columns(self._files, own)

    def _list(self, name: FileCommitName, parts: StagedParts, *, replaced: bool) -> None:
        """Make durable which files a transaction has.

        Args:
            name: the transaction.
            parts: its files.
            replaced: whether other files of it were deleted.
        """
        self._files.put(name.transaction, msgspec.json.encode(parts))

    # Records

    def _transaction(self, staged: Staged) -> tuple[FileCommitName, StagedParts]:
        """The files of a transaction that is not committed. Raises SinkTransactionLost."""
        name = FileCommitName(staged.commit, staged.name)
        parts = self._read(name, name.transaction)
        if parts is None:
            raise self._lost(name, [name.transaction])
        self._parts[staged.name] = parts
        return name, parts

    def _check_staged(self, name: FileCommitName, parts: StagedParts) -> None:
        """Whether all files are staged, before the first of them becomes visible. Raises SinkTransactionLost."""
        present = dict(self._files.sizes(f"{name.staged}/"))
        files = zip(parts.staged(name), parts.parts, strict=True)
        lost = [file for file, part in files if present.get(file) != part.bytes]
        if lost:
            raise self._lost(name, lost)

    def _records(self, job: str) -> list[FileCommitName]:
        files = self._files.names(f"{commits_folder(self._scope.index)}/{job}/")
        return [name for file in files if (name := parse_commit(file.rpartition("/")[2])) is not None]

    def _committed_parts(self, commit: Commit) -> tuple[FileCommitName, StagedParts]:
        """The files of a commit. Raises SinkTransactionLost."""
        prefix = f"{commits_folder(commit.index)}/{commit.job}/{commit.checkpoint}-job{commit.job}-"
        for file in self._files.names(prefix):
            name = parse_commit(file.rpartition("/")[2])
            parts = self._read(name, file) if name is not None and name.commit == commit else None
            if name is not None and parts is not None:
                return name, parts
        raise self._lost(FileCommitName(commit, ""), [f"{prefix}…"])

    def _lost_files(self, name: FileCommitName, parts: StagedParts) -> list[str]:
        """The visible names of the files that are neither visible nor taken back."""
        visible, hidden = parts.visible(name), parts.taken_back(name)
        missing = set(self._files.missing(visible))
        left = [at for at, file in enumerate(visible) if file in missing]
        gone = set(self._files.missing([hidden[at] for at in left]))
        return [visible[at] for at in left if hidden[at] in gone]

    def _delete_staged(self, folder: str) -> None:
        files = self._files.names(f"{folder}/")
        last = transaction_file(folder)  # so that a crash leaves no files that are not listed
        self._files.delete(file for file in files if file != last)
        self._files.delete([last])

    def _read(self, name: FileCommitName, file: str) -> StagedParts | None:
        data = self._files.read(file)
        try:
            return None if data is None else PARTS.decode(data)
        except msgspec.DecodeError as error:
            raise SinkTransactionLost(
                f"{self._sink}: expected {self._files.place}/{file} to list the files of a transaction of checkpoint "
                f"{name.commit.checkpoint}, found a file that cannot be read: {error}. Restore it from a backup"
            ) from error

    def _lost(self, name: FileCommitName, lost: Iterable[str]) -> SinkTransactionLost:
        return SinkTransactionLost(
            f"{self._sink}: expected the files of the transaction of checkpoint {name.commit.checkpoint}, instance "
            f"{name.commit.index}, staged or committed in {self._files.place}, found no {few(lost)}: a run from an older "
            "checkpoint has discarded them, or another program has deleted them. The sink has lost rows of that checkpoint: "
            "restore another checkpoint or a savepoint, restore the files from a backup, or begin a new job"
        )

    def _drop_copies(self) -> None:
        """Delete the copies that a savepoint was taken from."""
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    def _indices(self) -> list[int]:
        """The indices of the instances that have written to the location."""
        return sorted(int(name) for name in self._files.folders(f"{OWN}/") if name.isdigit())

    def _check_format(self, indices: Iterable[int]) -> None:
        former = self._former(indices)
        if former:
            raise SinkPathInUse(
                f"{self._sink}: expected no record of an earlier release of dagster-checkpoints in {self._files.place}, found "
                f"{few(former)}, whose format this release does not read: what it says of committed files would be lost. Let "
                "that release drain the pipeline, and give the new job another location"
            )


def _is_foreign(name: str) -> bool:
    return not is_hidden(name) and commit_of_part(name) is None


def _job(commit: str) -> str | None:
    name = parse_commit(commit.rpartition("/")[2])
    return None if name is None else name.commit.job
