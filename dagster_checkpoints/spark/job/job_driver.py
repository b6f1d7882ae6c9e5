"""The driver of a job machine on Spark: takes items from the queue, and performs the machine's actions.

A single thread runs it; other threads reach it through the queue. An action that waits for storage or Spark is performed to
its end, and the machine gets its result, before the next item is taken. It must not know the rules: they are in
`execution.job_machine`.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from dagster_checkpoints.coordination.events import (
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointTriggered,
    DiscardCheckpoint,
    DiscardStates,
    RequestCompleted,
    RequestNotCompleted,
    Tick,
    WriteMetadata,
)
from dagster_checkpoints.coordination.lifecycle import DrainAnnounced
from dagster_checkpoints.coordination.retention import JobStatus
from dagster_checkpoints.execution import job_actions as do
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.execution.job_actions import JobAction
from dagster_checkpoints.execution.job_events import JobMachineEvent, JobOutcome
from dagster_checkpoints.execution.job_machine import JobMachine
from dagster_checkpoints.execution.job_phases import JobPhase
from dagster_checkpoints.execution.job_requests import AnswerRequest
from dagster_checkpoints.execution.pipeline_state import JobState
from dagster_checkpoints.execution.trace import made
from dagster_checkpoints.spark.errors import JobFailedError
from dagster_checkpoints.spark.job import events
from dagster_checkpoints.spark.job.attempt_driver import AttemptDriver
from dagster_checkpoints.spark.job.events import JobResult
from dagster_checkpoints.spark.job.job_reporter import CheckpointReport, JobReporter
from dagster_checkpoints.spark.job.job_start import JobStart
from dagster_checkpoints.spark.job.requests import Requesters
from dagster_checkpoints.spark.job.run_sources import SourcePositions, SourceWatch
from dagster_checkpoints.spark.job.runtime import DeploymentCanceled, Item, QueuedRequest, Runtime, StartProgressItem, failure_of
from dagster_checkpoints.spark.job.status_reporter import StatusReporter
from dagster_checkpoints.spark.job.storage_driver import StorageDriver, restored_state
from dagster_checkpoints.spark.tasks.messages import TaskCommitRefused, TaskCommitted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_IDLE_TICK = 0.5
_WAITS_TO_RESTART = frozenset({JobPhase.RESTARTING, JobPhase.READING})
_JOB_STATES: Mapping[JobStatus, JobState] = {
    JobStatus.FINISHED: "FINISHED",
    JobStatus.CANCELED: "CANCELED",
    JobStatus.FAILED: "FAILED",
    JobStatus.SUSPENDED: "SUSPENDED",
}


ActionWithResult = (
    do.ChooseOlderStart | do.Deploy | do.BeginJob | do.ConfirmOwnership | do.ReadNewest | do.StartTasks | do.StopTasks | do.EndJob
)


class JobDriver:
    """Performs the actions of one job machine.

    Args:
        runtime: The values of the run.
        starting: Chooses the job's start point.
        session: Creates or joins the Spark session.
        status: Writes the pipeline's status.
        before_release: Waits until every answer is written: if a pipeline is released without an answer, its requester
            concludes that no answer will come.

    Attributes:
        machine: The job machine.
        reporter: Reports the job's events.
        source_watch: Knows the sources that do not answer.
        refused: The error because of which the job could not start; None otherwise.
    """

    def __init__(
        self,
        runtime: Runtime,
        starting: JobStart,
        session: Callable[[], SparkSession],
        status: StatusReporter,
        before_release: Callable[[], None],
    ) -> None:
        self.pipeline = runtime.pipeline
        self.reporter = JobReporter(runtime.pipeline, runtime.on_event)
        self.source_watch = SourceWatch(runtime.pipeline)
        self.refused: BaseException | None = None
        self._runtime = runtime
        self._starting = starting
        self._status = status
        self._before_release = before_release
        self._storage_driver = StorageDriver(runtime, starting)
        options = runtime.options
        self.machine = made(
            JobMachine,
            "job",
            runtime.recorder,
            time.monotonic(),
            pipeline=runtime.pipeline.name,
            config=options.checkpoints,
            restart=options.restart,
            epoch=runtime.ownership.epoch,
            failover=options.failover,
            burst=options.burst,
        )
        self._requesters = Requesters(runtime.storage, runtime.savepoints)
        self._positions = SourcePositions(runtime.ownership.epoch, options.checkpoints.timeout, runtime.log)
        self._uploads = ThreadPoolExecutor(options.upload_threads, thread_name_prefix="snapshot")
        self._attempt_driver = AttemptDriver(runtime, session, self._uploads)
        self._results: deque[JobMachineEvent] = deque()
        self._work_ended = False
        self._abandoned = False

    def result(self) -> JobResult:
        """The result of the job."""
        outcome, coordinator, stopped = self.machine.outcome, self.machine.coordinator, self.machine.requests.stopped
        assert outcome is not None
        latest = coordinator.latest_completed if coordinator is not None else None
        return JobResult(
            status=outcome.status,
            error=_error(outcome),
            job_id=self._storage_driver.job_id,
            last_checkpoint_id=latest.checkpoint_id if latest else None,
            last_checkpoint_location=latest.location if latest else None,
            finished_stages=tuple(s.name for s in self.pipeline.stages if s.name in self.reporter.announced),
            rows=self.reporter.rows(),
            ended_by=outcome.ended_by,
            savepoint=self._runtime.storage.url_of(stopped.location) if stopped else None,
        )

    # Turns of the loop

    def run(self) -> None:
        """Run the job until all its work has ended; call `close` after that."""
        self._results.append(self._choose())
        while not self._work_ended:
            if self._results:
                self._hand_in(self._results.popleft())
            else:
                self._take(self._next())
                self._watch_sources()
                self._report_status()

    def close(self) -> None:
        """Answer the remaining requests, and release the pipeline. Call it when no more requests can arrive."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._runtime.items.get_nowait()
                if isinstance(item, QueuedRequest) and not self._abandoned:
                    self._take(item)
        if self._abandoned:
            self._release("FAILED" if self.machine.begun else None)
        else:
            self._hand_in(on.WorkEnded())

    def abandon(self) -> None:
        """Stop all work after a failure of the loop itself."""
        self._abandoned = True
        try:
            if self._attempt_driver.deployment is not None:
                self._attempt_driver.stop(())
        finally:
            self._stop_work()

    def _next(self) -> Item:
        """The next item; a Tick if none arrives in time, or if the machine's deadline has come."""
        deadline = self.machine.next_deadline()
        wait = _IDLE_TICK if deadline is None else min(max(deadline - time.monotonic(), 0.0), _IDLE_TICK)
        try:
            return self._runtime.items.get(timeout=wait) if wait > 0 else self._runtime.items.get_nowait()
        except queue.Empty:
            return Tick()

    def _take(self, item: Item) -> None:
        match item:
            case QueuedRequest():
                received = self._requesters.receive(item, is_open=self.machine.requests.is_open(item.request.request_id))
                if received is not None:
                    self._hand_in(received)
            case StartProgressItem(attempt, progress):
                if self.machine.runs(progress.task, attempt) and self.machine.phase is JobPhase.RUNNING:
                    self.reporter.start_progressed(progress)
                    if (due := self._positions.began(progress)) is not None:
                        self._take(due)
            case TaskCommitted():  # of whatever attempt: its rows are visible
                self.reporter.task_committed(item)
            case TaskCommitRefused():
                self.reporter.commit_refused(item)
            case event:
                self._hand_in(event)

    def _hand_in(self, event: JobMachineEvent) -> None:
        for action in self.machine.handle(event, time.monotonic()):
            try:
                result = self._perform(action)
                self._results += [result] if result is not None else []
            except DeploymentCanceled:
                self._results.append(on.CancelRequested())
            except Exception as error:
                self._results += self._failed(action, error)

    def _failed(self, action: JobAction, error: Exception) -> list[JobMachineEvent]:
        """The events for an action that has raised: the job ends, and each step of its end has a result."""
        failed = on.FatalError(failure_of(error))
        match action:
            case do.StopTasks():
                return [failed, on.TasksStopped()]
            case do.EndJob() | do.FinishWork() | do.Release():
                self._runtime.log.warning("The job has ended, but not cleanly. %s: %s", type(error).__name__, error)
                return [on.JobEndNotRecorded()] if isinstance(action, do.EndJob) else []
        return [failed]

    def _watch_sources(self) -> None:
        deployment = self._attempt_driver.deployment
        if deployment is None or self.machine.phase is not JobPhase.RUNNING:
            self.source_watch.forget()
            return
        for event in self.source_watch.look(deployment, time.monotonic()):
            self._runtime.on_event(event)

    def _report_status(self) -> None:
        if self.machine.phase is JobPhase.RUNNING:
            self._status.report("stopping" if self.machine.requests.stop else "running", self)
        elif self.machine.runs_partly or self.machine.phase in _WAITS_TO_RESTART:
            self._status.report("restarting", self)

    # Actions

    def _perform(self, action: JobAction) -> JobMachineEvent | None:
        """Perform an action; returns its result, if it has one."""
        match action:
            case do.SendToTasks(tasks, message):
                if isinstance(message, DrainAnnounced):
                    self._note_unread()
                self._attempt_driver.send(tasks, message)
            case do.DiscoverSplits():
                self._attempt_driver.discover(action)
            case AnswerRequest():
                if not (action.done or action.requesters):
                    self._runtime.log.warning(
                        "The savepoint with which the run ends has failed, and is tried again: %s", action.message
                    )
                self._requesters.answer(action)
            case do.SourcesCut(sources):
                self._runtime.log.warning(
                    "The drain ends bounded sources before they have been read to their end: %s. Their other rows are in no "
                    "table, and a drained pipeline is not resumed. To read them first: a stop with drain, and bounded='finish'.",
                    ", ".join(sources),
                )
            case do.AttemptBegan() | do.AttemptRestarting() | do.TaskHasFinished():
                self._report(action)
            case (
                CheckpointTriggered() | CheckpointCompleted() | CheckpointFailed() | RequestCompleted() | RequestNotCompleted()
            ) as report:
                self._report_checkpoint(report)
            case do.Sweep() | do.ForgetSavepoints() | WriteMetadata() | DiscardStates() | DiscardCheckpoint():
                self._storage_driver.write(action)
            case do.FinishWork():
                self._work_ended = True
                self._stop_work()
            case do.Release(status):
                self._release(_JOB_STATES[status] if status is not None else None)
            case _:
                return self._perform_to_result(action)
        return None

    def _note_unread(self) -> None:
        """Log what a drain on request may leave unread; the condition of `drain_when` knows what it waits for."""
        deployment = self._attempt_driver.deployment
        if behind := list(self.source_watch.behind(deployment)) if deployment is not None else ():
            self._runtime.log.warning(
                "The drain ends unbounded sources that have not caught up: %s. What they have not read is in no table, and a "
                "drained pipeline is not resumed.",
                ", ".join(behind),
            )

    def _perform_to_result(self, action: ActionWithResult) -> JobMachineEvent | None:
        """Perform an action that waits for storage or Spark."""
        match action:
            case do.ChooseOlderStart():
                return self._storage_driver.choose_older(action)
            case do.Deploy():
                return self._deploy(action)
            case do.BeginJob():
                return self._storage_driver.begin(self._attempt_driver.spark.version)
            case do.ConfirmOwnership():
                return self._storage_driver.confirm_ownership()
            case do.ReadNewest(checkpoint):
                return self._storage_driver.read_newest(checkpoint)
            case do.StartTasks(vertices):
                return self._attempt_driver.start(vertices)
            case do.StopTasks(vertices):
                self._attempt_driver.stop(self.machine.finished, vertices)
                return on.TasksStopped()
            case do.EndJob():
                return self._storage_driver.end_job(action)

    def _report_checkpoint(self, report: CheckpointReport) -> None:
        """Report the coordinator's action on a checkpoint; create or delete the directory of a savepoint."""
        request, of_burst = None, False
        match report:
            case CheckpointTriggered(checkpoint_id, properties) if properties.is_savepoint:
                self._runtime.savepoints.directory(checkpoint_id, properties)
            case CheckpointFailed(int(checkpoint_id)):
                self._storage_driver.discard_savepoint(checkpoint_id)
            case CheckpointCompleted(completed):
                request_id = completed.properties.request_id
                request = self._requesters.open_request(request_id)
                of_burst = self.machine.requests.asked_by(request_id) == "caught_up"
        self.reporter.report_checkpoint(report, request, of_burst=of_burst)

    def _choose(self) -> JobMachineEvent:
        try:
            return self._storage_driver.choose()
        except Exception as error:
            self.refused = error
            return on.FatalError(failure_of(error))

    def _deploy(self, action: do.Deploy) -> JobMachineEvent:
        if not self._attempt_driver.is_prepared:
            self._attempt_driver.prepare()
        restored = restored_state(action.restored)
        self._starting.report_attempt(action.attempt, restored, self._stages_of(action.vertices))
        result = self._attempt_driver.deploy(action, restored, self._storage_driver.job_id)
        deployment = self._attempt_driver.deployment
        if isinstance(result, on.Deployed) and deployment is not None:
            self._positions.deployed(deployment.begin_at_end, action.vertices)
        return result

    def _report(self, action: do.AttemptBegan | do.AttemptRestarting | do.TaskHasFinished) -> None:
        match action:
            case do.AttemptBegan(attempt, point, vertices):
                deployment, coordinator = self._attempt_driver.deployment, self.machine.coordinator
                writer = self._storage_driver.writer
                assert deployment is not None and coordinator is not None and writer is not None
                writer.deployed(deployment)
                deployment.split_counts = lambda: self.machine.splits
                restored, seconds = restored_state(point), self._attempt_driver.seconds
                job_id = self._storage_driver.job_id
                self.reporter.attempt_began(deployment, coordinator, attempt, job_id, restored, seconds, vertices)
            case do.AttemptRestarting(attempt, delay, failure, vertices):
                self._runtime.on_event(events.JobRestarting(attempt, delay, failure.message, self._stages_of(vertices)))
                self._status.report("restarting", self)
            case do.TaskHasFinished(task):
                self.reporter.task_finished(task)

    def _stages_of(self, vertices: Set[str] | None) -> tuple[str, ...]:
        """The stages of these chains, in topological order; empty for all chains."""
        deployment = self._attempt_driver.deployment
        if vertices is None or deployment is None:
            return ()
        chosen = {stage for chain in deployment.chains if chain.name in vertices for stage in chain.stages}
        return tuple(stage.name for stage in self.pipeline.stages if stage.name in chosen)

    def _stop_work(self) -> None:
        self._attempt_driver.close()
        self._uploads.shutdown(wait=True, cancel_futures=True)
        self._storage_driver.finish()

    def _release(self, status: JobState | None) -> None:
        self._before_release()
        self._storage_driver.release(status)


def _error(outcome: JobOutcome) -> BaseException | None:
    """The error of a failed job; None if it has not failed."""
    if outcome.failure is None:
        return None
    cause = outcome.failure.error
    error = cause if isinstance(cause, BaseException) else JobFailedError(outcome.failure.message)
    if not outcome.given_up:
        return error
    failed = JobFailedError(outcome.message)
    failed.__cause__ = error
    return failed
