"""Rows that Spark dropped as late: counts per stage of a task since the job began, with a warning from time to time.

It must not know the source of the counts, nor their display.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.tasks.task_parts import StageInstance

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
