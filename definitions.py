"""The code location: the flights pipeline, its feeder, and what they need."""

from __future__ import annotations

import dagster as dg

from assets.flights_assets import feed_job, flights_assets
from dagster_checkpoints import instance_assets
from resources import checkpoint_coordinator

flights_job = dg.define_asset_job(
    "flights_job",
    selection=dg.AssetSelection.assets(flights_assets),
    description="The flights pipeline: all stages in one run, which ends when December has been consumed.",
)

every_night = dg.ScheduleDefinition(
    name="flights_every_night",
    job=flights_job,
    cron_schedule="0 3 * * *",
    default_status=dg.DefaultScheduleStatus.STOPPED,
)

defs = dg.Definitions(
    assets=[flights_assets, *instance_assets(flights_assets)],
    jobs=[flights_job, feed_job],
    schedules=[every_night],
    resources={"checkpoint_coordinator": checkpoint_coordinator},
    # A run is one op: a second process would only cost memory.
    executor=dg.in_process_executor,
)
