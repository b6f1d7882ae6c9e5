"""A standalone cluster: driver and executors are processes that share only a work directory, or nothing."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from bench.free_ports import free_port
from dagster_checkpoints.spark.session.work_directory import RemoteDirectory
from resources.embedded_s3 import EmbeddedS3
from tests.spark.processes.killed_runs import Feed
from tests.spark.servers import hdfs as servers
from tests.spark.servers import jars

DEADLINE = 120.0
AHEAD = 60  # seconds


@dataclass(frozen=True)
class Cluster:
    """A master and two workers with a core and 1 GB each.

    Attributes:
        url: The master's URL.
        state: URL of the master's state, as JSON.
        private: A directory in whose place each worker sees a directory that only it sees.
        workers: The workers' processes.
    """

    url: str
    state: str
    private: Path
    workers: list[subprocess.Popen[bytes]]


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
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from dagster_checkpoints.spark.session.java import find_java_home

    java = f"{find_java_home()}/bin/java"
    with servers.running_hdfs(tmp_path_factory.mktemp("hdfs"), java, jars.fetched(jars.HDFS, java)) as running:
        yield running


def clock_library(folder: Path) -> Path:
    """Compile the library that gives a process a clock of its own."""
    library = folder / "shifted_clock.so"
    source = Path(jars.__file__).with_name("shifted_clock.c")
    command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    return library


@pytest.fixture
def clocks() -> bool:
    """Whether the clocks of the workers can be shifted; a test that names this fixture gets such workers."""
    return shutil.which("cc") is not None


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    environments: list[dict[str, str]] = [{}, {}]
    if "clocks" in request.fixturenames and request.getfixturevalue("clocks"):
        library = str(clock_library(tmp_path))
        environments = [{"LD_PRELOAD": library, "SHIFTED_CLOCK": str(seconds)} for seconds in (AHEAD, -AHEAD)]
    with running_cluster(tmp_path, environments) as running:
        yield running


@contextlib.contextmanager
def running_cluster(tmp_path: Path, clocks: Sequence[dict[str, str]] = ({}, {})) -> Iterator[Cluster]:
    """Run a cluster inside the block.

    Args:
        tmp_path: The directory of its files.
        clocks: What the environment of each worker has more than the master's.
    """
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

    def launch(name: str, *arguments: str, before: list[str] | None = None, environment: dict[str, str] = environment) -> None:
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
                environment={**environment, **clocks[number - 1]},
            )
        state = f"http://127.0.0.1:{ui}/json/"
        wait_for_workers(state)
        yield Cluster(f"spark://127.0.0.1:{port}", state, private, processes[1:])
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # a test may have killed it
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
        except (OSError, ValueError):
            pass  # the master has not started yet, or does not serve this address yet
        assert time.monotonic() < until, f"the cluster does not start: {state}"
        time.sleep(0.2)


def _state(url: str) -> Any:
    import json

    with urlopen(url, timeout=5) as answer:
        return json.load(answer)


SPARK = {
    "spark.executor.memory": "512m",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": 2,
}


def executors(application: str) -> list[int]:
    """The process ids of an application's executors."""
    found = subprocess.run(["pgrep", "-f", f"CoarseGrainedExecutorBackend.*{application}"], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


def kill_one_executor(application: str) -> None:
    """SIGKILL to the executor that was started last, as soon as there is one."""
    until = time.monotonic() + DEADLINE
    while not (found := executors(application)):
        assert time.monotonic() < until, "the application has no executor"
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.kill(max(found), signal.SIGKILL)


def test_executors_are_killed_while_the_records_are_on_hdfs_and_the_checkpoints_on_s3(
    lab: Any, start: Any, cluster: Cluster, hdfs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dynamic allocation and speculation; each worker sees another directory under the path of temporary files."""
    spark = {
        **SPARK,
        "spark.master": cluster.url,
        "spark.speculation": True,
        "spark.speculation.interval": "50ms",
        "spark.speculation.multiplier": 1.01,
        "spark.speculation.quantile": 0.1,
        "spark.speculation.minTaskRuntime": "0ms",
        "spark.dynamicAllocation.enabled": True,
        "spark.dynamicAllocation.shuffleTracking.enabled": True,
        "spark.dynamicAllocation.executorIdleTimeout": "15s",
        "spark.dynamicAllocation.maxExecutors": 2,
    }
    feed = Feed(lab)
    feed.more()
    work = RemoteDirectory(f"{hdfs.url}/cluster").open(lab.spark)
    with EmbeddedS3() as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        settings = {"spark": spark, "work": str(work), "storage": f"{s3.url}/store", "restart_attempts": 5}

        def written(name: str) -> bool:
            return any(f"/{name}/" in str(file.path) for file in work.files_below())

        # During a checkpoint, during a batch, and during a write of a segment.
        child = start("killed", hold="upload", hold_at=2, hold_seconds=4.0, **settings)
        child.wait_for("Holding")
        [application] = [app["id"] for app in _state(cluster.state)["activeapps"]]
        kill_one_executor(application)
        done = child.wait_for("CheckpointDone", lambda done: done["stages"]["named"]["rows"] > 0)
        for moment in (lambda: True, lambda: written("_temporary")):
            feed.more()
            until = time.monotonic() + DEADLINE
            while not moment():
                assert time.monotonic() < until, child.story()
            kill_one_executor(application)
            done = child.wait_for("CheckpointDone", lambda later, id=done["checkpoint_id"]: later["checkpoint_id"] > id + 1)
        child.kill()

        # One of two workers is lost for ever.
        feed.more()
        os.killpg(cluster.workers[0].pid, signal.SIGKILL)
        feed.drain_when_consumed()
        child = start("last", **settings)
        assert child.end()["status"] == "FINISHED", child.story()
        assert child.events("JobStarted")[0]["restored_checkpoint"] >= done["checkpoint_id"]
        feed.check()
        left = [str(file.path) for file in work.files_below()]
        # Spark's maintenance may store state after the query's end; the next run deletes it.
        assert not [file for file in left if "/state/" not in file], "nothing is left behind"


def first_line(application: Path) -> float:
    """The time at which an executor wrote the first line of its log, by its own clock; seconds since 1970."""
    [log] = application.glob("*/stderr")
    stamp = next(found[0] for line in log.open() if (found := re.match(r"\d\d/\d\d/\d\d \d\d:\d\d:\d\d", line)))
    return dt.datetime.strptime(stamp, "%y/%m/%d %H:%M:%S").astimezone().timestamp()


def test_a_cluster_needs_a_shared_work_directory_and_with_one_is_exact_also_after_a_crash_and_whatever_the_clocks_say(
    lab: Any, start: Any, clocks: bool, cluster: Cluster
) -> None:
    """The clock of one worker is a minute ahead of the driver's, that of the other one a minute behind."""
    spark = {**SPARK, "spark.master": cluster.url}
    feed = Feed(lab)
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
    child.wait_for("JobStarted", lambda started: started["restored_checkpoint"] is not None)
    [found] = _state(cluster.state)["activeapps"]
    assert child.end()["status"] == "FINISHED", child.story()
    feed.check()
    if not clocks:
        pytest.skip("all else holds, but the clocks were the same: the library that shifts them needs a C compiler (cc)")
    ahead, behind = (first_line(lab.folder / f"worker-{number}" / found["id"]) for number in (1, 2))
    assert ahead - behind > AHEAD, "the clocks of the executors differ"
    assert behind < found["starttime"] / 1000 < ahead, "one is behind the master's, which started it"
