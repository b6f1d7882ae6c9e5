"""Settings that a job on Spark refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.coordination import CheckpointConfig, InvalidCheckpointConfig, NoRestart
from dagster_checkpoints.spark.job.job_options import JobOptions


@pytest.mark.parametrize(
    ("setting", "because"),
    [
        ({"mode": "at_least_once"}, "align their barriers"),
        ({"unaligned": True}, "align their barriers"),
        ({"checkpoints_after_tasks_finish": False}, "committed again if the job restarts"),
    ],
)
def test_settings_that_only_the_core_supports_are_refused(setting: dict[str, Any], because: str) -> None:
    (name,) = setting
    with pytest.raises(InvalidCheckpointConfig, match=f"{name} is .*{because}"):
        JobOptions(CheckpointConfig(interval=1.0, **setting), NoRestart(), Path("work"))
