"""Public names of the sensors: what `dagster_checkpoints.plugin.sensors` builds, and the conditions of a drain."""

from dagster_checkpoints.plugin.sensors.conditions import (
    ConditionContext,
    ConditionResult,
    DrainCondition,
    all_of,
    any_of,
    assets_materialized,
    at_time,
    bounded_stages_finished,
    live_lag_zero,
    marker_object,
    when,
)
from dagster_checkpoints.plugin.sensors.drain import build_drain_sensor
from dagster_checkpoints.plugin.sensors.end_of_input import NotASourceError, build_end_of_input_sensor
from dagster_checkpoints.plugin.sensors.recovery import Backoff, build_recovery_sensor
from dagster_checkpoints.plugin.sensors.reroot import build_reroot_sensor
from dagster_checkpoints.plugin.sensors.savepoint_check import build_savepoint_check_sensor
from dagster_checkpoints.plugin.sensors.savepoint_schedule import build_savepoint_schedule

__all__ = [
    "Backoff",
    "ConditionContext",
    "ConditionResult",
    "DrainCondition",
    "NotASourceError",
    "all_of",
    "any_of",
    "assets_materialized",
    "at_time",
    "bounded_stages_finished",
    "build_drain_sensor",
    "build_end_of_input_sensor",
    "build_recovery_sensor",
    "build_reroot_sensor",
    "build_savepoint_check_sensor",
    "build_savepoint_schedule",
    "live_lag_zero",
    "marker_object",
    "when",
]
