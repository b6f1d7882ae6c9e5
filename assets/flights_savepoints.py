"""The savepoints of the flights pipeline: an asset with one partition per savepoint, and its check."""

from __future__ import annotations

import dagster as dg

from assets.flights import flights
from assets.flights_assets import flights_assets
from dagster_checkpoints import savepoint_asset, savepoint_check

flights_savepoints = savepoint_asset(pipeline=flights, assets=flights_assets)

flights_savepoint_check = savepoint_check(pipeline=flights, savepoints=flights_savepoints)

# The launchpad of this job can name a savepoint; the button of the check takes the newest one.
check_savepoint_job = dg.define_asset_job(
    "flights_check_savepoint",
    selection=dg.AssetSelection.checks(flights_savepoint_check),
    description=(
        "Optional. Reads the newest savepoint, or the one named in the launchpad, and reports whether it can be restored."
    ),
)
