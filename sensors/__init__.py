"""The sensors, schedules and jobs of the flights code location."""

from __future__ import annotations

from sensors.flights_sensors import (
    drain_sensor,
    flights_every_night,
    flights_job,
    recovery_sensor,
    reroot_sensor,
    savepoint_check_sensor,
    savepoints_every_hour,
)

__all__ = [
    "drain_sensor",
    "flights_every_night",
    "flights_job",
    "recovery_sensor",
    "reroot_sensor",
    "savepoint_check_sensor",
    "savepoints_every_hour",
]
