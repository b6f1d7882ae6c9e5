"""The code location: the flights pipeline with its savepoints and sensors, and the job that feeds its live sources."""

from __future__ import annotations

import dagster as dg

import sensors
from assets.flights_assets import feed_job

# A run is one op: a second process would only need more memory.
defs = dg.Definitions.merge(sensors.flights_defs, dg.Definitions(jobs=[feed_job], executor=dg.in_process_executor))
