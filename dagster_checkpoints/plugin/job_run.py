"""A job within its Dagster run: turns the job's events into Dagster's, ends the run with the job, and the job with the run.

The job has a thread of its own, and passes its events, in order, to Dagster's. Dagster interrupts that one at any moment, so
calls to Spark may not run on it. A `SimpleQueue` joins the two threads, because an interrupted `get` leaves no lock behind. It
must not know the settings from which the job was made.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from logging.handlers import QueueHandler
from queue import Empty, SimpleQueue
from typing import Any

import dagster as dg

from dagster_checkpoints.control.requests import Answer, ControlRequest
from dagster_checkpoints.errors import DagsterCheckpointsError, PipelineOwned
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.interrupts import interrupts_delayed
from dagster_checkpoints.plugin.run_events import RunReporter, failure
from dagster_checkpoints.plugin.runs import tag_refusal
from dagster_checkpoints.spark.job.events import JobEvent, JobResult
from dagster_checkpoints.spark.job.job_execution import JobExecution

_ALIVE_SECONDS = 0.5


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

    Attributes:
        end: The job's last item; None while it runs. An interrupt may take the item from the queue and lose it.
    """

    end: JobEnded | None = None

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

    def cancel(self, seconds: float, on_event: Callable[[JobEvent], None], error: Exception | None = None) -> JobEnded | None:
        """Cancel the job and wait for its end; None if it has not ended after `seconds`.

        Args:
            seconds: The longest time.
            on_event: Receives the events until then: the job may have reached its end before it was cancelled.
            error: The error of the run, with which the job has failed; None if it is cancelled.
        """
        self.job.cancel(error)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            alive = self.is_alive
            item = self.next(min(left, _ALIVE_SECONDS) if alive else 0.0)
            if isinstance(item, JobEnded):
                return item
            if item is not None and not isinstance(item, LogLine | Answer):
                on_event(item)
            if item is None and not alive:
                return self.end or JobEnded(None, None)  # its last item was taken before, or it never started
        return None

    def _run(self) -> None:
        try:
            self.end = JobEnded(self.job.run(), None)
        except BaseException as error:
            self.end = JobEnded(None, error)
        self._items.put(self.end)


CANCEL_SECONDS = 30.0
_POLL_SECONDS = 1.0
_FORGET_SECONDS = 600.0
"""Seconds between two times at which the events that Dagster has written are dropped from memory."""


class IncompleteRunError(DagsterCheckpointsError):
    """The job has ended, but some of the selected stages have not finished."""


