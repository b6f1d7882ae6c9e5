"""The recovery sensor with real runs, real storage and real signals: the runs that it restarts after a crash, or an eviction."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.reconstruct import ReconstructableRepository
from dagster._grpc.types import ExecuteRunArgs

from dagster_checkpoints.control import PipelineControl
from dagster_checkpoints.plugin.job_run import CANCEL_SECONDS
from dagster_checkpoints.plugin.runs import ATTEMPT, RECOVERS
from dagster_checkpoints.plugin.stage_assets import REFUSED
from tests.dagster.processes.pipeline_of_numbers import PipelineOfNumbers

REPOSITORY = Path(__file__).resolve().parents[3]
LOCATION = Path(__file__).with_name("recovery_location.py")
SECONDS = 180.0


class World(PipelineOfNumbers):
    """A Dagster instance, its runs in separate processes, and the sensor, which ticks in this process."""

    def __init__(self, home: Path, instance: dg.DagsterInstance, location: ModuleType) -> None:
        super().__init__(home, instance, "recovered")
        self._location = location
        self._cursor: str | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self.termination_timeout: float = location.coordinator.termination_timeout

    def launch(self, request: Any = None) -> tuple[str, subprocess.Popen[bytes]]:
        """Start a run of the job, or the run that the sensor requests. Returns its id and its process."""
        known = {run.run_id for run in self.instance.get_runs()}
        command = [sys.executable, "-m", "dagster", "job", "execute", "-f", str(LOCATION), "-j", "numbers"]
        if request is not None:
            assert request.job_name == "numbers"
            command += ["--tags", json.dumps(dict(request.tags))]
        process = self._start(command)

        def appeared() -> str | None:
            return next((run.run_id for run in self.instance.get_runs() if run.run_id not in known), None)

        return self.until(appeared, "the run appears"), process

    def launch_container(self, job_name: str, tags: Mapping[str, str] | None = None) -> tuple[str, subprocess.Popen[bytes]]:
        """Start a run of a job with the command that the launchers for Docker and Kubernetes give to the container."""
        repository = ReconstructableRepository.for_file(str(LOCATION), "defs", str(REPOSITORY))
        job = repository.get_reconstructable_job(job_name)
        origin = job.get_python_origin()
        run = self.instance.create_run_for_job(job.get_definition(), tags=tags, job_code_origin=origin)
        arguments = ExecuteRunArgs(job_origin=origin, run_id=run.run_id, instance_ref=self.instance.get_ref())
        return run.run_id, self._start([sys.executable, "-m", *arguments.get_command_args()])

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with self.log(len(self._processes)).open("wb") as log:
            process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log, start_new_session=True)
        self._processes.append(process)
        return process

    def log(self, number: int) -> Path:
        return self.home / f"run-{number}.log"

    def until(self, look: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + SECONDS
        while not (found := look()):
            last = self.log(len(self._processes) - 1)
            assert time.monotonic() < deadline, f"{what}: {last.read_text()[-5000:] if last.exists() else ''}"
            time.sleep(0.2)
        return found

    def tick(self) -> Any:
        resources = {"checkpoint_coordinator": self._location.coordinator}
        with dg.build_sensor_context(instance=self.instance, cursor=self._cursor, resources=resources) as context:
            result = self._location.recovery.evaluate_tick(context)
        self._cursor = result.cursor
        return result

    def requested(self) -> Any:
        """Let the sensor tick until it requests a run. Returns the request."""

        def look() -> Any:
            requests = self.tick().run_requests
            return requests[0] if requests else None

        return self.until(look, "the sensor starts the pipeline again")

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.storage.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    (tmp_path / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.setenv("LIVE_ROOT", str(tmp_path / "data"))
    monkeypatch.delenv("CHECKPOINT_STORAGE", raising=False)
    spec = importlib.util.spec_from_file_location("recovery_location", LOCATION)
    assert spec is not None and spec.loader is not None
    location = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(location)
    with ExitStack() as stack:
        instance = stack.enter_context(dg.DagsterInstance.from_config(str(tmp_path)))
        made = World(tmp_path, instance, location)
        stack.callback(made.close)
        yield made


def test_a_crash_after_a_refused_run_and_an_eviction_are_both_recovered(world: World) -> None:
    world.drop("first", range(3))
    owner, process = world.launch()
    world.until(lambda: world.committed() == [0, 1, 4], "the first rows are committed")

    # A second run is refused while the first one is alive, and is not a run of the pipeline.
    refused, second = world.launch()
    second.wait(SECONDS)
    assert world.status(refused) is dg.DagsterRunStatus.FAILURE
    run = world.instance.get_run_by_id(refused)
    assert run is not None and run.tags[REFUSED] == "PipelineOwned"
    result = world.tick()
    assert not result.run_requests and f"The newest run, {owner}, is STARTED" in result.skip_message

    # The owner is killed; Dagster's run monitoring detects it.
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    dead = world.instance.get_run_by_id(owner)
    assert dead is not None
    world.instance.report_run_failed(dead)
    request = world.requested()
    assert request.run_key == request.tags[RECOVERS] == owner and request.tags[ATTEMPT] == "1"
    assert world.state().job.status == "RUNNING", "the killed owner could record nothing"

    # The next run is evicted from its machine: a SIGTERM that Dagster has not requested.
    world.drop("second", range(3, 6))
    evicted, process = world.launch(request)
    world.until(lambda: len(world.committed()) == 6, "the recovered run commits the rows dropped meanwhile")
    process.send_signal(signal.SIGTERM)
    process.wait(SECONDS)
    assert world.status(evicted) is dg.DagsterRunStatus.FAILURE, "Dagster knows of no termination"
    job = world.state().job
    assert (job.status, job.ended_by, job.stop_asked_by) == ("FINISHED", "suspend", "termination")
    request = world.requested()
    assert request.run_key == request.tags[RECOVERS] == evicted and request.tags[ATTEMPT] == "2"

    # The last run continues from that savepoint, and ends by itself.
    world.drop("third", range(6, 10))
    (world.home / "data" / "drain").touch()
    last, process = world.launch(request)
    assert process.wait(SECONDS) == 0, world.log(3).read_text()[-5000:]
    assert f"({job.savepoint})" in world.log(3).read_text()
    assert world.status(last) is dg.DagsterRunStatus.SUCCESS
    assert world.committed() == [number * number for number in range(10)]
    assert world.state().job.job_id == 1
    result = world.tick()
    assert not result.run_requests and f"The newest run, {last}, is SUCCESS" in result.skip_message


@pytest.mark.parametrize("job_name", ["numbers", "numbers_multiprocess"])
def test_a_container_that_is_stopped_saves_within_its_grace_period_and_another_run_continues(world: World, job_name: str) -> None:
    """A deleted pod, a stopped container: SIGTERM to its first process alone, and SIGKILL after the grace period."""
    grace_period = world.termination_timeout + CANCEL_SECONDS + 1
    world.drop("first", range(4))
    stopped, container = world.launch_container(job_name)
    world.until(lambda: world.committed() == [0, 1, 4, 9], "the first rows are committed")
    world.drop("second", range(4, 8))
    container.send_signal(signal.SIGTERM)
    try:
        exit_code = container.wait(grace_period)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the grace period has passed: {world.log(0).read_text()[-5000:]}")
    assert exit_code == 0, "the pod's phase is Succeeded: `fail_pod_on_run_failure` is not set"
    assert world.status(stopped) is dg.DagsterRunStatus.FAILURE, "Dagster knows of no termination"
    state = world.state()
    assert state.lease is None, "the next run need not wait for the end of a lease"
    assert (state.job.status, state.job.ended_by, state.job.stop_asked_by) == ("FINISHED", "suspend", "termination")

    request = world.requested()
    assert (request.job_name, request.tags[RECOVERS]) == (job_name, stopped)
    world.drop("third", range(8, 10))
    (world.home / "data" / "drain").touch()
    last, container = world.launch_container(request.job_name, request.tags)
    assert container.wait(SECONDS) == 0, world.log(1).read_text()[-5000:]
    assert world.status(last) is dg.DagsterRunStatus.SUCCESS
    assert f"({state.job.savepoint})" in world.log(1).read_text()
    assert world.committed() == [number * number for number in range(10)]


def test_runs_of_a_pool_wait_for_each_other_and_a_dead_run_holds_no_place(world: World) -> None:
    """A pool with one place, of ops (Dagster's default): a second run waits for the first, a recovery not for the dead run."""
    world.instance.event_log_storage.set_concurrency_slots("feeds", 1)

    def holders() -> set[str]:
        places = world.instance.event_log_storage.get_concurrency_info("feeds")
        return {place.run_id for place in places.claimed_slots}

    def waits(run_id: str) -> bool:
        return any("blocked by limit for pool feeds" in entry.user_message for entry in world.instance.all_logs(run_id))

    world.drop("first", range(3))
    killed, process = world.launch()
    world.until(lambda: world.committed() == [0, 1, 4], "the first rows are committed")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    dead = world.instance.get_run_by_id(killed)
    assert dead is not None
    world.instance.report_run_failed(dead)
    assert holders() == {killed}, "Dagster gives the dead run's place to no other"
    request = world.requested()
    assert holders() == set()

    world.drop("second", range(3, 6))
    first, process = world.launch(request)
    world.until(lambda: len(world.committed()) == 6, "the recovered run commits the rows dropped meanwhile")
    waiting, second = world.launch()
    world.until(lambda: waits(waiting), "the second run waits for the place")
    result = world.tick()
    assert not result.run_requests and holders() == {first}
    handle = PipelineControl(world.storage, asked_by="a test").stop(drain=False)
    handle.wait(SECONDS)
    assert process.wait(SECONDS) == 0, world.log(1).read_text()[-5000:]

    world.drop("third", range(6, 10))
    (world.home / "data" / "drain").touch()
    assert second.wait(SECONDS) == 0, world.log(2).read_text()[-5000:]
    assert {world.status(run) for run in (first, waiting)} == {dg.DagsterRunStatus.SUCCESS}
    assert world.committed() == [number * number for number in range(10)]
    assert world.state().job.job_id == 1 and holders() == set()
