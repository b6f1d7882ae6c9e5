"""Runs a job execution on its own thread, and passes its events, in order, to the main thread.

Dagster interrupts the main thread at any moment, so calls to Spark may not run on it. A `SimpleQueue` joins the two threads,
because an interrupted `get` leaves no lock behind. This module must not import Dagster.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from logging.handlers import QueueHandler
from queue import Empty, SimpleQueue

from dagster_checkpoints.control.requests import Answer, ControlRequest
from dagster_checkpoints.spark.job.events import JobEvent, JobResult
from dagster_checkpoints.spark.job.job_execution import JobExecution

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class LogLine:
    """A log line of the runtime, or of a stage that used `context.log`."""

    level: int
    text: str


@dataclass(frozen=True)
class JobEnded:
    """The last item of a job: its result, or the error because of which it did not start or did not return a result."""

    result: JobResult | None
    error: BaseException | None

    @property
    def suspended(self) -> str:
        """URL of the savepoint with which the job was suspended; "" if it was not."""
        if self.result is None or self.result.status != "FINISHED" or self.result.ended_by != "suspend":
            return ""
        return self.result.savepoint or ""


JobItem = JobEvent | LogLine | Answer | JobEnded


class JobThread:
    """Runs a job on a daemon thread.

    Args:
        create: Function that makes the job from its listener for events and its logger. Called on the caller's thread.
        name: Name in the names of the thread and the logger.
    """

    def __init__(self, create: Callable[[Callable[[JobEvent], None], logging.Logger], JobExecution], *, name: str) -> None:
        self._items: SimpleQueue[JobEvent | logging.LogRecord | Answer | JobEnded] = SimpleQueue()
        log = logging.Logger(f"dagster_checkpoints.{name}", logging.INFO)
        log.addHandler(QueueHandler(self._items))
        self.job = create(self._items.put, log)
        self._thread = threading.Thread(target=self._run, name=f"pipeline {name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the job runs. Ask before `next`: a job that ends in between leaves its last item."""
        return self._thread.is_alive()

    def next(self, timeout: float) -> JobItem | None:
        """The next item; None if none arrives within `timeout` seconds."""
        try:
            item = self._items.get(timeout=timeout)
        except Empty:
            return None
        return LogLine(item.levelno, item.getMessage()) if isinstance(item, logging.LogRecord) else item

    def ask(self, request: ControlRequest, *, termination: bool = False) -> None:
        """Send a request to the job; its answer is one of the items.

        Args:
            request: The request.
            termination: See :meth:`JobExecution.ask`.
        """
        self.job.ask(request, self._items.put, termination=termination)

    def cancel(self, seconds: float, on_event: Callable[[JobEvent], None]) -> JobEnded | None:
        """Cancel the job and wait for its end; None if it has not ended after `seconds`.

        Args:
            seconds: The longest time.
            on_event: Receives the events until then: the job may have reached its end before it was cancelled.
        """
        self.job.cancel()
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            alive = self.is_alive
            item = self.next(min(left, _POLL_SECONDS) if alive else 0.0)
            if isinstance(item, JobEnded):
                return item
            if item is not None and not isinstance(item, LogLine | Answer):
                on_event(item)
            if item is None and not alive:
                return JobEnded(None, None)  # the job never started, or an interrupt lost its last item
        return None

    def _run(self) -> None:
        try:
            self._items.put(JobEnded(self.job.run(), None))
        except BaseException as error:
            self._items.put(JobEnded(None, error))
