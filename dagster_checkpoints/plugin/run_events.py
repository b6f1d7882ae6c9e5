"""Turns the runtime's events into Dagster's: materializations, observations and log lines.

Runs on the main thread. It must not know where the events come from.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import dagster as dg

from dagster_checkpoints.control.clocks import CLOCKS, Clocks
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.execution.source_answers import silence_in_short, silence_text
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.event_metadata import address_metadata
from dagster_checkpoints.plugin.event_schedules import CommitSchedule, ObservationSchedule
from dagster_checkpoints.plugin.materializations import PipelineMaterializations
from dagster_checkpoints.plugin.observations import PipelineObservations
from dagster_checkpoints.plugin.savepoints.recording import is_recorded_by_asker, record_savepoint
from dagster_checkpoints.plugin.stage_assets import StageAssets
from dagster_checkpoints.plugin.start_lines import start_line
from dagster_checkpoints.spark.errors import StageError
from dagster_checkpoints.spark.job.events import (
    CheckpointDone,
    CheckpointNotDone,
    CommitRefused,
    FirstBatch,
    InstanceFinished,
    JobEndedBefore,
    JobEvent,
    JobRestarting,
    JobStarted,
    PipelineAcquired,
    SavepointDone,
    SinkCommitted,
    SourceAnswered,
    SourceSilent,
    StageFinished,
    StageProgress,
)
from dagster_checkpoints.storage.checkpoints import CheckpointStorage

_REFUSALS_EVERY = 60.0
"""Seconds between two reports of refused commits of a stage if its commits are not reported while it runs."""


@dataclass(frozen=True)
class ReportIntervals:
    """Seconds between two reports of one kind.

    Attributes:
        observe: Two observations of a running stage; see :class:`ObservationSchedule`.
        materialize: Two materializations of a running stage, None for none; see :class:`CommitSchedule`.
        checkpoint: Two periodic checkpoints, for the log; None for no periodic checkpoints.
    """

    observe: float
    materialize: float | None
    checkpoint: float | None


class RunReporter:
    """Reports the events of one run to Dagster.

    Args:
        context: The context of the op, through which events are logged.
        pipeline: The pipeline that runs.
        assets: The assets of the pipeline's stages.
        intervals: How often what is reported.
        progress: Returns the current progress of each stage; empty before the start.
        storage: Opens the pipeline's storage, to read the metadata of savepoints.
        clocks: The clocks by which reports are due, and have their times.
    """

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        pipeline: Pipeline,
        assets: StageAssets,
        *,
        intervals: ReportIntervals,
        progress: Callable[[], Mapping[str, StageProgress]],
        storage: Callable[[], CheckpointStorage],
        clocks: Clocks = CLOCKS,
    ) -> None:
        self._context = context
        self._pipeline = pipeline
        self._assets = assets
        self._interval = intervals.checkpoint
        self._progress = progress
        self._storage = storage
        self._wall = clocks.wall
        schedule = ObservationSchedule(intervals.observe)
        self._observations = PipelineObservations(context, pipeline, assets, schedule, clocks)
        commits = CommitSchedule(intervals.materialize)
        refusals = CommitSchedule(_REFUSALS_EVERY if intervals.materialize is None else intervals.materialize)
        self._materializations = PipelineMaterializations(context, pipeline, assets, commits, refusals, clocks)

    @property
    def last_checkpoint(self) -> CheckpointDone | None:
        """The newest completed checkpoint of this run."""
        return self._observations.checkpoint

    def report(self, event: JobEvent) -> Iterator[dg.MaterializeResult[Any]]:
        """Report an event; yields the materializations that are now possible, in topological order."""
        match event:
            case CheckpointDone():
                self._log(logging.INFO, self._observations.checkpoint_done(event))
            case SavepointDone():
                self._savepoint_done(event)
            case CheckpointNotDone():
                # A failure that does not count (a task ended meanwhile) is no warning; a refused trigger is for debugging.
                reason = FailureReason[event.reason]
                level = logging.WARNING if reason.counts else logging.DEBUG if reason.pre_flight else logging.INFO
                self._log(level, self._observations.checkpoint_failed(event))
            case JobRestarting(attempt, delay, cause, stages):
                which = f"The stages {', '.join(stages)} start" if stages else "The unfinished stages start"
                go_on = "; the others are not connected with them, and go on" if stages else ""
                self._context.log.error(
                    f"{cause}\n{which} again from the latest checkpoint in {delay:g} s (attempt {attempt}){go_on}."
                )
            case InstanceFinished():
                self._materializations.instance_finished(event)
            case SinkCommitted():
                self._materializations.committed(event)
            case CommitRefused():
                self._materializations.refused(event)
            case StageFinished():
                self._stage_finished(event)
            case SourceSilent() | SourceAnswered():
                self._source_answers(event)
            case start:
                if isinstance(start, JobStarted | JobEndedBefore):
                    self._materializations.job_started(start)
                if isinstance(start, JobStarted):
                    self._observations.queries = {stage: chain for chain in start.chains for stage in chain}
                if isinstance(start, PipelineAcquired):
                    self._observations.directory = start.storage
                self._log(logging.INFO, start_line(start, self._pipeline, self._interval))
                if isinstance(start, FirstBatch):
                    self._observations.runs(*start.stages)
                    self._observations.observe_stages(self._progress(), at_once=start.stages)
        yield from self._materializations.possible()

    def report_now(self, event: JobEvent) -> None:
        """Report an event of a run that is being terminated, whose op yields nothing more: the ends of stages are logged."""
        for end in self.report(event):
            self._materializations.log_end(end)

    @property
    def may_be_due(self) -> bool:
        """Whether an observation, or the materialization of a running stage, may be due."""
        return self._observations.may_be_due() or self._materializations.may_be_due()

    def report_due(self) -> None:
        """Observe and materialize the running stages that are due; call it about once per second."""
        self._observations.observe_stages(self._progress())
        self._materializations.log_due()

    def ended(self) -> None:
        """The job has ended: observe its newest checkpoint, and materialize the stages whose commits were held; once."""
        self._log(logging.INFO, self._observations.last_checkpoint())
        self._materializations.run_ended()

    def suspended(self, savepoint: str) -> None:
        """The job was suspended: report its unfinished stages, which continue in the next run.

        Args:
            savepoint: URL of the savepoint.
        """
        self._context.log.info(
            f"Pipeline {self._pipeline.name!r} is suspended with savepoint {savepoint}. The next run continues from it."
        )
        progress = self._progress()
        for stage in self.missing():
            metadata: dict[str, Any] = {}
            if stage in progress and progress[stage].rows is not None:
                metadata["rows"] = progress[stage].rows
            metadata |= {"state": "suspended", "savepoint": address_metadata(savepoint)}
            self._context.log_event(dg.AssetObservation(self._assets.keys[stage], metadata=metadata))

    def missing(self) -> list[str]:
        """The selected stages that have not been materialized, in topological order."""
        return self._materializations.missing()

    def _log(self, level: int, line: str | None) -> None:
        if line is not None:
            self._context.log.log(level, line)

    def _savepoint_done(self, event: SavepointDone) -> None:
        checkpoint = event.checkpoint
        purpose = {"": "taken in flight", "suspend": "of the suspend", "drain": "of the drain"}[event.stops]
        asked = f"requested by {event.asked_by or 'this run'}"
        if event.of_burst:
            asked = "all sources have read what was there; the next run deletes it"
        self._context.log.info(
            f"Savepoint {checkpoint.checkpoint_id} ({purpose}, {asked}) completed in "
            f"{checkpoint.duration:.2f} s; {checkpoint.total_bytes:,} bytes; {event.location}"
        )
        if not (event.of_burst or is_recorded_by_asker(self._context.instance, event)):
            record_savepoint(self._context, self._pipeline, event, self._storage)

    def _source_answers(self, event: SourceSilent | SourceAnswered) -> None:
        """Log that a query waits for its source, or not any more, and observe the source's asset."""
        if isinstance(event, SourceSilent):
            text = silence_text(event.sources, event.silence)
            self._context.log.log(logging.INFO if event.silence.doing == "reading" else logging.WARNING, text)
            since = (self._wall() - timedelta(seconds=event.silence.seconds)).timestamp()
            state = silence_in_short(event.silence.doing)
            shown: dict[str, Any] = {"state": state, "since": dg.MetadataValue.timestamp(since)}
            shown |= {"spark": event.silence.words, "check": text}
        else:
            self._context.log.info(f"{', '.join(event.sources)}: the query does not wait for its source any more.")
            shown = {"state": "running"}
        if self._pipeline.stage(event.sources[0]).parallelism > 1:
            shown["instance"] = event.instance
        for source in event.sources:
            if source in self._assets.keys:
                self._context.log_event(dg.AssetObservation(self._assets.keys[source], metadata=shown))

    def _stage_finished(self, event: StageFinished) -> None:
        if not self._materializations.stage_finished(event):
            return
        self._observations.ended(event.stage)
        if event.stage in self._assets.keys and not event.restored:
            result = self._materializations.end(event)
            rows = {"rows": result.pop("rows")} if "rows" in result else {}
            metadata = {**rows, "state": "finished", **result}
            self._context.log_event(dg.AssetObservation(self._assets.keys[event.stage], metadata=metadata))


