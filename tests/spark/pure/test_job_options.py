"""Settings that a job on Spark refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.errors import InvalidCheckpointConfig
from dagster_checkpoints.coordination.restarts import NoRestart
from dagster_checkpoints.spark.job.job_options import JobOptions


def test_tasks_that_end_without_a_checkpoint_are_refused() -> None:
    refused = "checkpoints_after_tasks_finish is False.*committed again if the job restarts"
    with pytest.raises(InvalidCheckpointConfig, match=refused):
        JobOptions(CheckpointConfig(interval=1.0, checkpoints_after_tasks_finish=False), NoRestart(), Path("work"))
