"""The attempts of one run, one deployment after the other: their work directories, numbers and settings.

Each attempt has a new work directory: it restores everything from storage, so the directories may be lost. It must not know when
a job restarts.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_checkpoints.coordination import CheckpointBarrier, CoordinatorEvent
from dagster_checkpoints.execution.job_events import TaskFailure, TaskReport
from dagster_checkpoints.execution.trace import Recorder
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.job.deployment import AttemptSettings, Deployer, Deployment
from dagster_checkpoints.spark.job.job_messages import Item, StartProgressItem, failure_of
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.job.savepoints_in_progress import SavepointsInProgress
from dagster_checkpoints.spark.session.work_directory import WorkDirectory
from dagster_checkpoints.spark.snapshots.restored_state import Restored
from dagster_checkpoints.spark.snapshots.uploads import SnapshotUploader
from dagster_checkpoints.spark.tasks.messages import StartProgress, TaskFirstBatch, TaskQueryStarted, TaskRaised, TaskWaiting
from dagster_checkpoints.storage import CheckpointStorage, StoredFile

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PER_RUN = 10_000  # the most attempts of a run: attempts are numbered by epoch, then within the run


class Attempts:
    """Deploys a run's attempts.

    Args:
        pipeline: The pipeline that runs.
        spark: The session of the job.
        storage: The storage of its checkpoints; this run owns the pipeline.
        options: The settings of the execution.
        savepoints: The directories of the savepoints in progress.
        work: The work directory.
        items: The queue of the job's loop, which receives the reports of tasks and uploads.
        uploads: The threads that store snapshots.
        check_canceled: Raises if the job was cancelled; called between two tasks.
        recorder: Writes the run's trace; None for no trace.
        log: The logger of the stages' `context.log`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        spark: SparkSession,
        storage: CheckpointStorage,
        options: JobOptions,
        savepoints: SavepointsInProgress,
        work: WorkDirectory,
        items: queue.SimpleQueue[Item],
        uploads: Executor,
        check_canceled: Callable[[], None],
        recorder: Recorder | None,
        log: logging.Logger,
    ) -> None:
        assert storage.ownership is not None
        self._storage = storage
        self._options = options
        self._savepoints = savepoints
        self._work = work
        self._items = items
        self._uploads = uploads
        self._epoch = storage.ownership.epoch
        self._recorder = recorder
        self._deployer = Deployer(pipeline, spark, storage, log, check_canceled)

    def deploy(
        self, attempt: int, restored: Restored | None, job_id: int, ended_sources: Collection[tuple[str, str]]
    ) -> Deployment:
        """Build an attempt.

        Args:
            attempt: The attempt's number within the run, from 1.
            restored: The checkpoint that the attempt starts from; None for a new start.
            job_id: The job's id; the job need not have begun, since no task uses the id before it is started.
            ended_sources: The sources (stage, instance) that a request has ended.

        Raises:
            StageError: A stage cannot be built; nothing was started.
            StorageError: State cannot be fetched, or is corrupt.
        """

        def report(event: CoordinatorEvent | TaskRaised | StartProgress) -> None:
            self._items.put(_as_item(attempt, event))

        uploader = SnapshotUploader(self._upload, self._uploads, report)
        deployment = self._deployer.deploy(self._settings(attempt, restored, job_id, ended_sources), restored, uploader, report)
        if restored is not None and restored.savepoint is None:
            self._storage.known(restored.location, restored.metadata.files())  # the deployment has verified them
        return deployment

    def _settings(
        self, attempt: int, restored: Restored | None, job_id: int, ended_sources: Collection[tuple[str, str]]
    ) -> AttemptSettings:
        ownership = self._storage.ownership
        assert ownership is not None
        later = restored is not None and ownership.has_later(restored.plan.checkpoint_id)
        return AttemptSettings(
            folder=self._work.create(self._epoch, attempt),
            number=self._epoch * _PER_RUN + attempt,
            token=f"e{self._epoch}a{attempt}",
            job_id=job_id,
            max_queued_bytes=self._options.max_queued_bytes,
            take_back_after=restored.plan.checkpoint_id if later and restored else None,
            ended_sources=frozenset(ended_sources),
            allow_changed_plan=self._options.allow_changed_plan,
            recorder=self._recorder,
        )

    def _upload(self, barrier: CheckpointBarrier, files: Mapping[str, Path]) -> Mapping[str, StoredFile]:
        if barrier.properties.is_savepoint:
            return self._savepoints.directory(barrier.checkpoint_id, barrier.properties).upload_files(files)
        return self._storage.upload_files(barrier.checkpoint_id, files)


def _as_item(attempt: int, event: CoordinatorEvent | TaskRaised | StartProgress) -> Item:
    """The item of the job's queue for a report of a task or an upload of an attempt."""
    match event:
        case TaskRaised(task, error):
            return TaskReport(attempt, TaskFailure(task, failure_of(error)))
        case TaskWaiting() | TaskQueryStarted() | TaskFirstBatch():
            return StartProgressItem(attempt, event)
        case _:
            return TaskReport(attempt, event)
