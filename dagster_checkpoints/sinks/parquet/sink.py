"""A sink that writes rows as Parquet files to a directory, visible exactly once: one directory rename per instance and
checkpoint.

Must not import Spark. Batches arrive as Parquet files that are already written; they are hard-linked, and of their content only
the number of rows is read.

::

    <path>/.sink.json                                   see :mod:`table_directory`
    <path>/.staging/                                    see :mod:`transactions`
    <path>/.fences/                                     see :mod:`dagster_checkpoints.sinks.fence`
    <path>/checkpoint=42-job1-0/*.parquet               committed with checkpoint 42 of job 1 by instance 0
    <path>/checkpoint=42-job1.ab12cd34-0/*.parquet      likewise, of a job 1 whose checkpoints are in another storage
    <path>/.taken-back/, <path>/.branches/              see :mod:`taken_back`

Readers of ``<path>`` (Spark, pandas, pyarrow) skip names that begin with a dot, and see an extra column
``checkpoint``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, get_args
from uuid import uuid4

import pyarrow.parquet as pq

from dagster_checkpoints.files.durable import place, sync
from dagster_checkpoints.files.urls import local_path, url_scheme
from dagster_checkpoints.sinks.base import AtNewStart, SinkCommit, SinkContext, TwoPhaseCommitSink
from dagster_checkpoints.sinks.fence import Fence, LocalOwnerFile
from dagster_checkpoints.sinks.parquet import table_directory
from dagster_checkpoints.sinks.parquet.taken_back import BRANCHES, COMMITTED, TAKEN_BACK, TakenBack
from dagster_checkpoints.sinks.parquet.transactions import NAME, STAGING, TransactionDirectories, parquet_rows
from dagster_checkpoints.sinks.transactions import (
    AbortRest,
    Commit,
    ContinueFrom,
    Settle,
    TakeFence,
    begins_timeline,
    new_start,
    recovery,
)
from dagster_checkpoints.sinks.unwritable import try_directory
from dagster_checkpoints.systems.errors import InvalidSinkPath, ReservedSinkColumn, SinkNotOpen

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_COLUMN = "checkpoint"
_FENCES = ".fences"
_TRASH = ".trash-"
_FORMER_MODES = {"append": "keep", "overwrite": "replace"}


class ParquetSink(TwoPhaseCommitSink):
    """Commits a stage's rows as Parquet files below a directory.

    Args:
        path: directory on a local file system, or on one that every machine of the run mounts at the same
            path. Only one stage of one pipeline may write to it.
        at_new_start: what a new start, not a resumption, does with rows that an earlier job has committed to the directory:
            ``refuse`` (default) stops the run before Spark starts, ``keep`` leaves them beside the new job's rows, ``replace``
            removes them when the new job begins. Files that the sink has not written are never removed.

    Raises:
        InvalidSinkPath: the path is an object store's URL, or empty.
        ValueError: ``at_new_start`` is not one of the three values.
        TypeError: an unknown setting, or ``at_new_start`` by its former name, ``mode``.

    Examples:
        >>> sink = ParquetSink("/data/hourly_delays", at_new_start="replace")
    """

    def __init__(self, path: str | os.PathLike[str], at_new_start: AtNewStart = "refuse", **former: Never) -> None:
        if "mode" in former:
            raise TypeError(_renamed(f"mode={former['mode']!r}", former["mode"]))
        if former:
            raise TypeError(f"ParquetSink has the settings path and at_new_start, found {', '.join(former)}")
        if at_new_start not in get_args(AtNewStart):
            found = f"at_new_start={at_new_start!r}"
            raise ValueError(
                _renamed(found, at_new_start)
                if at_new_start in _FORMER_MODES
                else f"expected ParquetSink(at_new_start='refuse', 'keep' or 'replace'), found {found}"
            )
        self.path = _local_path(os.fspath(path))
        self.at_new_start = at_new_start
        self._context: SinkContext | None = None
        self._current: Path | None = None
        self._rows: dict[int, int] = {}
        self._origin: int | None = None
        self._job = ""
        self._columns_checked = False

    def __repr__(self) -> str:
        return f"ParquetSink({str(self.path)!r}, at_new_start={self.at_new_start!r})"

    def __getstate__(self) -> dict[str, Any]:
        # Configuration only: a copy in another instance or process is opened separately.
        opened: dict[str, Any] = {
            "_context": None,
            "_current": None,
            "_rows": {},
            "_origin": None,
            "_job": "",
            "_columns_checked": False,
        }
        return {**self.__dict__, **opened}

    @property
    def location(self) -> str:
        """The directory, absolute and without symbolic links."""
        return os.path.realpath(self.path)

    @property
    def uri(self) -> str:
        """The directory as a ``file:`` URL."""
        return self.path.as_uri()

    def check_new_start(self, context: SinkContext) -> None:
        """Check whether a new job may write to the directory; changes nothing.

        Raises:
            SinkHoldsEarlierRows: with ``at_new_start="refuse"``: an earlier job has committed rows to the directory.
            SinkPathInUse: the directory belongs to another stage or pipeline; or holds files that no ParquetSink has written
                (not with ``at_new_start="keep"``); or holds rows of a job with the number that the new job will have.
            InvalidSinkPath: the path is a file, or cannot be written.
            SinkUnavailable: the file system is full.
        """
        table_directory.check_new_start(self.path, self.at_new_start, context)
        try_directory(self.path, f"Stage {context.stage!r} of pipeline {context.pipeline!r}: {self}")

    def check_target(self, context: SinkContext, rows: Path) -> None:
        """Check that the directory can be written and is the stage's, and that the rows have no column ``checkpoint``.

        Raises:
            InvalidSinkPath: the directory cannot be written.
            SinkPathInUse: the directory belongs to another stage or pipeline.
            ReservedSinkColumn: the rows have a column called ``checkpoint``.
            SinkUnavailable: the file system is full.
        """
        try_directory(self.path, str(self))
        table_directory.check_owner(self.path, context)
        _check_columns(pq.read_schema(rows).names, context)

    def open(self, context: SinkContext) -> None:
        """Prepare for writing.

        Raises:
            SinkPathInUse: the directory belongs to another stage or pipeline.
            SinkFenced: a newer run of the pipeline writes there.
        """
        for what, name in (("stage name", context.stage), ("attempt token", context.attempt)):
            if not NAME.fullmatch(name):
                raise InvalidSinkPath(f"{self}: expected a {what} that can name a directory, found {name!r}")
        self.path.mkdir(parents=True, exist_ok=True)
        self._job = table_directory.claim(self.path, context)
        self._context = context
        self._current = self._origin = None
        self._rows = {}
        self._fence().take()
        self._staging_area().mkdir(parents=True, exist_ok=True)

    def write(self, batch: DataFrame, files: Sequence[str], batch_id: int) -> None:
        """Link the batch's files into the current transaction.

        Raises:
            ReservedSinkColumn: the rows have a column called ``checkpoint``.
        """
        context = self._opened()
        if not self._columns_checked:
            _check_columns(getattr(batch, "columns", ()), context)
            self._columns_checked = True
        if self._current is None:
            if not files:
                return
            self._current = self._staging_area() / f"{self._fence().prefix}{context.attempt}-{uuid4().hex[:12]}"
            self._current.mkdir(parents=True)
        prefix = f"part-{batch_id:06d}-"
        for stale in self._current.glob(f"{prefix}*"):  # the same batch, written a second time
            stale.unlink()
        for number, file in enumerate(files):
            name = f"{prefix}{number:04d}-{context.index}-{context.attempt}.parquet"
            place(_local_path(file), self._current / name)
        self._rows[batch_id] = sum(parquet_rows(_local_path(file)) for file in files)

    def pre_commit(self, checkpoint_id: int) -> str | None:
        context = self._opened()
        if self._origin is not None and begins_timeline(self._origin, checkpoint_id):
            self._fence().take()
            self._taken_back().begin_branch(self._origin, checkpoint_id)
            self._origin = None
        current, self._current = self._current, None
        if current is None:
            return None
        rows, self._rows = sum(self._rows.values()), {}
        return self._directories().pre_commit(current, f"{_COLUMN}={checkpoint_id}-job{self._job}-{context.index}", rows)

    def commit(self, transaction: str) -> SinkCommit:
        """Rename the transaction's directory to its target, where readers see it.

        Raises:
            SinkTransactionLost: neither the staged nor the committed directory exists.
            SinkTransactionConflict: the target holds another transaction's rows.
            UnreadableSinkTransaction: the text is not a transaction of a ParquetSink.
        """
        return self._directories().commit(transaction)

    def abort(self, transaction: str) -> None:
        self._directories().abort(transaction)

    def transaction_files(self, transaction: str) -> dict[str, Path]:
        return self._directories().files(transaction)

    def restore_transaction(self, transaction: str, files: Mapping[str, Path]) -> None:
        """Create the transaction's staging directory again from a savepoint's files.

        Raises:
            SinkTransactionConflict: the transaction's committed directory holds other files.
            UnreadableSinkTransaction: the text is not a transaction of a ParquetSink.
        """
        if files:
            self._directories().restore(transaction, files, self._fence().prefix)

    def recover(self, committed: Sequence[str], *, restored: int | None = None) -> None:
        self._perform(recovery(committed, restored), committed)

    def start_new(self) -> None:
        self._perform(new_start())
        if self.at_new_start == "replace":
            self._remove_jobs_except(self._job)

    def _perform(
        self, steps: Sequence[TakeFence | Settle | Commit[str] | AbortRest | ContinueFrom], committed: Sequence[str] = ()
    ) -> None:
        for step in steps:
            match step:
                case TakeFence():
                    self._fence().take()
                case Settle(restored):
                    decoded = [self._directories().decode(transaction) for transaction in committed]
                    self._taken_back().settle(restored, [one.target for one in decoded if (self.path / one.staging).exists()])
                case Commit(transaction):
                    self.commit(transaction)
                case AbortRest():
                    self._abort_rest()
                case ContinueFrom(restored):
                    self._origin = self._beginning() if restored is None else restored

    def _remove_jobs_except(self, job: str) -> None:
        """Remove the committed and the taken-back directories of other jobs.

        Several instances may do this at the same time, and again after a crash: each directory is moved to a hidden directory
        by one of them before it is deleted.
        """
        trash = self.path / f"{_TRASH}{uuid4().hex}"
        trash.mkdir()
        for directory in (self.path, self.path / TAKEN_BACK):
            for entry in list(directory.iterdir()) if directory.exists() else ():
                match = COMMITTED.fullmatch(entry.name)
                if match and match[2] != job:
                    with suppress(FileNotFoundError):
                        os.rename(entry, trash / f"{entry.name}-{uuid4().hex}")
        for record in (self.path / BRANCHES).glob("job*.json"):
            if not record.name.startswith(f"job{job}-"):
                record.unlink(missing_ok=True)
        sync(self.path)
        for leftover in self.path.glob(f"{_TRASH}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def close(self) -> None:
        if self._current is not None:
            shutil.rmtree(self._current, ignore_errors=True)
        self._context = self._current = None

    def _opened(self) -> SinkContext:
        if self._context is None:
            raise SinkNotOpen(f"{self}: expected open(context) before any other call, found that the sink is not open")
        return self._context

    def _staging_area(self) -> Path:
        context = self._opened()
        return self.path / STAGING / f"{context.stage}-{context.index}"

    def _directories(self) -> TransactionDirectories:
        return TransactionDirectories(self.path, str(self))

    def _fence(self) -> Fence:
        context = self._opened()
        file = self.path / _FENCES / f"{context.stage}-{context.index}.json"
        return Fence(LocalOwnerFile(file), context.epoch, context.history)

    def _taken_back(self) -> TakenBack:
        context = self._opened()
        return TakenBack(self.path, self._job, context.index)

    def _beginning(self) -> int | None:
        """The origin of a job that continues from no checkpoint of this job: 0, the job's beginning.

        None if the instance has committed rows of this job already: a savepoint may have completed before a crash, after
        which the job begins a second time.
        """
        return None if self._taken_back().has_visible_rows() else 0

    def _abort_rest(self) -> None:
        fence = self._fence()
        for directory in self._staging_area().iterdir():
            if directory != self._current and not fence.is_newer(directory.name):
                shutil.rmtree(directory, ignore_errors=True)


def _check_columns(columns: Iterable[str], context: SinkContext) -> None:
    for column in columns:
        if column.lower() == _COLUMN:
            raise ReservedSinkColumn(
                f"stage {context.stage!r}: expected rows without a column {_COLUMN!r}, found "
                f"{column!r}. ParquetSink adds that column for readers: rename the stage's column"
            )


def _renamed(found: str, former: str) -> str:
    now = f"at_new_start={_FORMER_MODES[former]!r}" if former in _FORMER_MODES else "'refuse', 'keep' or 'replace'"
    return (
        f"expected ParquetSink(path, at_new_start=...), found {found}: the setting is called at_new_start now; "
        f"mode='append' is at_new_start='keep', mode='overwrite' is at_new_start='replace'. Write {now}; the default, 'refuse', "
        "stops a new start that finds rows of an earlier job"
    )


def _local_path(path: str) -> Path:
    """A path from a path or a ``file:`` URL; touches nothing."""
    scheme = url_scheme(path)
    found = local_path(path) if scheme == "file" else None
    if found is not None:
        return found
    if scheme is not None or not path.strip():
        raise InvalidSinkPath(
            f"expected a path on a local or mounted file system, such as /data/hourly_delays, found "
            f"{path!r}. ParquetSink commits by renaming a directory, which object stores cannot do: mount "
            "the object store as a file system, or use another sink"
        )
    return Path(os.path.abspath(os.path.expanduser(path)))
