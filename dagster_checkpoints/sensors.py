"""Public names of the sensors: what `dagster_checkpoints.plugin.sensors` builds, and the conditions of a drain or suspend."""

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
from dagster_checkpoints.plugin.sensors.end_of_input import NotASourceError, build_end_of_input_sensor
from dagster_checkpoints.plugin.sensors.health import build_health_sensor
from dagster_checkpoints.plugin.sensors.recovery import Backoff, build_recovery_sensor
from dagster_checkpoints.plugin.sensors.reroot import build_reroot_sensor
from dagster_checkpoints.plugin.sensors.run_schedule import build_burst_schedule, build_run_schedule
from dagster_checkpoints.plugin.sensors.savepoints import build_savepoint_check_sensor, build_savepoint_schedule
from dagster_checkpoints.plugin.sensors.stops import build_drain_sensor, build_suspend_sensor

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
    "build_burst_schedule",
    "build_drain_sensor",
    "build_end_of_input_sensor",
    "build_health_sensor",
    "build_recovery_sensor",
    "build_reroot_sensor",
    "build_run_schedule",
    "build_savepoint_check_sensor",
    "build_savepoint_schedule",
    "build_suspend_sensor",
    "live_lag_zero",
    "marker_object",
    "when",
]
