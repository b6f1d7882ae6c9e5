"""One execution of a pipeline in this process: the loop around the coordinator.

A single thread owns the pure coordinator; tasks, uploads and requests reach it through one queue, and it performs the
actions that come back. It acquires the pipeline, decides where to start, deploys, restarts after failures, and releases
the pipeline with how the job ended. It must not know Dagster.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dagster_checkpoints.coordination import (
    CheckpointCompleted,
    CheckpointCoordinator,
    CheckpointFailed,
    CheckpointProperties,
    CheckpointRequested,
    CompletedCheckpoint,
    CoordinatorAction,
    CoordinatorEvent,
    DiscardCheckpoint,
    DiscardStates,
    DrainBegan,
    FailJob,
    GiveUp,
    NotifyAborted,
    NotifyComplete,
    RequestFailed,
    Shutdown,
    TaskState,
    TaskStateChanged,
    Tick,
    TriggerFailed,
    TriggerTask,
    WriteMetadata,
)
from dagster_checkpoints.coordination import JobRestarting as CoordinatorRestarting
from dagster_checkpoints.coordination import JobStatus as CoordinatorStatus
from dagster_checkpoints.pipeline import Pipeline, TaskId
from dagster_checkpoints.spark import events
from dagster_checkpoints.spark.checkpointing import CheckpointWriter
from dagster_checkpoints.spark.deployment import AttemptSettings, Deployer, Deployment, Restored
from dagster_checkpoints.spark.errors import JobFailedError, NothingToRestoreError, SelectionError
from dagster_checkpoints.spark.events import JobEvent, JobResult, JobStatus
from dagster_checkpoints.spark.job_options import JobOptions
from dagster_checkpoints.spark.mail import (
    AskCheckpoint,
    Cancel,
    CheckpointIsAborted,
    CheckpointIsComplete,
    EndInput,
    EndSources,
    FromAttempt,
    Item,
    OwnershipIsLost,
    TaskFailed,
    TriggerCheckpoint,
)
from dagster_checkpoints.spark.reporting import checkpoint_done, stage_rows
from dagster_checkpoints.spark.restoring import StartPoint, choose_start, has_later
from dagster_checkpoints.spark.uploads import SnapshotUploader
from dagster_checkpoints.storage import (
    CheckpointStorage,
    CorruptStateFile,
    LeaseRenewer,
    MissingStateFile,
    Owner,
    StorageError,
    StorageUnavailable,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CANCEL_SECONDS = 30.0
_IDLE_TICK = 0.5


class _Canceled(Exception):
    """Unwinds the loop when the job is cancelled."""


@dataclass
class RunState:
    """What exists once a job has its Spark session.

    Attributes:
        finished: Tasks that have finished, in this run or before.
        told: Those of them whose end was told in this run.
        announced: Stages whose end was told.
    """

    coordinator: CheckpointCoordinator
    writer: CheckpointWriter
    deployer: Deployer
    spark: SparkSession
    uploads: ThreadPoolExecutor
    io: ThreadPoolExecutor
    attempt: int = 0
    deployment: Deployment | None = None
    finished: set[TaskId] = field(default_factory=set)
    told: set[TaskId] = field(default_factory=set)
    announced: set[str] = field(default_factory=set)


class JobExecution:
    """One execution of a pipeline; `run` once, on a worker thread.

    Args:
        pipeline: What to run.
        storage: Where its checkpoints live.
        options: The settings.
        session: Creates or joins the Spark session; called on the thread of `run`, after storage was found usable.
        on_event: Told of everything that happens, on the thread of `run`.
        run_id: Dagster's, or whatever a person would look for.
        selection: The stages to run; None for all. A stage left out must have finished.
        log: Where stages' `context.log` goes.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        storage: CheckpointStorage,
        options: JobOptions,
        session: Callable[[], SparkSession],
        on_event: Callable[[JobEvent], None],
        run_id: str,
        selection: frozenset[str] | None = None,
        log: logging.Logger | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.storage = storage
        self.options = options
        self.run_id = run_id
        self._session = session
        self._on_event = on_event
        self._selection = selection
        self._strategy = options.restart.fresh()
        self._unusable: list[str] = []
        self._ended_sources: set[tuple[str, str]] = set()
        self._restored: Restored | None = None
        self._log = log or logging.getLogger("dagster_checkpoints")
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._cancel_asked = threading.Event()
        self._run: RunState | None = None
        self._job_id = 0
        self._start: StartPoint | None = None
        self._work = options.work_directory / pipeline.name

    # From any thread

    def cancel(self) -> None:
        """End the job CANCELED as soon as possible; its checkpoints are kept."""
        self._cancel_asked.set()
        self._queue.put(Cancel())

    def drain(self) -> None:
        """End every source as if its input were exhausted: windows fire, everything is committed, the job is FINISHED."""
        self._queue.put(EndSources(None, None))

    def end_source(self, stage: str, instance: str | None = None) -> None:
        """End one source, or one instance of it.

        Raises:
            KeyError: The pipeline has no such source, or the source no such instance.
        """
        found = self.pipeline.stage(stage)
        if not found.kind.is_source or (instance is not None and instance not in found.instances):
            raise KeyError(f"{stage!r} (instance {instance!r}) is no source of pipeline {self.pipeline.name!r}")
        self._queue.put(EndSources(stage, instance))

    def trigger_checkpoint(self, request_id: str) -> None:
        """Ask for a checkpoint now."""
        self._queue.put(AskCheckpoint(request_id))

    def rows(self) -> Mapping[str, int]:
        """Rows that each stage has emitted since the job began (0 for a stage inside a chain); empty before the start."""
        run = self._run
        if run is None or run.deployment is None:
            return {}
        return {stage.name: stage_rows(run.deployment, stage.name) for stage in self.pipeline.stages}

    # The job

    def run(self) -> JobResult:
        """Run the pipeline to its end. Returns how it ended; failures are in the result, not raised.

        Raises:
            StorageError: Storage cannot be used, or another run owns the pipeline; nothing was started.
            DagsterCheckpointsError: The checkpoint does not fit, or the selection cannot run; nothing was started.
        """
        self.storage.check()
        owner = Owner(run_id=self.run_id, host=socket.gethostname(), pid=os.getpid())
        ownership = self.storage.acquire(owner, self.options.lease_seconds)
        status: JobStatus | None = None
        renewer = LeaseRenewer(ownership, lambda error: self._queue.put(OwnershipIsLost(error)))
        renewer.start()
        try:
            start = choose_start(self.pipeline, self.storage, self.options)
            self._check_selection(start.restored)
            self._begin(start)
            status = "FAILED"
            error = self._execute(start)
            status = "FINISHED" if error is None else "CANCELED" if isinstance(error, _Canceled) else "FAILED"
            return self._result(status, None if isinstance(error, _Canceled) else error)
        finally:
            renewer.stop(5.0)
            self._release(status)
            self._clear_work(ownership.epoch, own=True)

    def _begin(self, start: StartPoint) -> None:
        ownership = self.storage.ownership
        assert ownership is not None
        self._start = start
        location = start.restored.location if start.restored else None
        self._job_id = ownership.begin_job(resume=start.resume, restored=location)

    def _begin_older(self, start: StartPoint, error: StorageError) -> StartPoint:
        """A state file of the chosen checkpoint is corrupt or gone: go on from an older one, if the user allows it."""
        if not self.options.allow_older_checkpoint or start.restored is None:
            raise error
        self._log.warning("Passing over checkpoint %s: %s", start.restored.location, error)
        self._unusable.append(start.restored.location)
        try:
            older = choose_start(self.pipeline, self.storage, self.options, self._unusable)
        except NothingToRestoreError:
            raise error from None
        self._begin(older)
        return older

    def _execute(self, start: StartPoint) -> BaseException | None:
        assert self.storage.ownership is not None
        self._clear_work(self.storage.ownership.epoch, own=False)
        uploads = ThreadPoolExecutor(self.options.upload_threads, thread_name_prefix="snapshot")
        io = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-io")
        status: JobStatus = "FAILED"
        try:
            if start.sweep:
                io.submit(self._quietly, self.storage.delete_unreferenced)
            spark = self._session()
            writer = CheckpointWriter(self.pipeline, self.storage, self._job_id, self.run_id, spark.version)
            coordinator = None
            restored = start.restored
            while True:
                settings = self._attempt_settings(restored)
                deployer = self._run.deployer if self._run else self._deployer(spark)
                attempt = settings.number
                uploader = SnapshotUploader(self.storage, uploads, lambda e, a=attempt: self._report(a, e))  # type: ignore[misc]
                try:
                    deployment = deployer.deploy(settings, restored, uploader, lambda e, a=attempt: self._report(a, e))  # type: ignore[misc]
                except (CorruptStateFile, MissingStateFile) as unusable:
                    if coordinator is not None:
                        raise
                    start = self._begin_older(start, unusable)
                    restored = start.restored
                    continue
                if restored is not None:
                    self.storage.known(restored.metadata.files())  # each was fetched and verified just now
                if coordinator is None:
                    coordinator = self._coordinator(deployment, start)
                    self._run = RunState(coordinator, writer, deployer, spark, uploads, io)
                run = self._run
                assert run is not None
                error = self._one_attempt(run, deployment, restored, attempt)
                if error is None:
                    status = "FINISHED"
                    return None
                again = self._restart(run, error)
                if again is not None:
                    status = "CANCELED" if isinstance(again, _Canceled) else "FAILED"
                    return again
                restored = self._restored
        except _Canceled as canceled:
            status = "CANCELED"
            return canceled
        except Exception as error:
            return error
        finally:
            self._shut_down(status)
            uploads.shutdown(wait=True, cancel_futures=True)
            io.shutdown(wait=True)

    def _one_attempt(
        self, run: RunState, deployment: Deployment, restored: Restored | None, attempt: int
    ) -> BaseException | None:
        """Run one deployment. Returns None when every task has finished, else what ended it; its tasks are stopped."""
        run.attempt, run.deployment = attempt, deployment
        run.finished = set(deployment.finished)
        run.writer.deployed(deployment)
        self._announce_start(run, restored, attempt)
        try:
            for task in deployment.tasks.values():
                task.start()
            while len(run.finished) < deployment.graph.instance_count:
                self._take(run, self._next(run))
            return None
        except (_Canceled, TaskFailure, JobFailedError, StorageError) as error:
            return error
        finally:
            self._stop_tasks(run, deployment)

    def _next(self, run: RunState) -> Item:
        deadline = run.coordinator.next_deadline()
        wait = _IDLE_TICK if deadline is None else min(max(deadline - time.monotonic(), 0.0), _IDLE_TICK)
        try:
            return self._queue.get(timeout=wait) if wait > 0 else self._queue.get_nowait()
        except queue.Empty:
            return Tick()

    def _take(self, run: RunState, item: Item) -> None:
        match item:
            case Cancel():
                raise _Canceled
            case OwnershipIsLost(error):
                raise error
            case EndSources(stage, instance):
                self._end_sources(run, stage, instance)
            case AskCheckpoint(request_id):
                self._handle(run, CheckpointRequested(request_id, CheckpointProperties()))
            case FromAttempt(attempt, event):
                if attempt == run.attempt:
                    self._take_report(run, event)
            case event:
                self._handle(run, event)

    def _take_report(self, run: RunState, event: CoordinatorEvent | TaskFailed) -> None:
        if isinstance(event, TaskFailed):
            raise TaskFailure(event.task, event.error)
        self._handle(run, event)
        if isinstance(event, TaskStateChanged) and event.state is TaskState.FINISHED:
            self._task_finished(run, event.task)

    def _handle(self, run: RunState, event: CoordinatorEvent) -> None:
        for action in run.coordinator.handle(event, time.monotonic()):
            self._perform(run, action)

    def _perform(self, run: RunState, action: CoordinatorAction) -> None:
        tasks = run.deployment.tasks if run.deployment else {}
        match action:
            case TriggerTask(task, barrier):
                if task in tasks and task not in run.finished:
                    tasks[task].send(TriggerCheckpoint(barrier))
                else:
                    self._queue.put(TriggerFailed(task, barrier.checkpoint_id))
            case WriteMetadata(checkpoint):
                writer, finished = run.writer, frozenset(checkpoint.plan.finished)
                run.io.submit(lambda: self._queue.put(writer.write(checkpoint, finished)))
            case NotifyComplete(notified, checkpoint_id):
                for task in notified:
                    if task in tasks:
                        tasks[task].send(CheckpointIsComplete(checkpoint_id))
            case NotifyAborted(notified, checkpoint_id):
                for task in notified:
                    if task in tasks:
                        tasks[task].send(CheckpointIsAborted(checkpoint_id))
            case DiscardStates(checkpoint_id):
                discarded = checkpoint_id
                run.io.submit(self._quietly, lambda: run.writer.discard_states(discarded))
            case DiscardCheckpoint(completed):
                run.io.submit(self._quietly, lambda: run.writer.delete(completed))
            case CheckpointCompleted(completed):
                self._drop_passed_over(run)
                assert run.deployment is not None
                self._on_event(checkpoint_done(run.deployment, completed))
            case RequestFailed(_, reason, message) if reason.pre_flight:
                self._on_event(events.CheckpointNotDone(None, reason.name, message))
            case CheckpointFailed(checkpoint_id, reason, message):
                self._on_event(events.CheckpointNotDone(checkpoint_id, reason.name, message))
            case FailJob(reason, message):
                raise JobFailedError(
                    f"Pipeline {self.pipeline.name!r}: {message} ({reason.name}). More consecutive checkpoints failed "
                    f"than tolerable_failed_checkpoints={self.options.checkpoints.tolerable_failed_checkpoints} allows."
                )
            case _:
                pass

    def _drop_passed_over(self, run: RunState) -> None:
        """The job has gone on from an earlier checkpoint: the later ones, whose rows were taken back, are of no use."""
        if self._start is not None and self._start.passed_over:
            for checkpoint in self._start.passed_over:
                self._perform(run, DiscardCheckpoint(checkpoint))
            self._start = replace(self._start, passed_over=())

    # Tasks

    def _end_sources(self, run: RunState, stage: str | None, instance: str | None) -> None:
        assert run.deployment is not None
        if stage is None:
            self._handle(run, DrainBegan())
        for chain in run.deployment.chains:
            source = self.pipeline.stage(chain.stages[0])
            if not source.kind.is_source or stage not in (None, source.name):
                continue
            for index, name in enumerate(source.instances):
                task = run.deployment.tasks.get(TaskId(chain.name, index))
                if instance in (None, name):
                    self._ended_sources.add((source.name, name))  # also after a restart
                    if task is not None:
                        task.send(EndInput())

    def _task_finished(self, run: RunState, task: TaskId) -> None:
        assert run.deployment is not None
        run.finished.add(task)
        chain = next(c for c in run.deployment.chains if c.name == task.vertex)
        rows = run.deployment.tasks[task].rows_out
        tail = chain.stages[-1]
        if task not in run.told:  # a task restored after its finish ends once more
            run.told.add(task)
            for stage in chain.stages:
                kept = rows if stage == tail else 0
                self._on_event(events.InstanceFinished(stage, chain.instances[task.index], kept))
        if all(TaskId(chain.name, index) in run.finished for index in range(len(chain.instances))):
            latest = run.coordinator.latest_completed
            for stage in (name for name in chain.stages if name not in run.announced):
                run.announced.add(stage)
                total = stage_rows(run.deployment, stage)
                self._on_event(events.StageFinished(stage, total, latest.checkpoint_id if latest else None))

    def _stop_tasks(self, run: RunState, deployment: Deployment) -> None:
        unfinished = [task for task_id, task in deployment.tasks.items() if task_id not in run.finished]
        for task in unfinished:
            task.cancel()
        if unfinished:
            run.spark.sparkContext.cancelAllJobs()
        deadline = time.monotonic() + CANCEL_SECONDS
        for task in deployment.tasks.values():
            if not task.join(max(0.1, deadline - time.monotonic())):
                self._log.warning("Task %s did not stop within %.0f s; it can no longer commit.", task.id, CANCEL_SECONDS)
        for task in deployment.tasks.values():
            for channel in task.output.channels:
                channel.close()

    def _restart(self, run: RunState, error: BaseException) -> BaseException | None:
        """After a failed attempt: wait as the strategy says. Returns the error if there is no other attempt."""
        if isinstance(error, _Canceled | StorageError):
            return error
        cause = error.cause if isinstance(error, TaskFailure) else error
        decision = self._strategy.on_failure(time.monotonic())
        if isinstance(decision, GiveUp):
            failed = JobFailedError(f"Pipeline {self.pipeline.name!r} failed, and {decision.reason}. {cause}")
            failed.__cause__ = cause
            return failed
        self._on_event(events.JobRestarting(decision.attempt + 1, decision.delay, str(cause)))
        until = time.monotonic() + decision.delay
        try:
            self._tell_tasks_are_gone(run, error)
            # A checkpoint whose metadata is being written must be known before the start is chosen.
            while run.coordinator.finalizing is not None or time.monotonic() < until:
                item = self._next(run)
                if not isinstance(item, FromAttempt):
                    self._take(run, item)
            latest = self._latest(run)
        except (_Canceled, StorageError, JobFailedError) as ended:
            return ended
        if latest is None:
            self._handle(run, CoordinatorRestarting())
        else:
            own = latest is not self._restored_at_start
            known = CompletedCheckpoint(latest.plan.checkpoint_id, latest.location) if own else None
            self._handle(run, CoordinatorRestarting(frozenset(latest.plan.finished), known))
        self._restored = latest
        return None

    def _latest(self, run: RunState) -> Restored | None:
        """What to restart from. While storage is away it is waited for, as long as the lease holds."""
        while True:
            try:
                latest = run.writer.latest(self.pipeline, self.options.allow_non_restored_state)
                newest, epoch = run.writer.newest, run.writer.epoch
                return latest if newest is not None and newest.epoch == epoch else self._restored_at_start
            except StorageUnavailable as error:
                self._log.warning("The restart waits for storage: %s", error)
                item = self._next(run)
                if not isinstance(item, FromAttempt):
                    self._take(run, item)

    @property
    def _restored_at_start(self) -> Restored | None:
        return self._start.restored if self._start else None

    def _tell_tasks_are_gone(self, run: RunState, error: BaseException) -> None:
        """No checkpoint is triggered, and none waits for a task, between a failure and the restart."""
        assert run.deployment is not None
        failed = error.task if isinstance(error, TaskFailure) else None
        for task in run.deployment.tasks:
            if task not in run.finished:
                state = TaskState.FAILED if task == failed else TaskState.CANCELED
                self._handle(run, TaskStateChanged(task, state))

    # Beginning and end

    def _clear_work(self, epoch: int, *, own: bool) -> None:
        """Remove this execution's work directories, or those of the dead: never those of a later owner."""
        for folder in self._work.glob("epoch-*"):
            found = int(folder.name.split("-")[1])
            if found == epoch if own else found < epoch:
                shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._work.rmdir()

    def _attempt_settings(self, restored: Restored | None) -> AttemptSettings:
        number = (self._run.attempt % 10_000 if self._run else 0) + 1
        ownership = self.storage.ownership
        assert ownership is not None
        folder = self._work / f"epoch-{ownership.epoch}-attempt-{number}"
        self._clear_work(ownership.epoch, own=True)
        folder.mkdir(parents=True)
        later = restored is not None and has_later(self.storage, restored.plan.checkpoint_id)
        return AttemptSettings(
            folder=folder,
            number=ownership.epoch * 10_000 + number,
            token=f"e{ownership.epoch}a{number}",
            job_id=self._job_id,
            checkpointing=self.options.checkpoints.tasks_wait_for_final_checkpoint,
            max_queued_bytes=self.options.max_queued_bytes,
            take_back_after=restored.plan.checkpoint_id if later and restored else None,
            ended_sources=frozenset(self._ended_sources),
        )

    def _deployer(self, spark: SparkSession) -> Deployer:
        def check_canceled() -> None:
            if self._cancel_asked.is_set():
                raise _Canceled

        return Deployer(self.pipeline, spark, self.storage, self._log, check_canceled)

    def _coordinator(self, deployment: Deployment, start: StartPoint) -> CheckpointCoordinator:
        return CheckpointCoordinator(
            deployment.graph,
            self.options.checkpoints,
            next_checkpoint_id=start.next_checkpoint_id,
            finished=deployment.finished,
            completed=start.retained,
        )

    def _shut_down(self, status: JobStatus) -> None:
        if self._run is None:
            return
        actions = self._run.coordinator.handle(Shutdown(CoordinatorStatus[status]), time.monotonic())
        if any(isinstance(action, DiscardCheckpoint) for action in actions):
            # First it is said that the job is over: without its checkpoints a crash would look like a new start.
            ownership = self.storage.ownership
            assert ownership is not None
            try:
                ownership.end_job(status, keep_checkpoints=False)
            except StorageError as error:
                self._log.warning("The checkpoints of the finished job are kept: %s", error)
                return
        for action in actions:
            if isinstance(action, DiscardCheckpoint | DiscardStates):
                self._perform(self._run, action)

    def _release(self, status: JobStatus | None) -> None:
        ownership = self.storage.ownership
        if ownership is not None:
            self._quietly(lambda: ownership.release(status))
        self.storage.close()

    def _quietly(self, act: Callable[[], object]) -> None:
        """Cleaning up: what fails here is swept up by a later run."""
        try:
            act()
        except StorageError as error:
            self._log.warning("%s: %s", type(error).__name__, error)

    def _check_selection(self, restored: Restored | None) -> None:
        if self._selection is None:
            return
        finished = restored.plan.fully_finished if restored else frozenset()
        missing = [s.name for s in self.pipeline.stages if s.name not in self._selection and s.name not in finished]
        if missing:
            where = f"checkpoint {restored.plan.checkpoint_id}" if restored else "a new start"
            raise SelectionError(
                f"Pipeline {self.pipeline.name!r}: stage(s) {', '.join(map(repr, missing))} were not selected, but have not "
                f"finished in {where}. All stages of a pipeline run at the same time, because checkpoints span them: select "
                "every unfinished stage."
            )

    # Reporting

    def _report(self, attempt: int, event: CoordinatorEvent | TaskFailed) -> None:
        self._queue.put(FromAttempt(attempt, event))

    def _announce_start(self, run: RunState, restored: Restored | None, attempt: int) -> None:
        assert run.deployment is not None
        fully = tuple(s.name for s in self.pipeline.stages if restored and s.name in restored.plan.fully_finished)
        self._on_event(
            events.JobStarted(
                attempt=attempt % 10_000,
                job_id=self._job_id,
                restored_checkpoint=restored.plan.checkpoint_id if restored else None,
                restored_location=restored.location if restored else None,
                finished_stages=fully,
                chains=tuple(chain.stages for chain in run.deployment.chains),
            )
        )
        for stage in fully:
            if stage not in run.announced:
                run.announced.add(stage)
                rows = stage_rows(run.deployment, stage)
                self._on_event(events.StageFinished(stage, rows, restored.plan.checkpoint_id if restored else None, True))

    def _result(self, status: JobStatus, error: BaseException | None) -> JobResult:
        run = self._run
        latest = run.coordinator.latest_completed if run else None
        finished = tuple(s.name for s in self.pipeline.stages if run and s.name in run.announced)
        return JobResult(
            status=status,
            error=error,
            job_id=self._job_id,
            last_checkpoint_id=latest.checkpoint_id if latest else None,
            last_checkpoint_location=latest.location if latest else None,
            finished_stages=finished,
            rows=self.rows(),
        )


class TaskFailure(Exception):
    """A task has failed."""

    def __init__(self, task: TaskId, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.task = task
        self.cause = cause
