"""A job execution on a thread of its own, and what it tells, in order, to whoever waits on the main thread.

Dagster interrupts the main thread in the middle of whatever it does; so nothing that talks to Spark may run there. A
`SimpleQueue` joins the two, because its `get` can be interrupted without leaving a lock behind. It must not know Dagster.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from logging.handlers import QueueHandler
from queue import Empty, SimpleQueue

from dagster_checkpoints.control import Answer, ControlRequest
from dagster_checkpoints.spark.job.events import JobEvent, JobResult
from dagster_checkpoints.spark.job.job_execution import JobExecution

_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class LogLine:
    """Something that the runtime, or a stage through `context.log`, has logged."""

    level: int
    text: str


@dataclass(frozen=True)
class JobEnded:
    """The last item. `error`: nothing was started, or what was started broke in a way of its own."""

    result: JobResult | None
    error: BaseException | None


JobNews = JobEvent | LogLine | Answer | JobEnded


class JobThread:
    """Runs a job on a daemon thread.

    Args:
        create: Makes the job; told where its events and its log go. Called on the caller's thread.
        name: Of the thread and the log.
    """

    def __init__(self, create: Callable[[Callable[[JobEvent], None], logging.Logger], JobExecution], *, name: str) -> None:
        self._news: SimpleQueue[JobEvent | logging.LogRecord | Answer | JobEnded] = SimpleQueue()
        log = logging.Logger(f"dagster_checkpoints.{name}", logging.INFO)
        log.addHandler(QueueHandler(self._news))
        self.job = create(self._news.put, log)
        self._thread = threading.Thread(target=self._run, name=f"pipeline {name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def next(self, timeout: float) -> JobNews | None:
        """What comes next; None if there was nothing for `timeout` seconds."""
        try:
            news = self._news.get(timeout=timeout)
        except Empty:
            return None
        return LogLine(news.levelno, news.getMessage()) if isinstance(news, logging.LogRecord) else news

    def ask(self, request: ControlRequest, *, termination: bool = False) -> None:
        """Ask the job for something; the answer is among the news.

        Args:
            request: What is asked for.
            termination: See :meth:`JobExecution.ask`.
        """
        self.job.ask(request, self._news.put, termination=termination)

    def cancel(self, seconds: float) -> JobEnded | None:
        """Cancel the job and wait for its end; None if it had not ended after `seconds`."""
        self.job.cancel()
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            alive = self._thread.is_alive()
            news = self.next(min(left, _LOOK_SECONDS) if alive else 0.0)
            if isinstance(news, JobEnded):
                return news
            if news is None and not alive:
                return JobEnded(None, None)  # never started, or its last word was lost in an interrupt
        return None

    def _run(self) -> None:
        try:
            self._news.put(JobEnded(self.job.run(), None))
        except BaseException as error:
            self._news.put(JobEnded(None, error))
