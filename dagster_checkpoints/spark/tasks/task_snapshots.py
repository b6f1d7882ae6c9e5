"""What a checkpoint holds of one task: pinned while no batch emits, then given to the uploader.

It must not know when a snapshot is due, the order of its steps, nor barriers on channels.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from dagster_checkpoints.execution.task_events import PinSnapshot, StoreSnapshot
from dagster_checkpoints.spark.channels.channel_log import SegmentFiles
from dagster_checkpoints.spark.query.plans import QueryPlan
from dagster_checkpoints.spark.query.query import TaskQuery
from dagster_checkpoints.spark.snapshots.pinned_queries import QueryPins
from dagster_checkpoints.spark.snapshots.uploads import PinnedSnapshot
from dagster_checkpoints.spark.tasks.operator_chain import OperatorChain
from dagster_checkpoints.spark.tasks.task_parts import TaskParts
from dagster_checkpoints.spark.tasks.task_watermarks import TaskWatermarks
from dagster_checkpoints.state.metadata import QuerySnapshot, TaskSnapshot


class TaskSnapshots:
    """The snapshots of one task that are pinned and not yet given to the uploader.

    Args:
        parts: The task's parts: its folder, its sink and the uploader.
        query: The task's query.
        operators: The task's stages.
        watermarks: The task's event time.
    """

    def __init__(self, parts: TaskParts, query: TaskQuery, operators: OperatorChain, watermarks: TaskWatermarks) -> None:
        self._parts = parts
        self._query = query
        self._operators = operators
        self._watermarks = watermarks
        self._pinned: dict[int, PinnedSnapshot] = {}  # until the machine orders the upload
        self._pins = QueryPins(query.checkpoint, parts.folder.scratch / "queries")

    def pin(
        self,
        due: PinSnapshot,
        batch_id: int,
        plan: QueryPlan | None,
        tables: Mapping[str, tuple[SegmentFiles, ...]],
        *,
        rows_out: Mapping[str, int | None],
        finished: bool,
    ) -> None:
        """Snapshot the stages, pre-commit the sink and pin the query's files; no batch emits meanwhile.

        Args:
            due: The checkpoint's barrier, and what the machine knows of the input channels.
            batch_id: The newest committed batch; -1 if there is none.
            plan: The plan of the task's query.
            tables: The segments of each static input so far.
            rows_out: The number of rows that each stage has emitted since the job began; None if it is not known.
            finished: Whether the stages have finished: then their state is not in the snapshot.

        Raises:
            StageError: Of the stage whose code raised.
        """
        checkpoint_id = due.barrier.checkpoint_id
        folder = self._folder(checkpoint_id)
        stages = self._operators.snapshot(checkpoint_id, rows_out, self._watermarks.late_rows, self._watermarks.output)
        for source in due.inputs.fused:
            if source.ended:  # its stage finishes with the checkpoint, and has no state any more
                stages.pop(source.source, None)
        sink = self._parts.sink if due.barrier.properties.is_savepoint else None
        task = TaskSnapshot(
            stages=stages,
            end_of_data="drain" if finished else "none",
            watermark=self._watermarks.output,
            valve_watermark=due.inputs.valve_watermark,
            fused=due.inputs.fused,
            splits=due.inputs.splits,
        )
        transactions = sink.pin_transactions(folder / "transactions") if sink else {}
        query = None
        if batch_id >= 0 and not finished:
            own = bool(plan and plan.own_watermark)
            described = self._parts.described
            sources = described.sources if described is not None else None
            query = (
                self._pins.pin(batch_id, self._watermarks.operators),
                QuerySnapshot(batch_id, own_watermark=own, sources=sources),
            )
        pinned = PinnedSnapshot(task, folder, query, due.inputs.channels, tables, transactions)
        pinned.hold()
        self._pinned[checkpoint_id] = pinned

    def is_pinned(self, checkpoint_id: int) -> bool:
        """Whether the checkpoint's snapshot is pinned, and not yet given to the uploader."""
        return checkpoint_id in self._pinned

    def store(self, action: StoreSnapshot) -> None:
        """Give a pinned snapshot to the uploader, with the elements captured since; it stores and acknowledges the snapshot."""
        barrier = action.barrier
        pinned = self._pinned.pop(barrier.checkpoint_id).with_captured(action.captured)
        self._parts.uploader.submit(self._parts.id, barrier, pinned, action.statistics)

    def drop(self, checkpoint_id: int) -> None:
        """Release a pinned snapshot that is not stored: its checkpoint was aborted."""
        self._pinned.pop(checkpoint_id).release()

    def discard(self, checkpoint_id: int) -> None:
        """Delete the files of a snapshot that could not be pinned."""
        shutil.rmtree(self._folder(checkpoint_id), ignore_errors=True)

    def _folder(self, checkpoint_id: int) -> Path:
        return self._parts.folder.scratch / "snapshots" / f"chk-{checkpoint_id}"
