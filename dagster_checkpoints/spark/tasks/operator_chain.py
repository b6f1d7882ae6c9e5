"""The stages of one task and its sink: calls the user's code between opening and closing; the plan is built elsewhere.

If a stage raises, the error names that stage. It must not know the life cycle that orders the calls, the query, nor channels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from dagster_checkpoints.spark.channels.channel_log import SegmentFiles
from dagster_checkpoints.spark.query import plans
from dagster_checkpoints.spark.query.stage_inputs import table_dataframe
from dagster_checkpoints.spark.tasks.late_rows import LateRows
from dagster_checkpoints.spark.tasks.stage_errors import StageErrors
from dagster_checkpoints.spark.tasks.task_parts import TaskParts
from dagster_checkpoints.state import StageInstanceSnapshot

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


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

    def open_sink(self) -> None:
        """Open the sink with the transactions of the restored checkpoint.

        Raises:
            StageError: The sink raised; names the last stage.
        """
        if self._parts.sink is not None:
            restored = self._parts.restored
            tail = restored.stages.get(self._tail.stage.name) if restored else None
            with self._errors.running(self._tail):
                transactions = None if restored is None else tail.transactions if tail else ()
                self._parts.sink.open(transactions, self._parts.take_back_after, self._parts.transaction_files)

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

    def snapshot(self, checkpoint_id: int, rows_out: int, late_rows: LateRows) -> dict[str, StageInstanceSnapshot]:
        """Snapshot the stages' states and pre-commit the sink; the query is between two batches.

        Args:
            checkpoint_id: The checkpoint.
            rows_out: The number of rows that the last stage has emitted since the job began.
            late_rows: The numbers of late rows that the stages have dropped since the job began.

        Raises:
            StageError: A stage or the sink raised; names the stage.
        """
        stages = {}
        described = self._parts.described
        for instance in self._parts.instances:
            with self._errors.running(instance):
                instance.stage.snapshot_state(checkpoint_id)
            is_tail = instance is self._tail
            stages[instance.stage.name] = StageInstanceSnapshot(
                operator_states=instance.state.snapshot(),
                transactions=self._parts.sink.pre_commit(checkpoint_id) if is_tail and self._parts.sink else (),
                rows_out=rows_out if is_tail else 0,
                state_plan=described.operators[instance.stage.name] if described is not None else None,
                late_rows=late_rows.of(instance.stage.name),
            )
        return stages

    def finish(self, plan: plans.QueryPlan | None, write: Callable[[DataFrame], object]) -> None:
        """Call every stage's `end_input` and `finish`, in the order of the chain.

        Args:
            plan: The task's plan: rows that `finish` returns have its schema.
            write: Emits these rows.

        Raises:
            StageError: A stage raised, or its rows have another schema; names the stage.
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

    def commit(self, checkpoint_id: int) -> None:
        """Commit the sink up to a completed checkpoint, and notify the stages."""
        if self._parts.sink is not None:
            with self._errors.running(self._tail):
                self._parts.sink.commit_up_to(checkpoint_id)
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
            try:
                instance.stage.close()
            except Exception as error:
                instance.call.context.log.warning("close() of stage %s raised %r", instance.stage.name, error)
        if self._parts.sink is not None:
            try:
                self._parts.sink.close()
            except Exception as error:
                logging.getLogger(__name__).warning("closing the sink of %s raised %r", self._parts.id, error)