class JobRun:
    """Follows a job to its end, or ends it.

    Args:
        pipeline: The pipeline that the job runs.
        context: Context of the asset function.
        thread: The thread of the job.
        reporter: Reports the job's events to Dagster.
        suspend_seconds: Longest time in seconds for a savepoint when the run is terminated; None for no savepoint.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        context: dg.AssetExecutionContext,
        thread: JobThread,
        reporter: RunReporter,
        *,
        suspend_seconds: float | None,
    ) -> None:
        self._pipeline = pipeline
        self._context = context
        self._thread = thread
        self._reporter = reporter
        self._suspend_seconds = suspend_seconds

    def follow(
        self, drain_when: Callable[[Mapping[str, int]], bool] | None, on_event: Callable[[JobEvent], None] | None
    ) -> Iterator[dg.MaterializeResult[Any]]:
        """Report the job's events until it has ended; yields the materialization of each finished stage.

        Args:
            drain_when: Function that is called about once per second with the number of rows that each stage has emitted; every
                source ends when it returns True. None to leave the end to the sources. See :class:`StageRows`.
            on_event: Function that is called with every event of the job; None for no function.

        Raises:
            dagster.Failure: The job could not start, has failed, or has ended without a stage that was selected.
        """
        check_at = time.monotonic() if drain_when else None
        forget_at = time.monotonic() + _FORGET_SECONDS
        while True:
            item = self._thread.next(_POLL_SECONDS)
            match item:
                case None:
                    pass
                case LogLine(level, text):
                    with interrupts_delayed():
                        self._context.log.log(level, text)
                case JobEnded():
                    self._check_end(item)
                    return
                case Answer():
                    pass
                case event:
                    with interrupts_delayed():
                        materialized = list(self._reporter.report(event))
                    yield from materialized
                    if on_event is not None:
                        on_event(event)
            if self._reporter.may_be_due:
                with interrupts_delayed():
                    self._reporter.report_due()
            if time.monotonic() >= forget_at:
                forget_at = time.monotonic() + _FORGET_SECONDS
                self._forget_written_events()
            if check_at is not None and time.monotonic() >= check_at:
                assert drain_when is not None
                check_at = time.monotonic() + _POLL_SECONDS
                rows = self._thread.job.rows()
                if rows and drain_when(rows):  # no rows are known before the start
                    self._context.log.info(
                        f"Draining pipeline {self._pipeline.name!r}: each source ends; bounded ones are read first."
                    )
                    self._thread.job.drain()
                    check_at = None

    def _forget_written_events(self) -> None:
        """Drop the logged events, which Dagster has written and holds until the op yields: a run without an end never yields."""
        deque(self._context.op_execution_context.consume_events(), maxlen=0)

    def _check_end(self, ended: JobEnded) -> None:
        result, error = ended.result, ended.error
        self._reporter.ended()
        last_location = self._reporter.last_checkpoint.location if self._reporter.last_checkpoint else None
        if result is not None:
            last_location = result.last_checkpoint_location or last_location
            error = result.error
            if result.status == "FINISHED" and result.ended_by == "suspend":
                self._reporter.suspended(result.savepoint or "")
                return
            if error is None and (result.status != "FINISHED" or self._reporter.missing()):
                missing = ", ".join(map(repr, self._reporter.missing())) or "none"
                error = IncompleteRunError(
                    f"Pipeline {self._pipeline.name!r} ended {result.status}; expected FINISHED with every selected stage. Not "
                    f"finished: {missing}. The next run continues from the newest checkpoint."
                )
        if error is not None:
            tag_refusal(self._context, error)
            raise failure(self._pipeline, _as_dagster_knows(self._context.instance, error), last_location) from None

    def terminate(self, error: Exception | None = None) -> None:
        """The run ends: end the job too, with a savepoint if that is configured and completes in time.

        Args:
            error: The error of the run; None if Dagster terminates it.
        """
        ended = None
        if self._suspend_seconds is not None:
            with suppress(BaseException):  # also a second interrupt: the job is then cancelled at once
                ended = self._suspend(self._suspend_seconds)
        if ended is None:
            ended = self._thread.cancel(CANCEL_SECONDS, self._report_now, error)
        result = ended.result if ended is not None else None
        with interrupts_delayed():
            self._reporter.ended()
            if ended is not None and ended.suspended:  # also one that was complete in time, with an end that took longer
                self._reporter.suspended(ended.suspended)
                return
        if ended is None:
            self._context.log.warning(
                f"Spark did not stop within {CANCEL_SECONDS:g} s. The run ends all the same; Spark ends with its process."
            )
        elif result is not None and result.status == "FINISHED":
            how = "was drained" if result.ended_by == "drain" else "had come to its end"
            self._context.log.info(
                f"Pipeline {self._pipeline.name!r} {how} before it was cancelled: all its rows are committed, and the next run "
                "is a new start."
            )
        elif result is not None and result.last_checkpoint_id is not None:
            self._context.log.info(
                f"Canceled. The next run continues from checkpoint {result.last_checkpoint_id} "
                f"({result.last_checkpoint_location})."
            )

    def _report_now(self, event: JobEvent) -> None:
        """Report an event when the op yields no more results."""
        with interrupts_delayed():
            self._reporter.report_now(event)

    def _suspend(self, seconds: float) -> JobEnded | None:
        """Stop the job with a savepoint. Returns the end of the job, or None if the job has not ended in time."""
        now = datetime.now(UTC)
        request = ControlRequest(
            request_id=f"termination-{now:%Y%m%dT%H%M%S}",
            kind="stop",
            epoch=0,  # the request is not stored
            deadline_seconds=seconds,
            asked_by=f"termination of run {self._context.run.run_id}",
            asked_at=now,
            name=f"termination-{now:%Y%m%dT%H%M%S}",
        )
        self._context.log.info(f"Suspending pipeline {self._pipeline.name!r} before the run ends; at most {seconds:g} s.")
        self._thread.ask(request, termination=True)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            alive = self._thread.is_alive
            match self._thread.next(_POLL_SECONDS if alive else 0.0):
                case JobEnded() as ended:
                    return ended
                case None if not alive:
                    return self._thread.end  # the job had ended before: its last item was taken then
                case Answer(status="failed", message=message):
                    self._context.log.warning(f"No savepoint was taken at the termination of the run: {message}")
                    return None
                case LogLine(level, text):
                    self._context.log.log(level, text)
                case None | Answer():
                    pass
                case event:
                    self._report_now(event)
        self._context.log.warning(f"The pipeline was not suspended within {seconds:g} s, and is canceled now.")
        return None


def _as_dagster_knows(instance: dg.DagsterInstance, error: BaseException) -> BaseException:
    """The error; if Dagster cannot terminate the owner's run, with what to do instead."""
    if not isinstance(error, PipelineOwned) or not error.run_id:
        return error
    owner = instance.get_run_by_id(error.run_id)
    if owner is None:
        found = "This Dagster instance does not know that run: it was deleted, or is of another instance"
    elif owner.is_finished:
        found = f"Dagster shows that run as {owner.status.value} and cannot terminate it any more"
    else:
        return error
    return PipelineOwned(
        f"{error}. {found}, but its process goes on: suspend it (dagster-checkpoints stop), or end the process on its host"
    )
