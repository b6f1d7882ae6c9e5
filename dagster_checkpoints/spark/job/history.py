"""A run's entries of the pipeline's history: its ended checkpoints, its events, samples of its stages; and the report of them.

They are collected by one class that knows no files, and written by another one, on the thread that writes the status. Writing
must not fail the job, nor cost much: entries are written when there are some, the page about once a minute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from dagster_checkpoints.control.history import (
    CheckpointEntry,
    Entries,
    EventEntry,
    HistorySample,
    HistorySegments,
    InstancePart,
    Measured,
    Setting,
    StageSample,
    VertexParts,
)
from dagster_checkpoints.control.status import PipelineStatus, StageStatus
from dagster_checkpoints.coordination.checkpoint_record import (
    CheckpointRecord,
    CheckpointStatus,
    InstanceStatistics,
    VertexStatistics,
)
from dagster_checkpoints.execution.job_events import JobOutcome
from dagster_checkpoints.pipeline import Chain, Pipeline
from dagster_checkpoints.report.building import build_report, page
from dagster_checkpoints.spark.job.events import JobEvent, JobRestarting, JobStarted, StageFinished
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.storage.checkpoints import CheckpointStorage

PAGE_SECONDS = 60.0
"""Seconds between two versions of the page."""
_ENTRIES_SECONDS = 15.0
"""Seconds for which entries wait, so that a file that grows is not written with every status."""


class HistoryWriter:
    """Writes for one run; all methods are for one thread.

    Args:
        storage: The storage of the pipeline; this run owns the pipeline.
        epoch: Epoch of the run.
        log: Receives a warning if the history or the page cannot be written.
        monotonic: Monotonic seconds.
    """

    def __init__(self, storage: CheckpointStorage, epoch: int, log: logging.Logger, monotonic: Callable[[], float]) -> None:
        self._storage = storage
        self._epoch = epoch
        self._log = log
        self._monotonic = monotonic
        self._segments = HistorySegments(storage, epoch)
        self._waiting: list[Entries] = []
        self._entries_due = self._page_due = monotonic()
        self._news = True
        self._shown: dict[str, StageSample] = {}
        self._failing = False

    def add(self, entries: Entries) -> None:
        """Take the run's latest entries, for the next `write`."""
        if entries:
            self._waiting.append(entries)

    def write(self, status: PipelineStatus) -> None:
        """Write what is due; everything if the run has ended. Logs failures, and raises none.

        Args:
            status: The status of the run.
        """
        now, ended = self._monotonic(), status.phase == "ended"
        try:
            if self._waiting and (ended or now >= self._entries_due or any(each.events for each in self._waiting)):
                self._entries_due = now + _ENTRIES_SECONDS
                waiting, self._waiting = Entries.joined(self._waiting), []
                self._news = self._news or bool(waiting.checkpoints or waiting.events) or self._moved(waiting)
                self._segments.append(waiting)
            if self._news and (ended or (now >= self._page_due and status.stages)):
                self._page_due = now + PAGE_SECONDS
                self._write_page(status, ended)
                self._news = False
            self._failing = False
        except Exception as error:  # the history is for display: nothing that goes wrong with it may reach the job
            if not self._failing:
                self._log.warning("The history of the pipeline cannot be written now. %s: %s", type(error).__name__, error)
            self._failing = True

    def _write_page(self, status: PipelineStatus, ended: bool) -> None:
        report = build_report(
            pipeline=status.pipeline,
            url=self._storage.url,
            entries=self._segments.latest(),
            status=status,
            state="the run has ended" if ended else status.phase,
            running_epoch=None if ended else self._epoch,
            now=status.updated_at,
            refresh_seconds=None if ended else PAGE_SECONDS,
            problems=self._segments.problems,
        )
        self._storage.store.put(self._storage.layout.report, page(report))

    def _moved(self, entries: Entries) -> bool:
        """Whether a stage has moved since the newest sample of the last entries."""
        before, self._shown = self._shown, entries.samples[-1].stages if entries.samples else self._shown
        return before != self._shown


_LONGEST_PAUSE = 60.0
_SHARE = 0.01
_SETTINGS = (
    "interval",
    "interval_during_backlog",
    "backlog_rows",
    "initial_delay",
    "min_pause",
    "timeout",
    "max_concurrent",
    "tolerable_failed_checkpoints",
    "retained",
    "mode",
    "unaligned",
    "aligned_checkpoint_timeout",
)
"""The settings of checkpoints that users can change."""
_LONGEST_TEXT = 4_000


