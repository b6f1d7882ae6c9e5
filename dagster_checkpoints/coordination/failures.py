"""Why checkpoints fail, and how many consecutive failures a job tolerates.

The reasons are Flink's, by name (org.apache.flink.runtime.checkpoint.CheckpointFailureReason); the list is
closed. Must not know: how the job fails.
"""

from __future__ import annotations

from enum import Enum


class FailureReason(Enum):
    """Why a checkpoint was not triggered, or was aborted.

    ``pre_flight`` reasons arise before any task was triggered; the others after.
    """

    PERIODIC_SCHEDULER_SHUTDOWN = "Periodic checkpoints have been stopped."
    TOO_MANY_CHECKPOINT_REQUESTS = "The maximum number of queued checkpoint requests is exceeded."
    MINIMUM_TIME_BETWEEN_CHECKPOINTS = "The minimum pause between checkpoints has not passed."
    NOT_ALL_REQUIRED_TASKS_RUNNING = "Not all required tasks are running."
    IO_EXCEPTION = "Storage failed while the checkpoint was triggered."
    CHECKPOINT_ASYNC_EXCEPTION = "The asynchronous part of a task's snapshot failed."
    CHECKPOINT_EXPIRED = "The checkpoint did not complete within its timeout."
    CHECKPOINT_SUBSUMED = "A newer checkpoint has completed."
    CHECKPOINT_DECLINED = "A task declined the checkpoint."
    CHECKPOINT_DECLINED_TASK_CLOSING = "A task ended before it acknowledged."
    CHECKPOINT_DECLINED_SUBSUMED = "The barrier of a newer checkpoint arrived first."
    CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER = "A cancellation arrived on an input."
    CHECKPOINT_DECLINED_INPUT_END_OF_STREAM = "An input ended before its barrier."
    CHECKPOINT_COORDINATOR_SHUTDOWN = "The checkpoint coordinator is shut down."
    CHECKPOINT_COORDINATOR_SUSPEND = "Checkpoints are suspended: the job restarts or is being stopped."
    JOB_FAILURE = "The job has failed."
    JOB_FAILOVER_REGION = "A part of the job is restarting."
    TASK_FAILURE = "A task has failed."
    FINALIZE_CHECKPOINT_FAILURE = "The checkpoint's metadata could not be written."
    TRIGGER_CHECKPOINT_FAILURE = "A task could not be triggered."

    @property
    def pre_flight(self) -> bool:
        """Whether the checkpoint failed before any task was triggered."""
        return self in _PRE_FLIGHT

    @property
    def counts(self) -> bool:
        """Whether the failure counts against `tolerable_failed_checkpoints`."""
        return self in _COUNTED


_PRE_FLIGHT = frozenset(
    {
        FailureReason.PERIODIC_SCHEDULER_SHUTDOWN,
        FailureReason.TOO_MANY_CHECKPOINT_REQUESTS,
        FailureReason.MINIMUM_TIME_BETWEEN_CHECKPOINTS,
        FailureReason.NOT_ALL_REQUIRED_TASKS_RUNNING,
        FailureReason.IO_EXCEPTION,
    }
)
_COUNTED = frozenset(
    {
        FailureReason.IO_EXCEPTION,
        FailureReason.CHECKPOINT_ASYNC_EXCEPTION,
        FailureReason.CHECKPOINT_DECLINED,
        FailureReason.CHECKPOINT_EXPIRED,
        FailureReason.FINALIZE_CHECKPOINT_FAILURE,
    }
)


class FailureCounter:
    """Counts consecutive failed checkpoints; one id counts once, a completed checkpoint resets the count."""

    def __init__(self, tolerable: int) -> None:
        self._tolerable = tolerable
        self._counted: set[int] = set()
        self._last_completed = 0

    def completed(self, checkpoint_id: int) -> None:
        """A checkpoint has completed: failures of earlier ones no longer count."""
        if checkpoint_id > self._last_completed:
            self._last_completed = checkpoint_id
            self._counted.clear()

    def failed(self, checkpoint_id: int, reason: FailureReason) -> bool:
        """Count a failure; returns whether the job must fail because of it.

        Args:
            checkpoint_id: id of the failed checkpoint; not counted if it, or a later one, has completed.
            reason: why it has failed; some reasons are not counted (see `FailureReason.counts`).
        """
        if not reason.counts or checkpoint_id <= self._last_completed:
            return False
        self._counted.add(checkpoint_id)
        if len(self._counted) <= self._tolerable:
            return False
        self._counted.clear()
        return True
