"""What a running pipeline shows in Dagster: materializations, observations and log lines.

Turns the runtime's events into Dagster's, on the main thread. It must not know where the events come from.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import dagster as dg

from dagster_checkpoints.coordination import MAX_WATERMARK_MS, FailureReason
from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.savepoints.recording import record_savepoint
from dagster_checkpoints.spark.errors import StageError
from dagster_checkpoints.spark.events import (
    CheckpointDone,
    CheckpointNotDone,
    InstanceFinished,
    JobEvent,
    JobRestarting,
    JobStarted,
    SavepointDone,
    StageFinished,
    StageProgress,
)
from dagster_checkpoints.stage_assets import FINISHED_BEFORE, StageAssets, instance_key
from dagster_checkpoints.storage import CheckpointStorage


class RunReporter:
    """Reports one run.

    Args:
        context: Of the op; events are logged through it.
        pipeline: The pipeline that runs.
        assets: Which asset stands for which stage.
        observe_every: Seconds between two observations of a running stage; the first checkpoint is always observed.
        storage: The pipeline's, for what a savepoint says of itself.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        pipeline: Pipeline,
        assets: StageAssets,
        *,
        observe_every: float,
        storage: Callable[[], CheckpointStorage],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.last_checkpoint: CheckpointDone | None = None
        self._context = context
        self._pipeline = pipeline
        self._assets = assets
        self._observe_every = observe_every
        self._storage = storage
        self._clock = clock
        self._observed_at: float | None = None
        self._counted: frozenset[str] = frozenset()  # stages whose rows are known: those at the end of a chain
        self._job_id = 0
        self._finished: dict[str, StageFinished] = {}
        self._yielded: set[str] = set()

    def report(self, event: JobEvent) -> Iterator[dg.MaterializeResult[Any]]:
        """Log what has happened; yields the materializations that have become possible, in topological order."""
        match event:
            case JobStarted():
                self._started(event)
            case CheckpointDone():
                self._checkpoint_done(event)
            case SavepointDone():
                self._savepoint_done(event)
            case CheckpointNotDone(checkpoint_id, reason, message):
                which = f"Checkpoint {checkpoint_id}" if checkpoint_id is not None else "A checkpoint"
                # One that met the end of a task is nothing to worry about, one that was not even begun nothing to tell.
                known = FailureReason[reason]
                level = logging.WARNING if known.counts else logging.DEBUG if known.pre_flight else logging.INFO
                self._context.log.log(level, f"{which} failed ({reason}): {message}")
            case JobRestarting(attempt, delay, cause):
                self._context.log.error(
                    f"{cause}\nThe unfinished stages start again from the latest checkpoint in {delay:g} s (attempt {attempt})."
                )
            case InstanceFinished():
                self._instance_finished(event)
            case StageFinished():
                self._stage_finished(event)
        yield from self._materializations()

    def suspended(self, savepoint: str) -> None:
        """The job was suspended: its unfinished stages go on in the next run.

        Args:
            savepoint: URL of the savepoint.
        """
        self._context.log.info(
            f"Pipeline {self._pipeline.name!r} is suspended with savepoint {savepoint}. The next run continues from it."
        )
        metadata: dict[str, Any] = {"state": "suspended", "savepoint": dg.MetadataValue.path(savepoint)}
        for stage in self.missing():
            self._context.log_event(dg.AssetObservation(self._assets.keys[stage], metadata=metadata))

    def missing(self) -> list[str]:
        """The selected stages that have not been materialized, in topological order."""
        return [s.name for s in self._pipeline.stages if s.name in self._assets.selected - self._yielded]

    def _started(self, event: JobStarted) -> None:
        self._job_id = event.job_id
        self._counted = frozenset(chain[-1] for chain in event.chains)
        begin = (
            "a new start"
            if event.restored_checkpoint is None
            else f"continues from checkpoint {event.restored_checkpoint} ({event.restored_location})"
        )
        before = f"; finished before: {', '.join(event.finished_stages)}" if event.finished_stages else ""
        queries = "; ".join(" > ".join(chain) for chain in event.chains if not set(chain) <= set(event.finished_stages))
        self._context.log.info(
            f"Pipeline {self._pipeline.name!r}, job {event.job_id}, attempt {event.attempt}: {begin}{before}. Queries: {queries}."
        )

    def _checkpoint_done(self, event: CheckpointDone) -> None:
        self.last_checkpoint = event
        finished = f"; finished: {', '.join(event.finished_stages)}" if event.finished_stages else ""
        self._context.log.info(
            f"Checkpoint {event.checkpoint_id} completed in {event.duration:.2f} s from {', '.join(event.roots)}"
            f"{finished}; {event.new_bytes:,} new of {event.total_bytes:,} bytes; {event.location}"
        )
        now = self._clock()
        if self._observed_at is not None and now - self._observed_at < self._observe_every:
            return
        self._observed_at = now
        for stage, progress in event.stages.items():
            running = stage not in self._finished and stage not in event.finished_stages
            if running and stage in self._assets.keys:
                self._context.log_event(
                    dg.AssetObservation(self._assets.keys[stage], metadata=self._progress(event, stage, progress))
                )

    def _savepoint_done(self, event: SavepointDone) -> None:
        done = event.checkpoint
        purpose = {"": "taken in flight", "suspend": "of the suspend", "drain": "of the drain"}[event.stops]
        self._context.log.info(
            f"Savepoint {done.checkpoint_id} ({purpose}, asked for by {event.asked_by or 'this run'}) completed in "
            f"{done.duration:.2f} s; {done.total_bytes:,} bytes; {event.location}"
        )
        if not event.recorded_by_asker:
            record_savepoint(self._context, self._pipeline, event, self._storage)

    def _progress(self, event: CheckpointDone, stage: str, progress: StageProgress) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            "checkpoint": event.checkpoint_id,
            "checkpoint_duration": event.duration,
            "checkpoint_sync_seconds": event.sync_seconds,
            "checkpoint_new_bytes": event.new_bytes,
            "checkpoint_total_bytes": event.total_bytes,
            "state_bytes": progress.state_bytes,
            "finished_instances": progress.finished_instances,
        }
        if stage in self._counted:
            metadata["rows"] = progress.rows
        if progress.watermark_ms is not None and progress.watermark_ms < MAX_WATERMARK_MS:
            metadata["watermark"] = dg.MetadataValue.timestamp(_time(progress.watermark_ms))
        return metadata

    def _instance_finished(self, event: InstanceFinished) -> None:
        if self._pipeline.stage(event.stage).parallelism == 1 or event.stage not in self._assets.keys:
            return
        metadata = {"rows": event.rows} if event.stage in self._counted else {}
        key = instance_key(self._assets.keys[event.stage])
        self._context.log_event(dg.AssetMaterialization(key, partition=event.instance, metadata=metadata))

    def _stage_finished(self, event: StageFinished) -> None:
        if event.stage in self._finished:
            return
        self._finished[event.stage] = event
        if event.stage in self._assets.keys and not event.restored:
            metadata = {"state": "finished", **self._result(event)}
            self._context.log_event(dg.AssetObservation(self._assets.keys[event.stage], metadata=metadata))

    def _materializations(self) -> Iterator[dg.MaterializeResult[Any]]:
        """Dagster wants an asset after those it depends on, whichever has finished first."""
        for stage in self._pipeline.stages:
            name = stage.name
            if name in self._yielded or name not in self._finished or name not in self._assets.selected:
                continue
            if all(up in self._yielded or up not in self._assets.selected for up in self._pipeline.upstream(name)):
                self._yielded.add(name)
                yield dg.MaterializeResult(asset_key=self._assets.keys[name], metadata=self._result(self._finished[name]))

    def _result(self, event: StageFinished) -> dict[str, Any]:
        stage = self._pipeline.stage(event.stage)
        metadata: dict[str, Any] = {"job": self._job_id, "instances": stage.parallelism}
        if event.checkpoint_id is not None:
            metadata["checkpoint"] = event.checkpoint_id
        if event.restored:
            metadata[FINISHED_BEFORE] = True
        elif event.stage in self._counted:
            metadata["rows"] = event.rows
        path = getattr(stage.sink, "path", None)
        if path is not None:
            metadata["path"] = dg.MetadataValue.path(str(path))
        return metadata


def failure(pipeline: Pipeline, error: BaseException, last_checkpoint: str | None) -> dg.Failure:
    """The error of a job as Dagster shows it: the text, the stage, and where the latest checkpoint is.

    Args:
        pipeline: What ran.
        error: What ended it.
        last_checkpoint: Location of the latest completed checkpoint.
    """
    metadata: dict[str, Any] = {"pipeline": pipeline.name, "error": type(error).__name__}
    stage_error = next((e for e in _causes(error) if isinstance(e, StageError)), None)
    if stage_error is not None:
        metadata |= {"stage": stage_error.stage, "instance": stage_error.instance}
    if last_checkpoint is not None:
        metadata["last_checkpoint"] = last_checkpoint
    # An error with a text of ours says all; behind it stands what the user's own code, or a library, raised.
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


def _time(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
