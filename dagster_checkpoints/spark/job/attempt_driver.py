"""Builds, starts and stops the tasks of one attempt after the other on Spark, and sends messages to them.

It must not know when to do so: `execution.job_machine` decides that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Set
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from dagster_checkpoints.errors import CorruptStateFile, MissingStateFile, StorageUnavailable
from dagster_checkpoints.execution import job_actions as do
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.execution.job_events import JobMachineEvent
from dagster_checkpoints.execution.messages import TaskMessage
from dagster_checkpoints.execution.split_enumerators import enumerator_starts
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.sinks import SinkError
from dagster_checkpoints.spark.errors import StageError
from dagster_checkpoints.spark.job.attempts import Attempts
from dagster_checkpoints.spark.job.deployment import Deployment
from dagster_checkpoints.spark.job.job_messages import failure_of
from dagster_checkpoints.spark.job.runtime import Runtime
from dagster_checkpoints.spark.job.spark_start import prove_work_directory, start_spark
from dagster_checkpoints.spark.job.split_discovery import SplitDiscovery
from dagster_checkpoints.spark.session.ended_session import session_end
from dagster_checkpoints.spark.session.spark_session import check_session
from dagster_checkpoints.spark.snapshots.restored_state import Restored
from dagster_checkpoints.spark.tasks.task import Task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
            # OSError: of the work directory, such as a full disk.
            if isinstance(error, StageError | StorageUnavailable | OSError):
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
