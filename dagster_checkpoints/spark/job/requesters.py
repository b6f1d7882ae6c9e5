"""The requesters of a job: what each asked for, and how it is answered.

Between storage's requests and those of `execution.job_requests`. For the thread of the job's loop. It must not know what becomes
of a request.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from dagster_checkpoints.control import Answer, ControlRequest
from dagster_checkpoints.coordination import FailureReason
from dagster_checkpoints.execution.job_requests import AnswerRequest, Request, RequestReceived
from dagster_checkpoints.spark.job.job_messages import Asked
from dagster_checkpoints.spark.job.savepoints_in_progress import SavepointPlace, SavepointsInProgress
from dagster_checkpoints.storage import CheckpointStorage, StorageError


class Requesters:
    """Knows the requesters by number.

    Args:
        storage: Names the places of checkpoints and savepoints.
        savepoints: Where savepoints are to be taken.
    """

    def __init__(self, storage: CheckpointStorage, savepoints: SavepointsInProgress) -> None:
        self._storage = storage
        self._savepoints = savepoints
        self._respond: dict[int, Callable[[Answer], None]] = {}
        self._requests: dict[str, ControlRequest] = {}
        self._number = 0

    def asked(self, request_id: str) -> ControlRequest | None:
        """The request of that id, if it is not answered."""
        return self._requests.get(request_id)

    def receive(self, asked: Asked, *, is_open: bool) -> RequestReceived | None:
        """A requester asks for something. Returns what the job machine is told; None if the request was answered at once.

        Args:
            is_open: A request of the same id is not answered yet: the savepoint's place is what that one says.
        """
        request = asked.request
        if not is_open and request.kind in ("savepoint", "stop"):
            try:
                self._savepoints.ask(request.request_id, SavepointPlace.of(request))
            except StorageError as error:
                failed = AnswerRequest(request.request_id, (), FailureReason.IO_EXCEPTION, str(error))
                asked.respond(self._answer(failed))
                return None
        self._requests.setdefault(request.request_id, request)
        self._number += 1
        self._respond[self._number] = asked.respond
        wanted = Request(
            request_id=request.request_id,
            kind=request.kind,
            deadline_seconds=request.deadline_seconds,
            drain=request.drain,
            stage=request.stage,
            instance=request.instance,
            termination=asked.termination,
        )
        return RequestReceived(wanted, self._number, asked.seen_at)

    def answer(self, action: AnswerRequest) -> None:
        """Tell every requester of the request what has become of it."""
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
