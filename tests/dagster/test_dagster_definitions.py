"""This repository's code location loads, and holds what the README promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dagster as dg

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_workspace_is_valid(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dagster", "definitions", "validate", "-w", "workspace.yaml"]
    environment = {**os.environ, "DAGSTER_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_code_location_has_the_flights() -> None:
    from assets.flights import flights
    from definitions import defs

    graph = defs.resolve_asset_graph()
    stages = {dg.AssetKey([stage.name]) for stage in flights.stages}
    assert stages <= graph.materializable_asset_keys
    instances = dg.AssetKey(["flights_live_instances"])
    partitions = graph.get(instances).partitions_def
    assert partitions is not None and set(partitions.get_partition_keys()) == {"EWR", "JFK", "LGA"}
    assert {"flights_job", "feed_job"} <= {job.name for job in defs.resolve_all_job_defs()}
    schedule = defs.resolve_schedule_def("flights_every_night")
    assert schedule.default_status is dg.DefaultScheduleStatus.STOPPED
