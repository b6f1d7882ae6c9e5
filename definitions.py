"""The code location: the flights pipeline with its savepoints and sensors, its feeder, and their resources."""

from __future__ import annotations

import dagster as dg

from assets.flights_assets import feed_job, flights_assets
from assets.flights_savepoints import check_savepoint_job, flights_savepoint_check, flights_savepoints
from dagster_checkpoints import instance_assets
from resources import checkpoint_coordinator
from sensors import (
    drain_sensor,
    flights_every_night,
    flights_job,
    recovery_sensor,
    reroot_sensor,
    savepoint_check_sensor,
    savepoints_every_hour,
)

defs = dg.Definitions(
    assets=[flights_assets, *instance_assets(flights_assets), flights_savepoints],
    asset_checks=[flights_savepoint_check],
    jobs=[flights_job, feed_job, check_savepoint_job],
    sensors=[drain_sensor, reroot_sensor, recovery_sensor, savepoint_check_sensor],
    schedules=[flights_every_night, savepoints_every_hour],
    resources={"checkpoint_coordinator": checkpoint_coordinator},
    # A run is one op: a second process would only need more memory.
    executor=dg.in_process_executor,
)
