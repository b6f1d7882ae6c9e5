"""A task's side of its sink: batches in, pre-committed transactions into checkpoints, commits when these are complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagster_checkpoints.sinks import SinkContext, TwoPhaseCommitSink
from dagster_checkpoints.spark.channels import SegmentFiles

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType


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
        self._pending: list[tuple[int, str]] = []

    def open(self, restored: Sequence[str] | None, take_back_after: int | None = None) -> None:
        """Open the sink and make good what a checkpoint promised: commit its transactions, abort all others.

        Args:
            restored: The transactions that the checkpoint holds; None for a new start.
            take_back_after: The checkpoint's id, if the job had completed later ones: their rows will come again.
        """
        self._sink.open(self._context)
        if restored is None:
            self._sink.start_new()
        else:
            self._sink.recover(restored, restored=take_back_after)

    def write(self, segment: SegmentFiles, batch_id: int) -> None:
        """Put one micro-batch into the current transaction."""
        files = [str(file) for file in segment.files]
        batch = self._spark.read.schema(self._schema).parquet(*files)
        self._sink.write(batch, files, batch_id)

    def pre_commit(self, checkpoint_id: int) -> tuple[str, ...]:
        """Close the current transaction. Returns all that are not committed yet: they belong to the checkpoint."""
        transaction = self._sink.pre_commit(checkpoint_id)
        if transaction is not None:
            self._pending.append((checkpoint_id, transaction))
        return tuple(pending for _, pending in self._pending)

    def commit_up_to(self, checkpoint_id: int | None) -> None:
        """Commit the transactions of a completed checkpoint and of all before it; None: everything."""
        while self._pending and (checkpoint_id is None or self._pending[0][0] <= checkpoint_id):
            self._sink.commit(self._pending[0][1])
            del self._pending[0]

    def close(self) -> None:
        self._sink.close()
