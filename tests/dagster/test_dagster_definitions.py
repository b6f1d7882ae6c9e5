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


def test_which_job_to_launch_is_said_first() -> None:
    from definitions import defs

    says = {job.name: (job.description or "").split(".")[0].split(":")[0] for job in defs.resolve_all_job_defs()}
    assert {name: text for name, text in says.items() if not name.startswith("__")} == {
        "flights_job": "Launch this job first",
        "feed_job": "Launch this job second, when the run of flights_job has begun",
        "flights_recovery_job": "Launched by the sensor 'flights_recovery'",
        "flights_savepoint_check_job": "Launched by the sensor 'flights_savepoint_check'",
        "flights_savepoints_job": "Launched by the schedule 'flights_savepoints'",
    }


def test_nothing_starts_runs_or_fills_storage_by_itself() -> None:
    from definitions import defs

    for name in ("flights_runs", "flights_savepoints"):
        assert defs.resolve_schedule_def(name).default_status is dg.DefaultScheduleStatus.STOPPED
    assert defs.resolve_sensor_def("flights_recovery").default_status is dg.DefaultSensorStatus.STOPPED
    for name in ("flights_drain", "flights_reroot"):  # the pipeline ends when December is consumed; this sensor finds that out
        assert defs.resolve_sensor_def(name).default_status is dg.DefaultSensorStatus.RUNNING


def test_the_code_location_has_the_flights_savepoints() -> None:
    from definitions import defs

    graph = defs.resolve_asset_graph()
    savepoints = dg.AssetKey(["savepoints", "flights"])
    node = graph.get(savepoints)
    assert isinstance(node.partitions_def, dg.DynamicPartitionsDefinition)
    assert node.group_name != graph.get(dg.AssetKey("flights_live")).group_name
    assert [key.name for key in graph.asset_check_keys if key.asset_key == savepoints] == ["restorable"]
    assert {"flights_job", "flights_savepoint_check_job"} <= {job.name for job in defs.resolve_all_job_defs()}


def test_dagster_knows_the_library_and_its_version() -> None:
    from dagster_shared.libraries import DagsterLibraryRegistry

    import dagster_checkpoints.plugin

    assert DagsterLibraryRegistry.get()["dagster-checkpoints"] == dagster_checkpoints.__version__