def failure(pipeline: Pipeline, error: BaseException, last_checkpoint: str | None) -> dg.Failure:
    """The error of a job as a Dagster failure: its text, the stage, and the location of the latest checkpoint.

    Args:
        pipeline: The pipeline that ran.
        error: The error that ended it.
        last_checkpoint: Location of the latest completed checkpoint; None if there is none.
    """
    metadata: dict[str, Any] = {"pipeline": pipeline.name, "error": type(error).__name__}
    stage_error = next((e for e in _causes(error) if isinstance(e, StageError)), None)
    if stage_error is not None:
        metadata |= {"stage": stage_error.stage, "instance": stage_error.instance}
    if last_checkpoint is not None:
        metadata["last_checkpoint"] = last_checkpoint
    # The plugin's own errors need no traceback; shown is that of the error in the user's code, or in a library, behind it.
    foreign = next((e for e in _causes(error) if not isinstance(e, DagsterCheckpointsError)), None)
    if foreign is not None:
        trace = "".join(traceback.format_exception(foreign, chain=False))
        metadata["traceback"] = dg.MetadataValue.md(f"```\n{trace}\n```")
    text = str(error) if isinstance(error, DagsterCheckpointsError) else f"{type(error).__name__}: {error}"
    return dg.Failure(text, metadata=metadata, allow_retries=False)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