class HistoryRecorder:
    """The entries of one run; all methods are for the thread of the run.

    Args:
        pipeline: The pipeline that runs.
        options: The settings of the run.
        run_id: Id of the run, for display.
        started_at: Wall clock of the run's start.
        epoch: Epoch of the run.
    """

    def __init__(self, pipeline: Pipeline, options: JobOptions, run_id: str, started_at: datetime, epoch: int) -> None:
        self._epoch = epoch
        self._stop = ""
        self._sampled_at: float | None = None
        self._checkpoints: list[CheckpointEntry] = []
        self._samples: list[HistorySample] = []
        self._events = [
            EventEntry(
                at=started_at,
                epoch=epoch,
                kind="run_started",
                run_id=run_id,
                instances={stage.name: stage.parallelism for stage in pipeline.stages},
                settings=dict(settings_of(options)),
            )
        ]

    def happened(self, event: JobEvent, at: datetime) -> None:
        """The job has reported an event."""
        match event:
            case JobStarted():
                entry = EventEntry(
                    at=at,
                    epoch=self._epoch,
                    kind="job_started",
                    job_id=event.job_id,
                    attempt=event.attempt,
                    checkpoint_id=event.restored_checkpoint,
                    location=event.restored_location or "",
                    stages=event.restarted,
                )
            case JobRestarting(attempt, _, cause, stages):
                text = _readable(cause)
                entry = EventEntry(at=at, epoch=self._epoch, kind="restarting", text=text, attempt=attempt, stages=stages)
            case StageFinished() if not event.restored:
                entry = EventEntry(at=at, epoch=self._epoch, kind="stage_finished", stages=(event.stage,))
            case _:
                return
        self._events.append(entry)

    def ended(self, record: CheckpointRecord, chains: Sequence[Chain], at: datetime, now: float) -> None:
        """A checkpoint has ended.

        Args:
            record: its record.
            chains: the chains of the job, with the names of their instances.
            at: wall clock.
            now: the coordinator's clock at the same moment.
        """
        assert record.ended_at is not None
        names = {chain.name: chain.instances for chain in chains}
        vertices = tuple(_vertex(vertex, names.get(vertex.name, ())) for vertex in record.vertices())
        properties = record.properties
        self._checkpoints.append(
            CheckpointEntry(
                checkpoint_id=record.checkpoint_id,
                epoch=self._epoch,
                kind=properties.kind.value,
                status="completed" if record.status is CheckpointStatus.COMPLETED else "failed",
                triggered_at=at - timedelta(seconds=now - record.triggered_at),
                ended_at=at - timedelta(seconds=now - record.ended_at),
                acknowledged=record.acknowledged,
                expected=record.expected,
                periodic=properties.periodic,
                unaligned=properties.unaligned,
                stops_job=properties.stops_job,
                location=record.location or "",
                reason=record.reason.name if record.reason else "",
                message=_readable(record.message),
                measured=Measured.of_all(vertex.measured for vertex in vertices if vertex.measured is not None),
                vertices=vertices,
            )
        )

    def sampled(self, status: PipelineStatus) -> None:
        """A status was made: sample its stages, often at the beginning of a run, and every minute later."""
        if status.stop is not None and self._stop != status.stop.request_id:
            self._stop = status.stop.request_id
            how = "drain" if status.stop.drain else "suspend"
            self._events.append(EventEntry(at=status.updated_at, epoch=status.epoch, kind="stopping", text=how))
        if not status.stages:
            return
        age = (status.updated_at - status.started_at).total_seconds()  # not changed by a clock that jumps
        pause = min(_LONGEST_PAUSE, age * _SHARE)
        if self._sampled_at is not None and age - self._sampled_at < pause:
            return
        self._sampled_at = age
        stages = {stage.name: _sample(stage) for stage in status.stages}
        self._samples.append(HistorySample(status.updated_at, status.epoch, stages))

    def run_ended(self, outcome: JobOutcome | None, at: datetime) -> None:
        """The run ends; `outcome` is None if its job has not come to an end of its own."""
        entry = EventEntry(at=at, epoch=self._epoch, kind="run_ended")
        if outcome is not None:
            status, ended_by = outcome.status.value, outcome.ended_by
            text = _readable(outcome.message)
            entry = EventEntry(at=at, epoch=self._epoch, kind="run_ended", text=text, status=status, ended_by=ended_by)
        self._events.append(entry)

    def take(self) -> Entries:
        """The entries since the last call."""
        taken = Entries(tuple(self._checkpoints), tuple(self._events), tuple(self._samples))
        self._checkpoints, self._events, self._samples = [], [], []
        return taken


def settings_of(options: JobOptions) -> Mapping[str, Setting]:
    """The settings of a run that concern its checkpoints and restarts."""
    return {
        **{name: getattr(options.checkpoints, name) for name in _SETTINGS},
        "restart": str(options.restart),
        "failover": options.failover,
        "until": options.until,
        "restore_from": options.restore_from,
        "claim_mode": options.claim_mode.value,
        "lease_seconds": options.lease_seconds,
        "max_queued_bytes": options.max_queued_bytes,
        "batch_seconds": options.batch_seconds,
    }


def _readable(text: str) -> str:
    """A text of an error as far as the report shows it; '?' for what cannot be encoded, as in some names of files."""
    return text[:_LONGEST_TEXT].encode(errors="replace").decode()


def _vertex(vertex: VertexStatistics, names: tuple[str, ...]) -> VertexParts:
    instances = tuple(_instance(part, names) for part in vertex.instances)
    measured = [part.measured for part in instances if part.measured is not None]
    return VertexParts(vertex.stages, Measured.of_all(measured) if measured else None, instances)


def _instance(part: InstanceStatistics, names: tuple[str, ...]) -> InstancePart:
    name, measured, after = (
        names[part.index] if part.index < len(names) else str(part.index),
        part.measured,
        part.acknowledged_after,
    )
    if measured is None or after is None:
        return InstancePart(name, finished=part.finished)
    work = measured.alignment_seconds + measured.sync_seconds + measured.async_seconds
    return InstancePart(
        name,
        Measured(
            round(after, 4),
            round(max(0.0, after - work), 4),
            round(measured.alignment_seconds, 4),
            round(measured.sync_seconds, 4),
            round(measured.async_seconds, 4),
            measured.new_bytes,
            measured.total_bytes,
            measured.in_flight_bytes,
        ),
    )


def _sample(stage: StageStatus) -> StageSample:
    behind = [each.rows_behind for each in stage.instances if each.rows_behind is not None]
    running = [each for each in stage.instances if not each.end_of_data]
    watermarks = [each.watermark_ms for each in running if each.watermark_ms is not None]
    known = bool(watermarks) and len(watermarks) == len(running)
    return StageSample(stage.rows, sum(behind) if behind else None, min(watermarks) if known else None)
