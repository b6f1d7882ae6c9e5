"""The attempts of one run, one deployment after the other: their work directories, numbers and settings.

Each attempt has a new work directory: it restores everything from storage, so the directories may be lost. If a part of the job
restarts, the tasks of the others go on in the directory of their attempt. It must not know when a job restarts.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier
from dagster_checkpoints.execution.job_actions import Deploy
from dagster_checkpoints.execution.job_events import TaskFailure, TaskReport
from dagster_checkpoints.spark.job.attempt_settings import AttemptSettings
from dagster_checkpoints.spark.job.deployer import Deployer
from dagster_checkpoints.spark.job.deployment import Deployment
from dagster_checkpoints.spark.job.job_messages import Item, StartProgressItem, failure_of
from dagster_checkpoints.spark.job.runtime import Runtime
from dagster_checkpoints.spark.snapshots.restored_state import Restored
from dagster_checkpoints.spark.snapshots.uploads import SnapshotUploader
from dagster_checkpoints.spark.tasks.messages import (
    TaskCommitRefused,
    TaskCommitted,
    TaskFirstBatch,
    TaskQueryStarted,
    TaskRaised,
    TaskReported,
    TaskWaiting,
)
from dagster_checkpoints.storage.state_files import StoredFile
from dagster_checkpoints.storage.state_sources import StateSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PER_RUN = 10_000  # the most attempts of a run: attempts are numbered by epoch, then within the run


class Attempts:
    """Deploys a run's attempts.

    Args:
        runtime: The values of the run.
        spark: The session of the job.
        uploads: The threads that store snapshots.
    """

    def __init__(self, runtime: Runtime, spark: SparkSession, uploads: Executor) -> None:
        self._runtime = runtime
        self._uploads = uploads
        self._epoch = runtime.ownership.epoch
        self._deployer = Deployer(runtime.pipeline, spark, runtime.storage, runtime.log, runtime.check_canceled)
        self._attempt_of: dict[str, int] = {}
        """By chain, the attempt in whose work directory its tasks run."""

    def deploy(self, action: Deploy, restored: Restored | None, job_id: int) -> Deployment:
        """Build an attempt, or the part of one that restarts.

        Args:
            action: The machine's action, with the attempt's number.
            restored: The checkpoint that the attempt starts from; None for a new start.
            job_id: The job's id; the job need not have begun, since no task uses the id before it is started.

        Raises:
            StageError: A stage cannot be built; nothing was started.
            StorageError: State cannot be fetched, or is corrupt.
        """

        def report(event: TaskReported) -> None:
            self._runtime.items.put(_as_item(action.attempt, event))

        uploader = SnapshotUploader(self._upload, self._uploads, report)
        deployment = self._deployer.deploy(self._settings(action, restored, job_id), restored, uploader, report)
        self._attempt_of.update({chain.name: action.attempt for chain in deployment.plan.built})
        if restored is not None and restored.savepoint is None:
            self._runtime.storage.known(restored.location, restored.metadata.files())  # the deployment has verified them
        return deployment

    def _settings(self, action: Deploy, restored: Restored | None, job_id: int) -> AttemptSettings:
        attempt, vertices, ownership = action.attempt, action.vertices, self._runtime.ownership
        go_on = [] if vertices is None else [at for chain, at in self._attempt_of.items() if chain not in vertices]
        restored_id = restored.plan.checkpoint_id if restored is not None else 0
        return AttemptSettings(
            folder=self._runtime.work.create(self._epoch, attempt, go_on),
            number=self._epoch * _PER_RUN + attempt,
            token=f"e{self._epoch}a{attempt}",
            job_id=job_id,
            options=self._runtime.options,
            has_later=ownership.has_later(restored_id),
            next_checkpoint_id=ownership.steps.first_id_after(restored_id),
            ended_sources=action.ended_sources,
            vertices=vertices,
            recorder=self._runtime.recorder,
        )

    def _upload(self, barrier: CheckpointBarrier, files: Mapping[str, StateSource]) -> Mapping[str, StoredFile]:
        if barrier.properties.is_savepoint:
            return self._runtime.savepoints.directory(barrier.checkpoint_id, barrier.properties).upload_files(files)
        return self._runtime.storage.upload_files(barrier.checkpoint_id, files)


def _as_item(attempt: int, event: TaskReported) -> Item:
    """The item of the job's queue for a report of a task or an upload of an attempt."""
    match event:
        case TaskRaised(task, error):
            return TaskReport(attempt, TaskFailure(task, failure_of(error)))
        case TaskWaiting() | TaskQueryStarted() | TaskFirstBatch():
            return StartProgressItem(attempt, event)
        case TaskCommitted() | TaskCommitRefused():
            return event
        case _:
            return TaskReport(attempt, event)
