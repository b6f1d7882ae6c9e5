"""Webserver, daemon and code server are killed and started again, with changed code, while a run of a live pipeline goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeVar
from urllib.request import urlopen

import dagster as dg
import pyarrow.parquet as pq
import pytest
from dagster._core.errors import DagsterUserCodeUnreachableError
from dagster._grpc.client import DagsterGrpcClient
from dagster_graphql import DagsterGraphQLClient, DagsterGraphQLClientError, ReloadRepositoryLocationStatus

from dagster_checkpoints.control import PipelineControl
from dagster_checkpoints.plugin.sensors.recovery import RECOVERS
from dagster_checkpoints.storage import CheckpointStorage, PipelineState, open_store

REPOSITORY = Path(__file__).resolve().parents[3]
LOCATION = Path(__file__).with_name("restart_location.py")
SECONDS = 240.0
MONITORED = """
telemetry:
  enabled: false
run_monitoring:
  enabled: true
  poll_interval_seconds: 1
  max_runtime_seconds: 1
"""
T = TypeVar("T")


def free_port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Services:
    """Webserver, daemon and code server, each a process of its own, below one directory.

    Args:
        home: The directory.
        code_server: The code server: `api grpc` keeps the code that it has begun with, `code-server start` can load it again.
    """

    def __init__(self, home: Path, code_server: str = "api grpc") -> None:
        self.home, self.root = home, home / "data"
        (self.root / "input").mkdir(parents=True)
        (home / "dagster.yaml").write_text(MONITORED)
        # Before any other process: two that create Dagster's tables at once break them (https://github.com/dagster-io/dagster/issues/27390).
        self.instance = dg.DagsterInstance.from_config(str(home))
        self.location = home / "restart_location.py"
        self.location.write_text(LOCATION.read_text())
        code, web = free_port(), free_port()
        workspace = home / "workspace.yaml"
        workspace.write_text(f"load_from: [{{grpc_server: {{host: 127.0.0.1, port: {code}, location_name: live}}}}]\n")
        self._commands = {
            "code server": ["dagster", *code_server.split(), "-f", str(self.location), "-h", "127.0.0.1", "-p", str(code)],
            "webserver": ["dagster_webserver", "-h", "127.0.0.1", "-p", str(web), "-w", str(workspace)],
            "daemon": ["dagster._daemon", "run", "-w", str(workspace)],
        }
        self._code_server = DagsterGrpcClient(port=code, host="127.0.0.1")
        self._url = f"http://127.0.0.1:{web}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.storage = CheckpointStorage(open_store(str(home / "checkpoints")), "restarts")
        self.client = DagsterGraphQLClient("127.0.0.1", port_number=web)

    def start(self, service: str) -> None:
        environment = {**os.environ, "DAGSTER_HOME": str(self.home), "LIVE_ROOT": str(self.root)}
        environment.pop("CHECKPOINT_STORAGE", None)
        with self.log(service).open("ab") as log:
            self._processes[service] = subprocess.Popen(
                [sys.executable, "-m", *self._commands[service]], cwd=REPOSITORY, env=environment, stdout=log, stderr=log
            )

    def kill(self, service: str) -> None:
        """SIGKILL to the service alone, not to the runs that it has started."""
        self._processes[service].kill()
        self._processes[service].wait()

    def kill_worker(self) -> None:
        """SIGKILL to the process that owns the pipeline, and to Dagster's process above it, if there is one."""
        lease = self.state().lease
        assert lease is not None
        parent = int(Path(f"/proc/{lease.owner.pid}/stat").read_text().rpartition(")")[2].split()[1])
        above = b"execute_run" in Path(f"/proc/{parent}/cmdline").read_bytes()
        for process in (parent, lease.owner.pid) if above else (lease.owner.pid,):
            os.kill(process, signal.SIGKILL)

    def log(self, service: str) -> Path:
        return self.home / f"{service}.log"

    def until(self, look: Callable[[], T | None], what: str) -> T:
        deadline = time.monotonic() + SECONDS
        while not (found := look()):
            logs = "\n".join(f"{name}: {self.log(name).read_text()[-3000:]}" for name in self._processes)
            assert time.monotonic() < deadline, f"{what}: {logs}"
            time.sleep(0.3)
        return found

    def answers(self) -> bool:
        try:
            with urlopen(f"{self._url}/server_info", timeout=5):
                return True
        except OSError:
            return False

    def code_server_answers(self) -> bool:
        try:
            return "ListRepositoriesResponse" in self._code_server.list_repositories()
        except DagsterUserCodeUnreachableError:
            return False

    def launch(self) -> str:
        def submitted() -> str | None:
            try:
                return self.client.submit_job_execution("restarts_job")
            except Exception as error:  # the code server is not up yet
                self.log("webserver").open("a").write(f"launch: {error}\n")
                return None

        return self.until(submitted, "the run is launched")

    def status(self, run_id: str) -> dg.DagsterRunStatus:
        run = self.instance.get_run_by_id(run_id)
        assert run is not None
        return run.status

    def ended(self, run_id: str) -> bool:
        run = self.instance.get_run_by_id(run_id)
        return run is not None and run.is_finished

    def drop(self, name: str, numbers: range) -> None:
        new = self.root / f".{name}"
        new.write_text("".join(json.dumps({"id": number}) + "\n" for number in numbers))
        new.rename(self.root / "input" / f"{name}.json")

    def committed(self) -> list[int]:
        files = (self.root / "results").glob("checkpoint=*/*.parquet")
        return sorted(number for file in files for number in pq.ParquetFile(file).read().column("id").to_pylist())

    def state(self) -> PipelineState:
        state = self.storage.read_state()
        assert state is not None
        return state

    def completes_a_checkpoint(self, what: str) -> None:
        before = self.state().newest
        self.until(lambda: self.state().newest != before, what)

    def monitored(self, since: float) -> bool:
        """Whether the daemon has looked at the runs since then."""
        heartbeat = self.instance.get_daemon_heartbeats().get("MONITORING")
        return heartbeat is not None and heartbeat.timestamp > since and not heartbeat.errors

    def suspend(self) -> None:
        handle = PipelineControl(self.storage, asked_by="a test").stop(drain=False)
        handle.wait(SECONDS)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self.storage.close()
        self.instance.dispose()


