"""Rows that one task has counted since the job began: those that its stages have emitted, and those that Spark dropped as late.

The last stage's rows are counted where they are written, those of the stages before it by Spark, in the query that they share.
It must not know the display of the counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from dagster_checkpoints.pipeline import Pipeline, total_rows
from dagster_checkpoints.spark.channels.outputs import TaskOutput
from dagster_checkpoints.spark.tasks.task_parts import StageInstance
from dagster_checkpoints.state.metadata import TaskSnapshot
from dagster_checkpoints.state.row_counts import rows_in_snapshot


class EmittedRows:
    """The numbers of one task.

    Args:
        stages: The stages of the task's chain, in order; also fused sources that have ended.
        output: Counts the rows of the last stage.
        restored: The task's snapshot; None if the job was not restored.

    Attributes:
        before: The number of rows that the last stage had emitted at the restored checkpoint.
    """

    def __init__(self, stages: Sequence[str], output: TaskOutput, restored: TaskSnapshot | None) -> None:
        *self._inside, self._last = stages
        self._output = output
        self.before = (rows_in_snapshot(restored, self._last) or 0) if restored is not None else 0
        self._rows = {name: rows_in_snapshot(restored, name) if restored is not None else 0 for name in self._inside}

    def add(self, rows: Mapping[str, int | None]) -> None:
        """Add the rows that stages before the last one have emitted in a micro-batch."""
        for name, count in rows.items():
            self._rows[name] = total_rows((self._rows[name], count))

    def of(self, stage: str) -> int | None:
        """The number of rows of a stage."""
        return self.last if stage == self._last else self._rows[stage]

    @property
    def last(self) -> int:
        """The number of rows of the last stage, which is always known."""
        return self.before + self._output.rows

    def all(self) -> dict[str, int | None]:
        """The numbers of all stages."""
        return {**self._rows, self._last: self.last}


WARN_EVERY_SECONDS = 600.0
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class LateRows:
    """The counts of one task.

    Args:
        pipeline: The pipeline, with the allowed lateness at each stage.
        instances: The task's stages.
        before: The counts at the restored checkpoint, by stage.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        instances: Sequence[StageInstance],
        before: Mapping[str, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pipeline = pipeline
        self._instances = {instance.stage.name: instance for instance in instances}
        self._counts = {name: before.get(name, 0) for name in self._instances}
        self._clock = clock
        self._warned: dict[str, float] = {}
        self._unreported = dict.fromkeys(self._instances, 0)

    def of(self, stage: str) -> int:
        """The number of late rows that a stage has dropped since the job began; 0 for a fused source that does not run again."""
        return self._counts.get(stage, 0)

    @property
    def total(self) -> int:
        """The number of late rows that all stages of the task have dropped since the job began."""
        return sum(self._counts.values())

    def add(self, stages: Sequence[str], dropped: Sequence[int], watermark_ms: int) -> None:
        """Count what the stateful operators of a batch dropped.

        Args:
            stages: The stage of each operator; if some stages are not known, all rows count for the last stage.
            dropped: The number of rows that each operator dropped.
            watermark_ms: The watermark before which rows were late, epoch ms.
        """
        if not any(dropped):
            return
        last = next(reversed(self._instances))
        known = len(stages) == len(dropped)
        for position, count in enumerate(dropped):
            stage = stages[position] if known else last
            self._counts[stage] += count
            self._unreported[stage] += count
        for stage in self._instances:
            self._warn(stage, watermark_ms)

    def _warn(self, stage: str, watermark_ms: int) -> None:
        now = self._clock()
        if not self._unreported[stage] or now - self._warned.get(stage, -WARN_EVERY_SECONDS) < WARN_EVERY_SECONDS:
            return
        self._warned[stage] = now
        dropped, self._unreported[stage] = self._unreported[stage], 0
        instance = self._instances[stage]
        lateness = self._pipeline.event_time_lateness_ms(stage) or 0
        watermark = (_EPOCH + timedelta(milliseconds=watermark_ms)).isoformat(sep=" ")
        instance.call.context.log.warning(
            f"Stage {stage!r} (instance {instance.call.context.instance!r}) dropped at least {dropped:,} rows as late, at least "
            f"{self._counts[stage]:,} since the job began: their event time was before the watermark {watermark} (allowed "
            f"lateness: {timedelta(milliseconds=lateness)}). Of a grouped window Spark counts each key and window of a task "
            "once, and not the rows that it grouped. To drop fewer rows, give the source a longer lateness (watermark=). If a "
            "stage in between emits rows that are older than its input's watermark, from a timer or in another event-time "
            "column, declare that lateness at the stage: event_time=(column, lateness). This warning appears at most once in "
            f"{WARN_EVERY_SECONDS / 60:.0f} minutes."
        )
