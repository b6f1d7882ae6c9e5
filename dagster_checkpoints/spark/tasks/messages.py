"""The messages between tasks and the job: items of a task's mailbox, and a task's reports; values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dagster_checkpoints.coordination import CoordinatorEvent
from dagster_checkpoints.execution.messages import TaskMessage
from dagster_checkpoints.pipeline import TaskId

# To a task


@dataclass(frozen=True)
class WakeUp:
    """Wakes the task's thread: a channel has new elements, or the task is cancelled."""


Mail = TaskMessage | WakeUp


# From a task


@dataclass(frozen=True)
class TaskRaised:
    """A task has failed; the job restarts or fails."""

    task: TaskId
    error: BaseException


@dataclass(frozen=True)
class TaskWaiting:
    """A task starts its query only after these static inputs have been read to their end."""

    task: TaskId
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class TaskQueryStarted:
    """A task's query looks for input; or the single evaluation of a plan without streams has begun."""

    task: TaskId


@dataclass(frozen=True)
class TaskFirstBatch:
    """A task has processed its first micro-batch, or the first one with rows if that had none.

    Attributes:
        task: The task.
        rows: The number of rows that it emitted with this batch.
        seconds: The duration of the batch.
    """

    task: TaskId
    rows: int
    seconds: float


StartProgress = TaskWaiting | TaskQueryStarted | TaskFirstBatch
"""The progress of a task's start, for display only."""
SendReport = Callable[[CoordinatorEvent | TaskRaised | StartProgress], None]
