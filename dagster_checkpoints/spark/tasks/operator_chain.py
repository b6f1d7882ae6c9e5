"""The stages of one task and its sink: calls the user's code between opening and closing; the plan is built elsewhere.

If a stage raises, the error names that stage. It must not know the life cycle that orders the calls, the query, nor channels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_checkpoints.pipeline import RefusedRowLimit
from dagster_checkpoints.sinks import SinkCommit, merged
from dagster_checkpoints.spark.channels.channel_log import SegmentFiles
from dagster_checkpoints.spark.errors import CommitCheckFailedError
from dagster_checkpoints.spark.query import plans
from dagster_checkpoints.spark.query.stage_inputs import table_dataframe
from dagster_checkpoints.spark.tasks.commit_checks import CheckedRows
from dagster_checkpoints.spark.tasks.counted_rows import LateRows
from dagster_checkpoints.spark.tasks.messages import TaskCommitRefused, TaskCommitted
from dagster_checkpoints.spark.tasks.stage_errors import StageErrors
from dagster_checkpoints.spark.tasks.task_parts import TaskParts
from dagster_checkpoints.state.metadata import StageInstanceSnapshot

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class _AtSnapshot:
    """What a commit reports of the moment of its snapshot.

    Attributes:
        rows: The number of rows that the last stage had emitted since the job began.
        watermark_ms: The output watermark, epoch ms; None before the first.
    """

    rows: int
    watermark_ms: int | None


class OperatorChain:
    """Calls the stages of one task, as Flink's OperatorChain does.

    Args:
        parts: The task's parts; its stages have been opened.
        errors: Explains the errors that the stages raise.
    """

    def __init__(self, parts: TaskParts, errors: StageErrors) -> None:
        self._parts = parts
        self._errors = errors
        self._tail = parts.instances[-1]
        self._closed = False
        self._at_snapshots: dict[int, _AtSnapshot] = {}  # of checkpoints that are not committed yet
        quarantine = self._tail.stage.quarantine
        self._limit = RefusedRowLimit(quarantine, self._tail.call.context.instance) if quarantine is not None else None

    def open_sink(self) -> None:
        """Open the sink with the transactions of the restored checkpoint.

        Raises:
            StageError: The sink raised; names the last stage.
        """
        if self._parts.sink is not None:
            planned = self._parts.planned
            with self._errors.running(self._tail):
                self._parts.sink.open(planned.transactions, planned.take_back_after, self._parts.transaction_files)

    def process_batch(
        self, batch: DataFrame, batch_id: int, plan: plans.QueryPlan
    ) -> Callable[[SegmentFiles], DataFrame | None] | None:
        """A function that applies the last stage's `process_batch` to a batch's files; None if the stage does not override it.

        Args:
            batch: The micro-batch.
            batch_id: Spark's number of the micro-batch.
            plan: The task's plan: the rows keep its schema.
        """
        tail = self._tail
        if not tail.stage.overrides_process_batch:
            return None

        def process(segment: SegmentFiles) -> DataFrame | None:
            rows = table_dataframe(batch.sparkSession, batch.schema, segment.files)
            with self._errors.running(tail):
                processed = tail.stage.process_batch(rows, batch_id)
            return None if processed is None else plans.conform(tail.call, "process_batch", processed, plan.schema)

        return process

    def snapshot(
        self, checkpoint_id: int, rows_out: Mapping[str, int | None], late_rows: LateRows, watermark_ms: int | None
    ) -> dict[str, StageInstanceSnapshot]:
        """Snapshot the stages' states and pre-commit the sink; no batch emits meanwhile.

        Args:
            checkpoint_id: The checkpoint.
            rows_out: The number of rows that each stage has emitted since the job began; None if it is not known.
            late_rows: The numbers of late rows that the stages have dropped since the job began.
            watermark_ms: The output watermark, epoch ms; None before the first.

        Raises:
            CommitCheckFailedError: Rows did not pass a blocking check; nothing was pre-committed.
            StageError: A stage or the sink raised; names the stage.
        """
        self._check_commit(checkpoint_id)
        stages = {}
        described = self._parts.described
        if self._parts.sink is not None:
            self._at_snapshots[checkpoint_id] = _AtSnapshot(rows_out[self._tail.stage.name] or 0, watermark_ms)
        for instance in self._parts.instances:
            with self._errors.running(instance):
                instance.stage.snapshot_state(checkpoint_id)
            sink = self._parts.sink if instance is self._tail else None
            stages[instance.stage.name] = StageInstanceSnapshot(
                operator_states=instance.state.snapshot(),
                transactions=sink.pre_commit(checkpoint_id) if sink is not None else (),
                committed=sink.committed if sink is not None else None,
                rows_out=rows_out[instance.stage.name],
                state_plan=described.operators[instance.stage.name] if described is not None else None,
                late_rows=late_rows.of(instance.stage.name),
                planned=described.planned[instance.stage.name]
                if described is not None and described.planned is not None
                else None,
            )
        return stages

    def _check_commit(self, checkpoint_id: int) -> None:
        output, sink = self._parts.output, self._parts.sink
        evaluations = self._limit.evaluate(checkpoint_id, output.rows, output.refused) if self._limit is not None else ()
        if sink is not None:
            with self._errors.running(self._tail):
                evaluations = sink.check(checkpoint_id, evaluations)
        failed = [each for each in evaluations if each.blocking and not each.result.passed]
        if failed:
            if sink is not None:
                self._parts.report(TaskCommitRefused(self._tail.stage.name, evaluations))
            found = "; ".join(f"{each.check}: {each.result.description or 'not passed'}" for each in failed)
            raise CommitCheckFailedError(
                f"{self._tail.stage.where}, instance {self._tail.call.context.instance!r}: the rows since the last commit do not "
                f"pass blocking checks ({found}). No reader sees these rows, and the next checkpoint checks them again. "
                "Correct the rows in the stage, or the check."
            )

    def finish(self, plan: plans.QueryPlan | None, write: Callable[[DataFrame], object]) -> None:
        """Call every stage's `end_input` and `finish`, in the order of the chain, then the sink's `finish`.

        Args:
            plan: The task's plan: rows that `finish` returns have its schema.
            write: Emits these rows.

        Raises:
            StageError: A stage or the sink raised, or rows have another schema; names the stage.
        """
        for instance in self._parts.instances:
            for name in instance.stage.inputs:
                with self._errors.running(instance):
                    instance.stage.end_input(name)
            with self._errors.running(instance):
                held_back = instance.stage.finish()
            if held_back is not None:
                assert plan is not None
                rows = plans.conform(instance.call, "finish", held_back, plan.schema)
                write(rows)
        if self._parts.sink is not None:
            with self._errors.running(self._tail):
                self._parts.sink.finish()

    def commit(self, checkpoint_id: int, *, last: bool) -> None:
        """Commit the sink up to a completed checkpoint, and report that.

        Args:
            checkpoint_id: The checkpoint.
            last: Whether the task ends with this commit.
        """
        if self._limit is not None:
            self._limit.committed(checkpoint_id)
        if self._parts.sink is not None:
            with self._errors.running(self._tail):
                commits = self._parts.sink.commit_up_to(checkpoint_id)
            self._report_commit(checkpoint_id, commits, self._parts.sink.checked(checkpoint_id), last)

    def _report_commit(self, checkpoint_id: int, commits: Sequence[SinkCommit], checked: CheckedRows, last: bool) -> None:
        covered = sorted(taken for taken in self._at_snapshots if taken <= checkpoint_id)
        if not covered:
            return  # this attempt has taken none of these snapshots: the restore has committed them
        newest = [self._at_snapshots.pop(taken) for taken in covered][-1]
        self._parts.report(
            TaskCommitted(
                stage=self._tail.stage.name,
                instance=self._tail.call.context.instance,
                checkpoint_id=checkpoint_id,
                commit=merged(commits) if commits else None,
                rows=newest.rows,
                watermark_ms=newest.watermark_ms,
                last=last,
                checked=checked,
            )
        )

    def notify_complete(self, checkpoint_id: int) -> None:
        """Notify the stages that a checkpoint has completed."""
        for instance in self._parts.instances:
            with self._errors.running(instance):
                instance.stage.notify_checkpoint_complete(checkpoint_id)

    def notify_aborted(self, checkpoint_id: int) -> None:
        """Notify the stages that a checkpoint was aborted."""
        for instance in self._parts.instances:
            with self._errors.running(instance):
                instance.stage.notify_checkpoint_aborted(checkpoint_id)

    def close(self) -> None:
        """Close the stages, the last one first, and the sink; once. Errors are logged."""
        if self._closed:
            return
        self._closed = True
        for instance in reversed(self._parts.instances):
            instance.close()
        if self._parts.sink is not None:
            try:
                self._parts.sink.close()
            except Exception as error:
                logging.getLogger(__name__).warning("closing the sink of %s raised %r", self._parts.id, error)
