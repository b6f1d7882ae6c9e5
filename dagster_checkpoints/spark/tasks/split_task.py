"""The task of one instance of a split source: it reads one split after the other, each as one micro-batch.

No Spark query runs: a split is evaluated once, on the task's own thread, and emitted. Messages that wait are taken in front of
each split, so a barrier waits for one split at most. It must not know which splits there are: `execution.splits` hands
them out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from pyspark.sql import functions as F

from dagster_checkpoints.execution.elements import WatermarkStatus
from dagster_checkpoints.execution.task_events import ReadSplit, SplitRead, TaskAction, WatermarkReached
from dagster_checkpoints.execution.task_machine import TaskMachine
from dagster_checkpoints.pipeline import SplitSource, StageKind
from dagster_checkpoints.spark.channels.channel_log import SegmentFiles
from dagster_checkpoints.spark.identifiers import identifier
from dagster_checkpoints.spark.query.plans import conform
from dagster_checkpoints.spark.query.stage_inputs import table_dataframe
from dagster_checkpoints.spark.tasks.messages import TaskQueryStarted
from dagster_checkpoints.spark.tasks.query_runs import POLL_SECONDS
from dagster_checkpoints.spark.tasks.task import Task
from dagster_checkpoints.spark.tasks.task_parts import TaskParts


class SplitTask(Task):
    """An instance of a split source.

    Args:
        parts: The task's parts.
    """

    def __init__(self, parts: TaskParts) -> None:
        super().__init__(parts, _machine(parts))
        assert isinstance(self.tail.stage, SplitSource)
        self._source = self.tail.stage
        self._to_read: str | None = None
        self._batches = 0
        watermark = self._source.watermark
        self._idle_after = watermark.idle_after if watermark else None
        self._last_read_at = time.monotonic()
        self._idle = False

    def caught_up(self, stage: str) -> bool | None:
        return None if self.machine.running else True  # the splits that wait are known to `execution.splits`

    def perform_on_inputs(self, action: TaskAction) -> None:
        if not isinstance(action, ReadSplit):
            return super().perform_on_inputs(action)
        if not self._batches:
            self.parts.spark.sparkContext.setLocalProperty("spark.scheduler.pool", str(self.id))
            self.parts.report(TaskQueryStarted(self.id))
        self._to_read = action.split  # in the next step, after the messages that wait
        return None

    def seconds_to_next_look(self) -> float:
        if self._to_read is None:
            return super().seconds_to_next_look()
        return POLL_SECONDS if self.output.is_held_back else 0.0

    def step(self) -> None:
        if not self.machine.running:
            return
        if self._to_read is None:
            self._watch_idleness()
        elif not self.output.is_held_back:
            split, self._to_read = self._to_read, None
            self._read(split)
            self._batches += 1
            self._last_read_at = time.monotonic()
            self.handle(SplitRead(split))

    def first_free_batch(self) -> int:
        return self._batches

    def reach_max_watermark(self) -> None:
        """Nothing waits for the end of event time."""

    def _read(self, text: str) -> None:
        plan = self.plan
        assert plan is not None
        began, self._evaluates = time.monotonic(), True
        with self.stages.running(self.tail):
            frame = self._source.read(self.tail.call.context, self._source.decode_split(text))
        frame = conform(self.tail.call, "read", frame, plan.schema, of="schema")
        self._set_idle(False)  # before the rows, or consumers would advance event time without them
        process = self.operators.process_batch(frame, self._batches, plan)
        rows = self.output.write(frame, self._batches, process, self._take_event_time if self._source.watermark else None)
        self.report_first_batch(rows, time.monotonic() - began)
        if self._event_time_ms is not None:
            self.watermarks.send(WatermarkReached(self._event_time_ms))

    _event_time_ms: int | None = None
    """The watermark of the newest split with rows, epoch ms; an earlier one than before is not sent."""

    def _take_event_time(self, segments: Iterable[SegmentFiles]) -> None:
        """Take the watermark from the written rows: the latest event time, less the lateness, as Spark's `withWatermark`."""
        watermark = self._source.watermark
        files = [file for segment in segments for file in segment.files]
        assert watermark is not None and self.plan is not None
        if not files:
            return
        rows = table_dataframe(self.parts.spark, self.plan.schema, files)
        latest = rows.agg(F.unix_millis(F.max(F.col(identifier(watermark.column))))).first()
        if latest is not None and latest[0] is not None:
            self._event_time_ms = int(latest[0]) - watermark.lateness_ms

    def _watch_idleness(self) -> None:
        if self._idle_after is not None and not self._idle and time.monotonic() - self._last_read_at > self._idle_after:
            self._set_idle(True)

    def _set_idle(self, idle: bool) -> None:
        self._idle = idle
        self.watermarks.send(WatermarkStatus(idle))


def _machine(parts: TaskParts) -> TaskMachine:
    held = parts.restored.splits if parts.restored is not None else ()
    return parts.make_machine(
        time.monotonic(),
        task=parts.id,
        config=parts.checkpoints,
        traits=parts.traits(bounded=parts.instances[0].stage.kind is StageKind.BOUNDED_SOURCE),
        splits=held,
    )
