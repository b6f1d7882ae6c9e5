"""Runs of one task's query: starts it, waits for it, and runs single batches under a given watermark.

It must not know stages, channels or checkpoints.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.errors import StreamingQueryException

from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.spark.query.query import TaskQuery

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

POLL_SECONDS = 0.03
START_ATTEMPTS = 3
_log = logging.getLogger(__name__)


class QueryRuns:
    """Runs the query on the task's thread.

    Args:
        task: The task's id, for log lines.
        query: The task's query.
        output_mode: Spark's output mode of the query.
        check_canceled: Raises if the job has cancelled the task; called during each wait.
    """

    def __init__(self, task: TaskId, query: TaskQuery, output_mode: str, check_canceled: Callable[[], None]) -> None:
        self._task = task
        self._query = query
        self._output_mode = output_mode
        self._check_canceled = check_canceled

    def start(self, frame: DataFrame, trigger: Mapping[str, Any], before_first_batch: Callable[[], None] | None = None) -> None:
        """Start the query, and wait until it has asked its sources. Raises what it failed with."""

        def start() -> None:
            self._query.start(frame, self._output_mode, trigger, before_first_batch)

        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                self._query.start_in_turn(start, self._check)
                return
            except StreamingQueryException as error:
                # The machine is too busy for the time that Spark gives a worker; nothing has been processed yet.
                if "failed to connect back" not in str(error) or attempt == START_ATTEMPTS:
                    raise
                _log.warning("%s: a Python worker did not start in Spark's time; starting the query again", self._task)

    def plan_batch(self, watermark: int) -> None:
        """Plan one batch without input through the offset log; the query is stopped.

        Args:
            watermark: The watermark that the batch runs under, epoch ms.
        """
        batch_id = self._query.log.last_committed()
        self._query.log.plan_batch(batch_id + 1, watermark)
        self._query.log.forget_planned_after(batch_id + 1)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition. Raises what the query failed with, or if the task was cancelled."""
        while not condition():
            self._check()
            time.sleep(POLL_SECONDS)

    def check_query(self) -> None:
        """Raise what the query failed with."""
        failure = self._query.failure()
        if failure is not None:
            raise failure

    def _check(self) -> None:
        self._check_canceled()
        self.check_query()
