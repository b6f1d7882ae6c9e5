"""The checkpoint coordinator of this code location.

Storage is what CHECKPOINT_STORAGE names, else a directory below DAGSTER_HOME that survives restarts.
"""

from __future__ import annotations

from typing import Any

from dagster_checkpoints import CheckpointCoordinatorResource

_SETTINGS: dict[str, Any] = {
    "interval": 5.0,  # so that there is something to see
    "observe_every": 5.0,
    "retained": 2,
    "lease_seconds": 10.0,
    "spark_config": {"spark.master": "local[2]", "spark.sql.shuffle.partitions": "2"},
}


def coordinator_with(**settings: Any) -> CheckpointCoordinatorResource:
    """The coordinator of the flights pipeline, with some settings of its own."""
    return CheckpointCoordinatorResource(**{**_SETTINGS, **settings})


checkpoint_coordinator = coordinator_with()
