"""Writes the pipeline's status to storage every few seconds, for displays and sensors in other processes, and its history.

A separate thread writes; while it writes one version, another is created only for a change of the phase. It must not change
the job, nor let it fail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Protocol

import msgspec

from dagster_checkpoints.control.clocks import CLOCKS, Clocks
from dagster_checkpoints.control.history import Entries
from dagster_checkpoints.control.metrics import PipelineMetrics
from dagster_checkpoints.control.status import (
    CheckpointCountsStatus,
    CompletedCheckpointStatus,
    FailureStatus,
    InstanceStatus,
    PendingStatus,
    Phase,
    PipelineStatus,
    SilenceStatus,
    SplitsStatus,
    StageStatus,
    StopStatus,
    VertexPart,
    write_status,
)
from dagster_checkpoints.coordination.checkpoint_record import CheckpointRecord, VertexStatistics
from dagster_checkpoints.coordination.coordinator import CheckpointCoordinator
from dagster_checkpoints.coordination.plan import CheckpointPlan, TaskState
from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS
from dagster_checkpoints.errors import StorageError
from dagster_checkpoints.execution.job_machine import JobMachine
from dagster_checkpoints.execution.job_phases import JobPhase
from dagster_checkpoints.execution.job_requests import JobRequests
from dagster_checkpoints.execution.source_answers import Silence
from dagster_checkpoints.execution.splits import SplitCounts
from dagster_checkpoints.pipeline import Chain, Pipeline, TaskId, fused_in
from dagster_checkpoints.spark.job.deployment import Deployment, has_caught_up
from dagster_checkpoints.spark.job.events import JobEvent
from dagster_checkpoints.spark.job.history import HistoryRecorder, HistoryWriter
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.job.job_reporter import JobReporter
from dagster_checkpoints.spark.job.reporting import late_rows, stage_rows
from dagster_checkpoints.spark.job.run_sources import SourceWatch
from dagster_checkpoints.storage.checkpoints import CheckpointStorage


class ReportedJob(Protocol):
    """The parts of a running job that hold what is reported."""

    machine: JobMachine
    reporter: JobReporter
    source_watch: SourceWatch


class StatusReporter:
    """Reports one run; all methods are for the thread of the run.

    Args:
        pipeline: The pipeline that runs.
        storage: The storage of the pipeline; this run owns the pipeline.
        run_id: Id of the run, for display.
        options: The settings of the run.
        log: Receives a warning if the status cannot be written.
        metrics: Receives each version, too; None to send no metrics.
        clocks: The clocks by which versions are due, and have their times.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        storage: CheckpointStorage,
        run_id: str,
        options: JobOptions,
        log: logging.Logger,
        metrics: PipelineMetrics | None = None,
        clocks: Clocks = CLOCKS,
    ) -> None:
        self._pipeline = pipeline
        self._storage = storage
        self._run_id = run_id
        self._seconds = options.status_seconds
        self._log = log
        self._metrics = metrics
        self._monotonic = clocks.monotonic
        self._wall = clocks.wall
        self._began = self._due = clocks.monotonic()
        self._sequence = 0
        self._phase: Phase | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="status")
        self._writing: Future[None] | None = None
        self._failing = False
        ownership = storage.ownership
        assert ownership is not None
        self._epoch = ownership.epoch
        self._recorder = HistoryRecorder(pipeline, options, run_id, clocks.wall(), self._epoch)
        self._history = HistoryWriter(storage, self._epoch, log, clocks.monotonic)

    def observing(self, on_event: Callable[[JobEvent], None]) -> Callable[[JobEvent], None]:
        """A function that takes note of an event of the job for the history, and calls `on_event`."""

        def observed(event: JobEvent) -> None:
            self._recorder.happened(event, self._wall())
            on_event(event)

        return observed

    def report(self, phase: Phase, job: ReportedJob | None = None) -> None:
        """Write a version if one is due, or the phase has changed.

        A new phase is written behind a version that is being written: the next report may be minutes away, since the
        thread of the run also builds attempts.
        """
        now = self._monotonic()
        writing = self._writing is not None and not self._writing.done()
        if phase == self._phase and (writing or now < self._due):
            return
        self._due, self._phase = now + self._seconds, phase
        self._writing = self._submit(self._status(phase, job), job)

    def close(self, job: ReportedJob | None) -> None:
        """Write the last version: the run has ended."""
        self._recorder.run_ended(job.machine.outcome if job is not None else None, self._wall())
        self._submit(self._status("ended", job), job)
        if self._metrics is not None:
            self._metrics.close()
        self._writer.shutdown(wait=True)

    def _submit(self, status: PipelineStatus, job: ReportedJob | None) -> Future[None]:
        """Write a status, and what belongs into the history since the last one."""
        self._recorder.sampled(status)
        if job is not None and job.reporter.deployment is not None and job.machine.coordinator is not None:
            chains, now = job.reporter.deployment.chains, self._monotonic()
            for record in job.machine.coordinator.statistics.take_ended():
                self._recorder.ended(record, chains, status.updated_at, now)
        return self._writer.submit(self._write, status, self._recorder.take())

    def _write(self, status: PipelineStatus, entries: Entries) -> None:
        self._history.add(entries)
        try:
            write_status(self._storage, status)
            self._failing = False
        except StorageError as error:
            if not self._failing:
                self._log.warning("The status of the pipeline cannot be written now: %s", error)
            self._failing = True
        else:
            self._history.write(status)

    def _status(self, phase: Phase, job: ReportedJob | None) -> PipelineStatus:
        ownership = self._storage.ownership
        assert ownership is not None
        self._sequence += 1
        now = self._wall()
        status = PipelineStatus(
            pipeline=self._pipeline.name,
            run_id=self._run_id,
            epoch=self._epoch,
            phase=phase,
            sequence=self._sequence,
            updated_at=now,
            started_at=now - timedelta(seconds=self._monotonic() - self._began),
            job_id=ownership.job_id,
            interval=self._seconds,
        )
        if job is not None and job.reporter.deployment is not None and job.machine.coordinator is not None:
            status = _of_job(status, self._pipeline, job, job.reporter.deployment, job.machine.coordinator)
            status = _of_checkpoints(status, job.machine.coordinator, self._monotonic())
        if self._metrics is not None:
            self._metrics.update(status)
        return status


