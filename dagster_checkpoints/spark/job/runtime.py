"""The values that the parts of one run share, from the driver of the job to the building of a task."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Set
from dataclasses import dataclass

from dagster_checkpoints.control.requests import Answer, ControlRequest
from dagster_checkpoints.errors import repeats_by_nature
from dagster_checkpoints.execution.job_events import Failure, JobMachineEvent
from dagster_checkpoints.execution.trace import Recorder
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.files.work_path import WorkFolder
from dagster_checkpoints.spark.job.events import JobEvent
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.job.savepoints_in_progress import SavepointsInProgress
from dagster_checkpoints.spark.query.source_checks import SourceWarning
from dagster_checkpoints.spark.session.work_directory import WorkDirectory
from dagster_checkpoints.spark.tasks.messages import StartProgress, TaskCommitRefused, TaskCommitted
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.ownership import Ownership


@dataclass(frozen=True)
class QueuedRequest:
    """A control request.

    Attributes:
        request: The request.
        respond: Receives the final answer; called once, on the loop's thread.
        seen_at: The time at which it was received, monotonic seconds; its deadline counts from then.
        termination: Whether the run's own process made the request because it is being terminated.
    """

    request: ControlRequest
    respond: Callable[[Answer], None]
    seen_at: float
    termination: bool = False


@dataclass(frozen=True)
class StartProgressItem:
    """The progress of a task's start, for display only.

    Attributes:
        attempt: The task's attempt; the progress of earlier attempts is not reported.
        progress: The progress.
    """

    attempt: int
    progress: StartProgress


Item = JobMachineEvent | QueuedRequest | StartProgressItem | TaskCommitted | TaskCommitRefused


def failure_of(error: BaseException) -> Failure:
    """The description of an error for the job machine."""
    return Failure(str(error), repeats_by_nature(error), error)


class OnceLog:
    """Logs each text once, and what is true of several sources at length of the first of them only.

    Args:
        log: Receives the texts.
    """

    def __init__(self, log: logging.Logger) -> None:
        self.log = log
        self._said: set[str | SourceWarning] = set()
        self._explained: set[tuple[str, str]] = set()

    def __call__(self, level: int, text: str | SourceWarning) -> None:
        """Log a text, if it was not logged before."""
        if text not in self._said:
            self._said.add(text)
            self.log.log(level, "%s", self._shortened(text) if isinstance(text, SourceWarning) else text)

    def _shortened(self, warning: SourceWarning) -> str:
        explanation = (warning.found, warning.advice)
        if explanation in self._explained:
            return f"{warning.source} {warning.found}, see above."
        self._explained.add(explanation)
        return str(warning)


@dataclass(frozen=True)
class AttemptSettings:
    """The identity of one attempt, and the settings that its tasks need.

    Attributes:
        folder: The attempt's new work directory.
        number: The attempt's number over all runs; the watermark sources emit again when it changes.
        token: A text that differs between any two attempts of all runs.
        job_id: The job's id.
        options: The settings of the execution.
        has_later: Whether sinks may show other rows than those of the restored checkpoint.
        next_checkpoint_id: An id above those of all checkpoints that were completed, and at most that of the next one.
        ended_sources: The sources (stage, instance) that a request has ended before a restart: they read their available input,
            and end.
        vertices: The chains whose tasks are built, while the tasks of the others go on; None for all.
        recorder: Writes the run's trace; None for no trace.
    """

    folder: WorkFolder
    number: int
    token: str
    job_id: int
    options: JobOptions
    has_later: bool = False
    next_checkpoint_id: int = 1
    ended_sources: frozenset[tuple[str, str]] = frozenset()
    vertices: Set[str] | None = None
    recorder: Recorder | None = None

    def token_of_instance(self, index: int) -> str:
        """A text that differs between any two executions of instances of a stage: sinks name their transactions by it.

        Args:
            index: The index of the instance.
        """
        return f"{self.token}-{index}"


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
