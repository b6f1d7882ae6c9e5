"""The sensors, schedules and job of the flights pipeline.

Sensors that check savepoints, react to finished stages or drain the pipeline at its end are on from the start; automation that
starts runs of the pipeline or takes savepoints is off until it is switched on.
"""

from __future__ import annotations

from datetime import timedelta

import dagster as dg

from assets.flights import DATA, flights
from assets.flights_assets import flights_assets
from assets.flights_savepoints import flights_savepoint_check, flights_savepoints
from dagster_checkpoints.sensors import (
    bounded_stages_finished,
    build_drain_sensor,
    build_recovery_sensor,
    build_reroot_sensor,
    build_savepoint_check_sensor,
    build_savepoint_schedule,
    live_lag_zero,
    marker_object,
)

flights_job = dg.define_asset_job(
    "flights_job",
    selection=dg.AssetSelection.assets(flights_assets),
    config={"ops": {"flights_assets": {"config": {"restore_from": "latest", "claim_mode": "no_claim"}}}},
    description=(
        "Launch this job first. Runs the flights pipeline: all stages in one run, which ends when December has been consumed. "
        "It continues the previous run if that run did not finish. To begin from a savepoint, set restore_from in the launchpad "
        "to its location, URL or number; `none` is a new start."
    ),
)

# At a new start flights_assets removes the marker with the files of the feed, so a marker of any age is valid.
december_consumed = bounded_stages_finished() & live_lag_zero() & marker_object(str(DATA.feed_complete), of_any_age=True)

drain_sensor = build_drain_sensor(
    pipeline=flights,
    when=december_consumed,
    minimum_interval_seconds=10,
    default_status=dg.DefaultSensorStatus.RUNNING,
)

reroot_sensor = build_reroot_sensor(
    pipeline=flights,
    assets=flights_assets,
    minimum_interval_seconds=10,
    default_status=dg.DefaultSensorStatus.RUNNING,
)

recovery_sensor = build_recovery_sensor(pipeline=flights, assets=flights_assets, jobs=[flights_job])

savepoint_check_sensor = build_savepoint_check_sensor(
    pipeline=flights,
    savepoints=flights_savepoints,
    check=flights_savepoint_check,
    default_status=dg.DefaultSensorStatus.RUNNING,
)

savepoints_every_hour = build_savepoint_schedule(
    pipeline=flights,
    savepoints=flights_savepoints,
    cron_schedule="0 * * * *",
    keep=24,
    keep_for=timedelta(days=7),
)

flights_every_night = dg.ScheduleDefinition(
    name="flights_every_night",
    job=flights_job,
    cron_schedule="0 3 * * *",
    default_status=dg.DefaultScheduleStatus.STOPPED,
)
