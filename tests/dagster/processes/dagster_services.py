"""Dagster's webserver, daemon and code server, each a process of its own, for tests of runs that go on beside them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar
from urllib.request import urlopen

import dagster as dg
from dagster._core.errors import DagsterUserCodeUnreachableError
from dagster._grpc.client import DagsterGrpcClient
from dagster_graphql import DagsterGraphQLClient

from dagster_checkpoints.control import PipelineControl
from tests.dagster.processes.pipeline_of_numbers import PipelineOfNumbers

REPOSITORY = Path(__file__).resolve().parents[3]
SECONDS = 240.0
QUIET = """
telemetry:
  enabled: false
nux:
  enabled: false
"""
"""No telemetry, and no dialog that welcomes a new user."""
T = TypeVar("T")


def free_port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Services(PipelineOfNumbers):
    """Webserver, daemon and code server, each a process of its own, below one directory.

    Args:
        home: The directory.
        location: The file with the code location; its copy in the directory is loaded, which a test may change.
        pipeline: The name of its pipeline, which its job `<pipeline>_job` runs.
        code_server: The code server: `api grpc` keeps the code that it has begun with, `code-server start` can load it again.
        settings: The content of `dagster.yaml`.
    """

    table = "results"

    def __init__(self, home: Path, location: Path, pipeline: str, code_server: str = "api grpc", settings: str = QUIET) -> None:
        (home / "dagster.yaml").write_text(settings)
        # Before any other process: two that create Dagster's tables at once break them (https://github.com/dagster-io/dagster/issues/27390).
        super().__init__(home, dg.DagsterInstance.from_config(str(home)), pipeline)
        self.pipeline = pipeline
        self.location = home / location.name
        self.location.write_text(location.read_text())
        code, web = free_port(), free_port()
        workspace = home / "workspace.yaml"
        workspace.write_text(f"load_from: [{{grpc_server: {{host: 127.0.0.1, port: {code}, location_name: live}}}}]\n")
        self._commands = {
            "code server": ["dagster", *code_server.split(), "-f", str(self.location), "-h", "127.0.0.1", "-p", str(code)],
            "webserver": ["dagster_webserver", "-h", "127.0.0.1", "-p", str(web), "-w", str(workspace)],
            "daemon": ["dagster._daemon", "run", "-w", str(workspace)],
        }
        self._code_server = DagsterGrpcClient(port=code, host="127.0.0.1")
        self.url = f"http://127.0.0.1:{web}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.client = DagsterGraphQLClient("127.0.0.1", port_number=web)

    def start_all(self) -> None:
        """Start the three, and wait until they answer."""
        self.start("code server")
        self.until(self.code_server_answers, "the code server has loaded the definitions")
        self.start("webserver")
        self.start("daemon")
        self.until(self.answers, "the webserver answers")

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
            with urlopen(f"{self.url}/server_info", timeout=5):
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
                return self.client.submit_job_execution(f"{self.pipeline}_job")
            except Exception as error:  # the code server is not up yet
                self.log("webserver").open("a").write(f"launch: {error}\n")
                return None

        return self.until(submitted, "the run is launched")

    def ended(self, run_id: str) -> bool:
        run = self.instance.get_run_by_id(run_id)
        return run is not None and run.is_finished

    def completes_a_checkpoint(self, what: str) -> None:
        before = self.state().newest
        self.until(lambda: self.state().newest != before, what)

    def monitored(self, since: float) -> bool:
        """Whether the daemon has looked at the runs since then."""
        heartbeat = self.instance.get_daemon_heartbeats().get("MONITORING")
        return heartbeat is not None and heartbeat.timestamp > since and not heartbeat.errors

    def began(self, run_id: str) -> float:
        """When Dagster has started a run, epoch seconds."""
        record = self.instance.get_run_record_by_id(run_id)
        assert record is not None
        assert record.start_time is not None
        return record.start_time

    def suspend(self) -> None:
        handle = PipelineControl(self.storage, asked_by="a test").stop(drain=False)
        handle.wait(SECONDS)

    def close(self) -> None:
        """End the three processes, and the run of the pipeline that a failed test has left behind."""
        with suppress(OSError, AssertionError):
            self.kill_worker()
        for process in self._processes.values():
            process.kill()
            process.wait()
        self.storage.close()
        self.instance.dispose()
