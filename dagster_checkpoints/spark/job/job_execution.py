"""One execution of a pipeline in this process: from acquiring it to saying how it ended.

It acquires the pipeline, deploys one attempt after the other, and releases the pipeline. Where a job starts is decided by
`job_start`, whether it restarts by `job_restart`; `job_end` ends it, and what happens in between is `job_loop`'s. It must not
know Dagster.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from dagster_checkpoints.control import Answer, ControlRequest, RequestBox
from dagster_checkpoints.coordination import CheckpointCoordinator, DiscardCheckpoint
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.sinks import SinkError
from dagster_checkpoints.spark.errors import JobFailedError, StageError, StopFailedError
from dagster_checkpoints.spark.job import events
from dagster_checkpoints.spark.job.attempts import Attempts
from dagster_checkpoints.spark.job.checkpointing import CheckpointWriter
from dagster_checkpoints.spark.job.control_requests import ControlRequests
from dagster_checkpoints.spark.job.deployment import Deployment
from dagster_checkpoints.spark.job.events import JobEvent, JobResult, JobStatus, StageProgress
from dagster_checkpoints.spark.job.job_end import JobEnd
from dagster_checkpoints.spark.job.job_loop import Canceled, JobLoop, NotDeployed, TaskFailure
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.job.job_restart import JobRestart
from dagster_checkpoints.spark.job.job_start import JobStart
from dagster_checkpoints.spark.job.reporting import stage_rows
from dagster_checkpoints.spark.job.request_poller import RequestPoller
from dagster_checkpoints.spark.job.restoring import StartPoint
from dagster_checkpoints.spark.job.savepoints_in_progress import SavepointsInProgress
from dagster_checkpoints.spark.job.spark_start import prove_work_directory, start_spark
from dagster_checkpoints.spark.job.status_reporter import StatusReporter
from dagster_checkpoints.spark.session.spark_session import check_session
from dagster_checkpoints.spark.session.work_directory import WorkDirectory
from dagster_checkpoints.spark.snapshots.restored_state import Restored
from dagster_checkpoints.spark.tasks.messages import AskCheckpoint, Asked, Cancel, EndSources, Item, OwnershipIsLost
from dagster_checkpoints.storage import (
    CheckpointStorage,
    CorruptStateFile,
    LeaseRenewer,
    MissingStateFile,
    Ownership,
    PipelineState,
    StorageError,
    StorageUnavailable,
    describe_owner,
    mark_descendants,
    this_process,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CANCEL_SECONDS = 30.0


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
        self._log = log or logging.getLogger("dagster_checkpoints")
        self._starting = JobStart(pipeline, storage, options, selection, on_event, self._log)
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._cancel_asked = threading.Event()
        self._savepoints = SavepointsInProgress(storage)
        self._control = ControlRequests(storage, self._savepoints)
        self._end = JobEnd(pipeline, storage, self._control, self._log)
        self._run: JobLoop | None = None
        self._job_id = 0
        self._start: StartPoint | None = None
        self._work = WorkDirectory(options.work_directory / pipeline.name)

    # From any thread

    def cancel(self) -> None:
        """End the job CANCELED as soon as possible; its checkpoints are kept."""
        self._cancel_asked.set()
        self._queue.put(Cancel())

    def drain(self) -> None:
        """End every source as if its input were exhausted: windows fire, everything is committed, the job is FINISHED.

        Without a savepoint: with the job's end its checkpoints go.
        """
        self._end.drained = True
        self._queue.put(EndSources(None, None))

    def ask(self, request: ControlRequest, respond: Callable[[Answer], None], *, termination: bool = False) -> None:
        """Ask for something as others do through storage.

        Args:
            request: What is asked for.
            respond: Receives the answer, once, on some thread.
            termination: This process asks for a stop because it is being terminated: the job is meant to go on in another run.
        """
        self._queue.put(Asked(request, respond, time.monotonic(), termination))

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

    def progress(self) -> Mapping[str, StageProgress]:
        """How far each stage is now; empty before the start. Any thread."""
        return self._run.progress() if self._run is not None else {}

    # The job

    def run(self) -> JobResult:
        """Run the pipeline to its end. Returns how it ended; failures are in the result, not raised.

        Raises:
            StorageError: Storage cannot be used, or another run owns the pipeline; nothing was started.
            DagsterCheckpointsError: The checkpoint does not fit, the selection cannot run, or a sink refuses a new start; nothing
                was started.
        """
        began = time.monotonic()
        self.storage.check()
        if (found := self.storage.read_state()) is not None:
            self._starting.check_origin(found)  # before it waits for a lease that may be another pipeline's
        owner = this_process(self.run_id)
        mark_descendants(owner)

        def on_watch(state: PipelineState, seconds: float) -> None:
            self._on_event(events.LeaseWatched(describe_owner(state), seconds))

        ownership = self.storage.acquire(owner, self.options.lease_seconds, on_watch=on_watch)
        took = time.monotonic() - began
        status: JobStatus | None = None
        error: BaseException | None = None
        box = RequestBox(self.storage.store, self.storage.layout)
        answers = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._status = StatusReporter(self.pipeline, self.storage, self.run_id, self.options.status_seconds, self._log)
        self._status.report("starting")
        try:
            with self._owning(ownership, box, answers):
                self._on_event(events.PipelineAcquired(self.storage.url, ownership.epoch, took))
                start = self._starting.choose(ownership)
                status = "FAILED"
                error = self._execute(start)
                status = "FINISHED" if error is None else "CANCELED" if isinstance(error, Canceled) else "FAILED"
                failure = None if isinstance(error, Canceled) else error
                return self._end.result(self._run, status, failure, self._job_id, self.rows())
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._status.close(self._run)
            # Before the release: who asks takes a pipeline that is released, and has not answered, for one that never will.
            # Whoever is told that it has stopped may start it again at once: a new run waits for the release.
            self._control.over(status or "before it began", error, self._not_taken())
            answers.shutdown(wait=True)
            self._release(status if self._start is not None else None)
            self._work.clear(ownership.epoch, own=True)
            self.storage.close()

    @contextlib.contextmanager
    def _owning(self, ownership: Ownership, box: RequestBox, answers: ThreadPoolExecutor) -> Iterator[None]:
        """Renew the lease, and look for requests."""

        def answer(final: Answer) -> None:
            answers.submit(self._quietly, lambda: box.answer(final))

        renewer = LeaseRenewer(ownership, lambda error: self._queue.put(OwnershipIsLost(error)))
        poller = RequestPoller(
            box, ownership.epoch, self._savepoints, self._queue.put, answer, self.options.request_poll_seconds, self._log
        )
        renewer.start()
        poller.start()
        try:
            yield
        finally:
            poller.stop(5.0)
            renewer.stop(5.0)

    def _not_taken(self) -> list[Asked]:
        """Requests that came when nobody looked into the queue any more."""
        rest = []
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if isinstance(item, Asked):
                    rest.append(item)
        return rest

    def _execute(self, start: StartPoint) -> BaseException | None:
        """All attempts. Returns what the job failed or was cancelled with; None if it has FINISHED."""
        ownership = self.storage.ownership
        assert ownership is not None
        self._work.clear(ownership.epoch, own=False)
        uploads = ThreadPoolExecutor(self.options.upload_threads, thread_name_prefix="snapshot")
        io = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-io")
        status: JobStatus = "FAILED"
        try:
            io.submit(self._quietly, lambda: self._sweep(start))
            spark = start_spark(self._session, self._on_event)
            check_session(spark)
            prove_work_directory(
                spark,
                self._work,
                ownership.epoch,
                named=self.options.work_directory_named,
                check_canceled=self._check_canceled,
                log=self._log,
            )
            attempts = Attempts(
                self.pipeline,
                spark,
                self.storage,
                self.options,
                self._savepoints,
                self._work,
                self._queue,
                uploads,
                self._check_canceled,
                self._log,
            )
            restarts = JobRestart(
                self.pipeline,
                self.options.restart.fresh(),
                self.options.allow_non_restored_state,
                self._control,
                self._status,
                self._on_event,
                self._log,
            )
            restored = start.restored
            while True:
                if self._start is None:
                    self._job_id = ownership.job_id if start.resume else ownership.job_id + 1
                began = time.monotonic()
                self._starting.tell_building(attempts.next_in_run, restored)
                try:
                    deployment = attempts.deploy(restored, self._job_id, self._run.ended_sources if self._run else ())
                except (CorruptStateFile, MissingStateFile) as unusable:
                    if self._run is not None:
                        raise
                    start = self._starting.choose_older(start, unusable)
                    restored = start.restored
                    continue
                except (StageError, StorageUnavailable) as broken:
                    if self._run is None:
                        raise
                    error: BaseException | None = NotDeployed(broken)  # a restart: another one may be
                else:
                    if self._run is None:
                        self._job_id = self._starting.begin(start)
                        self._start = start  # it has begun, whatever becomes of the claim
                        self._starting.claim(start)
                        self._run = self._loop(spark, deployment, start, io)
                    took = time.monotonic() - began
                    error = self._one_attempt(self._run, attempts.number, deployment, restored, took)
                if error is None:
                    status = "FINISHED"
                    return None
                again = restarts.prepare(self._run, error, self._start.restored if self._start else None)
                if again is not None:
                    status = "CANCELED" if isinstance(again, Canceled) else "FAILED"
                    return again
                restored = restarts.restored
        except Canceled as canceled:
            status = "CANCELED"
            return canceled
        except Exception as error:
            return error
        finally:
            if self._run is not None:
                self._end.shut_down(self._run, status)
            uploads.shutdown(wait=True, cancel_futures=True)
            io.shutdown(wait=True)

    def _check_canceled(self) -> None:
        if self._cancel_asked.is_set():
            raise Canceled

    def _sweep(self, start: StartPoint) -> None:
        """Delete what killed runs have left behind."""
        self.storage.sweep_savepoints()
        self.storage.sweep_metadata()
        if start.sweep:
            self.storage.delete_unreferenced()

    def _loop(self, spark: SparkSession, deployment: Deployment, start: StartPoint, io: ThreadPoolExecutor) -> JobLoop:
        writer = CheckpointWriter(self.pipeline, self.storage, self._savepoints, self._job_id, self.run_id, spark.version)
        loop = JobLoop(
            self.pipeline,
            spark,
            self._coordinator(deployment, start),
            writer,
            self._control,
            self._savepoints,
            self._queue,
            io,
            self._on_event,
            self._log,
        )
        loop.passed_over = tuple(DiscardCheckpoint(checkpoint) for checkpoint in start.passed_over)
        return loop

    def _one_attempt(
        self, loop: JobLoop, number: int, deployment: Deployment, restored: Restored | None, seconds: float
    ) -> BaseException | None:
        """Run one deployment, which took `seconds` to build.

        Returns None when every task has finished, else what ended it; its tasks are stopped.
        """
        loop.begin_attempt(deployment, number, restored, seconds)
        try:
            self._confirm_ownership(loop)
            deployment.settle_finished_sinks()
            for task in deployment.tasks.values():
                task.start()
            while not loop.all_finished:
                loop.turn()
                self._status.report("stopping" if self._control.stop else "running", loop)
            while loop.coordinator.finalizing is not None:
                loop.turn()  # what is just being written has an outcome, and somebody waits for it
            self._control.all_finished()
            return None
        except (Canceled, TaskFailure, JobFailedError, StopFailedError, StorageError, SinkError) as error:
            return error
        finally:
            self._stop_tasks(loop, deployment)

    def _confirm_ownership(self, loop: JobLoop) -> None:
        """Building a deployment takes a while: before it touches the sinks it must be known that nobody else does by now."""
        ownership = self.storage.ownership
        assert ownership is not None
        while not ownership.renew():
            self._log.warning("The start waits for storage to confirm that this run owns the pipeline.")
            loop.take(loop.next())

    def _stop_tasks(self, loop: JobLoop, deployment: Deployment) -> None:
        unfinished = [task for task_id, task in deployment.tasks.items() if task_id not in loop.finished]
        for task in unfinished:
            task.cancel()
        if unfinished:
            loop.spark.sparkContext.cancelAllJobs()
        deadline = time.monotonic() + CANCEL_SECONDS
        for task in deployment.tasks.values():
            if not task.join(max(0.1, deadline - time.monotonic())):
                self._log.warning("Task %s did not stop within %.0f s; it can no longer commit.", task.id, CANCEL_SECONDS)
        for task in deployment.tasks.values():
            for channel in task.output.channels:
                channel.close()

    def _coordinator(self, deployment: Deployment, start: StartPoint) -> CheckpointCoordinator:
        return CheckpointCoordinator(
            deployment.graph,
            self.options.checkpoints,
            next_checkpoint_id=start.next_checkpoint_id,
            finished=deployment.finished,
            completed=start.retained,
            restored=next((c for c in start.retained if start.pointer and c.location == start.pointer.location), None),
        )

    def _release(self, status: JobStatus | None) -> None:
        ownership = self.storage.ownership
        if ownership is not None:
            self._quietly(lambda: ownership.release(status))

    def _quietly(self, act: Callable[[], object]) -> None:
        """Cleaning up: what fails here is swept up by a later run."""
        try:
            act()
        except StorageError as error:
            self._log.warning("%s: %s", type(error).__name__, error)
