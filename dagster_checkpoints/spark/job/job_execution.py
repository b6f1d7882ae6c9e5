"""One execution of a pipeline in this process: acquires the pipeline, runs the job, and releases the pipeline.

`execution.job_machine` decides what the job does, `job_driver` performs it. It must not know Dagster.
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

from dagster_checkpoints.control.metrics import PipelineMetrics
from dagster_checkpoints.control.request_box import RequestBox
from dagster_checkpoints.control.requests import NO_RUNNING_PIPELINE, Answer, ControlRequest, failure
from dagster_checkpoints.coordination.coordinator import CheckpointCoordinator
from dagster_checkpoints.coordination.retention import JobStatus
from dagster_checkpoints.errors import StorageError
from dagster_checkpoints.execution.job_events import CancelRequested, DrainRequested, EndSourceRequested, FatalError
from dagster_checkpoints.execution.pipeline_state import PipelineState, describe_owner
from dagster_checkpoints.execution.start_point import has_ended_before
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.job import events
from dagster_checkpoints.spark.job.deployment import Deployment
from dagster_checkpoints.spark.job.events import JobEvent, JobResult, StageProgress
from dagster_checkpoints.spark.job.job_driver import JobDriver
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.job.job_start import JobStart
from dagster_checkpoints.spark.job.requests import RequestPoller
from dagster_checkpoints.spark.job.runtime import Item, QueuedRequest, Runtime, failure_of
from dagster_checkpoints.spark.job.savepoints_in_progress import SavepointsInProgress
from dagster_checkpoints.spark.job.status_reporter import StatusReporter
from dagster_checkpoints.spark.job.trace_file import check_trace_folder, recording
from dagster_checkpoints.spark.session.session_life import EarlySession
from dagster_checkpoints.spark.session.work_directory import WorkDirectory
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.ownership import LeaseRenewer, Ownership
from dagster_checkpoints.storage.processes import mark_descendants, this_process

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SILENT_SHARE = 0.5
"""The share of another owner's lease after which Spark is started: an owner that is alive renews within a third."""


class _CanceledInWatch(Exception):
    """The job was cancelled while the run watched the lease of another owner."""


