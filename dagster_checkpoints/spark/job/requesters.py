"""The requesters of a job: their requests, and the delivery of answers.

It converts control requests into those of `execution.job_requests`, and answers back. For the thread of the job's loop. It must
not know how a request is carried out.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from dagster_checkpoints.control.requests import Answer, ControlRequest
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.errors import StorageError
from dagster_checkpoints.execution.job_requests import AnswerRequest, Request, RequestReceived
from dagster_checkpoints.spark.job.job_messages import QueuedRequest
from dagster_checkpoints.spark.job.savepoints_in_progress import SavepointDestination, SavepointsInProgress
from dagster_checkpoints.storage.checkpoints import CheckpointStorage


class Requesters:
    """Assigns a number to each requester.

    Args:
        storage: Gives the URLs of checkpoints and savepoints.
        savepoints: Receives the destinations of requested savepoints.
    """

    def __init__(self, storage: CheckpointStorage, savepoints: SavepointsInProgress) -> None:
        self._storage = storage
        self._savepoints = savepoints
        self._respond: dict[int, Callable[[Answer], None]] = {}
        self._requests: dict[str, ControlRequest] = {}
        self._number = 0

    def open_request(self, request_id: str) -> ControlRequest | None:
        """The request of that id; None if it is answered, or does not exist."""
        return self._requests.get(request_id)

    def receive(self, queued: QueuedRequest, *, is_open: bool) -> RequestReceived | None:
        """Register a requester. Returns the event for the job machine; None if the request was answered at once.

        Args:
            queued: The request from the queue.
            is_open: Whether an earlier request of the same id is not answered yet: then that one names the savepoint's
                destination.
        """
        request = queued.request
        if not is_open and request.kind in ("savepoint", "stop"):
            try:
                self._savepoints.register(request.request_id, SavepointDestination.of(request))
            except StorageError as error:
                failed = AnswerRequest(request.request_id, (), FailureReason.IO_EXCEPTION, str(error))
                queued.respond(self._answer(failed))
                return None
        self._requests.setdefault(request.request_id, request)
        self._number += 1
        self._respond[self._number] = queued.respond
        received = Request(
            request_id=request.request_id,
            kind=request.kind,
            deadline_seconds=request.deadline_seconds,
            drain=request.drain,
            bounded=request.bounded,
            stage=request.stage,
            instance=request.instance,
            asked_by="termination" if queued.termination else "request",
        )
        return RequestReceived(received, self._number, queued.seen_at)

    def answer(self, action: AnswerRequest) -> None:
        """Send the answer to every requester of the request."""
        self._requests.pop(action.request_id, None)
        answer = self._answer(action)
        for number in action.requesters:
            self._respond.pop(number)(answer)

    def _answer(self, action: AnswerRequest) -> Answer:
        return Answer(
            request_id=action.request_id,
            status="done" if action.done else "failed",
            reason=action.reason.name if action.reason is not None else "",
            message=action.message,
            checkpoint_id=action.checkpoint_id,
            location=action.location,
            url=self._storage.url_of(action.location) if action.location else "",
            answered_at=datetime.now(UTC),
            details=_details(action),
        )


def _details(action: AnswerRequest) -> dict[str, Any]:
    if action.cut:
        return {"cut": list(action.cut)}
    if action.ended:
        return {"ended": list(action.ended)}
    if action.checkpoint is None:
        return {}
    checkpoint = action.checkpoint
    return {
        "roots": list(checkpoint.roots),
        "finished_stages": sorted(checkpoint.fully_finished),
        "duration": checkpoint.duration,
    }
