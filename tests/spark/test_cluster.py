"""A standalone cluster: driver and executors are different processes that share nothing but a work directory."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
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


@pytest.fixture
def master(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A master and two workers with a core and 1 GB each. Gives the master's URL and that of its state as JSON."""
    import pyspark

    from dagster_checkpoints.spark.java import find_java_home

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

    def launch(name: str, *arguments: str) -> None:
        with (tmp_path / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [spark_class, *arguments], env=environment, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
            )
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
            )
        state = f"http://127.0.0.1:{ui}/json/"
        wait_for_workers(state)
        yield f"spark://127.0.0.1:{port}", state
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
            pass  # the master is not there yet
        assert time.monotonic() < until, f"the cluster does not come up: {state}"
        time.sleep(0.2)


def _state(url: str) -> Any:
    import json

    with urlopen(url, timeout=5) as answer:
        return json.load(answer)


def test_a_run_on_a_cluster_is_resumed_after_a_crash(lab: Any, start: Any, master: tuple[str, str]) -> None:
    url, state = master
    spark = {
        "spark.master": url,
        "spark.executor.memory": "512m",
        "spark.driver.memory": "1g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": 2,
    }
    feed = crash.Feed(lab)
    feed.more()
    child = start("first", spark=spark, lease_seconds=10.0)
    child.wait_for("CheckpointDone", lambda done: done["stages"]["named"]["rows"] > 0)
    application = _state(state)["activeapps"][0]
    assert application["cores"] == 2, "both workers serve the run"
    executors = [log for number in (1, 2) for log in (lab.folder / f"worker-{number}").glob("app-*/*/stderr")]
    assert len(executors) == 2
    child.kill()

    feed.more()
    feed.drain_when_consumed()
    child = start("second", spark=spark, lease_seconds=10.0)
    assert child.end()["status"] == "FINISHED", child.story()
    assert child.events("JobStarted")[0]["restored_checkpoint"] is not None
    feed.check()
