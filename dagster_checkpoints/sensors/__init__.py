"""Automation: sensors that control a running pipeline, and the schedule of its savepoints.

Each `build_…` makes one for your definitions. A tick writes a request into the pipeline's storage or looks at the answer to an
earlier one; it never waits for the pipeline, and says in its skip reason what it saw. Read `ticks` first (how a tick reaches
the pipeline) and `cursors` (what it remembers); then `reroot`, `conditions` and `drain`, `end_of_input`, `recovery`,
`savepoint_schedule`, `savepoint_check`.
"""

from dagster_checkpoints.sensors.conditions import (
    DrainCondition,
    Seen,
    Surroundings,
    all_of,
    any_of,
    assets_materialized,
    at_time,
    bounded_stages_finished,
    live_lag_zero,
    marker_object,
    when,
)
from dagster_checkpoints.sensors.drain import build_drain_sensor
from dagster_checkpoints.sensors.end_of_input import NotASourceError, build_end_of_input_sensor
from dagster_checkpoints.sensors.recovery import Backoff, build_recovery_sensor
from dagster_checkpoints.sensors.reroot import build_reroot_sensor
from dagster_checkpoints.sensors.savepoint_check import build_savepoint_check_sensor
from dagster_checkpoints.sensors.savepoint_schedule import build_savepoint_schedule

__all__ = [
    "Backoff",
    "DrainCondition",
    "NotASourceError",
    "Seen",
    "Surroundings",
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
