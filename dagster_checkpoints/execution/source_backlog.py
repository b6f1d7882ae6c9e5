"""Whether a task processes a backlog, during which latency does not matter.

A bounded source does until its data has ended. An unbounded one does while it measures at least as many unread rows as the
setting `backlog_rows` says. A part of the task machine; it must not know how rows are measured, nor what follows from a backlog.

Source: FLIP-309 (`setIsProcessingBacklog`); FLIP-328 (a threshold for sources that do not end).
"""

from __future__ import annotations

from dagster_checkpoints.coordination.config import CheckpointConfig


class SourceBacklog:
    """The backlog of one task.

    Args:
        config: the settings of checkpointing; read are the interval during a backlog and its threshold.
        bounded: whether the task is a source that ends by itself, and that is not fused.
        finished_before: whether the task's data had ended in the restored checkpoint.
    """

    def __init__(self, config: CheckpointConfig, *, bounded: bool, finished_before: bool) -> None:
        self._matters = config.interval_during_backlog is not None and not finished_before
        self._threshold = config.backlog_rows
        self._bounded = bounded
        self._measured = False
        self._told = False

    def measured(self, rows: int | None) -> None:
        """Take the number of unread rows of the source; None if it cannot tell."""
        self._measured = self._threshold is not None and rows is not None and rows >= self._threshold

    def changed(self, *, running: bool, fused: bool) -> bool | None:
        """What the coordinator is to be told.

        Args:
            running: whether the task runs, and its data has not ended.
            fused: whether a bounded source among its fused ones has not ended.

        Returns:
            Whether the task processes a backlog; None if the coordinator was told so before.
        """
        backlog = self._matters and running and (self._bounded or fused or self._measured)
        if backlog == self._told:
            return None
        self._told = backlog
        return backlog
