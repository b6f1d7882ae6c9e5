"""The observations of a running pipeline: their content, and their number.

A stage's observation shows the stage: rows, watermark, lag, state. The observations of one asset, `checkpoints/<pipeline>`, show
the checkpoints. This module must not know materializations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg

from dagster_checkpoints.control.clocks import Clocks
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.event_metadata import address_metadata, event_time_metadata
from dagster_checkpoints.plugin.event_schedules import ObservationSchedule
from dagster_checkpoints.plugin.stage_assets import StageAssets, checkpoints_key
from dagster_checkpoints.plugin.start_lines import query_name
from dagster_checkpoints.spark.job.events import CheckpointDone, CheckpointNotDone, StageProgress
from dagster_checkpoints.storage.layout import REPORT

STAGE_LABELS = (
    "rows",
    "watermark",
    "lag_seconds",
    "late_rows",
    "state",
    "state_bytes",
    "rows_per_second",
    "finished_instances",
    "splits_discovered",
    "splits_assigned",
    "splits_finished",
    "query",
)
"""The labels of a stage's observation, in the order in which Dagster shows them; unknown values are left out."""

_CHECKPOINTS = "checkpoints"
_FAILED = "failed checkpoints: "
_STAGE = "stage "


@dataclass(frozen=True)
class _Observed:
    rows: int | None
    at: float


