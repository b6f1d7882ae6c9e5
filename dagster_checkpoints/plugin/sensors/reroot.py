"""The re-root sensor: after a stage has finished, the next checkpoint begins at other stages; the sensor requests it at once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import dagster as dg
import msgspec

from dagster_checkpoints.control.pipeline_control import NoRunningPipeline, PipelineControl
from dagster_checkpoints.control.requests import Answer
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.pipeline.setting_values import check_seconds
from dagster_checkpoints.plugin.savepoints.asset import RESOURCE
from dagster_checkpoints.plugin.sensors.pipeline_sensor import (
    Cursor,
    NotRunning,
    RunningPipeline,
    SensorTick,
    TimedControl,
    pipeline_sensor,
    read_cursor,
    request_id,
    skip,
)
from dagster_checkpoints.plugin.stage_assets import FINISHED_BEFORE, reports_end, stage_keys

ATTEMPTS = 5
_NEWEST = 50


class _CheckpointRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a checkpoint after stages have finished.

    Args:
        run: id of the run.
        event: storage id of the newest materialization of these stages.
        stages: the stages that have finished.
        attempt: attempt number, from 1.
    """

    run: str
    event: int
    stages: tuple[str, ...]
    attempt: int = 1


class _RerootCursor(Cursor, frozen=True, kw_only=True, omit_defaults=True):
    """Args:
    seen: the storage id of each stage's newest materialization that a tick has read. One id per stage, because ids of different
        assets need not become visible in their order.
    asked: the requests without a final answer.
    """

    seen: dict[str, int] = msgspec.field(default_factory=dict)
    asked: tuple[_CheckpointRequest, ...] = ()


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
    """A sensor that requests a checkpoint of the running pipeline when stages have finished, and shows where it began.

    Checkpoints begin at the roots: the running stages none of whose predecessors runs. When a stage finishes, others become
    roots. The sensor reads all materializations of stages since its last tick, requests one checkpoint, and in a later tick, when
    the checkpoint is complete, reports an observation of every root. It never waits. The pipeline itself does not need the
    sensor: its next periodic checkpoint begins at the new roots in any case.

    Args:
        pipeline: The pipeline.
        assets: The assets that `@pipeline_assets` created for it.
        name: The sensor's name; default: the pipeline's name and `_reroot`.
        deadline: Seconds that the checkpoint may take.
        minimum_interval_seconds: Least seconds between two ticks.
        default_status: Whether the sensor runs without being switched on.
        resource_key: Key of the :class:`CheckpointCoordinatorResource`.

    Raises:
        NotAPipelineAssetError: The assets are not this pipeline's.
        InvalidDurationError: `deadline` is not a number of seconds above 0.
    """
    check_seconds("build_reroot_sensor", above=0, deadline=deadline)
    keys = stage_keys(assets, pipeline)
    sensor_name = name or f"{pipeline.name}_reroot"

    def evaluate(tick: SensorTick) -> dg.SensorResult:
        before = read_cursor(tick.dagster.cursor, _RerootCursor)
        seen, finished = _finished_since(tick.dagster.instance, keys, before.seen)
        running = tick.control.find_run()
        messages: list[str] = []
        observations: list[dg.AssetObservation] = []
        to_send, waiting = [], []
        for asked in before.asked:
            answer = tick.control.poll(_id(sensor_name, asked))
            if answer is not None and answer.status == "done":
                roots = _roots(answer, running)
                messages.append(f"Checkpoint {answer.checkpoint_id} began at {', '.join(roots) or 'unknown stages'}.")
                observations += _observations(keys, asked, answer, roots)
            elif isinstance(running, NotRunning) or running.run_id != asked.run:
                messages.append(f"Run {asked.run} has ended without the requested checkpoint.")
            elif answer is None or not answer.final:
                messages.append(f"Waiting for the checkpoint after the end of {', '.join(asked.stages)}.")
                waiting.append(asked)
            elif asked.attempt < ATTEMPTS:
                messages.append(f"The checkpoint failed, {answer.reason}: {answer.message}. Asking again.")
                to_send.append(msgspec.structs.replace(asked, attempt=asked.attempt + 1))
            else:
                messages.append(f"The checkpoint failed {asked.attempt} times, {answer.reason}: {answer.message}. Given up.")
        if isinstance(running, NotRunning):
            messages.append(running.text)
        else:
            if stages := finished.get(running.run_id):
                to_send.append(_CheckpointRequest(run=running.run_id, event=max(stages.values()), stages=tuple(stages)))
            elif not messages:
                messages.append(f"No stage of run {running.run_id} has finished since the last tick.")
            waiting += _send(tick.control, to_send, messages)
        return skip(" ".join(messages), _RerootCursor(seen=seen, asked=tuple(waiting)), observations)

    def _send(control: TimedControl, requests: list[_CheckpointRequest], messages: list[str]) -> list[_CheckpointRequest]:
        for asked in requests:
            asked_id = _id(sensor_name, asked)
            try:
                control.do(partial(PipelineControl.checkpoint, request_id=asked_id, deadline=deadline))
            except NoRunningPipeline as error:
                messages.append(str(error))
                return []
            messages.append(f"Asked run {asked.run} for a checkpoint, since {', '.join(asked.stages)} finished.")
        return requests

    return pipeline_sensor(
        evaluate,
        pipeline=pipeline,
        name=sensor_name,
        description=f"Requests a checkpoint of pipeline {pipeline.name!r} when stages have finished, and shows its roots.",
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        resource_key=resource_key,
    )


def _finished_since(
    instance: dg.DagsterInstance, keys: Mapping[str, dg.AssetKey], seen: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Every stage's new materializations.

    Returns:
        The newest storage id of each stage; and the storage ids of the materializations since, by run and stage. Without a
        memory only the newest few are read: the end of a stage is its last materialization in a run.
    """
    newest: dict[str, int] = dict(seen)
    finished: dict[str, dict[str, int]] = {}
    for stage, key in keys.items():
        wanted = dg.AssetRecordsFilter(asset_key=key, after_storage_id=seen.get(stage))
        records = instance.fetch_materializations(wanted, limit=_NEWEST).records
        if records:
            newest[stage] = records[0].storage_id
        for record in records:
            materialized = record.asset_materialization
            # A new run materializes stages again that were restored as finished, and commits materialize running stages: these
            # change no root.
            if materialized is not None and FINISHED_BEFORE not in materialized.metadata and reports_end(materialized):
                finished.setdefault(record.run_id, {}).setdefault(stage, record.storage_id)
    return newest, finished


def _roots(answer: Answer, running: RunningPipeline | NotRunning) -> list[str]:
    reported = answer.details.get("roots")
    if isinstance(reported, list):
        return [str(root) for root in reported]
    status = running.status if isinstance(running, RunningPipeline) else None
    return list(status.roots) if status is not None else []


def _observations(
    keys: Mapping[str, dg.AssetKey], asked: _CheckpointRequest, answer: Answer, roots: list[str]
) -> list[dg.AssetObservation]:
    metadata = {
        "roots": ", ".join(roots),
        "finished": ", ".join(asked.stages),
        "checkpoint": answer.checkpoint_id,
        "location": answer.location,
        "run": dg.MetadataValue.dagster_run(asked.run),
    }
    shown = {name: value for name, value in metadata.items() if value is not None}
    return [dg.AssetObservation(keys[root], metadata=shown) for root in roots if root in keys]


def _id(sensor: str, asked: _CheckpointRequest) -> str:
    return request_id(sensor, asked.run, asked.event, *([asked.attempt] if asked.attempt > 1 else []))
