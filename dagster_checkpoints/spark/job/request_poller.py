"""The thread that polls storage for requests and passes them to the job's loop.

It must not know how a request is carried out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime

from dagster_checkpoints.control.request_box import RequestBox
from dagster_checkpoints.control.requests import Answer, ControlRequest
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.errors import DagsterCheckpointsError, OutcomeUnknown, StorageError, StorageUnavailable, WriteConflict
from dagster_checkpoints.spark.job.job_messages import QueuedRequest
from dagster_checkpoints.spark.job.savepoints_in_progress import SavepointDestination, SavepointsInProgress

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
