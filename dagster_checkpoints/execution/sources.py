"""The sources of a run: which process a backlog, which have caught up, and which have come to the end of their data.

A *backlog* does not need low latency. A bounded source processes one until its data has ended. An unbounded one does while it
measures at least as many unread rows as the setting `backlog_rows` says.

Sources have *caught up* when Spark has asked them since their query began, and found nothing after the newest batch::

    begins ── a batch that was planned before runs unasked ──> asked ── rows ──> a batch ──> asked ── none ──> caught up

Two facts prove it, and nothing else does. Either Spark has found no rows and no work after the newest batch; or the newest batch
has no rows of the source, and Spark planned it in this run of the query, after asking. Only the second one comes from a query
that always wants another batch, such as one with timers of processing time. That no batch runs proves nothing: rows may wait.

Must not know: how rows are measured, and what follows from a backlog.

Source: PROTOCOL section 6; FLIP-309 (`setIsProcessingBacklog`); FLIP-328 (a threshold for sources that do not end); Spark's
`MicroBatchExecution.constructNextBatch` (`noNewData`, the offset log).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.execution.job_requests import SourceInstance
from dagster_checkpoints.execution.task_events import SourceEnded
from dagster_checkpoints.pipeline import TaskId


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


class SourceEnds:
    """The sources that have ended in the tasks that are deployed."""

    def __init__(self) -> None:
        self._ended: set[tuple[TaskId, str | None]] = set()

    def take(self, report: SourceEnded) -> None:
        """A source, or all sources of a task, have ended."""
        self._ended.add((report.task, report.source))

    def stopped(self, vertices: Set[str] | None) -> None:
        """The tasks of these vertices are stopped, None for all: those that start in their place report again."""
        self._ended = set() if vertices is None else {end for end in self._ended if end[0].vertex not in vertices}

    def all_of(self, task: TaskId) -> bool:
        """Whether all sources of the task have ended."""
        return (task, None) in self._ended

    def unread(self, sources: Iterable[SourceInstance], finished: Set[TaskId]) -> tuple[SourceInstance, ...]:
        """Those of these instances of sources that may have more rows to read.

        Args:
            sources: the instances.
            finished: the tasks that have finished.
        """
        return tuple(
            source
            for source in sources
            if source.task not in finished and not self.all_of(source.task) and (source.task, source.stage) not in self._ended
        )


class SourceProgress:
    """The progress of one query's sources; a fact may be told late, and on any thread."""

    def __init__(self) -> None:
        self._asks_from = 0
        """The first batch that the running query plans itself."""
        self._nothing_after: int | None = None
        """The batch after which Spark has found nothing; None if it has not since the query began."""

    def begins(self, planned: int) -> None:
        """The query begins.

        Args:
            planned: number of the newest batch in its offset log, which is run without asking the sources; -1 for none.
        """
        self._asks_from, self._nothing_after = planned + 1, None

    def found_nothing(self, committed: int) -> None:
        """Spark has asked the sources, and wants no batch.

        Args:
            committed: number of the newest batch that was committed before this was seen; -1 for none.
        """
        self._nothing_after = committed

    def caught_up(self, newest: int, has_rows: Callable[[int], bool]) -> bool:
        """Whether the sources have caught up.

        Args:
            newest: number of the newest planned batch; -1 for none.
            has_rows: whether a planned batch has rows of them.
        """
        return self._nothing_after == newest or (newest >= self._asks_from and not has_rows(newest))
