"""PostgreSQL as Dagster's storage: what a user sees of runs, and what happens to a run when that server is away."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from uuid import uuid4

import dagster as dg
import pytest
from dagster._core.definitions.asset_checks.asset_check_evaluation import AssetCheckEvaluation
from dagster._core.remote_origin import GrpcServerCodeLocationOrigin, RemoteInstigatorOrigin, RemoteRepositoryOrigin
from dagster._core.scheduler.instigation import InstigatorState, InstigatorStatus, InstigatorType, SensorInstigatorData
from dagster_postgres import PostgresEventLogStorage, PostgresRunStorage, PostgresScheduleStorage

from bench.postgresql import PostgresqlServer
from dagster_checkpoints.plugin.runs import RECOVERS
from dagster_checkpoints.plugin.stage_assets import reports_end
from tests.dagster.processes.pipeline_of_numbers import PipelineOfNumbers

REPOSITORY = Path(__file__).resolve().parents[3]
LOCATION = Path(__file__).with_name("postgresql_location.py")
SECONDS = 180.0
STORED_IN_POSTGRESQL = """
telemetry:
  enabled: false
storage:
  postgres:
    postgres_url:
      env: DAGSTER_POSTGRES_URL
"""
CHECKPOINTS = dg.AssetKey(["checkpoints", "stored_live"])
HEALTHY = dg.AssetCheckKey(CHECKPOINTS, "healthy")
RETRYING = "Retrying failed database connection"
GIVEN_UP = "too many retries for DB connection"
T = TypeVar("T")


class World(PipelineOfNumbers):
    """A Dagster instance in PostgreSQL, its runs in separate processes, and sensors, which tick in this process."""

    def __init__(self, home: Path, instance: dg.DagsterInstance, location: ModuleType) -> None:
        super().__init__(home, instance, "stored_live")
        self.location = location
        self._processes: list[subprocess.Popen[bytes]] = []

    def launch(self, job: str, request: Any = None) -> tuple[str, subprocess.Popen[bytes]]:
        """Start a run of a job, or the run that a sensor requests, as a launcher does. Returns its id and its process."""
        known = {run.run_id for run in self.instance.get_runs()}
        command = [sys.executable, "-m", "dagster", "job", "execute", "-f", str(LOCATION), "-j", job]
        if request is not None:
            assert request.job_name == job
            command += ["--tags", json.dumps(dict(request.tags))]
        with self._log.open("ab") as log:
            process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log, start_new_session=True)
        self._processes.append(process)

        def appeared() -> str | None:
            assert process.poll() is None, self.log()[-5000:]
            return next((run.run_id for run in self.instance.get_runs() if run.run_id not in known), None)

        return self.until(appeared, "the run appears"), process

    def recover(self, failed: str) -> tuple[str, subprocess.Popen[bytes]]:
        """Start the run that the recovery sensor requests. Returns its id and its process."""
        (request,) = self.until(lambda: self.tick(self.location.recovery).run_requests, "the recovery sensor requests a run")
        assert request.run_key == request.tags[RECOVERS] == failed
        return self.launch("numbers", request)

    @property
    def _log(self) -> Path:
        return self.home / "runs.log"

    def log(self, since: int = 0) -> str:
        return self._log.read_bytes()[since:].decode()

    def until(self, look: Callable[[], T | None], what: str) -> T:
        deadline = time.monotonic() + SECONDS
        while not (found := look()):
            assert time.monotonic() < deadline, f"{what}: {self.log()[-5000:]}"
            time.sleep(0.2)
        return found

    def tick(self, sensor: dg.SensorDefinition) -> dg.SensorResult:
        """One tick, with the cursor in Dagster's storage, as Dagster's daemon keeps it."""
        repository = RemoteRepositoryOrigin(GrpcServerCodeLocationOrigin("localhost", 1), "__repository__")
        origin = RemoteInstigatorOrigin(repository, sensor.name)
        state = InstigatorState(origin, InstigatorType.SENSOR, InstigatorStatus.RUNNING, SensorInstigatorData(min_interval=30))
        stored = self.instance.get_instigator_state(state.instigator_origin_id, state.selector_id)
        if stored is None:
            stored = self.instance.add_instigator_state(state)
        assert isinstance(stored.instigator_data, SensorInstigatorData)
        resources = {"checkpoint_coordinator": self.location.coordinator}
        cursor = stored.instigator_data.cursor
        with dg.build_sensor_context(instance=self.instance, cursor=cursor, resources=resources) as context:
            result = sensor.evaluate_tick(context)
        self.instance.update_instigator_state(state.with_data(SensorInstigatorData(min_interval=30, cursor=result.cursor)))
        return result  # type: ignore[return-value]

    def tick_says(self, sensor: dg.SensorDefinition, words: str) -> str | None:
        """The skip reason of one tick, if it has these words."""
        text = str(self.tick(sensor).skip_message)
        return text if words in text else None

    def healthy(self) -> AssetCheckEvaluation:
        """The newest evaluation of the check `healthy`."""
        (record,) = self.instance.event_log_storage.get_asset_check_execution_history(HEALTHY, limit=1)
        assert record.event is not None and record.event.dagster_event is not None
        evaluation = record.event.dagster_event.event_specific_data
        assert isinstance(evaluation, AssetCheckEvaluation)
        return evaluation

    def sensor(self, name: str) -> dg.SensorDefinition:
        return self.location.defs.resolve_sensor_def(name)

    def execute(self, job: str, **options: Any) -> dg.ExecuteInProcessResult:
        """Execute a job that needs no Spark in this process, on the instance."""
        return self.location.defs.resolve_job_def(job).execute_in_process(instance=self.instance, **options)

    def materializations(self, *key: str) -> list[dg.AssetMaterialization]:
        records = self.instance.fetch_materializations(dg.AssetKey(key), limit=1000, ascending=True).records
        return [record.asset_materialization for record in records if record.asset_materialization]

    def shown_rows(self) -> int:
        """The number of committed rows that the newest materialization of `squares` shows."""
        newest = self.materializations("squares")[-1:]
        return sum(metadata(materialization)["dagster/row_count"] for materialization in newest)

    def observation(self, key: dg.AssetKey) -> dict[str, Any]:
        """The metadata of the newest observation."""
        (record,) = self.instance.fetch_observations(key, limit=1).records
        assert record.asset_observation is not None
        return {name: value.value for name, value in record.asset_observation.metadata.items()}

    def has_committed(self, rows: int) -> None:
        squares = [number * number for number in range(rows)]
        self.until(lambda: self.committed() == squares, f"{rows} rows are committed")

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.storage.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgresql: PostgresqlServer) -> Iterator[World]:
    url = postgresql.url(schema=f"d{uuid4().hex[:12]}")
    monkeypatch.setenv("DAGSTER_POSTGRES_URL", url.replace("postgresql://", "postgresql+psycopg2://"))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.setenv("LIVE_ROOT", str(tmp_path / "data"))
    monkeypatch.delenv("CHECKPOINT_STORAGE", raising=False)
    (tmp_path / "dagster.yaml").write_text(STORED_IN_POSTGRESQL)
    spec = importlib.util.spec_from_file_location("postgresql_location", LOCATION)
    assert spec is not None and spec.loader is not None
    location = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(location)
    with ExitStack() as stack:
        instance = stack.enter_context(dg.DagsterInstance.from_config(str(tmp_path)))
        made = World(tmp_path, instance, location)
        stack.callback(made.close)
        yield made


def metadata(materialization: dg.AssetMaterialization) -> dict[str, Any]:
    return {name: value.value for name, value in materialization.metadata.items()}


def test_runs_savepoints_sensors_and_checks_with_dagsters_storage_in_postgresql(world: World) -> None:
    instance = world.instance
    storages = (instance.run_storage, instance.event_log_storage, instance.schedule_storage)
    kinds = (PostgresRunStorage, PostgresEventLogStorage, PostgresScheduleStorage)
    assert all(isinstance(storage, kind) for storage, kind in zip(storages, kinds, strict=True))

    # A bounded pipeline: each stage is materialized once, at its end.
    bounded, process = world.launch("stored_bounded_job")
    assert process.wait(SECONDS) == 0, world.log()[-5000:]
    assert world.status(bounded) is dg.DagsterRunStatus.SUCCESS
    assert world.committed("doubled") == [0, 2, 4, 6, 8]
    for stage in ("numbers", "doubled"):
        (end,) = filter(reports_end, world.materializations(stage))
        assert metadata(end)["rows"] == 5
    assert world.observation(dg.AssetKey(["checkpoints", "stored_bounded"]))["completed"] >= 1

    # An unbounded one, which the savepoint asset suspends.
    drain = world.sensor("stored_live_drain")
    assert "has never been run" in str(world.tick(world.location.recovery).skip_message)
    assert "not running" in str(world.tick(drain).skip_message)
    world.drop("first", range(5))
    first, process = world.launch("numbers")
    world.has_committed(5)
    world.until(lambda: world.materializations("squares"), "the commit is materialized")
    world.until(lambda: world.materializations("backfill"), "the end of the backfill is materialized")
    assert f"The newest run, {first}, is STARTED" in str(world.tick(world.location.recovery).skip_message)
    assert "Not drained" in str(world.tick(drain).skip_message)
    assert world.execute("look").success
    assert world.healthy().passed

    instance.add_dynamic_partitions("savepoints_stored_live", ["before-upgrade"])
    suspend = {"ops": {"savepoints__stored_live": {"config": {"stop": "suspend"}}}}
    assert world.execute("take_savepoint", partition_key="before-upgrade", run_config=suspend).success
    assert process.wait(SECONDS) == 0, world.log()[-5000:]
    assert world.status(first) is dg.DagsterRunStatus.SUCCESS
    (end,) = filter(reports_end, world.materializations("backfill"))
    assert metadata(end)["rows"] == 5
    commits = world.materializations("squares")
    assert not any(map(reports_end, commits)), "it has not ended: it is suspended"
    assert sum(metadata(commit)["committed_rows"] for commit in commits) == 5
    assert world.observation(dg.AssetKey("squares"))["state"] == "suspended"
    state, shown = world.state(), world.observation(CHECKPOINTS)
    assert state.newest is not None and shown["roots"] == "live" and shown["finished_stages"] == "backfill"
    (savepoint,) = world.materializations("savepoints", "stored_live")
    assert savepoint.partition == "before-upgrade"
    taken = metadata(savepoint)
    assert (taken["pipeline"], taken["run"], taken["trigger"]) == ("stored_live", first, "suspend")
    assert taken["checkpoint"] == state.newest.checkpoint_id and Path(taken["path"].removeprefix("file://")).is_dir()
    assert "The newest run" in str(world.tick(world.location.recovery).skip_message)

    # The next run continues from the savepoint. The drain sensor ends it; its last tick knows the request from its cursor.
    world.drop("second", range(5, 8))
    second, process = world.launch("numbers")
    world.has_committed(8)
    (world.home / "checkpoints" / "stored_live" / "drain-now").touch()
    assert f"Asked run {second} to drain" in world.until(lambda: world.tick_says(drain, "Asked run"), "the drain is requested")
    assert process.wait(SECONDS) == 0, world.log()[-5000:]
    assert "Drained with savepoint" in str(world.tick(drain).skip_message)
    assert world.status(second) is dg.DagsterRunStatus.SUCCESS
    *commits, end = world.materializations("squares")
    assert reports_end(end) and metadata(end)["rows"] == metadata(end)["dagster/row_count"] == 8
    assert f"The newest run, {second}, is SUCCESS" in str(world.tick(world.location.recovery).skip_message)
    assert len(world.materializations("savepoints", "stored_live")) == 2
    assert world.execute("look").success
    assert world.healthy().passed


def test_a_run_while_dagsters_server_is_restarted_and_killed(world: World, postgresql: PostgresqlServer) -> None:
    world.drop("first", range(3))
    first, process = world.launch("numbers")
    world.has_committed(3)
    world.until(lambda: world.shown_rows() == 3, "the commit is materialized")

    # A restart that lets the writes in progress end: Dagster repeats its attempts to connect, and the run does not notice.
    since = len(world.log())
    postgresql.stop("smart")
    try:
        world.until(lambda: RETRYING in world.log(since), "a write of the run finds no server")
    finally:
        postgresql.start()
    world.drop("second", range(3, 6))
    world.has_committed(6)
    world.until(lambda: world.shown_rows() == 6, "the next commit is materialized")
    assert GIVEN_UP not in world.log() and process.poll() is None
    assert world.status(first) is dg.DagsterRunStatus.STARTED

    # Killed, and back when Dagster has given up a write: the run fails, and is restarted.
    since = len(world.log())
    postgresql.stop()
    try:
        world.until(lambda: GIVEN_UP in world.log(since), "the run gives up to write an event")
    finally:
        postgresql.start()
    assert process.wait(SECONDS) != 0
    assert world.status(first) is dg.DagsterRunStatus.FAILURE
    second, process = world.recover(first)
    world.drop("third", range(6, 8))
    world.has_committed(8)
    world.until(lambda: world.shown_rows() == 8, "the recovered run's commit is materialized")

    # Killed, and away until the process has ended: the run cannot tell its end.
    postgresql.stop()
    try:
        world.drop("fourth", range(8, 9))
        assert process.wait(SECONDS) != 0
    finally:
        postgresql.start()
    assert world.status(second) is dg.DagsterRunStatus.STARTED, "its end could not be written"
    state = world.state()
    assert (state.lease, state.job.status, state.job.run_id) == (None, "FAILED", second), "the pipeline is released"
    # The recovery sensor marks it as failed, and restarts it; all rows are there once, and also Dagster is told of all.
    result = world.tick(world.location.recovery)
    assert not result.run_requests and f"The newest run, {second}, is STARTED" in str(result.skip_message)
    gone = "has given up the pipeline, and has not written the end of its op"
    world.until(lambda: world.tick_says(world.location.recovery, gone), "the dead run is noticed")
    assert world.status(second) is dg.DagsterRunStatus.FAILURE
    third, process = world.recover(second)
    world.drop("fifth", range(9, 10))
    world.has_committed(10)
    world.until(lambda: world.shown_rows() == 10, "what was committed without the server is materialized")
    (world.home / "checkpoints" / "stored_live" / "drain-now").touch()
    drain = world.sensor("stored_live_drain")
    world.until(lambda: world.tick_says(drain, "Asked run"), "the drain is requested")
    assert process.wait(SECONDS) == 0, world.log()[-5000:]
    assert world.status(third) is dg.DagsterRunStatus.SUCCESS and world.state().job.job_id == 1
    assert world.committed() == [number * number for number in range(10)]
    assert world.committed("backfill") == list(range(5))
