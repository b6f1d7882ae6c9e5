"""What a job is not asked for that it cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.coordination import CheckpointConfig, InvalidCheckpointConfig, NoRestart
from dagster_checkpoints.spark.job_options import JobOptions


@pytest.mark.parametrize("setting", [{"mode": "at_least_once"}, {"unaligned": True}])
def test_what_only_the_core_can_do_is_refused(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(InvalidCheckpointConfig, match=f"{name} is .*align their barriers"):
        JobOptions(CheckpointConfig(interval=1.0, **setting), NoRestart(), Path("work"))
