"""The sensors, schedules and job of the flights code location."""

from __future__ import annotations

from sensors.flights_sensors import flights_defs

__all__ = ["flights_defs"]
