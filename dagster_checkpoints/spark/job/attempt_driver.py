"""Builds, starts and stops the tasks of one attempt after the other on Spark, and sends messages to them.

Each attempt has a number and a new work directory: it restores everything from storage, so the directories may be lost. If a part
of the job restarts, the tasks of the others go on in the directory of their attempt. It must not know when a job starts or
restarts: `execution.job_machine` decides that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Set
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier
from dagster_checkpoints.errors import CorruptStateFile, MissingStateFile, StorageUnavailable
from dagster_checkpoints.execution import job_actions as do
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.execution.job_actions import Deploy
from dagster_checkpoints.execution.job_events import JobMachineEvent, TaskFailure, TaskReport
from dagster_checkpoints.execution.splits import enumerator_starts
from dagster_checkpoints.execution.task_events import TaskMessage
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.sinks import SinkError
from dagster_checkpoints.spark.errors import StageError
from dagster_checkpoints.spark.job.deployer import Deployer
from dagster_checkpoints.spark.job.deployment import Deployment
from dagster_checkpoints.spark.job.runtime import AttemptSettings, Item, Runtime, StartProgressItem, failure_of
from dagster_checkpoints.spark.job.spark_start import prove_work_directory, start_spark
from dagster_checkpoints.spark.job.split_discovery import SplitDiscovery
from dagster_checkpoints.spark.session.session_life import session_end
from dagster_checkpoints.spark.session.spark_session import check_session
from dagster_checkpoints.spark.session.work_directory import WorkDirectoryError, unusable_directory
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
from dagster_checkpoints.spark.tasks.task import Task
from dagster_checkpoints.storage.state_files import StateSource, StoredFile

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


CANCEL_SECONDS = 30.0


class AttemptDriver:
    """Performs the actions that concern the tasks of a job.

    Args:
        runtime: The values of the run.
        session: Creates or joins the Spark session; called once.
        uploads: The threads that store snapshots.

    Attributes:
        deployment: The current attempt's tasks; None before the first attempt.
        seconds: The time that building these tasks took, with the start of Spark.
    """

    def __init__(self, runtime: Runtime, session: Callable[[], SparkSession], uploads: Executor) -> None:
        self.deployment: Deployment | None = None
        self.seconds = 0.0
        self._runtime = runtime
        self._session = session
        self._uploads = uploads
        self._spark: SparkSession | None = None
        self._attempts: Attempts | None = None
        self._discovery: SplitDiscovery | None = None

    @property
    def spark(self) -> SparkSession:
        """The session in which the tasks run."""
        assert self._spark is not None
        return self._spark

    def prepare(self) -> None:
        """Start Spark, and check that it can run the job.

        Raises:
            DagsterCheckpointsError: Spark cannot run the job.
            Exception: The error that `check_canceled` raises.
        """
        runtime = self._runtime
        runtime.check_canceled()  # perhaps while this run waited for another owner's lease
        self._spark = spark = start_spark(self._session, runtime.on_event)
        check_session(spark)
        runtime.work.open(spark)
        runtime.work.clear(runtime.ownership.epoch, own=False)
        prove_work_directory(spark, runtime)
        self._discovery = SplitDiscovery(runtime.pipeline, spark, runtime.options.assets, runtime.log, runtime.items.put)
        self._attempts = Attempts(runtime, spark, self._uploads)

    @property
    def is_prepared(self) -> bool:
        """Whether Spark has started."""
        return self._attempts is not None

    def deploy(self, action: do.Deploy, restored: Restored | None, job_id: int) -> JobMachineEvent:
        """Build the tasks of an attempt, or of the part of it that restarts.

        Args:
            action: The machine's action, with the attempt's number.
            restored: The checkpoint that the attempt starts from; None for a new start.
            job_id: The job's id; the job need not have begun.

        Raises:
            SparkEndedError: The session has ended.
            SparkSettingError: A stage's function has changed a setting on which checkpoints rely.
            Exception: Another error that ends the job.
        """
        assert self._attempts is not None
        began = time.monotonic()
        try:
            if action.vertices is not None:
                for task in self._tasks_of(action.vertices):
                    task.parts.folder.remove()
            deployment = self._attempts.deploy(action, restored, job_id)
        except Exception as error:
            if (ended := session_end(self.spark)) is not None:
                raise ended from error  # whatever the error is, another attempt would have the same
            if isinstance(error, CorruptStateFile | MissingStateFile):
                return on.DeployFailed(failure_of(error), unusable=True)
            if isinstance(error, OSError) and not isinstance(error, ConnectionError):  # such as a full disk
                error = unusable_directory(self._runtime.work, error)
            if isinstance(error, StageError | StorageUnavailable | WorkDirectoryError | OSError):
                return on.DeployFailed(failure_of(error), may_pass=True)
            raise
        if action.vertices is not None and self.deployment is not None:
            deployment = self.deployment.with_restarted(deployment, action.vertices)
        self.deployment, self.seconds = deployment, time.monotonic() - began
        check_session(self.spark)  # the stages' functions have run by now, and no query has started
        known = restored.plan.enumerators if restored is not None else {}
        held = {task.id: task.machine.splits.held for task in self._tasks_of(action.vertices) if task.machine.splits is not None}
        enumerators = enumerator_starts(self._runtime.pipeline, deployment.finished, known, held)
        return on.Deployed(deployment.plan.graph, deployment.finished, deployment.plan.sources, enumerators)

    def _tasks_of(self, vertices: Set[str] | None) -> list[Task]:
        """The tasks of these chains; None for all chains."""
        assert self.deployment is not None
        return [task for task in self.deployment.tasks.values() if vertices is None or task.id.vertex in vertices]

    def start(self, vertices: Set[str] | None) -> JobMachineEvent | None:
        """Start the tasks of these chains, None for all. Returns a failure after which another attempt may succeed, or None.

        Raises:
            Exception: An error that ends the job.
        """
        assert self.deployment is not None
        try:
            self.deployment.settle_sinks()
        except SinkError as error:
            return on.StartFailed(failure_of(error))
        for task in self._tasks_of(vertices):
            task.start()
        return None

    def discover(self, action: do.DiscoverSplits) -> None:
        """Begin to find the splits of a source."""
        assert self._discovery is not None
        self._discovery.begin(action)

    def send(self, tasks: Collection[TaskId], message: TaskMessage) -> None:
        """Put a message into the mailboxes of these tasks."""
        assert self.deployment is not None
        for task in tasks:
            self.deployment.tasks[task].send(message)

    def stop(self, finished: Collection[TaskId], vertices: Set[str] | None = None) -> None:
        """Cancel the tasks that have not finished, and wait for all of them.

        Args:
            finished: The tasks that have finished.
            vertices: The chains whose tasks are stopped; None for all.

        Raises:
            SparkEndedError: The session has ended: no task can be started again. The tasks are stopped all the same.
        """
        assert self._discovery is not None
        self._discovery.stop(vertices)
        tasks = self._tasks_of(vertices)
        unfinished = [task for task in tasks if task.id not in finished]
        for task in unfinished:
            task.cancel()
        ended = session_end(self.spark) if unfinished else None
        if ended is None and vertices is None and unfinished:
            self.spark.sparkContext.cancelAllJobs()
        elif ended is None:
            for task in unfinished:
                self.spark.sparkContext.cancelJobsWithTag(task.job_tag)
        deadline = time.monotonic() + CANCEL_SECONDS
        for task in tasks:
            if not task.join(max(0.1, deadline - time.monotonic())):
                self._runtime.log.warning(
                    "Task %s did not stop within %.0f s; it cannot commit any more.", task.id, CANCEL_SECONDS
                )
        for task in tasks:
            for channel in task.output.channels:
                channel.close()
        if ended is not None:
            raise ended

    def close(self) -> None:
        """The job has ended: close what was built and never started. No task runs any more."""
        for task in self.deployment.tasks.values() if self.deployment is not None else ():
            task.join(0.0)
