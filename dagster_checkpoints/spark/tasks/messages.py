"""What tasks and the job tell each other: a task's mailbox, and what it reports; values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dagster_checkpoints.coordination import CoordinatorEvent
from dagster_checkpoints.execution.messages import TaskMessage
from dagster_checkpoints.pipeline import TaskId

# To a task


@dataclass(frozen=True)
class LookAgain:
    """Something has arrived on a channel."""


Mail = TaskMessage | LookAgain


# From a task


@dataclass(frozen=True)
class TaskRaised:
    """A task has failed; the job restarts or fails."""

    task: TaskId
    error: BaseException


@dataclass(frozen=True)
class TaskWaiting:
    """A task has no query before these static inputs have been read to their end."""

    task: TaskId
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class TaskQueryStarted:
    """A task's query looks for input. What is evaluated once, without a streaming query, says so when that begins."""

    task: TaskId


@dataclass(frozen=True)
class TaskFirstBatch:
    """A task has processed its first micro-batch, or the first one with rows if that had none.

    Attributes:
        rows: Emitted with it.
        seconds: That it took.
    """

    task: TaskId
    rows: int
    seconds: float


StartProgress = TaskWaiting | TaskQueryStarted | TaskFirstBatch
"""How far a task has come, for people; nothing is decided by it."""
SendReport = Callable[[CoordinatorEvent | TaskRaised | StartProgress], None]
