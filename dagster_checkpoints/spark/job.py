"""One execution of a pipeline in this process: from acquiring it to saying how it ended.

It decides where to start, deploys, restarts after failures, and releases the pipeline. What happens in between is
`job_loop`'s. It must not know Dagster.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from dagster_checkpoints.coordination import (
    CheckpointCoordinator,
    CompletedCheckpoint,
    DiscardCheckpoint,
    DiscardStates,
    GiveUp,
    JobRestarting,
    Shutdown,
)
from dagster_checkpoints.coordination import JobStatus as CoordinatorStatus
from dagster_checkpoints.errors import repeats_by_nature
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.sinks import SinkError
from dagster_checkpoints.spark import events
from dagster_checkpoints.spark.attempts import Attempts
from dagster_checkpoints.spark.checkpointing import CheckpointWriter
from dagster_checkpoints.spark.control import ControlRequests, RequestPoller
from dagster_checkpoints.spark.deployment import Deployment, Restored
from dagster_checkpoints.spark.errors import JobFailedError, NothingToRestoreError, SelectionError, StageError, StopFailedError
from dagster_checkpoints.spark.events import JobEvent, JobResult, JobStatus, StageProgress
from dagster_checkpoints.spark.executor_check import ExecutorCheck
from dagster_checkpoints.spark.job_loop import Canceled, JobLoop, NotDeployed, TaskFailure
from dagster_checkpoints.spark.job_options import JobOptions
from dagster_checkpoints.spark.mail import AskCheckpoint, Asked, Cancel, EndSources, Item, OwnershipIsLost
from dagster_checkpoints.spark.reporting import stage_rows
from dagster_checkpoints.spark.restoring import StartPoint, choose_start, completed_checkpoint, is_repeated_start
from dagster_checkpoints.spark.savepoints import SavepointsInProgress
from dagster_checkpoints.spark.session import check_session
from dagster_checkpoints.spark.sinking import check_new_start
from dagster_checkpoints.spark.status import StatusReporter
from dagster_checkpoints.spark.work_directory import WorkDirectory, check_work_directory_named, is_local
from dagster_checkpoints.storage import (
    Answer,
    CheckpointStorage,
    ControlRequest,
    CorruptStateFile,
    LeaseRenewer,
    MissingStateFile,
    Ownership,
    PipelineState,
    RequestBox,
    StorageError,
    StorageUnavailable,
    check_origin,
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
        self._selection = selection
        self._strategy = options.restart.fresh()
        self._unusable: list[str] = []
        self._restored: Restored | None = None
        self._log = log or logging.getLogger("dagster_checkpoints")
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._cancel_asked = threading.Event()
        self._savepoints = SavepointsInProgress(storage)
        self._control = ControlRequests(storage, self._savepoints)
        self._run: JobLoop | None = None
        self._draining = False
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
        self._draining = True
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
            self._check_origin(found)  # before it waits for a lease that may be another pipeline's
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
                self._check_origin(ownership.previous)
                self._follow_earlier_runs(ownership.previous)
                start = choose_start(self.pipeline, self.storage, self.options)
                self._check_selection(start.restored)
                self._tell_start(start.restored)
                if start.restored is None:
                    check_new_start(self.pipeline, ownership)
                status = "FAILED"
                error = self._execute(start)
                status = "FINISHED" if error is None else "CANCELED" if isinstance(error, Canceled) else "FAILED"
                return self._result(status, None if isinstance(error, Canceled) else error)
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

    def _check_origin(self, found: PipelineState) -> None:
        if not self.options.allow_moved_pipeline:
            check_origin(self.pipeline.name, self.storage.url, found.origin, self.options.origin)

    def _follow_earlier_runs(self, found: PipelineState) -> None:
        """A retry or re-execution goes on with what the run that it repeats has done; another Dagster's runs are only named."""
        if found.origin.instance and self.options.origin.instance not in ("", found.origin.instance):
            self._log.warning(
                "Pipeline %r was last run by another Dagster instance (%s). If that instance still runs it, give each of them "
                "a storage of its own.",
                self.pipeline.name,
                found.origin.instance,
            )
        asked = self.options.restore_from
        if is_repeated_start(asked, self.options.earlier_runs, found):
            self._log.info(
                "The run configuration says restore_from: %r. Run %s, which this run repeats, has begun job %d there; so this "
                "run continues from the latest checkpoint. To begin at %r again, launch a new run instead of a retry or "
                "re-execution.",
                asked,
                found.job.begun_by,
                found.job.job_id,
                asked,
            )
            self.options = replace(self.options, restore_from="latest")

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

    def _begin(self, start: StartPoint) -> None:
        """Say that the job runs from there: only once all of its state is here, or a restore that fails would leave behind
        that the pipeline goes on from what cannot be restored."""
        ownership = self.storage.ownership
        assert ownership is not None
        named = self.options.restore_from != "latest"
        self._job_id = ownership.begin_job(resume=start.resume, restored=start.pointer, named=named, origin=self.options.origin)
        self._start = start
        if start.claimed and start.pointer is not None:
            ownership.claim(start.pointer)

    def _older(self, start: StartPoint, error: StorageError) -> StartPoint:
        """A state file of the chosen checkpoint is corrupt or gone: go on from an older one, if the user allows it."""
        if not self.options.allow_older_checkpoint or start.restored is None:
            raise error
        self._log.warning("Passing over checkpoint %s: %s", start.restored.location, error)
        self._unusable.append(start.restored.location)
        try:
            return choose_start(self.pipeline, self.storage, self.options, self._unusable)
        except NothingToRestoreError:
            raise error from None

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
            spark = self._start_spark()
            check_session(spark)
            self._check_work_directory(spark, ownership.epoch)
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
            restored = start.restored
            while True:
                if self._start is None:
                    self._job_id = ownership.job_id if start.resume else ownership.job_id + 1
                began = time.monotonic()
                self._tell_building(attempts.next_in_run, restored)
                try:
                    deployment = attempts.deploy(restored, self._job_id, self._run.ended_sources if self._run else ())
                except (CorruptStateFile, MissingStateFile) as unusable:
                    if self._run is not None:
                        raise
                    start = self._older(start, unusable)
                    restored = start.restored
                    continue
                except (StageError, StorageUnavailable) as broken:
                    if self._run is None:
                        raise
                    error: BaseException | None = NotDeployed(broken)  # a restart: another one may be
                else:
                    if self._run is None:
                        self._begin(start)
                        self._run = self._loop(spark, deployment, start, io)
                    took = time.monotonic() - began
                    error = self._one_attempt(self._run, attempts.number, deployment, restored, took)
                if error is None:
                    status = "FINISHED"
                    return None
                again = self._restart(self._run, error)
                if again is not None:
                    status = "CANCELED" if isinstance(again, Canceled) else "FAILED"
                    return again
                restored = self._restored
        except Canceled as canceled:
            status = "CANCELED"
            return canceled
        except Exception as error:
            return error
        finally:
            self._shut_down(status)
            uploads.shutdown(wait=True, cancel_futures=True)
            io.shutdown(wait=True)

    def _start_spark(self) -> SparkSession:
        began = time.monotonic()
        self._on_event(events.SparkStarting())
        spark = self._session()
        context = spark.sparkContext
        self._on_event(
            events.SparkStarted(
                version=spark.version,
                master=context.master or "",
                application=context.applicationId or "",
                web_ui=context.uiWebUrl or None,
                seconds=time.monotonic() - began,
            )
        )
        return spark

    def _tell_start(self, restored: Restored | None) -> None:
        self._on_event(
            events.StartChosen(
                restored_checkpoint=restored.plan.checkpoint_id if restored else None,
                restored_location=restored.location if restored else None,
                finished_stages=self._finished_in(restored),
            )
        )

    def _tell_building(self, attempt: int, restored: Restored | None) -> None:
        finished = self._finished_in(restored)
        self._on_event(
            events.AttemptBuilding(
                attempt=attempt,
                stages=tuple(s.name for s in self.pipeline.stages if s.name not in finished),
                restored_checkpoint=restored.plan.checkpoint_id if restored else None,
            )
        )

    def _finished_in(self, restored: Restored | None) -> tuple[str, ...]:
        """The stages that had finished in what is restored, in topological order."""
        return tuple(s.name for s in self.pipeline.stages if restored and s.name in restored.plan.fully_finished)

    def _check_work_directory(self, spark: SparkSession, epoch: int) -> None:
        """Refuse to start where executors would write elsewhere than the driver reads."""
        master = str(spark.sparkContext.master)  # of the session in fact: one that was there is joined
        check_work_directory_named(master, named=self.options.work_directory_named)
        if not is_local(master):
            began = time.monotonic()
            executors = ExecutorCheck(spark.sparkContext, self._work.proof(epoch), self._check_canceled, self._log).run()
            self._log.info("%d executor(s) share the work directory (%.1f s).", executors, time.monotonic() - began)

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

    def _restart(self, loop: JobLoop, error: BaseException) -> BaseException | None:
        """After a failed attempt: wait as the strategy says. Returns the error if there is no other attempt."""
        if isinstance(error, Canceled | StorageError):
            return error
        cause = error.cause if isinstance(error, TaskFailure | NotDeployed) else error
        loop.restarting = True
        self._control.attempt_failed(str(cause))
        if repeats_by_nature(cause):
            return self._failed("another attempt would fail in the same way", cause)
        decision = self._strategy.on_failure(time.monotonic())
        if isinstance(decision, GiveUp):
            return self._failed(decision.reason, cause)
        self._on_event(events.JobRestarting(decision.attempt + 1, decision.delay, str(cause)))
        self._status.report("restarting", loop)
        until = time.monotonic() + decision.delay
        try:
            loop.tasks_are_gone(error)
            # A checkpoint whose metadata is being written must be known before the start is chosen.
            while loop.coordinator.finalizing is not None or time.monotonic() < until:
                loop.take(loop.next())
            self._control.attempt_failed(str(cause))
            latest = self._latest(loop)
        except (Canceled, StorageError, JobFailedError) as ended:
            return ended
        if latest is None:
            loop.handle(JobRestarting())
        else:
            # It may be news: one that has landed although nobody heard of it.
            newest = loop.writer.newest if latest is not self._restored_at_start else None
            known = completed_checkpoint(newest) if newest is not None else None
            loop.handle(JobRestarting(frozenset(latest.plan.finished), known))
        if self._control.stop is None:
            loop.drain_if_wanted()
        self._restored = latest
        return None

    def _failed(self, because: str, cause: BaseException) -> JobFailedError:
        failed = JobFailedError(f"Pipeline {self.pipeline.name!r} failed, and {because}. {cause}")
        failed.__cause__ = cause
        return failed

    def _latest(self, loop: JobLoop) -> Restored | None:
        """What to restart from. While storage is away it is waited for, as long as the lease holds."""
        while True:
            try:
                latest = loop.writer.latest(self.pipeline, self.options.allow_non_restored_state)
                newest, epoch = loop.writer.newest, loop.writer.epoch
                return latest if newest is not None and newest.epoch == epoch else self._restored_at_start
            except StorageUnavailable as error:
                self._log.warning("The restart waits for storage: %s", error)
                loop.take(loop.next())

    @property
    def _restored_at_start(self) -> Restored | None:
        return self._start.restored if self._start else None

    # Beginning and end

    def _coordinator(self, deployment: Deployment, start: StartPoint) -> CheckpointCoordinator:
        return CheckpointCoordinator(
            deployment.graph,
            self.options.checkpoints,
            next_checkpoint_id=start.next_checkpoint_id,
            finished=deployment.finished,
            completed=start.retained,
            restored=next((c for c in start.retained if start.pointer and c.location == start.pointer.location), None),
        )

    @property
    def _ended_by(self) -> Literal["", "end_of_data", "drain", "suspend"]:
        """In what way a FINISHED job has come to its end."""
        stopped = self._control.stopped
        if stopped is not None:
            return "drain" if stopped.drain else "suspend"
        return "drain" if self._draining else "end_of_data"

    def _shut_down(self, status: JobStatus) -> None:
        if self._run is None:
            return
        actions = self._run.coordinator.handle(Shutdown(CoordinatorStatus[status]), time.monotonic())
        if status == "FINISHED":
            # First it is said that the job is over: without its checkpoints a crash would look like a new start.
            ownership = self.storage.ownership
            assert ownership is not None
            keep = not any(isinstance(action, DiscardCheckpoint) for action in actions)
            try:
                stopped = self._control.stopped
                asked_by: Literal["", "request", "termination"] = ""
                if stopped is not None:
                    asked_by = "termination" if stopped.termination else "request"
                dropped = ownership.end_job(status, keep_checkpoints=keep, ended_by=self._ended_by, stop_asked_by=asked_by)
            except StorageError as error:
                self._log.warning("The checkpoints of the finished job are kept: %s", error)
                return
            known = {action.checkpoint.location for action in actions if isinstance(action, DiscardCheckpoint)}
            unknown = [pointer for pointer in dropped if pointer.location not in known]  # of earlier jobs
            actions = [*actions, *(DiscardCheckpoint(CompletedCheckpoint(p.checkpoint_id, p.location)) for p in unknown)]
        for action in actions:
            if isinstance(action, DiscardCheckpoint | DiscardStates):
                self._run.perform(action)

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

    def _result(self, status: JobStatus, error: BaseException | None) -> JobResult:
        loop = self._run
        latest = loop.coordinator.latest_completed if loop else None
        stopped = self._control.stopped
        return JobResult(
            status=status,
            error=error,
            job_id=self._job_id,
            last_checkpoint_id=latest.checkpoint_id if latest else None,
            last_checkpoint_location=latest.location if latest else None,
            finished_stages=tuple(s.name for s in self.pipeline.stages if loop and s.name in loop.announced),
            rows=self.rows(),
            ended_by=self._ended_by if status == "FINISHED" else "",
            savepoint=self.storage.url_of(stopped.location) if stopped else None,
        )
