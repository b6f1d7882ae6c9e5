"""The restart of a job within its run: whether a failed attempt is followed by another, when, and from what.

Source: PROTOCOL 9.1. It must not know how an attempt is deployed, nor how a run begins or ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from dagster_checkpoints.coordination import GiveUp, JobRestarting, RestartStrategy
from dagster_checkpoints.errors import repeats_by_nature
from dagster_checkpoints.execution.start_point import completed_checkpoint
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.errors import JobFailedError
from dagster_checkpoints.spark.job import events
from dagster_checkpoints.spark.job.control_requests import ControlRequests
from dagster_checkpoints.spark.job.events import JobEvent
from dagster_checkpoints.spark.job.job_loop import Canceled, JobLoop, NotDeployed, TaskFailure
from dagster_checkpoints.spark.job.status_reporter import StatusReporter
from dagster_checkpoints.spark.snapshots.restored_state import Restored
from dagster_checkpoints.storage import StorageError, StorageUnavailable


class JobRestart:
    """Decides on the restarts of one run.

    Args:
        pipeline: What runs.
        strategy: How often a failed attempt is followed by another, and after what time; of this run alone.
        allow_non_restored_state: Leave state behind that no stage claims.
        control: The requests to the run: those that the failure ends are answered.
        status: Told that the job restarts.
        on_event: Told as well.
        log: Told what a restart waits for.

    Attributes:
        restored: What the next attempt starts from; None for the job's beginning without a checkpoint.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        strategy: RestartStrategy,
        allow_non_restored_state: bool,
        control: ControlRequests,
        status: StatusReporter,
        on_event: Callable[[JobEvent], None],
        log: logging.Logger,
    ) -> None:
        self.restored: Restored | None = None
        self._pipeline = pipeline
        self._strategy = strategy
        self._allow_non_restored_state = allow_non_restored_state
        self._control = control
        self._status = status
        self._on_event = on_event
        self._log = log

    def prepare(self, loop: JobLoop, error: BaseException, at_start: Restored | None) -> BaseException | None:
        """After a failed attempt: wait as the strategy says.

        Args:
            loop: Of the job.
            error: What the attempt has failed with; its tasks are stopped.
            at_start: What the run started from.

        Returns:
            The error that ends the job, if there is no other attempt; else None, and `restored` is set.
        """
        if isinstance(error, Canceled | StorageError):
            return error
        cause = error.cause if isinstance(error, TaskFailure | NotDeployed) else error
        loop.restarting = True
        self._control.attempt_failed(str(cause))
        if repeats_by_nature(cause):
            return self._failed("another attempt would fail in the same way", cause)
        decision = self._strategy.on_failure(time.monotonic())
        if isinstance(decision, GiveUp):
            return self._failed(decision.reason, cause)
        self._on_event(events.JobRestarting(decision.attempt + 1, decision.delay, str(cause)))
        self._status.report("restarting", loop)
        until = time.monotonic() + decision.delay
        try:
            loop.tasks_are_gone(error)
            # A checkpoint whose metadata is being written must be known before the start is chosen.
            while loop.coordinator.finalizing is not None or time.monotonic() < until:
                loop.take(loop.next())
            self._control.attempt_failed(str(cause))
            latest = self._latest(loop, at_start)
        except (Canceled, StorageError, JobFailedError) as ended:
            return ended
        if latest is None:
            loop.handle(JobRestarting())
        else:
            # Storage may name a checkpoint whose write has reported an unknown outcome.
            newest = loop.writer.newest if latest is not at_start else None
            known = completed_checkpoint(newest) if newest is not None else None
            loop.handle(JobRestarting(frozenset(latest.plan.finished), known))
        if self._control.stop is None:
            loop.drain_if_wanted()
        self.restored = latest
        return None

    def _failed(self, because: str, cause: BaseException) -> JobFailedError:
        failed = JobFailedError(f"Pipeline {self._pipeline.name!r} failed, and {because}. {cause}")
        failed.__cause__ = cause
        return failed

    def _latest(self, loop: JobLoop, at_start: Restored | None) -> Restored | None:
        """What to restart from. While storage is away it is waited for, as long as the lease holds."""
        while True:
            try:
                latest = loop.writer.latest(self._pipeline, self._allow_non_restored_state)
                newest, epoch = loop.writer.newest, loop.writer.epoch
                return latest if newest is not None and newest.epoch == epoch else at_start
            except StorageUnavailable as error:
                self._log.warning("The restart waits for storage: %s", error)
                loop.take(loop.next())