@pytest.fixture
def services(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Services]:
    started = Services(tmp_path, getattr(request, "param", "api grpc"))
    try:
        started.start("code server")
        started.until(started.code_server_answers, "the code server has loaded the definitions")
        started.start("webserver")
        started.start("daemon")
        started.until(started.answers, "the webserver answers")
        yield started
    finally:
        started.close()


def test_a_live_run_outlives_dagsters_services_and_keeps_its_code(services: Services) -> None:
    services.drop("first", range(5))
    first = services.launch()
    services.until(lambda: services.committed() == [0, 1, 4, 9, 16], "the first rows are committed")

    for service in ("webserver", "daemon", "code server"):
        services.kill(service)
        services.completes_a_checkpoint(f"a checkpoint without the {service}")
        if service == "code server":
            services.location.write_text(LOCATION.read_text().replace("id * id AS", "-id AS"))
        services.start(service)
    services.until(services.answers, "the webserver answers again")
    restarted = time.time()
    services.until(lambda: services.monitored(restarted), "the daemon has looked at the runs again")
    services.drop("second", range(5, 8))
    services.until(lambda: len(services.committed()) == 8, "the rows dropped meanwhile are committed")
    assert services.committed() == [number * number for number in range(8)], "the run keeps the code that it began with"
    assert services.status(first) is dg.DagsterRunStatus.STARTED
    assert len(services.instance.get_runs()) == 1, "no sensor has started another run"

    services.suspend()
    services.until(lambda: services.status(first) is dg.DagsterRunStatus.SUCCESS, "the suspended run ends")
    assert services.state().lease is None

    services.drop("third", range(8, 10))
    second = services.launch()
    squares_then_negatives = sorted([*(number * number for number in range(8)), -8, -9])
    services.until(lambda: services.committed() == squares_then_negatives, "the next run has the new code")

    # Its code server was restarted since: Dagster cannot reach the process any more, a request in storage does.
    services.kill("code server")
    services.start("code server")
    services.until(services.code_server_answers, "the code server answers again")
    with pytest.raises(DagsterGraphQLClientError, match="TerminateRunFailure"):
        services.client.terminate_run(second)
    assert services.status(second) is dg.DagsterRunStatus.CANCELING
    services.completes_a_checkpoint("a checkpoint after the termination that failed")
    services.suspend()
    services.until(lambda: services.ended(second), "the second run ends")
    assert services.status(second) is dg.DagsterRunStatus.SUCCESS
    assert services.state().job.job_id == 1, "the second run has continued the job of the first"

    # A worker that dies after its code server was replaced: nothing in Dagster notices it, the recovery sensor does.
    third = services.launch()
    services.drop("fourth", [10])
    services.until(lambda: -10 in services.committed(), "the third run goes on")
    services.kill("code server")
    services.start("code server")
    services.until(services.code_server_answers, "the code server answers once more")
    services.kill_worker()
    services.until(lambda: services.status(third) is dg.DagsterRunStatus.FAILURE, "the dead run is marked as failed")
    services.drop("fifth", [11])
    services.until(lambda: -11 in services.committed(), "its recovery goes on")
    assert services.committed() == sorted([*(number * number for number in range(8)), -8, -9, -10, -11])
    recovered = services.instance.get_runs(limit=1)[0]
    assert recovered.tags[RECOVERS] == third and recovered.job_name == "restarts_recovery_job"
    services.suspend()
    services.until(lambda: services.ended(recovered.run_id), "the recovered run ends")


@pytest.mark.parametrize("services", ["code-server start"], indirect=True)
def test_a_location_that_is_reloaded_with_changed_code_leaves_the_run_alone(services: Services) -> None:
    """The old code server lives as long as its run: Dagster can still terminate that."""
    services.drop("first", range(5))
    first = services.launch()
    services.until(lambda: services.committed() == [0, 1, 4, 9, 16], "the first rows are committed")

    services.location.write_text(LOCATION.read_text().replace("id * id AS", "-id AS"))
    reloaded = services.client.reload_repository_location("live")
    assert reloaded.status is ReloadRepositoryLocationStatus.SUCCESS, reloaded.message
    services.completes_a_checkpoint("a checkpoint after the reload")
    services.drop("second", range(5, 8))
    services.until(lambda: len(services.committed()) == 8, "the rows dropped meanwhile are committed")
    assert services.committed() == [number * number for number in range(8)], "the run keeps the code that it began with"
    assert services.status(first) is dg.DagsterRunStatus.STARTED

    services.client.terminate_run(first)
    services.until(lambda: services.ended(first), "the terminated run ends")
    assert services.status(first) is dg.DagsterRunStatus.CANCELED
    services.drop("third", range(8, 10))
    second = services.launch()
    squares_then_negatives = sorted([*(number * number for number in range(8)), -8, -9])
    services.until(lambda: services.committed() == squares_then_negatives, "the next run has the new code")
    services.client.terminate_run(second)
    services.until(lambda: services.ended(second), "the second run ends")
    assert services.state().job.job_id == 1, "the second run has continued the job of the first"
