"""Sources that begin at their present end, such as a topic's latest message: where that is, is recorded at once.

It is known when their query has had its first batch, and a checkpoint holds it from then on. A restart before that checkpoint
begins at what is the end then, and what came in between would not be read. So the run asks itself for a checkpoint.

Must not know how a source says where it begins. For the thread of the job's loop.

Source: Spark's `MicroBatchExecution`, which writes the offsets of a query's first batch before it runs it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Set
from datetime import UTC, datetime

from dagster_checkpoints.control.requests import Answer, ControlRequest
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.spark.job.job_messages import QueuedRequest
from dagster_checkpoints.spark.tasks.messages import StartProgress, TaskFirstBatch


class SourcePositions:
    """Asks for a checkpoint when the sources of an attempt have begun that begin at their present end.

    Args:
        epoch: Fencing epoch of the run.
        deadline_seconds: The time that a checkpoint may take.
        log: Receives a warning if it fails.
    """

    def __init__(self, epoch: int, deadline_seconds: float, log: logging.Logger) -> None:
        self._epoch = epoch
        self._deadline_seconds = deadline_seconds
        self._log = log
        self._waits_for: frozenset[TaskId] = frozenset()
        self._asked = 0

    def deployed(self, unrecorded: Set[TaskId], vertices: Set[str] | None) -> None:
        """The tasks of an attempt are built.

        Args:
            unrecorded: The tasks of these vertices whose sources begin at an end that no checkpoint holds.
            vertices: The vertices that restart; None for all.
        """
        others = () if vertices is None else (task for task in self._waits_for if task.vertex not in vertices)
        self._waits_for = frozenset([*others, *unrecorded])

    def began(self, progress: StartProgress) -> QueuedRequest | None:
        """The request for a checkpoint, if this was the last of the first batches that it waits for."""
        if not isinstance(progress, TaskFirstBatch) or progress.task not in self._waits_for:
            return None
        self._waits_for -= {progress.task}
        if self._waits_for:
            return None
        self._asked += 1
        request = ControlRequest(
            request_id=f"sources-began-e{self._epoch}-{self._asked}",
            kind="checkpoint",
            epoch=self._epoch,
            deadline_seconds=self._deadline_seconds,
            asked_by="the run, for where its sources begin",
            asked_at=datetime.now(UTC),
        )
        return QueuedRequest(request, self._answered, time.monotonic())

    def _answered(self, answer: Answer) -> None:
        if answer.status == "failed":
            self._log.warning(
                "The checkpoint that records where sources began at their latest row has failed: %s. After a failure before the "
                "next checkpoint they begin at what is the latest then, and what came in between is not read. To be independent "
                "of that, let them begin at a named offset or at the earliest.",
                answer.message,
            )
