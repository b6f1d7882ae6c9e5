"""What comes into the queue of a job's loop; values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dagster_checkpoints.control import Answer, ControlRequest
from dagster_checkpoints.errors import repeats_by_nature
from dagster_checkpoints.execution.job_events import Failure, JobMachineEvent
from dagster_checkpoints.spark.tasks.messages import TaskNews


@dataclass(frozen=True)
class Asked:
    """A control request.

    Attributes:
        respond: Takes the final answer; called once, on the loop's thread.
        seen_at: When it was found, monotonic seconds; its deadline counts from here.
        termination: The run's own process asks, because it is being terminated.
    """

    request: ControlRequest
    respond: Callable[[Answer], None]
    seen_at: float
    termination: bool = False


@dataclass(frozen=True)
class NewsOfTask:
    """How far a task has come, for people; nothing is decided by it.

    Attributes:
        attempt: The one that the task belongs to; of earlier ones nothing is told.
    """

    attempt: int
    news: TaskNews


Item = JobMachineEvent | Asked | NewsOfTask


def failure_of(error: BaseException) -> Failure:
    """What the job machine is to know of an error."""
    return Failure(str(error), repeats_by_nature(error), error)
