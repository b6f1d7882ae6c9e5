"""Which sources have come to the end of their data, as their tasks report it; for a job that waits for some of them.

It must not know: who waits, how a source ends.

Source: PROTOCOL section 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from dagster_checkpoints.execution.job_requests import SourceInstance
from dagster_checkpoints.execution.task_events import SourceEnded
from dagster_checkpoints.pipeline import TaskId


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
