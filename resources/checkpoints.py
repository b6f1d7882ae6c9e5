"""The checkpoint coordinator of this code location.

CHECKPOINT_STORAGE names the storage; without it, the storage is a directory in DAGSTER_HOME.
"""

from __future__ import annotations

from typing import Any

from assets.flights_kafka import spark_settings
from dagster_checkpoints import CheckpointCoordinatorResource

_SETTINGS: dict[str, Any] = {
    "interval": 5.0,  # short, for the demonstration
    "observe_every": 5.0,
    "retained": 2,
    "lease_seconds": 10.0,
    "spark_config": {"spark.master": "local[2]", "spark.sql.shuffle.partitions": "2", **spark_settings()},
}


def coordinator_with(**settings: Any) -> CheckpointCoordinatorResource:
    """The coordinator of the flights pipeline with changed settings."""
    return CheckpointCoordinatorResource(**{**_SETTINGS, **settings})


checkpoint_coordinator = coordinator_with()
