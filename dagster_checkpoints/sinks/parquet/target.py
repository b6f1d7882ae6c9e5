"""The target of a ParquetSink: directories that are renamed, so that readers see all files of a commit or none.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import msgspec

from dagster_checkpoints.files.durable import place, sizes, sync
from dagster_checkpoints.sinks.engine import LedgerChanged, SinkScope
from dagster_checkpoints.sinks.ledger import Commit, Ledger, Moves, Staged, encode_ledger, stored_ledger
from dagster_checkpoints.sinks.parquet_files import parquet_rows
from dagster_checkpoints.sinks.stage_mark import encoded, mark_of, read_mark
from dagster_checkpoints.sinks.target import Batch, Guard, Sealed, SteppedTarget
from dagster_checkpoints.systems.errors import (
    ReservedSinkColumn,
    SinkPathInUse,
    SinkTransactionConflict,
    SinkTransactionLost,
    few,
)

COLUMN = "checkpoint"
_MARKER = ".sink.json"
_LEDGERS = ".ledgers"
_STAGING = ".staging"
_COMMITS = ".commits"
_TAKEN_BACK = ".taken-back"
_TRASH = ".trash-"
_FORMER = ".fences"
"""The directory by which the records of an earlier release are known."""
_COMMITTED = re.compile(rf"{COLUMN}=(\d+)-job(\d+(?:\.\w+)?)-(\d+)")
"""Groups: the checkpoint's id, the job, the instance's index."""


class ParquetTarget(SteppedTarget):
    """A directory, for one instance.

    Args:
        path: the directory.
        sink: the sink as errors name it.
    """

    def __init__(self, path: Path, sink: str) -> None:
        self._path = path
        self._sink = sink
        self._known: bytes | None = None
        self._rows: dict[str, dict[int, int]] = {}
        self._columns_checked = False
        self._history = ""

    @property
    def place(self) -> str:
        return ""  # a savepoint may be restored at another path

    # Before a run

    def jobs(self, scope: SinkScope) -> list[str]:
        self.check_stage(scope)
        names = [*self._names(self._path), *self._names(self._path / _COMMITS)]
        return sorted({self._commit(name).job for name in names if _COMMITTED.fullmatch(name)})

    def foreign(self) -> list[str]:
        return sorted(name for name in self._names(self._path) if name[0] not in "._" and not _COMMITTED.fullmatch(name))

    def check_stage(self, scope: SinkScope) -> None:
        """Check that the directory is the stage's, or has no stage yet. Raises SinkPathInUse."""
        with suppress(FileNotFoundError, NotADirectoryError):
            data = (self._path / _MARKER).read_bytes()
            self._history = read_mark(data, scope, self._path, self._path / _MARKER).history
        if (self._path / _FORMER).exists():
            raise SinkPathInUse(
                f"{self._sink}: expected no record of an earlier release of dagster-checkpoints in {self._path}, found "
                f"{_FORMER}, whose format this release does not read: what it says of committed rows would be lost. Let that "
                "release drain the pipeline, and give the new job another path"
            )

    @staticmethod
    def check_columns(columns: Iterable[str], where: str) -> None:
        """Refuse rows that have the sink's own column. Raises ReservedSinkColumn."""
        for column in columns:
            if column.lower() == COLUMN:
                raise ReservedSinkColumn(
                    f"{where}: expected rows without a column {COLUMN!r}, found {column!r}. ParquetSink adds that column for "
                    "readers: rename the stage's column"
                )

    # A run

    def open(self, scope: SinkScope, guard: Guard) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        self._claim(scope)
        self.check_stage(scope)
        self._scope, self._guard = scope, guard
        self._instance = f"{scope.stage}-{scope.index}"
        self._staging = self._path / _STAGING / self._instance
        self._staging.mkdir(parents=True, exist_ok=True)

    def _claim(self, scope: SinkScope) -> None:
        """Mark the directory as the stage's, if it has no mark."""
        file, temporary = self._path / _MARKER, self._path / f"{_MARKER}-{uuid4().hex}"
        temporary.write_bytes(encoded(mark_of(scope)))
        try:
            os.link(temporary, file)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            if not file.exists():
                os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)

    def close(self) -> None:
        for name in self._rows:
            shutil.rmtree(self._staging / name, ignore_errors=True)
        self._rows = {}

    def read_ledger(self) -> Ledger:
        self._known = data = self._stored()
        return Ledger() if data is None else stored_ledger(data, str(self._ledger))

    def put_ledger(self, ledger: Ledger) -> None:
        # No file system compares and sets: a newer owner between the two lines is found by its next change.
        if self._stored() != self._known:
            raise LedgerChanged
        data = msgspec.json.format(encode_ledger(ledger), indent=2) + b"\n"
        self._ledger.parent.mkdir(exist_ok=True)
        temporary = self._ledger.with_name(f"{self._ledger.name}-{uuid4().hex}")
        temporary.write_bytes(data)
        sync(temporary)
        os.replace(temporary, self._ledger)
        sync(self._ledger.parent)
        self._known = data

    @property
    def _ledger(self) -> Path:
        return self._path / _LEDGERS / f"{self._instance}.json"

    def _stored(self) -> bytes | None:
        try:
            return self._ledger.read_bytes()
        except FileNotFoundError:
            return None

    def committed(self, job: str) -> list[Commit]:
        found = [self._commit(name) for name in self._names(self._path / _COMMITS) if _COMMITTED.fullmatch(name)]
        return [commit for commit in found if (commit.job, commit.index) == (job, self._scope.index)]

    # Staged files

    def stage(self, name: str, batch: Batch) -> None:
        if not self._columns_checked:
            self.check_columns(getattr(batch.frame, "columns", ()), f"stage {self._scope.stage!r}")
            self._columns_checked = True
        folder, prefix = self._staging / name, f"part-{batch.id:06d}-"
        if name not in self._rows:
            folder.mkdir(parents=True)
        rows = self._rows.setdefault(name, {})
        for stale in folder.glob(f"{prefix}*"):  # the same batch, written a second time
            stale.unlink()
        for number, file in enumerate(batch.files):
            place(file, folder / f"{prefix}{number:04d}-{self._scope.index}-{self._scope.attempt}.parquet")
        rows[batch.id] = sum(map(parquet_rows, batch.files))

    def seal(self, name: str, commit: Commit) -> Sealed | None:
        folder = self._staging / name
        sync(folder)
        sync(self._staging)
        rows, files = sum(self._rows.pop(name, {}).values()), sizes(folder)
        return Sealed(rows, sum(files.values()), len(files))

    def staged(self) -> list[str]:
        return self._names(self._staging)

    def discard(self, names: Sequence[str]) -> None:
        for name in names:
            self._guard(self.read_ledger())
            shutil.rmtree(self._staging / name, ignore_errors=True)

    def copies(self, staged: Staged) -> dict[str, Path]:
        folder = self._staging / staged.name
        files = {file.name: file for file in sorted(folder.iterdir())} if folder.exists() else {}
        if len(files) != staged.files:
            raise SinkTransactionLost(
                f"{self._sink}: expected the {staged.files} files of a pre-committed transaction in {folder}, found "
                f"{len(files)}: another program deletes files there. The job writes the rows again if it restarts from its "
                "latest checkpoint"
            )
        return files

    def restage(self, staged: Staged, files: Mapping[str, Path]) -> None:
        folder, target = self._staging / staged.name, self._path / self._directory(staged.commit)
        wanted = {name: file.stat().st_size for name, file in files.items()}
        if target.exists() and sizes(target) != wanted:
            raise SinkTransactionConflict(
                f"{self._sink}: expected no directory {target}, or one with the {len(wanted)} files that the savepoint holds "
                f"({few(wanted)}), found others ({few(sizes(target))}). The savepoint's rows cannot be committed to that "
                "directory: if they are to replace its rows, move it away and restore again"
            )
        if target.exists() or (folder.exists() and sizes(folder) == wanted):
            return
        complete = self._staging / f"{staged.name}.restoring"
        shutil.rmtree(complete, ignore_errors=True)
        complete.mkdir()
        for name, file in files.items():
            place(file, complete / name)
        sync(complete)
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete directory: a crash has interrupted its deletion
        os.rename(complete, folder)
        sync(self._staging)

    # Moves

    def check_moves(self, moves: Moves) -> None:
        lost = [self._directory(commit) for commit in moves.show if not self._exists(commit)]
        if lost:
            raise SinkTransactionLost(
                f"expected the rows that the restored checkpoint holds, and that were taken back since, in "
                f"{self._path / _TAKEN_BACK}, found no {few(lost)}: they have been deleted. Restore {_TAKEN_BACK} from a backup, "
                "or restore another checkpoint or savepoint"
            )
        for staged in moves.publish:
            folder, target = self._staging / staged.name, self._path / self._directory(staged.commit)
            if target.exists() and folder.exists() and sizes(folder) != sizes(target):
                raise SinkTransactionConflict(
                    f"{self._sink}: expected no directory {target} before transaction {staged.name} is committed to it, found "
                    "one with other files. Was the pipeline restored from a checkpoint older than the newest? Its later rows are "
                    "committed already: remove the directories of the later checkpoints, or start the job without restoring"
                )
            if not target.exists() and not folder.exists():
                raise self._lost(staged)

    def publish(self, staged: Staged) -> None:
        folder, name = self._staging / staged.name, self._directory(staged.commit)
        target = self._path / name
        record = self._path / _COMMITS / name
        record.parent.mkdir(exist_ok=True)
        record.touch()
        sync(record.parent)
        if target.exists():
            shutil.rmtree(folder, ignore_errors=True)  # the restore of a savepoint staged rows that are already committed
            return
        try:
            os.rename(folder, target)
        except FileNotFoundError:
            if not target.exists():
                raise self._lost(staged) from None
        sync(self._path)

    def hide(self, commit: Commit) -> None:
        self._rename(self._path, self._path / _TAKEN_BACK, self._directory(commit))

    def show(self, commit: Commit) -> None:
        self._rename(self._path / _TAKEN_BACK, self._path, self._directory(commit))

    def remove_other_jobs(self, job: str) -> None:
        """Several instances may do this at the same time, and again after a crash: each directory is moved away before it is
        deleted, by one of them."""
        trash = self._path / f"{_TRASH}{uuid4().hex}"
        trash.mkdir()
        for folder in (self._path, self._path / _TAKEN_BACK):
            for name in self._of_other_jobs(folder, job):
                with suppress(FileNotFoundError):
                    os.rename(folder / name, trash / f"{name}-{uuid4().hex}")
        for name in self._of_other_jobs(self._path / _COMMITS, job):
            (self._path / _COMMITS / name).unlink(missing_ok=True)
        sync(self._path)
        for leftover in self._path.glob(f"{_TRASH}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _of_other_jobs(self, folder: Path, job: str) -> Iterator[str]:
        names = (name for name in self._names(folder) if _COMMITTED.fullmatch(name))
        return (name for name in names if self._commit(name).job != job)

    def _rename(self, source: Path, into: Path, name: str) -> None:
        into.mkdir(exist_ok=True)
        if (into / name).exists():
            shutil.rmtree(source / name, ignore_errors=True)  # the same rows: a savepoint has brought them a second time
        else:
            with suppress(FileNotFoundError):  # deleted by an operator
                os.rename(source / name, into / name)
        for folder in (source, into):
            if folder.exists():
                sync(folder)

    def _exists(self, commit: Commit) -> bool:
        name = self._directory(commit)
        return (self._path / name).exists() or (self._path / _TAKEN_BACK / name).exists()

    def _lost(self, staged: Staged) -> SinkTransactionLost:
        return SinkTransactionLost(
            f"{self._sink}: expected the {staged.files} files of a pre-committed transaction in {self._staging / staged.name}, "
            f"or committed in {self._path / self._directory(staged.commit)}, found neither: another program has deleted them. "
            "This sink has lost the rows of that checkpoint; restore the directory from a backup, or start the job without "
            "restoring"
        )

    # Names

    def _directory(self, commit: Commit) -> str:
        """The name of a commit's directory; of the first history's jobs only the number is in it."""
        job = commit.job.removesuffix(f".{self._history}") if self._history else commit.job
        return f"{COLUMN}={commit.checkpoint}-job{job}-{commit.index}"

    def _commit(self, name: str) -> Commit:
        found = _COMMITTED.fullmatch(name)
        assert found is not None
        job = f"{found[2]}.{self._history}" if self._history and "." not in found[2] else found[2]
        return Commit(job, int(found[3]), int(found[1]))

    @staticmethod
    def _names(folder: Path) -> list[str]:
        try:
            return os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
