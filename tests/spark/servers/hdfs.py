"""HDFS for tests: a NameNode and a DataNode, each a process of its own, on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests

from bench.free_ports import free_port

DEADLINE = 120.0


@dataclass(frozen=True)
class Hdfs:
    """A running HDFS.

    Attributes:
        url: The URL of its root, without a slash at its end.
        web: The same, for its HTTP interface.
        namenode: The NameNode's process.
        datanode: The DataNode's process.
    """

    url: str
    web: str
    namenode: subprocess.Popen[bytes]
    datanode: subprocess.Popen[bytes]

    @contextmanager
    def away(self) -> Iterator[None]:
        """The NameNode answers nothing inside the block."""
        self.namenode.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.namenode.send_signal(signal.SIGCONT)


@contextmanager
def running_hdfs(folder: Path, java: str, jars: Sequence[Path]) -> Iterator[Hdfs]:
    """Start HDFS with its files below a folder."""
    import pyspark

    port, http = free_port(), free_port()
    conf = folder / "hdfs-conf"
    conf.mkdir()
    settings = {
        "fs.defaultFS": f"hdfs://127.0.0.1:{port}",
        "hadoop.tmp.dir": str(folder / "hdfs-tmp"),
        "dfs.namenode.name.dir": f"file://{folder}/hdfs-name",
        "dfs.datanode.data.dir": f"file://{folder}/hdfs-data",
        "dfs.replication": "1",
        "dfs.permissions.enabled": "false",
        "dfs.namenode.safemode.extension": "0",
        "dfs.namenode.redundancy.considerLoad": "false",  # there is only one DataNode, which takes everything
        "dfs.namenode.http-address": f"127.0.0.1:{http}",
        "dfs.datanode.hostname": "127.0.0.1",
        **{f"dfs.datanode.{name}": "127.0.0.1:0" for name in ("address", "http.address")},
        "dfs.datanode.ipc.address": "127.0.0.1:0",
    }
    properties = "".join(f"<property><name>{name}</name><value>{value}</value></property>" for name, value in settings.items())
    for name in ("core", "hdfs"):
        (conf / f"{name}-site.xml").write_text(f"<configuration>{properties}</configuration>")
    classes = ":".join([str(conf), *map(str, jars), f"{Path(pyspark.__file__).parent}/jars/*"])
    command = [java, "-Xmx256m", "-cp", classes]
    server = "org.apache.hadoop.hdfs.server"
    formatted = subprocess.run([*command, f"{server}.namenode.NameNode", "-format", "-nonInteractive"], capture_output=True)
    assert formatted.returncode == 0, formatted.stderr.decode()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for name in ("namenode.NameNode", "datanode.DataNode"):
            with (folder / f"{name}.log").open("wb") as log:
                processes.append(subprocess.Popen([*command, f"{server}.{name}"], stdout=log, stderr=log, cwd=folder))
        _wait_for(http, processes)
        yield Hdfs(settings["fs.defaultFS"], f"webhdfs://127.0.0.1:{http}", *processes)
    finally:
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(20)


def _wait_for(http: int, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until a file has been written to a DataNode."""
    until = time.monotonic() + DEADLINE
    while not _takes_files(http):
        assert all(process.poll() is None for process in processes), "HDFS did not start; see its logs"
        assert time.monotonic() < until, "HDFS did not start in time"
        time.sleep(0.2)


def _takes_files(http: int) -> bool:
    url = f"http://127.0.0.1:{http}/webhdfs/v1/ready?op=CREATE&overwrite=true"
    try:
        named = requests.put(url, allow_redirects=False, timeout=5)
        return named.status_code == 307 and requests.put(named.headers["Location"], data=b"yes", timeout=10).status_code == 201
    except requests.RequestException:
        return False
