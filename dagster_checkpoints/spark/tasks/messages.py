"""What tasks and the job tell each other: a task's mailbox, and the queue of the job's loop; values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dagster_checkpoints.control import Answer, ControlRequest
from dagster_checkpoints.coordination import CheckpointBarrier, CoordinatorEvent
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.storage import StorageError

# To a task


@dataclass(frozen=True)
class TriggerCheckpoint:
    """From the coordinator to a root."""

    barrier: CheckpointBarrier


@dataclass(frozen=True)
class CheckpointIsComplete:
    checkpoint_id: int


@dataclass(frozen=True)
class CheckpointIsAborted:
    checkpoint_id: int


@dataclass(frozen=True)
class SavepointIsComplete:
    """A plain savepoint, which commits nothing."""

    checkpoint_id: int


@dataclass(frozen=True)
class EndInput:
    """A source shall end as if its input were exhausted."""


@dataclass(frozen=True)
class LookAgain:
    """Something has arrived on a channel."""


Mail = TriggerCheckpoint | CheckpointIsComplete | CheckpointIsAborted | SavepointIsComplete | EndInput | LookAgain


# From a task


@dataclass(frozen=True)
class TaskFailed:
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


TaskNews = TaskWaiting | TaskQueryStarted | TaskFirstBatch
"""How far a task has come, for people; nothing is decided by it."""
Report = Callable[[CoordinatorEvent | TaskFailed | TaskNews], None]


# To the job's loop


@dataclass(frozen=True)
class Cancel:
    """End the job."""


@dataclass(frozen=True)
class EndSources:
    """End one source (instance), or all of them (None)."""

    stage: str | None
    instance: str | None


@dataclass(frozen=True)
class AskCheckpoint:
    """Somebody asks for a checkpoint."""

    request_id: str


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
class OwnershipIsLost:
    """From the lease's renewer: another run owns the pipeline, or may."""

    error: StorageError


@dataclass(frozen=True)
class FromAttempt:
    """A report of a task or an upload; those of earlier attempts are of no interest any more."""

    attempt: int
    event: CoordinatorEvent | TaskFailed | TaskNews


Item = Cancel | EndSources | AskCheckpoint | Asked | OwnershipIsLost | FromAttempt | CoordinatorEvent
