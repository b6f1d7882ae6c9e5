"""A stop with savepoint, from the request to the answer: first the savepoint, then the end of every task.

    WAITING_FOR_SAVEPOINT ── SavepointCompleted ──> SAVEPOINT_CREATED ── AllTasksFinished ──> FINAL

The answer is sent only when the job has ended, because the commits after the savepoint can fail too: the savepoint is
then kept, and the answer names it. Must not know: how a savepoint is taken (`progress.StopProgress` is the coordinator's part),
how a job fails over.

Source: FLIP-34; Flink's StopWithSavepointTerminationManager and StopWithSavepointTerminationHandlerImpl.
"""

from __future__ import annotations

from enum import Enum
from typing import NoReturn

import msgspec

from dagster_checkpoints.coordination.errors import UnexpectedEvent
from dagster_checkpoints.coordination.failures import FailureReason


class StopState(Enum):
    """How far a stop is."""

    WAITING_FOR_SAVEPOINT = "waiting for the savepoint"
    SAVEPOINT_CREATED = "the savepoint is created, waiting for the tasks to end"
    FINAL = "answered"


# Events


class SavepointCompleted(msgspec.Struct, frozen=True):
    """The coordinator has answered with RequestCompleted."""

    checkpoint_id: int
    location: str


class SavepointFailed(msgspec.Struct, frozen=True):
    """The coordinator has answered with RequestNotCompleted."""

    reason: FailureReason
    message: str


class TaskFailed(msgspec.Struct, frozen=True):
    """A task has failed; before the savepoint the job and the coordinator handle it alone."""

    message: str


class AllTasksFinished(msgspec.Struct, frozen=True):
    """Every task is FINISHED."""


class JobCanceled(msgspec.Struct, frozen=True):
    """The job was canceled."""


class JobFailed(msgspec.Struct, frozen=True):
    """The job has ended FAILED, and is not restarted."""

    message: str


StopEvent = SavepointCompleted | SavepointFailed | TaskFailed | AllTasksFinished | JobCanceled | JobFailed

# Actions


class FailOver(msgspec.Struct, frozen=True):
    """Restart the job from its latest checkpoint: after a savepoint that is the savepoint, and its commits are
    retried."""

    message: str


class AnswerDone(msgspec.Struct, frozen=True):
    """The job has ended, and everything that the savepoint holds is committed."""

    checkpoint_id: int
    location: str


class AnswerFailed(msgspec.Struct, frozen=True):
    """The job has not stopped as requested.

    Attributes:
        location: location of the savepoint if it completed before the failure; None otherwise.
    """

    reason: FailureReason
    message: str
    location: str | None = None


StopAction = FailOver | AnswerDone | AnswerFailed


class StopWithSavepoint:
    """One stop with savepoint.

    Args:
        request_id: id of the request.
        drain: whether the sources were ended: a job whose drain fails cannot continue.
    """

    def __init__(self, request_id: str, drain: bool) -> None:
        self.request_id = request_id
        self.drain = drain
        self._state = StopState.WAITING_FOR_SAVEPOINT
        self._savepoint: SavepointCompleted | None = None

    @property
    def state(self) -> StopState:
        return self._state

    @property
    def savepoint(self) -> SavepointCompleted | None:
        """The savepoint, once it has completed."""
        return self._savepoint

    def handle(self, event: StopEvent) -> list[StopAction]:
        """Take one event, return what to do, in this order. After the answer every event is ignored.

        Raises:
            UnexpectedEvent: a second outcome of the savepoint.
        """
        if self._state is StopState.FINAL:
            return []
        if self._savepoint is None:
            return self._before_savepoint(event)
        return self._after_savepoint(event, self._savepoint)

    def _before_savepoint(self, event: StopEvent) -> list[StopAction]:
        match event:
            case SavepointCompleted():
                self._state = StopState.SAVEPOINT_CREATED
                self._savepoint = event
                return []
            case SavepointFailed(reason, message):
                answer = self._failed(reason, message)
                # If the coordinator has shut down, the job has ended, and nothing is left to restart.
                job_runs = reason is not FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN
                fails_over = self.drain and job_runs
                return [*answer, FailOver(f"the drain's savepoint failed: {message}")] if fails_over else answer
            case TaskFailed():
                # The savepoint's outcome is still open: its metadata may just be being written.
                return []
            case AllTasksFinished():
                reason = FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN
                return self._failed(reason, "every task has finished before the savepoint")
            case JobCanceled():
                return self._failed(FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN, "the job was canceled before the savepoint")
            case JobFailed(message):
                return self._failed(FailureReason.JOB_FAILURE, message)

    def _after_savepoint(self, event: StopEvent, savepoint: SavepointCompleted) -> list[StopAction]:
        match event:
            case AllTasksFinished():
                self._state = StopState.FINAL
                return [AnswerDone(savepoint.checkpoint_id, savepoint.location)]
            case TaskFailed(message):
                answer = self._failed(FailureReason.TASK_FAILURE, message)
                return [*answer, FailOver(self._kept(message))]
            case JobCanceled():
                return self._failed(FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN, "the job was canceled")
            case JobFailed(message):
                return self._failed(FailureReason.JOB_FAILURE, message)
            case SavepointCompleted() | SavepointFailed():
                self._refuse(event, savepoint)

    def _failed(self, reason: FailureReason, message: str) -> list[StopAction]:
        self._state = StopState.FINAL
        location = self._savepoint.location if self._savepoint is not None else None
        return [AnswerFailed(reason, self._kept(message), location)]

    def _kept(self, message: str) -> str:
        if self._savepoint is None:
            return message
        return (
            f"{message} (after savepoint {self._savepoint.checkpoint_id} had completed; it is kept at "
            f"{self._savepoint.location}, and a start from it commits what is not committed yet)"
        )

    def _refuse(self, event: StopEvent, savepoint: SavepointCompleted) -> NoReturn:
        raise UnexpectedEvent(
            f"A stop whose savepoint {savepoint.checkpoint_id} has completed cannot take {event!r}: "
            "a savepoint has one outcome. Send the answers of the stop's own request only."
        )
