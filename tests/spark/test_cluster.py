"""A standalone cluster: driver and executors are processes that share only a work directory, or nothing."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

DEADLINE = 120.0


def _crash_tests() -> Any:
    """The children and their pipeline are those of the crash tests."""
    path = Path(__file__).with_name("test_crash_processes.py")
    spec = importlib.util.spec_from_file_location("crash_processes_for_the_cluster", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


crash = _crash_tests()
start = crash.start  # the fixture


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Cluster:
    """A master and two workers with a core and 1 GB each.

    Attributes:
        url: The master's URL.
        state: URL of the master's state, as JSON.
        private: A directory in whose place each worker sees a directory that only it sees.
    """

    url: str
    state: str
    private: Path


def namespace() -> list[str]:
    """The prefix of a command that mounts directories which only that command sees; skips the test where that is not allowed."""
    tried = []
    for command in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        try:
            found = subprocess.run([*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True)
        except FileNotFoundError as error:
            pytest.skip(f"a worker needs a mount namespace for a directory of its own: {error}")
        if found.returncode == 0:
            return command
        tried.append(found.stderr.strip())
    pytest.skip(f"a worker needs a mount namespace for a directory of its own; this machine allows none: {'; '.join(tried)}")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    import pyspark

    from dagster_checkpoints.spark.session.java import find_java_home

    environment = {
        **os.environ,
        "JAVA_HOME": find_java_home(),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_MEMORY": "256m",
    }
    spark_class = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
    port, ui = free_port(), free_port()
    processes: list[subprocess.Popen[bytes]] = []

    private = tmp_path / "private"
    private.mkdir()
    mount = [*namespace(), "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', str(private)]

    def launch(name: str, *arguments: str, before: list[str] | None = None) -> None:
        command = [*(before or ()), spark_class, *arguments]
        with (tmp_path / f"{name}.log").open("w") as log:
            process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
        processes.append(process)

    deploy = "org.apache.spark.deploy"
    host = ["--host", "127.0.0.1", "--port"]
    try:
        launch("master", f"{deploy}.master.Master", *host, str(port), "--webui-port", str(ui))
        for number in (1, 2):
            resources = ["--cores", "1", "--memory", "1g", "--work-dir", str(tmp_path / f"worker-{number}")]
            url = f"spark://127.0.0.1:{port}"
            launch(
                f"worker-{number}",
                f"{deploy}.worker.Worker",
                *host,
                str(free_port()),
                "--webui-port",
                str(free_port()),
                *resources,
                url,
                before=mount,
            )
        state = f"http://127.0.0.1:{ui}/json/"
        wait_for_workers(state)
        yield Cluster(f"spark://127.0.0.1:{port}", state, private)
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(20)


def wait_for_workers(state: str) -> None:
    until = time.monotonic() + DEADLINE
    while True:
        try:
            if _state(state)["aliveworkers"] == 2:
                return
        except OSError:
            pass  # the master has not started yet
        assert time.monotonic() < until, f"the cluster does not start: {state}"
        time.sleep(0.2)


def _state(url: str) -> Any:
    import json

    with urlopen(url, timeout=5) as answer:
        return json.load(answer)


def test_a_cluster_needs_a_shared_work_directory_and_with_one_is_exact_also_after_a_crash(
    lab: Any, start: Any, cluster: Cluster
) -> None:
    spark = {
        "spark.master": cluster.url,
        "spark.executor.memory": "512m",
        "spark.driver.memory": "1g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": 2,
    }
    feed = crash.Feed(lab)
    feed.more()

    # Each worker sees a different directory under the path of the work directory.
    refused = start("refused", spark=spark, work=str(cluster.private)).end()
    assert refused["status"] == "FAILED", refused
    assert "WorkDirectoryNotSharedError" in refused["error"]
    assert f"an executor on host {socket.gethostname()}: " in refused["error"]
    assert str(cluster.private) in refused["error"] and "work_directory=" in refused["error"]

    # Executors that start later are not asked: their first batch is refused.
    child = start("unasked", spark=spark, work=str(cluster.private), ask_executors=False)
    refused = child.end()
    assert refused["status"] == "FAILED", child.story()
    assert "SegmentRowsError" in refused["error"] and "as many as Spark has written, found 0" in refused["error"]
    assert "work_directory=" in refused["error"]
    assert not lab.committed("named") and not lab.committed("hours")

    # The same workers, and a directory that all of them see.
    child = start("first", spark=spark, lease_seconds=10.0)
    child.wait_for("CheckpointDone", lambda done: done["stages"]["named"]["rows"] > 0)
    application = _state(cluster.state)["activeapps"][0]
    assert application["cores"] == 2, "both workers serve the run"
    folders = [lab.folder / f"worker-{number}" / application["id"] for number in (1, 2)]
    assert [len(list(folder.glob("*/stderr"))) for folder in folders] == [1, 1]
    child.kill()

    feed.more()
    feed.drain_when_consumed()
    child = start("second", spark=spark, lease_seconds=10.0)
    assert child.end()["status"] == "FINISHED", child.story()
    assert child.events("JobStarted")[0]["restored_checkpoint"] is not None
    feed.check()
