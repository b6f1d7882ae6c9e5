"""A task's use of its sink: it writes batches, pre-commits them with checkpoints, and commits when a checkpoint is complete.

A sink may want the id of the checkpoint that is the first to hold a row, as a column: such rows wait for it.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from dagster_checkpoints.files.durable import link_or_new_file
from dagster_checkpoints.files.urls import local_path
from dagster_checkpoints.pipeline import CheckEvaluation, Pipeline, Stage
from dagster_checkpoints.sinks import SinkCommit, SinkContext, SinkError, TwoPhaseCommitSink
from dagster_checkpoints.sinks.target_sink import TargetSink
from dagster_checkpoints.sinks.transactions import PendingTransactions
from dagster_checkpoints.sinks.unwritable import reaching
from dagster_checkpoints.spark.channels.channel_log import SegmentFiles
from dagster_checkpoints.spark.channels.segments import write_segment
from dagster_checkpoints.spark.files.work_path import WorkPath, local_copies
from dagster_checkpoints.spark.query.stage_inputs import table_dataframe
from dagster_checkpoints.spark.tasks.commit_checks import CheckedRows, CommitChecks
from dagster_checkpoints.state.metadata import LastCommit
from dagster_checkpoints.storage.ownership import Ownership

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


class HeldRows:
    """The rows of one task's sink since its last snapshot; meant for few rows.

    Args:
        folder: The directory for the rows with their column.
        column: The column for the id, a BIGINT, which the rows have.
        read: The rows of files as a DataFrame.
    """

    def __init__(self, folder: WorkPath, column: str, read: Callable[[Sequence[WorkPath]], DataFrame]) -> None:
        self._folder = folder
        self._column = column
        self._read = read
        self._held: dict[int, SegmentFiles] = {}
        self._number = itertools.count()

    def add(self, segment: SegmentFiles, batch_id: int) -> None:
        """Hold a micro-batch; the same id again replaces it."""
        segment.hold()
        replaced = self._held.pop(batch_id, None)
        self._held[batch_id] = segment
        if replaced is not None:
            replaced.release()

    def take(self, checkpoint_id: int) -> tuple[SegmentFiles, int] | None:
        """All held rows as one micro-batch, with the id of the checkpoint or savepoint; None if there are none.

        Returns:
            The micro-batch, held for the caller, and the number of the newest one in it.
        """
        if not self._held:
            return None
        rows = self._read([file for segment in self._held.values() for file in segment.files])
        numbered = rows.withColumn(self._column, F.lit(checkpoint_id).cast("bigint"))
        segment = write_segment(numbered, self._folder / f"{next(self._number):06d}")
        assert segment is not None
        segment.hold()
        newest = max(self._held)
        self.close()
        return segment, newest

    def close(self) -> None:
        """Release all that is held."""
        for segment in self._held.values():
            segment.release()
        self._held.clear()


_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


def sink_context(
    pipeline: Pipeline,
    stage: Stage,
    index: int,
    ownership: Ownership | None,
    job_id: int,
    attempt: str,
    committed: LastCommit | None = None,
) -> SinkContext:
    """The description of the instance that a sink serves.

    Args:
        pipeline: The pipeline.
        stage: The stage that has the sink.
        index: The index of the stage's instance.
        ownership: The run's ownership of the pipeline; None if there are no owners.
        job_id: The job's id; the job need not have begun.
        attempt: The unique token of this execution of the instance; empty before the first attempt.
        committed: What the stage's sink had committed last in the restored checkpoint, perhaps at another place.
    """
    assert stage.sink is not None
    return SinkContext(
        pipeline=pipeline.name,
        stage=stage.uid,
        instance=stage.instances[index],
        index=index,
        parallelism=stage.parallelism,
        job_id=job_id,
        attempt=attempt,
        history=ownership.history if ownership else "",
        epoch=ownership.epoch if ownership else 0,
        highest_checkpoint_id=ownership.highest_checkpoint_id if ownership else None,
        committed=committed.transaction if committed is not None and committed.location == (stage.sink.location or "") else None,
    )


def check_new_start(pipeline: Pipeline, ownership: Ownership, *, named: bool) -> None:
    """Check with every sink that a new job may begin, before anything is started.

    Args:
        pipeline: The pipeline.
        ownership: The run's ownership of the pipeline.
        named: Whether the run's configuration asks for a new start.

    Raises:
        SinkError: A sink refuses the new job, for example because it holds rows of an earlier job.
    """
    found_no_job = not named and ownership.previous.job.status == "NONE"
    for stage in pipeline.stages:
        for index in range(stage.parallelism if stage.sink is not None else 0):
            assert stage.sink is not None
            with reaching_sink(stage.sink, f"{stage.where}: {stage.sink}"):
                context = sink_context(pipeline, stage, index, ownership, ownership.job_id + 1, attempt="")
                stage.sink.check_new_start(replace(context, found_no_job=found_no_job))


def reaching_sink(sink: TwoPhaseCommitSink, name: str = "") -> AbstractContextManager[None]:
    """A context in which errors of the file system below a sink's place become the sink's own errors.

    Args:
        sink: The sink.
        name: The sink as errors name it; by default its own text.
    """
    path = local_path(sink.uri) if sink.uri is not None else None
    return reaching(name or str(sink), path or sink.uri or "its place")


class TaskSink:
    """The sink of a chain's last stage, in one task.

    Args:
        sink: The task's copy of the sink.
        context: The description of the instance that writes.
        spark: The session that reads batches, for sinks that use a batch as a DataFrame.
        schema: The schema of the batches.
        scratch: A directory of this machine for copies of batches, which need not exist.
        checks: Holds the rows that are not committed; None if neither checks nor a sample need them.
        held: Holds the rows until a snapshot, if they get the id of its checkpoint.
    """

    def __init__(
        self,
        sink: TwoPhaseCommitSink,
        context: SinkContext,
        spark: SparkSession,
        schema: StructType,
        scratch: Path,
        checks: CommitChecks | None = None,
        held: HeldRows | None = None,
    ) -> None:
        self._sink = sink
        self._reads_batches = type(sink).write is not TargetSink.write
        """Whether the sink may use a batch's DataFrame, which costs twenty messages to Java: this package's sinks read files."""
        self._context = context
        self._spark = spark
        self._schema = schema
        self._scratch = scratch
        self._checks = checks
        self._held = held
        self._finish_due = False
        self._pending = PendingTransactions[str]()
        self._committed = context.committed
        self._turn = threading.Lock()
        """Held by `write`, in a thread of Spark's, and by `commit_up_to`: the sink's methods are called one after another."""

    def open(
        self,
        transactions: Sequence[str] | None,
        take_back_after: int | None = None,
        restored_files: Mapping[int, Mapping[str, Path]] | None = None,
    ) -> None:
        """Open the sink, commit the transactions of the restored checkpoint, and abort all others.

        Args:
            transactions: The transactions that the checkpoint or savepoint holds; None for a new start. A restore under a new job
                id is not a new start.
            take_back_after: The checkpoint's or savepoint's id if this job took it: the job will write the rows of its later
                checkpoints again. It may be given even if there are no later checkpoints.
            restored_files: The fetched files of a savepoint's transactions, by position in `transactions`, then by name.
        """
        with reaching_sink(self._sink):
            self._sink.open(self._context)
            if transactions is None:
                self._sink.start_new()
                return
            for position, files in sorted((restored_files or {}).items()):
                self._sink.restore_transaction(transactions[position], files)
            self._sink.recover(transactions, restored=take_back_after)
            self._committed = transactions[-1] if transactions else self._committed

    def settle(
        self,
        transactions: Sequence[str],
        files: Mapping[int, Mapping[str, Path]],
        restored: int | None,
        next_checkpoint_id: int,
    ) -> None:
        """Show exactly the rows of a restored checkpoint, and close the sink: the instance does not run any more.

        Args:
            transactions: The instance's transactions in the checkpoint.
            files: See `open`, `restored_files`.
            restored: The checkpoint's or savepoint's id if this job took it, and later ones were completed; otherwise None.
            next_checkpoint_id: An id above those of all completed checkpoints: the sink records that the job's checkpoints from
                there on continue the restored one. Without the record a later restore would show rows of the abandoned ones.
        """
        self.open(transactions, restored, files)
        # Without rows; a sink may give a transaction all the same.
        for transaction in self.pre_commit(next_checkpoint_id) if restored is not None else ():
            self._sink.abort(transaction)
        self.close()

    def write(self, segment: SegmentFiles, batch_id: int) -> None:
        """Put one micro-batch into the current transaction."""
        if self._held is not None:
            self._held.add(segment, batch_id)
        else:
            self._write(segment, batch_id)

    def _write(self, segment: SegmentFiles, batch_id: int) -> None:
        batch = table_dataframe(self._spark, self._schema, segment.files) if self._reads_batches else None
        with local_copies(segment.files, self._scratch) as files, self._turn:
            with reaching_sink(self._sink):
                self._sink.write(batch, [str(file) for file in files], batch_id)  # type: ignore[arg-type]
            if self._checks is not None:
                self._checks.add(segment, batch_id, files)

    def finish(self) -> None:
        """The data has ended: what the sink has held back joins the current transaction."""
        if self._held is not None:
            self._finish_due = True  # behind the rows that are still held
            return
        with reaching_sink(self._sink):
            self._sink.finish()

    def check(self, checkpoint_id: int, refused: tuple[CheckEvaluation, ...] = ()) -> tuple[CheckEvaluation, ...]:
        """Evaluate the stage's checks over the rows that are not committed; before `pre_commit`.

        Rows that waited for the checkpoint's id join the current transaction first.

        Args:
            checkpoint_id: The checkpoint or savepoint that is being taken.
            refused: The result for the number of refused rows, which joins those of the checks.
        """
        taken = self._held.take(checkpoint_id) if self._held is not None else None
        if taken is not None:
            segment, batch_id = taken
            self._write(segment, batch_id)
            segment.release()
        return self._checks.evaluate(checkpoint_id, refused) if self._checks is not None else ()

    def pre_commit(self, checkpoint_id: int) -> tuple[str, ...]:
        """Close the current transaction. Returns all uncommitted transactions: they belong to the checkpoint."""
        with reaching_sink(self._sink):
            if self._finish_due:
                self._finish_due = False
                self._sink.finish()
            transaction = self._sink.pre_commit(checkpoint_id)
        if transaction is not None:
            self._pending.add(checkpoint_id, transaction)
        return self._pending.all

    def pin_transactions(self, folder: Path) -> dict[int, dict[str, Path]]:
        """Link the files of all uncommitted transactions into `folder`; copy them where links are impossible.

        For a savepoint, right after `pre_commit`: while the files are being stored, a checkpoint may commit and so move them.

        Args:
            folder: A directory that does not exist yet.

        Returns:
            The linked files, by position in the result of `pre_commit`, then by name; transactions without files are left out.

        Raises:
            SinkError: The sink gives a file a name that cannot be stored.
        """
        pinned: dict[int, dict[str, Path]] = {}
        for position, transaction in enumerate(self._pending.all):
            files = self._sink.transaction_files(transaction)
            if not files:
                continue
            target = folder / str(position)
            target.mkdir(parents=True)
            for name, file in files.items():
                if not _FILE_NAME.fullmatch(name):
                    raise SinkError(
                        f"{self._sink}: expected transaction_files() to name files by letters, digits, '_', '-' and '.', found "
                        f"{name!r}: the name becomes a path in savepoints"
                    )
                link_or_new_file(file, target / name)
            pinned[position] = {name: target / name for name in files}
        return pinned

    @property
    def committed(self) -> LastCommit | None:
        """What the sink has committed last; None if it has committed nothing."""
        return None if self._committed is None else LastCommit(self._committed, self._sink.location or "")

    def commit_up_to(self, checkpoint_id: int) -> list[SinkCommit]:
        """Commit the transactions of a completed checkpoint and of all earlier checkpoints.

        Returns:
            What each of them has made visible, oldest first; one for each transaction.
        """
        commits = []
        while (transaction := self._pending.first_up_to(checkpoint_id)) is not None:
            with self._turn, reaching_sink(self._sink):
                commits.append(self._sink.commit(transaction) or SinkCommit())
            self._committed = transaction
            self._pending.committed()
        return commits

    def checked(self, checkpoint_id: int) -> CheckedRows:
        """What checks and sample say of the rows that were committed up to a checkpoint; after `commit_up_to`."""
        return self._checks.committed(checkpoint_id) if self._checks is not None else CheckedRows()

    def close(self) -> None:
        """Release the sink, and the rows that are held for checks."""
        try:
            self._sink.close()
        finally:
            if self._held is not None:
                self._held.close()
            if self._checks is not None:
                self._checks.close()
