"""The items of the queue of a job's loop; values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dagster_checkpoints.control.requests import Answer, ControlRequest
from dagster_checkpoints.errors import repeats_by_nature
from dagster_checkpoints.execution.job_events import Failure, JobMachineEvent
from dagster_checkpoints.spark.tasks.messages import StartProgress, TaskCommitRefused, TaskCommitted


@dataclass(frozen=True)
class QueuedRequest:
    """A control request.

    Attributes:
        request: The request.
        respond: Receives the final answer; called once, on the loop's thread.
        seen_at: The time at which it was received, monotonic seconds; its deadline counts from then.
        termination: Whether the run's own process made the request because it is being terminated.
    """

    request: ControlRequest
    respond: Callable[[Answer], None]
    seen_at: float
    termination: bool = False


@dataclass(frozen=True)
class StartProgressItem:
    """The progress of a task's start, for display only.

    Attributes:
        attempt: The task's attempt; the progress of earlier attempts is not reported.
        progress: The progress.
    """

    attempt: int
    progress: StartProgress


Item = JobMachineEvent | QueuedRequest | StartProgressItem | TaskCommitted | TaskCommitRefused


def failure_of(error: BaseException) -> Failure:
    """The description of an error for the job machine."""
    return Failure(str(error), repeats_by_nature(error), error)