class PipelineObservations:
    """Makes the observations of one run.

    Args:
        context: The context of the op, through which events are logged.
        pipeline: The pipeline that runs.
        assets: The assets of the pipeline's stages.
        schedule: Decides which observations are due.
        clocks: The clocks; a watermark's lag is measured against the wall clock.

    Attributes:
        queries: For every stage the stages that share its query; set when the job starts.
        directory: URL of the pipeline's directory in storage, which has the report; "" before the run owns the pipeline.
        checkpoint: The newest completed checkpoint of this run.
    """

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        pipeline: Pipeline,
        assets: StageAssets,
        schedule: ObservationSchedule,
        clocks: Clocks,
    ) -> None:
        self.queries: Mapping[str, tuple[str, ...]] = {}
        self.directory = ""
        self.checkpoint: CheckpointDone | None = None
        self._context = context
        self._pipeline = pipeline
        self._assets = assets
        self._schedule = schedule
        self._clock = clocks.monotonic
        self._wall = clocks.wall
        self._running: set[str] = set()
        self._observed: dict[str, _Observed] = {}
        self._shown: CheckpointDone | None = None
        self._longest = 0.0

    # Stages

    def runs(self, *stages: str) -> None:
        """Observe these stages from now on: they have processed rows, or a checkpoint has them."""
        self._running.update(stage for stage in stages if stage in self._assets.keys)

    def ended(self, stage: str) -> None:
        """Stop observing this stage: it has finished."""
        self._running.discard(stage)

    def may_be_due(self) -> bool:
        """Whether an observation of a stage would be due now if the stage has changed."""
        now = self._clock()
        return any(self._schedule.may_be_due(f"{_STAGE}{stage}", now) for stage in self._running)

    def observe_stages(self, stages: Mapping[str, StageProgress], at_once: Collection[str] = ()) -> None:
        """Observe the running stages that are due.

        Args:
            stages: Progress of each stage.
            at_once: Stages that are observed whether they are due or not.
        """
        now = self._clock()
        for stage in self._pipeline.stages:
            progress = stages.get(stage.name)
            if stage.name not in self._running or progress is None:
                continue
            seen = (progress.rows, progress.watermark_ms, progress.finished_instances, progress.late_rows, progress.splits)
            decide = self._schedule.made if stage.name in at_once else self._schedule.due
            if decide(f"{_STAGE}{stage.name}", seen, now) is not None:
                metadata = self._stage(stage.name, progress, now)
                self._context.log_event(dg.AssetObservation(self._assets.keys[stage.name], metadata=metadata))

    def _stage(self, stage: str, progress: StageProgress, now: float) -> dict[str, Any]:
        shown: dict[str, Any] = {"state": "running"}
        shown |= event_time_metadata(self._pipeline, stage, progress.watermark_ms, self._wall)
        if progress.late_rows:
            shown["late_rows"] = progress.late_rows
        if progress.instances > 1:
            shown["finished_instances"] = progress.finished_instances
        if progress.splits is not None:
            counts = progress.splits
            shown["splits_discovered"], shown["splits_assigned"] = counts.discovered, counts.assigned
            shown["splits_finished"] = counts.finished
        shown |= self._volume(stage, progress, now)
        query = self.queries.get(stage, ())
        ends_query = query[-1:] == (stage,)
        if ends_query and progress.state_bytes:
            shown["state_bytes"] = progress.state_bytes
        if len(query) > 1:
            elsewhere = "" if ends_query else f"; its state is shown at {query[-1]}"
            shown["query"] = f"{query_name(query)}{elsewhere}"
        return {label: shown[label] for label in STAGE_LABELS if label in shown}

    def _volume(self, stage: str, progress: StageProgress, now: float) -> dict[str, Any]:
        """The number of rows and their rate, as far as they are known."""
        before, self._observed[stage] = self._observed.get(stage), _Observed(progress.rows, now)
        if progress.rows is None:
            return {}
        shown: dict[str, Any] = {"rows": progress.rows}
        if before is not None and before.rows is not None and now > before.at:
            shown["rows_per_second"] = _rounded((progress.rows - before.rows) / (now - before.at))
        return shown

    # Checkpoints

    def checkpoint_done(self, event: CheckpointDone) -> str | None:
        """A checkpoint has completed: observe the checkpoints, and the stages, if they are due.

        Returns:
            The line for the run's log; None if the checkpoints are not due.
        """
        self.checkpoint = event
        self._longest = max(self._longest, event.duration)
        self.runs(*(stage for stage in event.stages if stage not in event.finished_stages))
        self.observe_stages(event.stages)
        shown, now = self._shown, self._clock()
        changed = shown is not None and (shown.roots, shown.finished_stages) != (event.roots, event.finished_stages)
        if changed:
            skipped: int | None = self._schedule.made(_CHECKPOINTS, event.checkpoint_id, now)
        else:
            skipped = self._schedule.due(_CHECKPOINTS, event.checkpoint_id, now)
        return None if skipped is None else self._show(event, skipped)

    def last_checkpoint(self) -> str | None:
        """The run ends: observe its newest checkpoint if no observation shows it. Returns the line for the run's log."""
        if self.checkpoint is None or self.checkpoint is self._shown:
            return None
        skipped = self._schedule.made(_CHECKPOINTS, self.checkpoint.checkpoint_id, self._clock())
        return self._show(self.checkpoint, max(skipped - 1, 0))

    def _show(self, event: CheckpointDone, skipped: int) -> str:
        self._shown = event
        metadata: dict[str, Any] = {
            "checkpoint": event.checkpoint_id,
            "duration_seconds": round(event.duration, 3),
            "total_bytes": event.total_bytes,
            "new_bytes": event.new_bytes,
            "roots": ", ".join(event.roots),
            "finished_stages": ", ".join(event.finished_stages) or "none",
            "location": event.location,
            "sync_seconds": round(event.sync_seconds, 3),
            "async_seconds": round(event.async_seconds, 3),
            "alignment_seconds": round(event.alignment_seconds, 3),
            "longest_duration_seconds": round(self._longest, 3),
            "completed": event.completed,
            "failed": event.failed,
            **_report_in(self.directory),
        }
        self._context.log_event(dg.AssetObservation(checkpoints_key(self._pipeline.name), metadata=metadata))
        finished = f"; finished: {', '.join(event.finished_stages)}" if event.finished_stages else ""
        more = f". {skipped} more since the last line, the longest in {self._longest:.2f} s" if skipped else ""
        self._longest = 0.0
        return (
            f"Checkpoint {event.checkpoint_id} completed in {event.duration:.2f} s from {', '.join(event.roots)}"
            f"{finished}; {event.new_bytes:,} new of {event.total_bytes:,} bytes; {event.location}{more}"
        )

    def checkpoint_failed(self, event: CheckpointNotDone) -> str | None:
        """The line for the run's log about a failed checkpoint; None if a line about this reason is not due."""
        skipped = self._schedule.due(f"{_FAILED}{event.reason}", object(), self._clock())
        if skipped is None:
            return None
        which = f"Checkpoint {event.checkpoint_id}" if event.checkpoint_id is not None else "A checkpoint"
        more = f" ({skipped} more for this reason since the last line)" if skipped else ""
        return f"{which} failed ({event.reason}): {event.message}{more}"


def _report_in(directory: str) -> dict[str, Any]:
    """The address of the report that the run writes."""
    return {"report": address_metadata(f"{directory}/{REPORT}")} if directory else {}


def _rounded(number: float) -> float:
    """A number with few digits, for people: 12345.678 becomes 12346.0, 1.2345 becomes 1.2."""
    return float(round(number)) if abs(number) >= 100 else round(number, 1)