def _of_job(
    status: PipelineStatus, pipeline: Pipeline, job: ReportedJob, deployment: Deployment, coordinator: CheckpointCoordinator
) -> PipelineStatus:
    stages, splits, silences = [], job.machine.splits, job.source_watch.silences
    for stage in pipeline.stages:
        chain = next(c for c in deployment.chains if stage.name in c.stages)
        finished = stage.name in job.reporter.announced
        instances = tuple(
            _instance(
                deployment,
                coordinator,
                chain,
                index,
                stage.name,
                finished,
                stage.kind.is_source,
                silences,
                splits.get(stage.name),
            )
            for index in range(stage.parallelism)
        )
        stages.append(
            StageStatus(
                name=stage.name,
                finished=finished,
                rows=stage_rows(deployment, stage.name),
                late_rows=late_rows(deployment, stage.name),
                instances=instances,
                fused=stage.name in fused_in(pipeline, chain.stages),
                splits=_splits(splits.get(stage.name)),
                uid=stage.uid,
                inputs=stage_inputs(pipeline, stage.name),
            )
        )
    machine, plan = job.machine, coordinator.plan()
    running = machine.phase is JobPhase.RUNNING
    return msgspec.structs.replace(
        status,
        attempt=machine.attempt,
        roots=plan.roots_without(job.reporter.announced) if running and isinstance(plan, CheckpointPlan) else (),
        chains=tuple(chain.stages for chain in deployment.chains),
        stages=tuple(stages),
        stop=_stop(machine.requests, stages),
    )


def _stop(requests: JobRequests, stages: Sequence[StageStatus]) -> StopStatus | None:
    stop, waiting = requests.stop, requests.waiting_drain
    if stop is not None:
        names = [f"{stage.name}[{each.name}]" for stage in stages for each in stage.instances if not each.end_of_data]
        waits_for = tuple(names) if stop.drain else ()
        return StopStatus(request_id=stop.request_id, drain=stop.drain, state=stop.state.name, waits_for=waits_for)
    if waiting is None:
        return None
    return StopStatus(request_id=waiting.request_id, drain=True, state="WAITING_FOR_BOUNDED_SOURCES", waits_for=waiting.waits_for)


def stage_inputs(pipeline: Pipeline, stage: str) -> dict[str, str]:
    """How a stage reads others, by their names."""
    return {
        edge.source: "table" if edge.input.mode == "static" else edge.pattern.value.replace("_", " ")
        for edge in pipeline.edges
        if edge.target == stage
    }


def _splits(counts: SplitCounts | None) -> SplitsStatus | None:
    if counts is None:
        return None
    return SplitsStatus(
        discovered=counts.discovered, assigned=counts.assigned, finished=counts.finished, complete=counts.complete
    )


