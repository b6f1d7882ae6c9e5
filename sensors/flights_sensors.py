"""The flights pipeline's definitions for Dagster: its job, savepoints, sensors and schedules.

Sensors that check savepoints, react to finished stages or drain the pipeline at its end are on from the start; automation that
starts runs of the pipeline or takes savepoints is off until it is switched on.
"""

from __future__ import annotations

from assets.flights import DATA, flights
from assets.flights_assets import flights_assets
from dagster_checkpoints import build_pipeline_defs
from dagster_checkpoints.sensors import bounded_stages_finished, live_lag_zero, marker_object
from resources import checkpoint_coordinator

# At a new start flights_assets removes the marker with the files of the feed, so a marker of any age is valid.
december_consumed = bounded_stages_finished() & live_lag_zero() & marker_object(str(DATA.feed_complete), of_any_age=True)

flights_defs = build_pipeline_defs(
    flights,
    coordinator=checkpoint_coordinator,
    assets=flights_assets,
    drain_when=december_consumed,
    reroot=True,
    run_schedule="0 3 * * *",
    savepoint_schedule="0 * * * *",
    keep_savepoints=24,
    minimum_interval_seconds=10,
)
