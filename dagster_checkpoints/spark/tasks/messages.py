"""The messages between tasks and the job: items of a task's mailbox, and a task's reports; values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dagster_checkpoints.coordination.events import EventOfTask
from dagster_checkpoints.execution.split_events import SplitRequest
from dagster_checkpoints.execution.task_events import SourceEnded, SourcesRead, TaskMessage
from dagster_checkpoints.pipeline import CheckEvaluation, TaskId
from dagster_checkpoints.sinks import SinkCommit
from dagster_checkpoints.spark.tasks.commit_checks import CheckedRows

# To a task


@dataclass(frozen=True)
class WakeUp:
    """Wakes the task's thread: a channel has new elements, or the task is cancelled."""


Mail = TaskMessage | WakeUp


# From a task

_UNCHECKED = CheckedRows()


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
        rows_read: The number of rows that its sources gave; None if that is not known, or it reads channels.
    """

    task: TaskId
    rows: int
    seconds: float
    rows_read: int | None = None


@dataclass(frozen=True, slots=True)
class TaskCommitted:
    """A task with a sink has committed it up to a completed checkpoint.

    What a restore commits is not reported: the attempt that has taken the checkpoint may have reported it before.

    Attributes:
        stage: The stage that has the sink.
        instance: The stage's instance.
        checkpoint_id: The checkpoint.
        commit: What has become visible; None if there was nothing to commit.
        rows: The number of rows that the instance has committed since the job began, over all runs.
        watermark_ms: The output watermark at the checkpoint, epoch ms; None before the first.
        last: Whether the task ends with this commit: its data has ended, or the job is suspended.
        checked: The results of the stage's checks for these rows, and a sample of them.
    """

    stage: str
    instance: str
    checkpoint_id: int
    commit: SinkCommit | None
    rows: int
    watermark_ms: int | None
    last: bool
    checked: CheckedRows = _UNCHECKED


@dataclass(frozen=True, slots=True)
class TaskCommitRefused:
    """Rows did not pass a blocking check: the task declines the checkpoint.

    Attributes:
        stage: The stage that has the sink.
        checks: The results of all checks of the instance.
    """

    stage: str
    checks: tuple[CheckEvaluation, ...]


StartProgress = TaskWaiting | TaskQueryStarted | TaskFirstBatch
"""The progress of a task's start, for display only."""
TaskReported = (
    EventOfTask | SplitRequest | SourcesRead | SourceEnded | TaskRaised | StartProgress | TaskCommitted | TaskCommitRefused
)
"""All that a task reports to the job."""
SendReport = Callable[[TaskReported], None]
