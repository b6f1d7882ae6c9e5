"""Event time on a task's outputs: a watermark that never goes back, and whether the task is idle.

Must not know: how the watermark is determined, channels, queries.
"""

from __future__ import annotations

from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS
from dagster_checkpoints.execution.elements import Mark, WatermarkAt, WatermarkStatus
from dagster_checkpoints.execution.task_events import WatermarkReached


class OutputEventTime:
    """The marks of event time on a task's outputs.

    Args:
        lateness_ms: the lateness that the last stage declares for its rows, milliseconds.
        watermark: the last watermark that was sent before the restored checkpoint, epoch ms; None before the first.
        idle: whether the consumers know the task as idle; None in a restored task, which says it again.
    """

    __slots__ = ("_idle", "_lateness_ms", "watermark")

    def __init__(self, lateness_ms: int = 0, watermark: int | None = None, idle: bool | None = False) -> None:
        self._lateness_ms = lateness_ms
        self._idle = idle
        self.watermark = watermark
        """The last watermark that was sent, epoch ms; None before the first."""

    @property
    def idle(self) -> bool:
        """Whether the consumers were last sent that the task is idle."""
        return self._idle is True

    def handle(self, event: WatermarkReached | WatermarkAt | WatermarkStatus) -> list[Mark]:
        """Take one event, return the marks to append to every output.

        Args:
            event: `WatermarkReached` of a running task; MAX_WATERMARK in it is not sent, because `finish` may still return rows.
                `WatermarkAt` after those rows. `WatermarkStatus` of a source, or of the inputs.
        """
        if isinstance(event, WatermarkReached):
            return [] if event.ms >= MAX_WATERMARK_MS else self._advance(event.ms - self._lateness_ms)
        if isinstance(event, WatermarkAt):
            return self._advance(event.ms)
        if event.idle == self._idle:
            return []
        self._idle = event.idle
        return [event]

    def _advance(self, ms: int) -> list[Mark]:
        if self.watermark is not None and ms <= self.watermark:
            return []
        self.watermark = ms
        return [WatermarkAt(ms)]
