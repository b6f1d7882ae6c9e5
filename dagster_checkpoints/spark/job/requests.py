"""Requests to a running job: polled from storage, handed to the job's loop, and answered.

Polling has a thread of its own; requesters belong to the thread of the job's loop. Control requests become those of
`execution.job_requests`, and answers are converted back. It must not know how a request is carried out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from dagster_checkpoints.control.request_box import RequestBox
from dagster_checkpoints.control.requests import Answer, ControlRequest
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.errors import DagsterCheckpointsError, OutcomeUnknown, StorageError, StorageUnavailable, WriteConflict
from dagster_checkpoints.execution.job_requests import AnswerRequest, Request, RequestReceived
from dagster_checkpoints.spark.job.runtime import QueuedRequest
from dagster_checkpoints.spark.job.savepoints_in_progress import SavepointDestination, SavepointsInProgress
from dagster_checkpoints.storage.checkpoints import CheckpointStorage

KEEP_ANSWERS_SECONDS = 7 * 24 * 3600.0
SWEEP_SECONDS = 3600.0


class RequestPoller:
    """Polls storage for requests to this owner, on a separate thread.

    Args:
        box: The requests in storage.
        epoch: This owner's epoch; requests to earlier owners are refused.
        savepoints: Checks the target directories of savepoints: this thread, which may wait for storage, refuses a request whose
            target cannot be written.
        take: Receives each request once.
        answer: Writes an answer with `write`; not on the caller's thread.
        seconds: Seconds between two polls.
        log: Receives warnings about storage.
    """

    def __init__(
        self,
        box: RequestBox,
        epoch: int,
        savepoints: SavepointsInProgress,
        take: Callable[[QueuedRequest], None],
        answer: Callable[[Answer], None],
        seconds: float,
        log: logging.Logger,
    ) -> None:
        self._box = box
        self._epoch = epoch
        self._savepoints = savepoints
        self._take = take
        self._answer = answer
        self._seconds = seconds
        self._log = log
        self._seen: set[str] = set()
        self._unwritten: deque[Answer] = deque()
        """Final answers that storage may not have."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control requests", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Stop polling; waits for the thread, at most for this number of seconds."""
        self._stopping.set()
        self._thread.join(seconds)

    def poll(self) -> None:
        """Poll once."""
        found = self._box.open_requests(self._epoch)
        self._seen.intersection_update(request.request_id for request in found)  # an id is free again when its files are deleted
        for request in found:
            if request.request_id not in self._seen:
                if self._destination_is_usable(request):
                    self._box.answer(Answer(request_id=request.request_id, status="accepted", answered_at=datetime.now(UTC)))
                    self._take(QueuedRequest(request, self._answer, time.monotonic()))
                self._seen.add(request.request_id)  # last: if storage fails before, the next poll repeats this

    def write(self, answer: Answer) -> None:
        """Write a final answer; while storage does not take it, again with each poll. Any thread."""
        self._write(answer, warn=True)

    def write_again(self) -> None:
        """Write the answers that storage may not have, once more. At the end of the run a later run refuses the others."""
        for _ in range(len(self._unwritten)):
            self._write(self._unwritten.popleft(), warn=False)

    def _write(self, answer: Answer, *, warn: bool) -> None:
        try:
            self._box.answer(answer)
        except StorageError as error:
            if isinstance(error, StorageUnavailable | OutcomeUnknown | WriteConflict):
                self._unwritten.append(answer)
            if warn:
                text = "The answer to request %s is not written yet. %s: %s"
                self._log.warning(text, answer.request_id, type(error).__name__, error)

    def _destination_is_usable(self, request: ControlRequest) -> bool:
        try:
            self._savepoints.check(SavepointDestination.of(request))
        except Exception as error:  # boto3 raises errors of its own for its settings; no request may end this thread
            text = str(error) if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
            reason = FailureReason.IO_EXCEPTION.name
            now = datetime.now(UTC)
            self._box.answer(Answer(request_id=request.request_id, status="failed", reason=reason, message=text, answered_at=now))
            return False
        return True

    def _run(self) -> None:
        sweep_at, failing, wait = 0.0, False, 0.0
        while not self._stopping.wait(wait):
            wait = self._seconds
            try:
                if time.monotonic() >= sweep_at:
                    sweep_at = time.monotonic() + SWEEP_SECONDS
                    self._box.refuse_older(self._epoch)
                    self._box.sweep(KEEP_ANSWERS_SECONDS)
                self.write_again()
                self.poll()
                failing = False
            except Exception as error:  # no error may end this thread: the run would answer no request any more
                if not failing:
                    text = str(error) if isinstance(error, DagsterCheckpointsError) else f"{type(error).__name__}: {error}"
                    self._log.warning("Control requests cannot be read now: %s", text)
                failing = True


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
