"""Turns the start reports of tasks into events of queries: one per query and attempt, not per instance.

A query has as many tasks as its chain has instances; the number of events must not grow with them. It must not know threads.
"""

from __future__ import annotations

from collections.abc import Iterable

from dagster_checkpoints.pipeline import Chain, TaskId
from dagster_checkpoints.spark.job.events import FirstBatch, QueryEvent, QueryStarted, QueryWaiting
from dagster_checkpoints.spark.tasks.messages import StartProgress, TaskFirstBatch, TaskQueryStarted, TaskWaiting


class QueryStarts:
    """The starts of one attempt's queries.

    Args:
        chains: The chains of the attempt.
        tasks: The tasks that will start a query.
        began: The time at which they were started, monotonic seconds.
    """

    def __init__(self, chains: Iterable[Chain], tasks: Iterable[TaskId], began: float) -> None:
        self._chains = {chain.name: chain for chain in chains}
        self._starting: dict[str, set[TaskId]] = {}
        for task in tasks:
            self._starting.setdefault(task.vertex, set()).add(task)
        self._instances = {name: len(tasks) for name, tasks in self._starting.items()}
        self._began = began
        self._started = 0
        self._waiting: set[str] = set()
        self._rows: dict[str, int] = {}
        """The number of rows in the first batch that was reported, by query."""

    def take(self, progress: StartProgress, now: float) -> QueryEvent | None:
        """The event of a query for a task's report; None if there is none.

        Args:
            progress: The task's report.
            now: Monotonic seconds.
        """
        chain = self._chains[progress.task.vertex]
        match progress:
            case TaskQueryStarted(task):
                starting = self._starting.get(task.vertex, set())
                if task not in starting:
                    return None  # the task has started its query a second time, for the last batch
                starting.discard(task)
                if starting:
                    return None
                self._started += 1
                total, instances = len(self._starting), self._instances[task.vertex]
                return QueryStarted(chain.stages, instances, self._started, total, now - self._began)
            case TaskWaiting(task, inputs):
                if task.vertex in self._waiting:
                    return None
                self._waiting.add(task.vertex)
                return QueryWaiting(chain.stages, inputs)
            case TaskFirstBatch(task, rows, seconds, rows_read):
                if self._rows.get(task.vertex) or (not rows and task.vertex in self._rows):
                    return None
                self._rows[task.vertex] = rows
                return FirstBatch(chain.stages, chain.instances[task.index], rows, seconds, rows_read)