class JobExecution:
    """One execution of a pipeline; `run` once, on a worker thread.

    Args:
        pipeline: The pipeline to run.
        storage: The storage of its checkpoints.
        options: The settings of the execution.
        session: Creates or joins the Spark session; called on the thread of `run`, when it owns the pipeline, or on another
            thread while it waits for an earlier owner's lease.
        on_event: Receives all events, on the thread of `run`.
        run_id: Id of the run, for display: Dagster's, or another name that a user recognises.
        log: The logger of the stages' `context.log`; default: the package's.
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
        log: logging.Logger | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.storage = storage
        self.options = options
        self.run_id = run_id
        self._session = EarlySession(session)
        self._on_event = on_event
        self._log = log or logging.getLogger("dagster_checkpoints")
        self._starting = JobStart(pipeline, storage, options, on_event, self._log)
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._cancel_asked = threading.Event()
        self._savepoints = SavepointsInProgress(storage, pipeline.stages)
        self._driver: JobDriver | None = None

    # From any thread

    def cancel(self, error: Exception | None = None) -> None:
        """End the job as soon as possible; its checkpoints are kept. With the error of the run around it, it has failed."""
        self._cancel_asked.set()
        self._queue.put(CancelRequested() if error is None else FatalError(failure_of(error)))

    def drain(self) -> None:
        """End every source as if its input were exhausted: windows fire, everything is committed, the job is FINISHED.

        Bounded sources are read to their end first. This takes no savepoint, and the job's checkpoints are deleted at its end.
        """
        self._queue.put(DrainRequested())

    def ask(self, request: ControlRequest, respond: Callable[[Answer], None], *, termination: bool = False) -> None:
        """Hand in a control request without storage.

        Args:
            request: The request.
            respond: Receives the final answer, once, on another thread; none if the job has ended before it takes the request.
            termination: Whether this process requests a stop because it is being terminated: another run shall continue the job.
                It fails at once if the process does not own the pipeline yet, for example because it waits for another lease.
        """
        if termination and self._driver is None:
            text = "the run did not own the pipeline yet."
            return respond(failure(request.request_id, NO_RUNNING_PIPELINE, text))
        self._queue.put(QueuedRequest(request, respond, time.monotonic(), termination))

    def end_source(self, stage: str, instance: str | None = None) -> None:
        """End one source, or one instance of it.

        Raises:
            KeyError: The pipeline has no such source, or the source no such instance.
        """
        source = self.pipeline.stage(stage)
        if not source.kind.is_source or (instance is not None and instance not in source.instances):
            raise KeyError(f"{stage!r} (instance {instance!r}) is no source of pipeline {self.pipeline.name!r}")
        self._queue.put(EndSourceRequested(stage, instance))

    def rows(self) -> Mapping[str, int]:
        """The number of rows that each stage has emitted since the job began (0 inside a chain); empty before the start."""
        return self._driver.reporter.rows() if self._driver is not None else {}

    def progress(self) -> Mapping[str, StageProgress]:
        """The current progress of each stage; empty before the start. For any thread."""
        return self._driver.reporter.progress() if self._driver is not None else {}

    @property
    def coordinator(self) -> CheckpointCoordinator | None:
        """The coordinator of the job, for reading only; None before the first attempt is deployed."""
        return self._driver.machine.coordinator if self._driver is not None else None

    @property
    def deployment(self) -> Deployment | None:
        """The tasks of the current attempt, for reading only; None before the first attempt."""
        return self._driver.reporter.deployment if self._driver is not None else None

    # The job

    def run(self) -> JobResult:
        """Run the pipeline to its end. Failures of the job are in the result, not raised.

        Raises:
            StorageError: Storage cannot be used, or another run owns the pipeline; nothing was started.
            DagsterCheckpointsError: The checkpoint does not fit, the selection cannot run, or a sink refuses a new start; nothing
                was started.
        """
        began = time.monotonic()
        if self.options.trace is not None:
            check_trace_folder(self.options.trace, self.pipeline.name)
        self.storage.check()
        if (state := self.storage.read_state()) is not None:
            self._starting.check_origin(state)  # before this run waits for a lease that may be another pipeline's
        owner = this_process(self.run_id)
        mark_descendants(owner)

        def on_watch(state: PipelineState, seconds: float) -> None:
            self._on_event(events.LeaseWatched(describe_owner(state), seconds))
            if seconds > 0:
                self._session.create_after(seconds * _SILENT_SHARE)

        metrics = PipelineMetrics(self.pipeline.name, self.run_id) if self.options.metrics else None
        try:
            ownership = self.storage.acquire(
                owner,
                self.options.lease_seconds,
                start_named=self.options.restore_from != "latest",
                on_watch=on_watch,
                sleep=self._sleep_unless_canceled,
            )
        except BaseException as error:
            self._session.close()
            if metrics is not None:
                metrics.close()
            if not isinstance(error, _CanceledInWatch):
                raise
            self.storage.close()
            return JobResult(JobStatus.CANCELED, None, 0, None, None, (), {})
        took = time.monotonic() - began
        if has_ended_before(self.options.retried_runs, ownership.previous):
            self._session.close()
            if metrics is not None:
                metrics.close()
            return self._ended_before(ownership)
        box = RequestBox(self.storage.store, self.storage.layout)
        answers = ThreadPoolExecutor(1, thread_name_prefix="answers")
        status = StatusReporter(self.pipeline, self.storage, self.run_id, self.options, self._log, metrics)
        status.report("starting")
        tracing = contextlib.ExitStack()
        recorder = tracing.enter_context(
            recording(self.options.trace, self.pipeline.name, self.run_id, ownership.epoch, self._log)
        )

        def before_release() -> None:
            status.close(driver)  # a requester that waits for the answer does not wait for this
            answers.shutdown(wait=True)

        name = self.pipeline.name
        directories = self.options.work_directory / name, self.options.scratch_directory / name
        work = WorkDirectory(*directories, ownership.history)
        runtime = Runtime(
            pipeline=self.pipeline,
            storage=self.storage,
            options=self.options,
            savepoints=self._savepoints,
            work=work,
            items=self._queue,
            canceled=self._cancel_asked,
            on_event=status.observing(self._on_event),
            run_id=self.run_id,
            recorder=recorder,
            log=self._log,
        )
        self._driver = driver = JobDriver(runtime, self._starting, self._session, status, before_release)
        try:
            with self._owning(ownership, box, answers):
                self._on_event(events.PipelineAcquired(self.storage.url, ownership.epoch, took))
                driver.run()
        except BaseException:
            driver.abandon()
            raise
        finally:
            # A requester that receives the answer of a stop may start the job again at once: a new run waits for the release.
            driver.close()
            self._session.close()
            tracing.close()
            work.clear(ownership.epoch, own=True)
            self.storage.close()
        if driver.refused is not None:
            raise driver.refused
        return driver.result()

    def _sleep_unless_canceled(self, seconds: float) -> None:
        if self._cancel_asked.wait(seconds):
            raise _CanceledInWatch

    def _ended_before(self, ownership: Ownership) -> JobResult:
        """Report the end of the job that an earlier run has brought to its end, and release the pipeline."""
        with contextlib.suppress(StorageError):  # the lease then expires by itself
            ownership.release()
        self.storage.close()
        job = ownership.previous.job
        suspended = self.storage.url_of(job.savepoint) if job.ended_by == "suspend" else None
        stages = () if suspended is not None else tuple(stage.name for stage in self.pipeline.stages)
        self._on_event(events.JobEndedBefore(job.job_id, job.run_id, suspended))
        for stage in stages:
            self._on_event(events.StageFinished(stage, None, None, restored=True))
        return JobResult(JobStatus.FINISHED, None, job.job_id, None, None, stages, {}, job.ended_by, suspended)

    @contextlib.contextmanager
    def _owning(self, ownership: Ownership, box: RequestBox, answers: ThreadPoolExecutor) -> Iterator[None]:
        """Renew the lease, and poll for requests, while the block runs."""

        def answer(final: Answer) -> None:
            answers.submit(poller.write, final)

        def lost(error: Exception) -> None:
            self._log.warning("%s: %s", type(error).__name__, error)  # the run's end may have to wait for the storage
            self._queue.put(FatalError(failure_of(error)))

        renewer = LeaseRenewer(ownership, lost)
        seconds = self.options.request_poll_seconds
        seconds = self.storage.store.poll_seconds if seconds is None else seconds
        poller = RequestPoller(box, ownership.epoch, self._savepoints, self._queue.put, answer, seconds, self._log)
        renewer.start()
        poller.start()
        try:
            yield
        finally:
            poller.stop(5.0)
            answers.submit(poller.write_again)
            renewer.stop(5.0)
