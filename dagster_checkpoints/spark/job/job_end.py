"""The end of a job: how it has ended, said in storage and in its result, and the deletion of checkpoints that it ends.

It must not know when a job ends, nor why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Literal

from dagster_checkpoints.coordination import CompletedCheckpoint, DiscardCheckpoint, DiscardStates, Shutdown
from dagster_checkpoints.coordination import JobStatus as CoordinatorStatus
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.job.control_requests import ControlRequests
from dagster_checkpoints.spark.job.events import JobResult, JobStatus
from dagster_checkpoints.spark.job.job_loop import JobLoop
from dagster_checkpoints.storage import CheckpointStorage, StorageError


class JobEnd:
    """Ends a job whose tasks have stopped.

    Args:
        pipeline: What has run.
        storage: Where its checkpoints are stored.
        control: The requests to the run, among them the one that has stopped it.
        log: Told why the checkpoints of a finished job are kept.

    Attributes:
        drained: Every source was asked to end, without a savepoint.
    """

    def __init__(self, pipeline: Pipeline, storage: CheckpointStorage, control: ControlRequests, log: logging.Logger) -> None:
        self.drained = False
        self._pipeline = pipeline
        self._storage = storage
        self._control = control
        self._log = log

    def shut_down(self, loop: JobLoop, status: JobStatus) -> None:
        """Shut the coordinator down, and delete what its end leaves without a use.

        Args:
            loop: Of the job.
            status: How the job has ended.
        """
        actions = loop.coordinator.handle(Shutdown(CoordinatorStatus[status]), time.monotonic())
        if status == "FINISHED":
            # First it is said that the job is over: without its checkpoints a crash would look like a new start.
            ownership = self._storage.ownership
            assert ownership is not None
            keep = not any(isinstance(action, DiscardCheckpoint) for action in actions)
            try:
                stopped = self._control.stopped
                asked_by: Literal["", "request", "termination"] = ""
                if stopped is not None:
                    asked_by = "termination" if stopped.termination else "request"
                dropped = ownership.end_job(status, keep_checkpoints=keep, ended_by=self._ended_by, stop_asked_by=asked_by)
            except StorageError as error:
                self._log.warning("The checkpoints of the finished job are kept: %s", error)
                return
            known = {action.checkpoint.location for action in actions if isinstance(action, DiscardCheckpoint)}
            unknown = [pointer for pointer in dropped if pointer.location not in known]  # of earlier jobs
            actions = [*actions, *(DiscardCheckpoint(CompletedCheckpoint(p.checkpoint_id, p.location)) for p in unknown)]
        for action in actions:
            if isinstance(action, DiscardCheckpoint | DiscardStates):
                loop.perform(action)

    def result(
        self, loop: JobLoop | None, status: JobStatus, error: BaseException | None, job_id: int, rows: Mapping[str, int]
    ) -> JobResult:
        """How the job has ended.

        Args:
            loop: Of the job; None if nothing was deployed.
            status: How it has ended.
            error: What it has failed with.
            job_id: Of the job.
            rows: Rows that each stage has emitted.
        """
        latest = loop.coordinator.latest_completed if loop else None
        stopped = self._control.stopped
        return JobResult(
            status=status,
            error=error,
            job_id=job_id,
            last_checkpoint_id=latest.checkpoint_id if latest else None,
            last_checkpoint_location=latest.location if latest else None,
            finished_stages=tuple(s.name for s in self._pipeline.stages if loop and s.name in loop.announced),
            rows=rows,
            ended_by=self._ended_by if status == "FINISHED" else "",
            savepoint=self._storage.url_of(stopped.location) if stopped else None,
        )

    @property
    def _ended_by(self) -> Literal["", "end_of_data", "drain", "suspend"]:
        """In what way a FINISHED job has come to its end."""
        stopped = self._control.stopped
        if stopped is not None:
            return "drain" if stopped.drain else "suspend"
        return "drain" if self.drained else "end_of_data"
