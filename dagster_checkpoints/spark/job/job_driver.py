"""The driver of a job machine on Spark: takes items from the queue, and performs what the machine asks for.

A single thread runs it; everything else reaches it through the queue. Actions that wait for storage or Spark are performed to
their end, and their results handed in, before the next item is taken. It must not know the rules: they are
`execution.job_machine`'s.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from dagster_checkpoints.coordination import (
    CheckpointCompleted,
    CheckpointCoordinator,
    CheckpointFailed,
    CheckpointTriggered,
    CompletedCheckpoint,
    DiscardCheckpoint,
    DiscardStates,
    JobStatus,
    RequestCompleted,
    RequestFailed,
    Tick,
    WriteMetadata,
)
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.execution.job_events import JobAction, JobBeginning, JobOutcome, RestorePoint
from dagster_checkpoints.execution.job_events import JobEvent as MachineEvent
from dagster_checkpoints.execution.job_machine import JobMachine, JobPhase
from dagster_checkpoints.execution.job_requests import AnswerRequest
from dagster_checkpoints.execution.start_point import completed_checkpoint
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.errors import JobFailedError
from dagster_checkpoints.spark.job import events
from dagster_checkpoints.spark.job.attempt_driver import AttemptDriver
from dagster_checkpoints.spark.job.checkpointing import CheckpointWriter
from dagster_checkpoints.spark.job.events import JobEvent, JobResult
from dagster_checkpoints.spark.job.job_messages import Asked, Item, NewsOfTask, failure_of
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.job.job_reporter import CoordinatorsReport, JobReporter
from dagster_checkpoints.spark.job.job_start import JobStart
from dagster_checkpoints.spark.job.requesters import Requesters
from dagster_checkpoints.spark.job.restoring import StartPoint, read_restored
from dagster_checkpoints.spark.job.savepoints_in_progress import SavepointsInProgress
from dagster_checkpoints.spark.job.status_reporter import StatusReporter
from dagster_checkpoints.spark.session.work_directory import WorkDirectory
from dagster_checkpoints.spark.snapshots.restored_state import Restored
from dagster_checkpoints.storage import CheckpointStorage, Ownership, StorageError, StorageUnavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_IDLE_TICK = 0.5
_STATUS: Mapping[JobStatus, events.JobStatus] = {
    JobStatus.FINISHED: "FINISHED",
    JobStatus.CANCELED: "CANCELED",
    JobStatus.FAILED: "FAILED",
    JobStatus.SUSPENDED: "SUSPENDED",
}


class Canceled(Exception):
    """Unwinds the building of an attempt when the job is cancelled."""


class JobDriver:
    """Performs the actions of one job machine.

    Args:
        pipeline: What runs.
        storage: Owned by this run.
        options: The settings.
        starting: Decides what the job starts from.
        session: Creates or joins the Spark session.
        savepoints: Where those being taken go.
        work: The work directory.
        items: The queue.
        canceled: Set when the job is cancelled: what is being built is given up.
        status: Told how the run goes.
        on_event: Told of everything that happens, on the thread of `run`.
        before_release: Waits until every answer is written: a requester takes a pipeline that is released, and has not answered,
            for one that never will.
        run_id: Dagster's, or whatever a person would look for.
        log: Told what a person should know; where stages' `context.log` goes.

    Attributes:
        machine: The rules.
        reporter: What the job tells of itself.
        refused: Why the job could not start at all.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        storage: CheckpointStorage,
        options: JobOptions,
        starting: JobStart,
        session: Callable[[], SparkSession],
        savepoints: SavepointsInProgress,
        work: WorkDirectory,
        items: queue.SimpleQueue[Item],
        canceled: threading.Event,
        status: StatusReporter,
        on_event: Callable[[JobEvent], None],
        before_release: Callable[[], None],
        run_id: str,
        log: logging.Logger,
    ) -> None:
        self.pipeline = pipeline
        self.reporter = JobReporter(pipeline, on_event)
        self.refused: BaseException | None = None
        self._storage = storage
        self._options = options
        self._starting = starting
        self._savepoints = savepoints
        self._work = work
        self._items = items
        self._canceled = canceled
        self._status = status
        self._on_event = on_event
        self._before_release = before_release
        self._run_id = run_id
        self._log = log
        self.machine = JobMachine(pipeline.name, options.checkpoints, options.restart, self._ownership.epoch)
        self._requesters = Requesters(storage, savepoints)
        self._uploads = ThreadPoolExecutor(options.upload_threads, thread_name_prefix="snapshot")
        self._io = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-io")
        self._tasks = AttemptDriver(
            pipeline,
            storage,
            options,
            session,
            savepoints,
            work,
            items,
            self._uploads,
            self._check_canceled,
            on_event,
            log,
        )
        self._start: StartPoint | None = None
        self._writer: CheckpointWriter | None = None
        self._job_id = 0
        self._results: deque[MachineEvent] = deque()
        self._work_ended = False
        self._abandoned = False

    @property
    def tasks(self) -> AttemptDriver:
        """The tasks of the present attempt."""
        return self._tasks

    def result(self) -> JobResult:
        """How the job has ended."""
        outcome, coordinator, stopped = self.machine.outcome, self.machine.coordinator, self.machine.requests.stopped
        assert outcome is not None
        latest = coordinator.latest_completed if coordinator is not None else None
        return JobResult(
            status=_STATUS[outcome.status],
            error=_error(outcome),
            job_id=self._job_id,
            last_checkpoint_id=latest.checkpoint_id if latest else None,
            last_checkpoint_location=latest.location if latest else None,
            finished_stages=tuple(s.name for s in self.pipeline.stages if s.name in self.reporter.announced),
            rows=self.reporter.rows(),
            ended_by=outcome.ended_by,
            savepoint=self._storage.url_of(stopped.location) if stopped else None,
        )

    @property
    def _ownership(self) -> Ownership:
        assert self._storage.ownership is not None
        return self._storage.ownership

    @property
    def _coordinator(self) -> CheckpointCoordinator:
        assert self.machine.coordinator is not None
        return self.machine.coordinator

    def _check_canceled(self) -> None:
        if self._canceled.is_set():
            raise Canceled

    # Turns of the loop

    def run(self) -> None:
        """Run the job to its end, until nothing of it works any more; `close` comes next."""
        self._results.append(self._choose())
        while not self._work_ended:
            if self._results:
                self._hand_in(self._results.popleft())
            else:
                self._take(self._next())
                self._report_status()

    def close(self) -> None:
        """Answer the requests that are left, and release the pipeline. Call it when no request can come any more."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._items.get_nowait()
                if isinstance(item, Asked) and not self._abandoned:
                    self._take(item)
        if self._abandoned:
            self._release("FAILED" if self.machine.begun else None)
        else:
            self._hand_in(on.WorkEnded())

    def abandon(self) -> None:
        """The loop itself has failed: stop whatever works."""
        self._abandoned = True
        if self._tasks.deployment is not None:
            self._tasks.stop(())
        self._stop_work()

    def _next(self) -> Item:
        """The next item; a Tick if there is none for a while, or when one is due."""
        deadline = self.machine.next_deadline()
        wait = _IDLE_TICK if deadline is None else min(max(deadline - time.monotonic(), 0.0), _IDLE_TICK)
        try:
            return self._items.get(timeout=wait) if wait > 0 else self._items.get_nowait()
        except queue.Empty:
            return Tick()

    def _take(self, item: Item) -> None:
        match item:
            case Asked():
                received = self._requesters.receive(item, is_open=self.machine.requests.is_open(item.request.request_id))
                if received is not None:
                    self._hand_in(received)
            case NewsOfTask(attempt, news):
                if attempt == self.machine.attempt and self.machine.phase is JobPhase.RUNNING:
                    self.reporter.task_news(news)
            case event:
                self._hand_in(event)

    def _hand_in(self, event: MachineEvent) -> None:
        for action in self.machine.handle(event, time.monotonic()):
            try:
                result = self._perform(action)
            except Canceled:
                result = on.CancelRequested()
            except Exception as error:
                result = on.FatalError(failure_of(error))
            if result is not None:
                self._results.append(result)

    def _report_status(self) -> None:
        if self.machine.phase is JobPhase.RUNNING:
            self._status.report("stopping" if self.machine.requests.stop else "running", self)

    # Actions

    def _perform(self, action: JobAction) -> MachineEvent | None:
        """Perform an action; returns its result, if it has one."""
        match action:
            case on.SendToTasks(tasks, message):
                self._tasks.send(tasks, message)
            case AnswerRequest():
                self._requesters.answer(action)
            case on.Deploy():
                return self._deploy(action)
            case on.BeginJob() | on.ClaimSavepoint():
                return self._begin(action)
            case on.ConfirmOwnership():
                return self._confirm_ownership()
            case on.ReadNewest(checkpoint):
                return self._read_newest(checkpoint)
            case on.StartTasks():
                return self._tasks.start()
            case on.StopTasks():
                self._tasks.stop(self.machine.finished)
                return on.TasksStopped()
            case on.ChooseOlderStart():
                return self._choose_older(action)
            case on.EndJob() | on.FinishWork() | on.Release():
                return self._end(action)
            case on.AttemptBegan() | on.AttemptRestarting() | on.TaskHasFinished():
                self._report(action)
            case (
                CheckpointTriggered() | CheckpointCompleted() | CheckpointFailed() | RequestCompleted() | RequestFailed()
            ) as told:
                self._tell(told)
            case _:
                self._write(action)
        return None

    def _tell(self, told: CoordinatorsReport) -> None:
        """Report what the coordinator says of a checkpoint; a savepoint has a directory of its own meanwhile."""
        asked = None
        match told:
            case CheckpointTriggered(checkpoint_id, properties) if properties.is_savepoint:
                self._savepoints.directory(checkpoint_id, properties)
            case CheckpointFailed(int(checkpoint_id)):
                self._later(lambda: self._savepoints.discard(checkpoint_id))
            case CheckpointCompleted(completed):
                asked = self._requesters.asked(completed.properties.request_id)
        self.reporter.tell(told, asked)

    def _write(self, action: JobAction) -> None:
        """Write or delete, on the thread for input and output."""
        writer = self._writer
        match action:
            case on.Sweep():
                self._work.clear(self._ownership.epoch, own=False)
                self._later(self._sweep)
            case on.ForgetSavepoints(retained):
                self._ownership.forget_savepoints(retained)
            case WriteMetadata(checkpoint):
                assert writer is not None
                finished = frozenset(checkpoint.plan.finished)
                self._io.submit(lambda: self._items.put(writer.write(checkpoint, finished)))
            case DiscardStates(discarded):
                assert writer is not None
                self._later(lambda: writer.discard_states(discarded))
            case DiscardCheckpoint(completed):
                assert writer is not None
                self._later(lambda: writer.delete(completed))
            case _:
                raise TypeError(f"expected an action of a job, found {action!r}")

    def _later(self, act: Callable[[], object]) -> None:
        self._io.submit(self._quietly, act)

    def _quietly(self, act: Callable[[], object]) -> None:
        """Cleaning up: what fails here is swept up by a later run."""
        try:
            act()
        except StorageError as error:
            self._log.warning("%s: %s", type(error).__name__, error)

    def _sweep(self) -> None:
        """Delete what killed runs have left behind."""
        assert self._start is not None
        self._storage.sweep(files=self._start.sweep)

    # The start

    def _choose(self) -> MachineEvent:
        try:
            return self._chosen(self._starting.choose(self._ownership))
        except Exception as error:
            self.refused = error
            return on.FatalError(failure_of(error))

    def _choose_older(self, action: on.ChooseOlderStart) -> MachineEvent:
        assert self._start is not None and isinstance(action.failure.error, StorageError)
        return self._chosen(self._starting.choose_older(self._start, action.failure.error))

    def _chosen(self, start: StartPoint) -> on.StartChosen:
        self._start = start
        self._job_id = self._ownership.job_id + (not start.resume)
        restored = _restore_point(start.restored) if start.restored is not None else None
        claims = start.claimed and start.pointer is not None
        return on.StartChosen(JobBeginning(restored, start.next_checkpoint_id, start.retained, start.passed_over, claims))

    def _begin(self, action: on.BeginJob | on.ClaimSavepoint) -> MachineEvent:
        assert self._start is not None
        if isinstance(action, on.ClaimSavepoint):
            self._starting.claim(self._start)
            return on.SavepointClaimed()
        self._job_id = self._starting.begin(self._start)
        version = self._tasks.spark.version
        self._writer = CheckpointWriter(self.pipeline, self._storage, self._savepoints, self._job_id, self._run_id, version)
        return on.JobBegun()

    # Attempts

    def _deploy(self, action: on.Deploy) -> MachineEvent:
        if not self._tasks.is_prepared:
            self._tasks.prepare()
        restored = _restored(action.restored)
        self._starting.tell_building(action.attempt, restored)
        return self._tasks.deploy(action, restored, self._job_id)

    def _confirm_ownership(self) -> MachineEvent:
        if not self._ownership.renew():  # after an unknown outcome this learns which write has landed
            what = "start" if self.machine.phase is JobPhase.CONFIRMING else "restart"
            self._log.warning("The %s waits for storage to confirm that this run owns the pipeline.", what)
            return on.StorageSilent()
        newest = self._ownership.newest
        if newest is None:
            return on.OwnershipConfirmed()
        return on.OwnershipConfirmed(completed_checkpoint(newest), newest.epoch)

    def _read_newest(self, checkpoint: CompletedCheckpoint) -> MachineEvent:
        allow = self._options.allow_non_restored_state
        try:
            restored = read_restored(self.pipeline, self._storage, checkpoint.location, allow)
        except StorageUnavailable as error:
            self._log.warning("The restart waits for storage: %s", error)
            return on.StorageSilent()
        return on.NewestRead(_restore_point(restored))

    def _report(self, action: on.AttemptBegan | on.AttemptRestarting | on.TaskHasFinished) -> None:
        match action:
            case on.AttemptBegan(attempt, point):
                deployment = self._tasks.deployment
                assert deployment is not None and self._writer is not None
                self._writer.deployed(deployment)
                restored, seconds = _restored(point), self._tasks.seconds
                self.reporter.attempt_began(deployment, self._coordinator, attempt, self._job_id, restored, seconds)
            case on.AttemptRestarting(attempt, delay, failure):
                self._on_event(events.JobRestarting(attempt, delay, failure.message))
                self._status.report("restarting", self)
            case on.TaskHasFinished(task):
                self.reporter.task_finished(task)

    # The end

    def _end(self, action: on.EndJob | on.FinishWork | on.Release) -> MachineEvent | None:
        match action:
            case on.EndJob(keep, ended_by, asked_by):
                try:
                    dropped = self._ownership.end_job(
                        "FINISHED", keep_checkpoints=keep, ended_by=ended_by, stop_asked_by=asked_by
                    )
                except StorageError as error:
                    self._log.warning("The checkpoints of the finished job are kept: %s", error)
                    return on.JobEndNotRecorded()
                return on.JobEndRecorded(tuple(CompletedCheckpoint(p.checkpoint_id, p.location) for p in dropped))
            case on.FinishWork():
                self._stop_work()
                self._work_ended = True
            case on.Release(status):
                self._release(_STATUS[status] if status is not None else None)
        return None

    def _stop_work(self) -> None:
        self._uploads.shutdown(wait=True, cancel_futures=True)
        self._io.shutdown(wait=True)

    def _release(self, status: events.JobStatus | None) -> None:
        self._before_release()
        self._quietly(lambda: self._ownership.release(status))


def _restore_point(restored: Restored) -> RestorePoint:
    """What the job machine is to know of a checkpoint that fits."""
    return RestorePoint(restored.plan.checkpoint_id, restored.location, frozenset(restored.plan.finished), restored)


def _restored(point: RestorePoint | None) -> Restored | None:
    if point is None:
        return None
    assert isinstance(point.state, Restored)
    return point.state


def _error(outcome: JobOutcome) -> BaseException | None:
    """What a job has failed with."""
    if outcome.failure is None:
        return None
    cause = outcome.failure.error
    error = cause if isinstance(cause, BaseException) else JobFailedError(outcome.failure.message)
    if not outcome.given_up:
        return error
    failed = JobFailedError(outcome.message)
    failed.__cause__ = error
    return failed