def _instance(
    deployment: Deployment,
    coordinator: CheckpointCoordinator,
    chain: Chain,
    index: int,
    stage: str,
    finished: bool,
    is_source: bool,
    silences: Mapping[TaskId, Silence],
    splits: SplitCounts | None,
) -> InstanceStatus:
    task = deployment.tasks.get(TaskId(chain.name, index))
    name = chain.instances[index]
    if task is None or finished:
        return InstanceStatus(name=name, state=TaskState.FINISHED.name, end_of_data=True, caught_up=True)
    watermark = task.output_watermark
    ended = stage in task.machine.ended_sources
    silence = silences.get(task.id) if is_source and not ended else None
    return InstanceStatus(
        name=name,
        state=coordinator.state_of(task.id).name,
        end_of_data=task.machine.operators_finished or ended,
        caught_up=has_caught_up(task, stage, splits) if silence is None else None,
        watermark_ms=watermark if watermark is not None and watermark < MAX_WATERMARK_MS else None,
        rows_behind=task.rows_behind,
        silence=SilenceStatus(**asdict(silence)) if silence else None,
    )


def _of_checkpoints(status: PipelineStatus, coordinator: CheckpointCoordinator, now: float) -> PipelineStatus:
    statistics, since = coordinator.statistics, coordinator.interval_since
    pending = tuple(
        PendingStatus(
            checkpoint_id=record.checkpoint_id,
            kind=record.properties.kind.value,
            acknowledged=record.acknowledged,
            expected=record.expected,
            seconds=now - record.triggered_at,
            waits_for=tuple(_task_name(status, task) for task in record.waits_for),
        )
        for record in statistics.in_progress
    )
    counts, duration = statistics.counts, statistics.summary.duration
    checkpoints = CheckpointCountsStatus(
        triggered=counts.triggered,
        completed=counts.completed,
        failed=counts.failed,
        savepoints=counts.savepoints,
        restored=counts.restored,
        failed_in_a_row=counts.failed_in_a_row,
        duration_p50=duration.percentile(50),
        duration_p99=duration.percentile(99),
        duration_max=duration.maximum,
    )
    completed = [record for record in (statistics.latest_completed, statistics.latest_savepoint) if record is not None]
    last = max(completed, key=lambda record: record.checkpoint_id, default=None)
    failed = statistics.latest_failed
    return msgspec.structs.replace(
        status,
        pending=pending,
        checkpoints=checkpoints,
        last_checkpoint=_checkpoint(last, status.updated_at, now) if last else None,
        last_failure=_failure(failed, status.updated_at, now) if failed else None,
        checkpoint_interval=max(coordinator.interval, coordinator.config.min_pause) if coordinator.interval else None,
        checkpoints_since=status.updated_at - timedelta(seconds=now - since) if since is not None else None,
    )


def _task_name(status: PipelineStatus, task: TaskId) -> str:
    """A task as people know it: the stages of its query, and its instance where there are several."""
    stages = next(stages for stages in status.chains if stages[0] == task.vertex)
    instances = next(stage.instances for stage in status.stages if stage.name == task.vertex)
    return " + ".join(stages) + (f"[{instances[task.index].name}]" if len(instances) > 1 else "")


def _checkpoint(last: CheckpointRecord, at: datetime, now: float) -> CompletedCheckpointStatus:
    assert last.ended_at is not None
    measured = last.measured
    return CompletedCheckpointStatus(
        checkpoint_id=last.checkpoint_id,
        location=last.location or "",
        completed_at=at - timedelta(seconds=now - last.ended_at),
        kind=last.properties.kind.value,
        duration=last.duration or 0.0,
        new_bytes=measured.new_bytes,
        total_bytes=measured.total_bytes,
        parts=tuple(_part(vertex) for vertex in last.vertices() if vertex.acknowledged),
    )


def _part(vertex: VertexStatistics) -> VertexPart:
    measured = vertex.measured
    return VertexPart(
        stages=vertex.stages,
        acknowledged_after=vertex.acknowledged_after or 0.0,
        alignment_seconds=measured.alignment_seconds,
        sync_seconds=measured.sync_seconds,
        async_seconds=measured.async_seconds,
        new_bytes=measured.new_bytes,
        total_bytes=measured.total_bytes,
    )


def _failure(failed: CheckpointRecord, at: datetime, now: float) -> FailureStatus:
    assert failed.ended_at is not None
    return FailureStatus(
        checkpoint_id=failed.checkpoint_id,
        reason=failed.reason.name if failed.reason else "",
        message=failed.message,
        failed_at=at - timedelta(seconds=now - failed.ended_at),
    )
