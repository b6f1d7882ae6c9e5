"""The re-root sensor: when a stage has finished, the next checkpoint begins at other stages; it asks for that one at once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import dagster as dg
import msgspec

from dagster_checkpoints.control import Answer, NoRunningPipeline, PipelineControl
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.savepoints import RESOURCE
from dagster_checkpoints.plugin.sensors.cursors import Cursor, read_cursor
from dagster_checkpoints.plugin.sensors.pipeline_sensor import (
    NotRunning,
    RunningPipeline,
    SensorTick,
    TimedControl,
    pipeline_sensor,
    request_id,
    skip,
)
from dagster_checkpoints.plugin.stage_assets import FINISHED_BEFORE, NotAPipelineAssetError, stage_keys

ATTEMPTS = 5
_NEWEST = 50


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was asked for: of which run, because these stages had finished, and for the how manyth time."""

    run: str
    event: int
    stages: tuple[str, ...]
    attempt: int = 1


class _RerootCursor(Cursor, frozen=True, kw_only=True, omit_defaults=True):
    """Args:
    seen: by stage, the storage id of its newest materialization seen. Per stage, because ids of different assets need not
        become visible in their order.
    asked: what has not been answered yet.
    """

    seen: dict[str, int] = msgspec.field(default_factory=dict)
    asked: tuple[_Asked, ...] = ()


def build_reroot_sensor(
    *,
    pipeline: Pipeline,
    assets: dg.AssetsDefinition,
    name: str | None = None,
    deadline: float = 600.0,
    minimum_interval_seconds: int = 30,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
    resource_key: str = RESOURCE,
) -> dg.SensorDefinition:
    """A sensor that asks the running pipeline for a checkpoint when stages have finished, and shows where it began.

    Checkpoints begin at the roots: the running stages none of whose predecessors runs. When a stage finishes, others become
    roots. The sensor sees every stage's materialization, however many come between two ticks, asks for one checkpoint, and in
    a later tick, when that is complete, reports an observation of every root. It never waits. The pipeline itself needs no
    sensor for that: its next periodic checkpoint begins at the new roots in any case.

    Args:
        pipeline: The pipeline.
        assets: What `@pipeline_assets` made of it.
        name: Of the sensor; by default the pipeline's with `_reroot` behind.
        deadline: Seconds that the checkpoint may take.
        minimum_interval_seconds: Between two ticks.
        default_status: Whether it runs from the start.
        resource_key: Of the :class:`CheckpointCoordinatorResource`.

    Raises:
        NotAPipelineAssetError: The assets are not this pipeline's.
    """
    keys = stage_keys(assets, pipeline)
    if not keys:
        raise NotAPipelineAssetError(
            f"expected the assets that @pipeline_assets(pipeline=...) made of {pipeline.name!r}, found "
            f"{sorted(key.to_user_string() for key in assets.keys)}"
        )
    sensor_name = name or f"{pipeline.name}_reroot"

    def evaluate(tick: SensorTick) -> dg.SensorResult:
        before = read_cursor(tick.dagster.cursor, _RerootCursor)
        seen, finished = _finished_since(tick.dagster.instance, keys, before.seen)
        running = tick.control.look()
        said: list[str] = []
        observations: list[dg.AssetObservation] = []
        again, waiting = [], []
        for asked in before.asked:
            answer = tick.control.poll(_id(sensor_name, asked))
            if answer is not None and answer.status == "done":
                roots = _roots(answer, running)
                said.append(f"Checkpoint {answer.checkpoint_id} began at {', '.join(roots) or 'unknown stages'}.")
                observations += _observations(keys, asked, answer, roots)
            elif isinstance(running, NotRunning) or running.run_id != asked.run:
                said.append(f"Run {asked.run} has ended without the checkpoint that was asked for.")
            elif answer is None or not answer.final:
                said.append(f"Waiting for the checkpoint after the end of {', '.join(asked.stages)}.")
                waiting.append(asked)
            elif asked.attempt < ATTEMPTS:
                said.append(f"The checkpoint failed, {answer.reason}: {answer.message}. Asking again.")
                again.append(msgspec.structs.replace(asked, attempt=asked.attempt + 1))
            else:
                said.append(f"The checkpoint failed {asked.attempt} times, {answer.reason}: {answer.message}. Given up.")
        if isinstance(running, NotRunning):
            said.append(running.text)
        else:
            if mine := finished.get(running.run_id):
                again.append(_Asked(run=running.run_id, event=max(mine.values()), stages=tuple(mine)))
            elif not said:
                said.append(f"No stage of run {running.run_id} has finished since the last tick.")
            waiting += _ask(tick.control, again, said)
        return skip(" ".join(said), _RerootCursor(seen=seen, asked=tuple(waiting)), observations)

    def _ask(control: TimedControl, wanted: list[_Asked], said: list[str]) -> list[_Asked]:
        for asked in wanted:
            asked_id = _id(sensor_name, asked)
            try:
                control.do(partial(PipelineControl.checkpoint, request_id=asked_id, deadline=deadline))
            except NoRunningPipeline as error:
                said.append(str(error))
                return []
            said.append(f"Asked run {asked.run} for a checkpoint, since {', '.join(asked.stages)} finished.")
        return wanted

    return pipeline_sensor(
        evaluate,
        pipeline=pipeline,
        name=sensor_name,
        description=f"Asks pipeline {pipeline.name!r} for a checkpoint when stages have finished, and shows its roots.",
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        resource_key=resource_key,
    )


def _finished_since(
    instance: dg.DagsterInstance, keys: Mapping[str, dg.AssetKey], seen: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Every stage's new materializations.

    Returns:
        By stage, the newest storage id seen by now; and, by run and stage, those of the materializations since. Without a
        memory, the newest few are looked at: a stage is materialized once in a run.
    """
    now_seen: dict[str, int] = dict(seen)
    finished: dict[str, dict[str, int]] = {}
    for stage, key in keys.items():
        wanted = dg.AssetRecordsFilter(asset_key=key, after_storage_id=seen.get(stage))
        records = instance.fetch_materializations(wanted, limit=_NEWEST).records
        if records:
            now_seen[stage] = records[0].storage_id
        for record in records:
            materialized = record.asset_materialization
            # One that was restored as finished is materialized again by the new run, and no root has moved.
            if materialized is not None and FINISHED_BEFORE not in materialized.metadata:
                finished.setdefault(record.run_id, {}).setdefault(stage, record.storage_id)
    return now_seen, finished


def _roots(answer: Answer, running: RunningPipeline | NotRunning) -> list[str]:
    told = answer.details.get("roots")
    if isinstance(told, list):
        return [str(root) for root in told]
    status = running.status if isinstance(running, RunningPipeline) else None
    return list(status.roots) if status is not None else []


def _observations(keys: Mapping[str, dg.AssetKey], asked: _Asked, answer: Answer, roots: list[str]) -> list[dg.AssetObservation]:
    metadata = {
        "roots": ", ".join(roots),
        "finished": ", ".join(asked.stages),
        "checkpoint": answer.checkpoint_id,
        "location": answer.location,
        "run": dg.MetadataValue.dagster_run(asked.run),
    }
    shown = {name: value for name, value in metadata.items() if value is not None}
    return [dg.AssetObservation(keys[root], metadata=shown) for root in roots if root in keys]


def _id(sensor: str, asked: _Asked) -> str:
    return request_id(sensor, asked.run, asked.event, *([asked.attempt] if asked.attempt > 1 else []))
