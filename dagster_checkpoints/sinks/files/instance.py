"""One instance of a FileSink: its current transaction, and the steps of a start.

Must not know the sink's settings as users write them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq

from dagster_checkpoints.sinks.base import SinkContext
from dagster_checkpoints.sinks.fence import Fence
from dagster_checkpoints.sinks.files.columns import (
    FileColumns,
    agree_on_columns,
    check_partitions,
    check_types,
)
from dagster_checkpoints.sinks.files.names import FileCommitName, job_of, owner_name, staged_folder
from dagster_checkpoints.sinks.files.new_start import remove_earlier_jobs
from dagster_checkpoints.sinks.files.open_transaction import EncodedTransaction, LinkedTransaction, OpenTransaction
from dagster_checkpoints.sinks.files.part_files import FileLayout
from dagster_checkpoints.sinks.files.records import StagedParts
from dagster_checkpoints.sinks.files.restores import FileRestores
from dagster_checkpoints.sinks.files.target_files import TargetFiles
from dagster_checkpoints.sinks.files.transactions import FileTransactions
from dagster_checkpoints.sinks.parquet_files import arrow_schema, spark_schema
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
from dagster_checkpoints.systems.errors import SinkError


class FileInstance:
    """An open instance.

    Args:
        files: the location.
        context: the instance.
        layout: how rows are divided into files.
        manifests: whether each commit writes a manifest.
        sink: the sink as errors name it.
    """

    def __init__(self, files: TargetFiles, context: SinkContext, layout: FileLayout, *, manifests: bool, sink: str) -> None:
        self._fence = Fence(files.owner_file(owner_name(context.index)), context.epoch, context.history)
        self.transactions = FileTransactions(files, context, self._fence, manifests=manifests, sink=sink)
        self._job = job_of(context)
        self._restores = FileRestores(files, self.transactions, self._job, sink)
        self._files = files
        self._context = context
        self._attempt = f"{self._fence.prefix}{context.attempt}"
        self._layout = layout
        self._sink = sink
        self._current: OpenTransaction | None = None
        self._number = 0
        self._fitted = False
        self._origin: int | None = None

    def take_fence(self) -> None:
        """Record this owner: older owners are refused from now on. Raises SinkFenced."""
        self._fence.take()

    def write(self, sources: Sequence[Path], batch_id: int) -> None:
        """Put a batch into the current transaction; see ``FileSink.write``."""
        sources = [file for file in sources if pq.read_metadata(file).num_rows]
        if sources and not self._fitted:
            self._fit(sources[0])
        if self._current is None:
            if not sources:
                return
            folder = staged_folder(self._context.index, self._attempt, self._number)
            self._current = (
                LinkedTransaction(self._files, folder)
                if self._layout.links
                else EncodedTransaction(self._files, folder, self._layout, self._sink)
            )
        self._current.write(sources, batch_id)

    def pre_commit(self, checkpoint_id: int) -> str | None:
        """Close the current transaction; see ``TwoPhaseCommitSink.pre_commit``."""
        if self._origin is not None and begins_timeline(self._origin, checkpoint_id):
            self._fence.take()
            self._restores.begin_branch(self._origin, checkpoint_id)
            self._origin = None
        if self._current is None:
            return None
        parts = self._current.close()
        name = FileCommitName(checkpoint_id, self._job, self._context.index, self._attempt, self._number)
        text = self.transactions.pre_commit(name, StagedParts(self._layout.format, tuple(parts))) if parts else None
        self._current = None
        self._number += 1
        return text

    def recover(self, committed: Sequence[str], restored: int | None) -> None:
        """The steps after a restore; see ``TwoPhaseCommitSink.recover``."""
        for text in committed:
            self.transactions.decode(text)
        self._perform(recovery(committed, restored))

    def start_new(self, *, replace: bool) -> None:
        """The steps of a new start; see ``TwoPhaseCommitSink.start_new``.

        Args:
            replace: whether the files of earlier jobs are removed.
        """
        self._perform(new_start())
        if replace:
            remove_earlier_jobs(self._files, self._context)

    def close(self) -> None:
        """Delete the open transaction and copies."""
        self.transactions.drop_copies()
        current, self._current = self._current, None
        with suppress(SinkError, OSError):  # a later start deletes what is left
            if current is not None:
                current.discard()

    def _perform(self, steps: Iterable[TakeFence | Settle | Commit[str] | AbortRest | ContinueFrom]) -> None:
        for step in steps:
            match step:
                case TakeFence():
                    self._fence.take()
                case Settle(restored):
                    self._restores.settle(restored)
                case Commit(transaction):
                    self.transactions.commit(transaction)
                case AbortRest():
                    self.transactions.abort_rest(self._attempt)
                case ContinueFrom(restored):
                    self._origin = self._beginning() if restored is None else restored

    def _beginning(self) -> int | None:
        """The origin of a job that continues from no checkpoint of this job: 0, the job's beginning.

        None if the instance has committed rows of this job already: a savepoint may have completed before a crash, after
        which the job begins a second time.
        """
        return None if self._restores.has_visible_rows() else 0

    def _fit(self, file: Path) -> None:
        """Check the columns of the first rows."""
        agree_on_columns(self._files, columns_of_rows(file, self._layout, self._job, self._sink))
        self._fitted = True


def columns_of_rows(file: Path, layout: FileLayout, job: str, sink: str) -> FileColumns:
    """The columns of the rows in a Parquet file.

    Args:
        file: the file.
        layout: how rows are divided into files.
        job: the job that writes the rows.
        sink: the sink as errors name it.

    Raises:
        SinkColumnsMismatch: the format does not have a column's type, or a partition column is missing or has another type.
    """
    metadata = pq.read_metadata(file)
    schema = arrow_schema(metadata)
    check_partitions(schema, layout.partition_by, sink)
    if not layout.links:
        check_types(schema, spark_schema(metadata), layout.format, sink)
    columns = tuple((field.name, str(field.type)) for field in schema)
    return FileColumns(job, layout.format, layout.partition_by, columns)
