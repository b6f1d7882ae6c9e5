"""The health sensor: evaluates the check of a pipeline's health by itself, from what its run writes into storage."""

from __future__ import annotations

import dagster as dg

from dagster_checkpoints.control.health import DEFAULT_THRESHOLDS, HealthMemory, HealthThresholds
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.health_check import NAME, NEVER_RUN, evaluation, look_at
from dagster_checkpoints.plugin.savepoints.asset import RESOURCE
from dagster_checkpoints.plugin.sensors.pipeline_sensor import (
    Cursor,
    SensorTick,
    pipeline_sensor,
    read_cursor,
    skip,
    write_cursor,
)
from dagster_checkpoints.plugin.stage_assets import checkpoints_key

REPEAT_SECONDS = 3600.0
"""Seconds after which an evaluation is recorded again, although nothing has changed."""


class _HealthCursor(Cursor, frozen=True, kw_only=True, omit_defaults=True):
    """Args:
    memory: what earlier ticks have seen.
    found: names of the rules that were broken at the last recorded evaluation.
    reported_at: time of that evaluation, seconds since 1970; 0 before the first.
    running: whether the pipeline ran at that evaluation.
    """

    memory: HealthMemory = HealthMemory()
    found: tuple[str, ...] = ()
    reported_at: float = 0.0
    running: bool = False


def build_health_sensor(
    *,
    pipeline: Pipeline,
    thresholds: HealthThresholds = DEFAULT_THRESHOLDS,
    name: str | None = None,
    minimum_interval_seconds: int = 60,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
    resource_key: str = RESOURCE,
) -> dg.SensorDefinition:
    """A sensor that evaluates the check `healthy` of `checkpoints/<pipeline>`: the asset turns red by itself, and green again.

    An evaluation is recorded when something has changed, and once an hour. It reads the storage, and does not disturb the run.

    Args:
        pipeline: The pipeline.
        thresholds: From when it counts as unhealthy.
        name: The sensor's name; default: the pipeline's name and `_health`.
        minimum_interval_seconds: Least seconds between two ticks.
        default_status: Whether the sensor runs without being switched on.
        resource_key: Key of the :class:`CheckpointCoordinatorResource`.

    Examples:
        >>> build_health_sensor(pipeline=flights, thresholds=HealthThresholds(slow_checkpoint=30.0))
    """
    key = checkpoints_key(pipeline.name)

    def evaluate(tick: SensorTick) -> dg.SensorResult:
        before = read_cursor(tick.dagster.cursor, _HealthCursor)
        look = tick.control.do(lambda control: look_at(control, before.memory, thresholds, tick.now))
        if look.state is None and not look.problems:
            return skip(NEVER_RUN, _HealthCursor())
        found, running, now = tuple(problem.name for problem in look.problems), look.running, tick.now.timestamp()
        shown = evaluation(look)
        unchanged = bool(before.reported_at) and (found, running) == (before.found, before.running)
        if unchanged and now < before.reported_at + REPEAT_SECONDS:
            after = _HealthCursor(memory=look.memory, found=found, reported_at=before.reported_at, running=running)
            return skip(shown["description"], after)
        after = _HealthCursor(memory=look.memory, found=found, reported_at=now, running=running)
        reported = dg.AssetCheckEvaluation(asset_key=key, check_name=NAME, **shown)
        return dg.SensorResult(skip_reason=shown["description"], cursor=write_cursor(after), asset_events=[reported])

    return pipeline_sensor(
        evaluate,
        pipeline=pipeline,
        name=name or f"{pipeline.name}_health",
        description=f"Evaluates whether pipeline {pipeline.name!r} is healthy.",
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        resource_key=resource_key,
    )
