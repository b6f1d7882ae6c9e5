"""A task's side of its sink: batches in, pre-committed transactions into checkpoints, commits when these are complete."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_checkpoints.pipeline import Pipeline, Stage
from dagster_checkpoints.sinks import SinkContext, SinkError, TwoPhaseCommitSink
from dagster_checkpoints.sinks.durable import link_or_copy
from dagster_checkpoints.sinks.transactions import PendingTransactions
from dagster_checkpoints.spark.channels.channel_log import SegmentFiles
from dagster_checkpoints.storage import Ownership

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


def sink_context(
    pipeline: Pipeline, stage: Stage, index: int, ownership: Ownership | None, job_id: int, attempt: str
) -> SinkContext:
    """Which instance a sink serves.

    Args:
        stage: Whose sink it is.
        index: The instance's.
        ownership: Of the run; None if there are no owners.
        job_id: Of the job, which need not have begun.
        attempt: A token that differs between attempts; empty before the first.
    """
    return SinkContext(
        pipeline=pipeline.name,
        stage=stage.name,
        instance=stage.instances[index],
        index=index,
        parallelism=stage.parallelism,
        job_id=job_id,
        attempt=attempt,
        history=ownership.history if ownership else "",
        epoch=ownership.epoch if ownership else 0,
    )


def check_new_start(pipeline: Pipeline, ownership: Ownership) -> None:
    """Ask every sink whether a new job may begin; nothing has been started yet.

    Raises:
        SinkError: A sink holds what the new job must not meet, such as rows of an earlier one.
    """
    for stage in pipeline.stages:
        for index in range(stage.parallelism if stage.sink is not None else 0):
            assert stage.sink is not None
            stage.sink.check_new_start(sink_context(pipeline, stage, index, ownership, ownership.job_id + 1, attempt=""))


class TaskSink:
    """The sink of a chain's last stage, in one task.

    Args:
        sink: The task's own copy.
        context: Who writes.
        spark: For sinks that want a batch as a DataFrame.
        schema: Of the batches.
    """

    def __init__(self, sink: TwoPhaseCommitSink, context: SinkContext, spark: SparkSession, schema: StructType) -> None:
        self._sink = sink
        self._context = context
        self._spark = spark
        self._schema = schema
        self._pending = PendingTransactions[str]()

    def open(
        self,
        transactions: Sequence[str] | None,
        take_back_after: int | None = None,
        restored_files: Mapping[int, Mapping[str, Path]] | None = None,
    ) -> None:
        """Open the sink and make good what a checkpoint promised: commit its transactions, abort all others.

        Args:
            transactions: Those that the checkpoint or savepoint holds; None for a new start. A restore under a new job id is
                no new start.
            take_back_after: The checkpoint's or savepoint's id, if this job had it itself: rows that the job committed with
                later ones will come again. It may be given also when there are no later ones.
            restored_files: By position in `transactions`, then by name: the fetched files that a savepoint holds of them.
        """
        self._sink.open(self._context)
        if transactions is None:
            self._sink.start_new()
            return
        for position, files in sorted((restored_files or {}).items()):
            self._sink.restore_transaction(transactions[position], files)
        self._sink.recover(transactions, restored=take_back_after)

    def write(self, segment: SegmentFiles, batch_id: int) -> None:
        """Put one micro-batch into the current transaction."""
        files = [str(file) for file in segment.files]
        batch = self._spark.read.schema(self._schema).parquet(*files)
        self._sink.write(batch, files, batch_id)

    def pre_commit(self, checkpoint_id: int) -> tuple[str, ...]:
        """Close the current transaction. Returns all that are not committed yet: they belong to the checkpoint."""
        transaction = self._sink.pre_commit(checkpoint_id)
        if transaction is not None:
            self._pending.add(checkpoint_id, transaction)
        return self._pending.all

    def pin_transactions(self, folder: Path) -> dict[int, dict[str, Path]]:
        """Link the files of all transactions that are not committed yet (copied where links are impossible) into `folder`.

        For a savepoint, right after `pre_commit`: a checkpoint may commit, that is move, them while they are being stored.

        Args:
            folder: A directory that does not exist yet.

        Returns:
            By position in what `pre_commit` has returned, then by name; transactions without files are left out.

        Raises:
            SinkError: The sink names a file so that it cannot be stored.
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
                link_or_copy(file, target / name)
            pinned[position] = {name: target / name for name in files}
        return pinned

    def commit_up_to(self, checkpoint_id: int) -> None:
        """Commit the transactions of a completed checkpoint and of all before it."""
        while (transaction := self._pending.first_up_to(checkpoint_id)) is not None:
            self._sink.commit(transaction)
            self._pending.committed()

    def close(self) -> None:
        self._sink.close()
