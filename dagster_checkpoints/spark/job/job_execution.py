"""One execution of a pipeline in this process: from acquiring it to saying how it ended.

It acquires the pipeline, runs the job, and releases the pipeline. What the job does is decided by `execution.job_machine` and
performed by `job_driver`. It must not know Dagster.
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
from dagster_checkpoints.coordination import CheckpointCoordinator, CheckpointRequested
from dagster_checkpoints.execution.job_events import CancelRequested, DrainRequested, EndSourceRequested, FatalError
from dagster_checkpoints.execution.trace import Recorder
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.job import events
from dagster_checkpoints.spark.job.deployment import Deployment
from dagster_checkpoints.spark.job.events import JobEvent, JobResult, StageProgress
from dagster_checkpoints.spark.job.job_driver import JobDriver
from dagster_checkpoints.spark.job.job_messages import Asked, Item, failure_of
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.job.job_start import JobStart
from dagster_checkpoints.spark.job.request_poller import RequestPoller
from dagster_checkpoints.spark.job.savepoints_in_progress import SavepointsInProgress
from dagster_checkpoints.spark.job.status_reporter import StatusReporter
from dagster_checkpoints.spark.job.trace_file import check_trace_folder, recording
from dagster_checkpoints.spark.session.work_directory import WorkDirectory
from dagster_checkpoints.storage import (
    CheckpointStorage,
    LeaseRenewer,
    Ownership,
    PipelineState,
    StorageError,
    describe_owner,
    mark_descendants,
    this_process,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
        self._driver: JobDriver | None = None
        self._work = WorkDirectory(options.work_directory / pipeline.name)

    # From any thread

    def cancel(self) -> None:
        """End the job CANCELED as soon as possible; its checkpoints are kept."""
        self._cancel_asked.set()
        self._queue.put(CancelRequested())

    def drain(self) -> None:
        """End every source as if its input were exhausted: windows fire, everything is committed, the job is FINISHED.

        Without a savepoint: with the job's end its checkpoints go.
        """
        self._queue.put(DrainRequested())

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
        self._queue.put(EndSourceRequested(stage, instance))

    def trigger_checkpoint(self, request_id: str) -> None:
        """Ask for a checkpoint now."""
        self._queue.put(CheckpointRequested(request_id))

    def rows(self) -> Mapping[str, int]:
        """Rows that each stage has emitted since the job began (0 for a stage inside a chain); empty before the start."""
        return self._driver.reporter.rows() if self._driver is not None else {}

    def progress(self) -> Mapping[str, StageProgress]:
        """How far each stage is now; empty before the start. Any thread."""
        return self._driver.reporter.progress() if self._driver is not None else {}

    @property
    def coordinator(self) -> CheckpointCoordinator | None:
        """The coordinator of the job, to be looked at only; None before the first attempt is deployed."""
        return self._driver.machine.coordinator if self._driver is not None else None

    @property
    def deployment(self) -> Deployment | None:
        """The tasks of the present attempt, to be looked at only; None before the first."""
        return self._driver.reporter.deployment if self._driver is not None else None

    # The job

    def run(self) -> JobResult:
        """Run the pipeline to its end. Returns how it ended; failures are in the result, not raised.

        Raises:
            StorageError: Storage cannot be used, or another run owns the pipeline; nothing was started.
            DagsterCheckpointsError: The checkpoint does not fit, the selection cannot run, or a sink refuses a new start; nothing
                was started.
        """
        began = time.monotonic()
        if self.options.trace is not None:
            check_trace_folder(self.options.trace, self.pipeline.name)
        self.storage.check()
        if (found := self.storage.read_state()) is not None:
            self._starting.check_origin(found)  # before it waits for a lease that may be another pipeline's
        owner = this_process(self.run_id)
        mark_descendants(owner)

        def on_watch(state: PipelineState, seconds: float) -> None:
            self._on_event(events.LeaseWatched(describe_owner(state), seconds))

        ownership = self.storage.acquire(owner, self.options.lease_seconds, on_watch=on_watch)
        took = time.monotonic() - began
        box = RequestBox(self.storage.store, self.storage.layout)
        answers = ThreadPoolExecutor(1, thread_name_prefix="answers")
        status = StatusReporter(self.pipeline, self.storage, self.run_id, self.options.status_seconds, self._log)
        status.report("starting")
        tracing = contextlib.ExitStack()
        recorder = tracing.enter_context(
            recording(self.options.trace, self.pipeline.name, self.run_id, ownership.epoch, self._log)
        )
        self._driver = driver = self._new_driver(status, recorder, before_release=lambda: answers.shutdown(wait=True))
        try:
            with self._owning(ownership, box, answers):
                self._on_event(events.PipelineAcquired(self.storage.url, ownership.epoch, took))
                driver.run()
        except BaseException:
            driver.abandon()
            raise
        finally:
            status.close(driver)
            # A requester that is told that the job has stopped may start it again at once: a new run waits for the release.
            driver.close()
            tracing.close()
            self._work.clear(ownership.epoch, own=True)
            self.storage.close()
        if driver.refused is not None:
            raise driver.refused
        return driver.result()

    def _new_driver(self, status: StatusReporter, recorder: Recorder | None, before_release: Callable[[], None]) -> JobDriver:
        return JobDriver(
            self.pipeline,
            self.storage,
            self.options,
            self._starting,
            self._session,
            self._savepoints,
            self._work,
            self._queue,
            self._cancel_asked,
            status,
            self._on_event,
            before_release,
            self.run_id,
            recorder,
            self._log,
        )

    @contextlib.contextmanager
    def _owning(self, ownership: Ownership, box: RequestBox, answers: ThreadPoolExecutor) -> Iterator[None]:
        """Renew the lease, and look for requests."""

        def answer(final: Answer) -> None:
            answers.submit(self._quietly, lambda: box.answer(final))

        renewer = LeaseRenewer(ownership, lambda error: self._queue.put(FatalError(failure_of(error))))
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

    def _quietly(self, act: Callable[[], object]) -> None:
        """An answer that cannot be written: a later run refuses the request."""
        try:
            act()
        except StorageError as error:
            self._log.warning("%s: %s", type(error).__name__, error)
