"""The values that the parts of one run share, from the driver of the job to the building of a task."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from dagster_checkpoints.execution.trace import Recorder
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.job.events import JobEvent
from dagster_checkpoints.spark.job.job_messages import Item
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.job.savepoints_in_progress import SavepointsInProgress
from dagster_checkpoints.spark.session.work_directory import WorkDirectory
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.ownership import Ownership


class DeploymentCanceled(Exception):
    """Ends the building of an attempt when the job is cancelled."""


@dataclass(frozen=True)
class Runtime:
    """What one run of a job has, from the moment that it owns its pipeline.

    Attributes:
        pipeline: The pipeline that runs.
        storage: The storage of its checkpoints; this run owns the pipeline.
        options: The settings of the execution.
        savepoints: The directories of the savepoints in progress.
        work: The work directory.
        items: The queue of the job's loop, which receives requests, the reports of tasks and uploads, and the outcomes of writes.
        canceled: Set when the job is cancelled: an attempt that is being built is given up.
        on_event: Receives all events, on the thread of the job's loop.
        run_id: Id of the run, for display: Dagster's, or another name that a user recognises.
        recorder: Writes the run's trace; None for no trace.
        log: Receives warnings; also the logger of the stages' `context.log`.
    """

    pipeline: Pipeline
    storage: CheckpointStorage
    options: JobOptions
    savepoints: SavepointsInProgress
    work: WorkDirectory
    items: queue.SimpleQueue[Item]
    canceled: threading.Event
    on_event: Callable[[JobEvent], None]
    run_id: str
    recorder: Recorder | None
    log: logging.Logger

    @property
    def ownership(self) -> Ownership:
        """This run's ownership of the pipeline."""
        assert self.storage.ownership is not None
        return self.storage.ownership

    def check_canceled(self) -> None:
        """Called between two steps of the building of an attempt.

        Raises:
            DeploymentCanceled: The job was cancelled.
        """
        if self.canceled.is_set():
            raise DeploymentCanceled
