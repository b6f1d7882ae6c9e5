"""The target of a ParquetSink: a FileTarget whose commits are directories, renamed so that readers see all files of one or none.

::

    <path>/.sink.json                                   the stage that writes here, and the history of its first job
    <path>/.ledgers/delays-0.json                       what instance 0 has committed, see sinks/ledger.py
    <path>/.staging/delays-0/e7.h1-<attempt>-000003/    a transaction of instance 0: written, or pre-committed
    <path>/checkpoint=42-job1-0/*.parquet               committed with checkpoint 42 of job 1 by instance 0
    <path>/checkpoint=42-job1.ab12cd34-0/*.parquet      likewise, of a job 1 whose checkpoints are in another storage
    <path>/.commits/checkpoint=42-job1-0                says that it was committed
    <path>/.taken-back/checkpoint=45-job1-0/            taken back by a restore of an older checkpoint

Readers of ``<path>`` (Spark, pandas, pyarrow) skip names that begin with a dot, and see an extra column ``checkpoint``. Rows are
moved, never deleted. An operator may delete ``.taken-back`` if no savepoint that is later than the restored one will be restored:
a restore that needs a deleted directory fails and names it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import msgspec

from dagster_checkpoints.files.durable import sync
from dagster_checkpoints.sinks.engine import SinkScope
from dagster_checkpoints.sinks.files.columns import FileColumns
from dagster_checkpoints.sinks.files.names import FileCommitName, StagedPart, StagedParts
from dagster_checkpoints.sinks.files.part_files import FileLayout
from dagster_checkpoints.sinks.files.target import FileTarget
from dagster_checkpoints.sinks.files.target_files import LocalTargetFiles
from dagster_checkpoints.sinks.ledger import Commit, Moves, Staged
from dagster_checkpoints.systems.errors import ReservedSinkColumn, SinkTransactionConflict, SinkTransactionLost, few

COLUMN = "checkpoint"
_COMMITS = ".commits"
_TAKEN_BACK = ".taken-back"
_TRASH = ".trash-"
_FORMER = ".fences"
_COMMITTED = re.compile(rf"{COLUMN}=(\d+)-job(\d+(?:\.\w+)?)-(\d+)")
"""Groups: the checkpoint's id, the job, the instance's index."""


@dataclass(frozen=True, slots=True)
class DirectoryName(FileCommitName):
    """A transaction whose only file, for :class:`FileTarget`, is its directory.

    Args:
        folder: the folder of the instance's staged transactions.
        history: the history whose jobs have only their number in names.
    """

    folder: str
    history: str

    @property
    def text(self) -> str:
        job = self.commit.job.removesuffix(f".{self.history}") if self.history else self.commit.job
        return f"{COLUMN}={self.commit.checkpoint}-job{job}-{self.commit.index}"

    @property
    def staged(self) -> str:
        return f"{self.folder}/{self.name}"

    @property
    def record(self) -> str:
        return f"{_COMMITS}/{self.text}"

    def part(self, folder: str, number: int, extension: str) -> str:
        return self.text

    def staged_part(self, number: int) -> str:
        return self.staged

    def taken_back(self, number: int) -> str:
        return f"{_TAKEN_BACK}/{self.text}"


class DirectoryTarget(FileTarget):
    """A directory, for one instance.

    Args:
        root: the directory.
        kind: the kind of sink, for errors.
        sink: the sink as errors name it.
    """

    mark = ".sink.json"
    ending = "-{name}.parquet"

    def __init__(self, root: Path, kind: str, sink: str) -> None:
        super().__init__(LocalTargetFiles(root, kind), FileLayout("parquet", (), None, None), manifests=False, sink=sink)
        self._root = root

    def jobs(self, scope: SinkScope) -> list[str]:
        self.check_stage(scope)
        return sorted({commit.job for folder in ("", _COMMITS) for commit in self._commits(folder).values()})

    def foreign(self) -> list[str]:
        return sorted(name for name in self._names("") if name[0] not in "._" and not _COMMITTED.fullmatch(name))

    def columns_of(self, rows: Path, job: str) -> FileColumns:
        """The columns of the rows in a Parquet file. Raises ReservedSinkColumn."""
        found = super().columns_of(rows, job)
        for column, _ in found.columns:
            if column.lower() == COLUMN:
                raise ReservedSinkColumn(
                    f"{self._sink}: stage {self._scope.stage!r}: expected rows without a column {COLUMN!r}, found {column!r}. "
                    "ParquetSink adds that column for readers: rename the stage's column"
                )
        return found

    def committed(self, job: str) -> list[Commit]:
        found = {commit for folder in (_COMMITS, "", _TAKEN_BACK) for commit in self._commits(folder).values()}
        return [each for each in found if (each.job, each.index) == (job, self._scope.index)]

    def unlisted(self, job: str) -> list[Commit]:
        return []  # `committed` goes by the rows, too

    # Staged files: those in the transaction's folder

    def copies(self, staged: Staged) -> dict[str, Path]:
        name, parts = self._transaction(staged)
        self._check_staged(name, parts)
        return {file: self._root / name.staged / file for file in sorted(self._sizes(name.staged))}

    def restage(self, staged: Staged, files: Mapping[str, Path]) -> None:
        name, _ = self._transaction(staged)
        if self._sizes(name.staged) != {saved: file.stat().st_size for saved, file in files.items()}:
            self._delete_staged(name.staged)
            self._files.place_all({f"{name.staged}/{saved}": file for saved, file in files.items()})

    # Moves

    def check_moves(self, moves: Moves) -> None:
        super().check_moves(msgspec.structs.replace(moves, hide=()))  # an operator may delete what is visible

    def publish(self, staged: Staged) -> None:
        name, parts = self._transaction(staged)
        record = self._root / name.record
        record.parent.mkdir(exist_ok=True)
        record.touch()
        sync(record.parent)
        self._show(name, parts, parts.staged(name))

    def hide(self, commit: Commit) -> None:
        with suppress(SinkTransactionLost):
            super().hide(commit)

    def other_jobs(self) -> list[str]:
        found = {commit.job for folder in ("", _TAKEN_BACK, _COMMITS) for commit in self._commits(folder).values()}
        return sorted(found - {self._scope.job})

    def remove_jobs(self, jobs: Sequence[str]) -> None:
        """Several instances may do this at the same time, and again after a crash: each directory is moved away before it is
        deleted, by one of them."""
        trash = self._root / f"{_TRASH}{uuid4().hex}"
        trash.mkdir()
        for folder in ("", _TAKEN_BACK, _COMMITS):
            for name, commit in self._commits(folder).items():
                if commit.job in jobs:
                    with suppress(FileNotFoundError):
                        os.rename(self._root / folder / name, trash / f"{name}-{uuid4().hex}")
            sync(self._root)
        for leftover in self._root.glob(f"{_TRASH}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    # What differs from files that are moved one by one

    def _places(self, scope: SinkScope) -> tuple[str, str]:
        instance = f"{scope.stage}-{scope.index}"
        return f".ledgers/{instance}.json", f".staging/{instance}"

    def _former(self, indices: Iterable[int]) -> list[str]:
        return [_FORMER] if (self._root / _FORMER).exists() else []

    def _agree(self, own: FileColumns) -> None:
        """Each directory may have columns of its own."""

    def _list(self, name: FileCommitName, parts: StagedParts, *, replaced: bool) -> None:
        own, whole = self._named(name.commit, name.name, sum(part.bytes for part in parts.parts))
        self._check_complete(own, whole)
        if replaced:
            sync(self._root / own.staged)  # that the replaced files are gone

    def _delete_staged(self, folder: str) -> None:
        shutil.rmtree(self._root / folder, ignore_errors=True)

    def _transaction(self, staged: Staged) -> tuple[DirectoryName, StagedParts]:
        return self._named(staged.commit, staged.name, staged.bytes or 0)

    def _committed_parts(self, commit: Commit) -> tuple[DirectoryName, StagedParts]:
        return self._named(commit, "", 0)

    def _check_staged(self, name: FileCommitName, parts: StagedParts) -> None:
        visible, staged = self._sizes(name.text), self._sizes(name.staged)
        if visible and staged and visible != staged:
            raise SinkTransactionConflict(
                f"{self._sink}: expected no directory {self._root / name.text} before transaction {name.name} with the files "
                f"{few(staged)} is committed to it, found one with other files ({few(visible)}). Was the checkpoint storage "
                "emptied or exchanged? If the transaction's rows are to replace those, move that directory away and start again"
            )
        if not visible:
            self._check_complete(name, parts)

    def _check_complete(self, name: FileCommitName, parts: StagedParts) -> None:
        size = parts.parts[0].bytes
        if sum(self._sizes(name.staged).values()) != size:
            raise self._lost(name, [f"{name.staged} with files of {size} bytes"])

    def _move(self, name: FileCommitName, parts: StagedParts, present: Sequence[str], new: Sequence[str]) -> None:
        source, target = self._root / present[0], self._root / new[0]
        target.parent.mkdir(exist_ok=True)
        if self._sizes(new[0]):
            shutil.rmtree(source, ignore_errors=True)  # the same rows: a savepoint has brought them again
        else:
            try:
                os.rename(source, target)
            except FileNotFoundError:
                if not target.exists():
                    raise self._lost(name, present) from None
        for folder in {target.parent, self._root}:
            sync(folder)

    def _named(self, commit: Commit, name: str, size: int) -> tuple[DirectoryName, StagedParts]:
        _, folder = self._places(self._scope)
        return DirectoryName(commit, name, folder, self._history), StagedParts("", (StagedPart(0, "", 0, size),))

    def _commits(self, folder: str) -> dict[str, Commit]:
        """The names in a folder that are a commit's; of the first history's jobs only the number is in them."""
        found = {}
        for match in filter(None, map(_COMMITTED.fullmatch, self._names(folder))):
            job = f"{match[2]}.{self._history}" if self._history and "." not in match[2] else match[2]
            found[match[0]] = Commit(job, int(match[3]), int(match[1]))
        return found

    def _names(self, folder: str) -> list[str]:
        try:
            return os.listdir(self._root / folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _sizes(self, folder: str) -> dict[str, int]:
        try:
            with os.scandir(self._root / folder) as entries:
                return {entry.name: entry.stat().st_size for entry in entries}
        except (FileNotFoundError, NotADirectoryError):
            return {}
