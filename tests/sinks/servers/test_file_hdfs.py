"""FileSink in HDFS, through its HTTP interface, with real servers on this machine."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.json as pa_json
import pyarrow.parquet as pq
import pytest

from dagster_checkpoints.sinks import FileSink, InvalidSinkPath, SinkFenced, SinkUnavailable
from dagster_checkpoints.sinks.engine import LedgerChanged
from dagster_checkpoints.sinks.files import web_hdfs
from dagster_checkpoints.sinks.files.hdfs_files import HdfsFiles, HdfsLedgerFile
from dagster_checkpoints.spark.session.java import find_java_home
from dagster_checkpoints.testing import SinkConformance
from tests.sinks.staged_files import opened, staged
from tests.spark.servers import jars
from tests.spark.servers.hdfs import running_hdfs

WEB = "HDFS_OF_THE_TESTS"


@pytest.fixture(scope="module", autouse=True)
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The servers; the environment leads to them, also in the processes that the suite kills."""
    java = f"{find_java_home()}/bin/java"
    found = jars.fetched(jars.HDFS, java)
    servers = running_hdfs(tmp_path_factory.mktemp("hdfs"), java, found)
    with servers as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv(WEB, running.web)
        yield running


def _reader(url: str) -> tuple[Any, str]:
    """Another client than the sink's, and the path."""
    host, _, path = url.removeprefix("webhdfs://").partition("/")
    server, _, port = host.partition(":")
    return fsspec.filesystem("webhdfs", host=server, port=int(port), user="reader", skip_instance_cache=True), f"/{path}"


class TestJsonFilesInHdfs(SinkConformance):
    crash_points = 1

    def make_sink(self, folder: Path) -> FileSink:
        return FileSink(_url(folder), "json")

    def read(self, folder: Path) -> Sequence[int]:
        client, path = _reader(_url(folder))
        files = client.glob(f"{path}/*.json")
        return [n for file in files for n in pa_json.read_json(io.BytesIO(client.cat_file(file)))["n"].to_pylist()]


def _url(folder: Path) -> str:
    return f"{os.environ[WEB]}/lake/{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"


def test_partitions_a_name_node_that_is_away_and_older_restores(
    hdfs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{hdfs.web}/lake/a folder/ü"
    client, path = _reader(url)

    def rows() -> list[int]:
        files = [file for file in client.find(path) if file.endswith(".parquet") and "/_" not in file]
        return sorted(n for file in files for n in pq.read_table(io.BytesIO(client.cat_file(file)))["n"].to_pylist())

    sink = opened(FileSink(url, partition_by="day", manifest=True), 1)
    sink.start_new()
    transaction = staged(sink, tmp_path, 1, 1, 2, 3)
    assert rows() == []
    with hdfs.away(), monkeypatch.context() as impatient:
        impatient.setattr(web_hdfs, "_SECONDS", (0.5, 0.5))
        with pytest.raises(SinkUnavailable, match=r"cannot .* webhdfs://127.0.0.1:.*timed out"):
            sink.commit(transaction)
    sink.commit(transaction)
    sink.commit(transaction)
    assert rows() == [1, 1, 2, 2, 3, 3]
    assert {each.rpartition("/")[2] for each in client.ls(path, detail=False) if "=" in each} == {"day=é+%2F 0", "day=é+%2F 1"}
    assert [file for file in client.find(path) if "/staged/" in file or ".~" in file] == []
    sink.commit(staged(sink, tmp_path, 2, 7))
    again = FileSink(url, partition_by="day", manifest=True)
    for epoch, restored, found in ((2, 1, [1, 1, 2, 2, 3, 3]), (3, 2, [1, 1, 2, 2, 3, 3, 7, 7])):
        opened(again, epoch).recover([], restored=restored)
        assert rows() == found and len([f for f in client.find(path) if "_manifests" in f]) == restored
    with pytest.raises(SinkFenced, match=r"epoch 1.*epoch 3"):
        sink.commit(transaction)


def test_of_two_owners_that_read_the_same_one_is_refused(hdfs: Any) -> None:
    files = HdfsFiles(f"{hdfs.web}/owners")
    for older, newer in ((1, 2), (4, 6), (7, 9)):
        late = HdfsLedgerFile(files, "owner")
        late.read()
        for epoch in range(older, newer):  # several in between: the number that the late one wants may be free again
            newest = HdfsLedgerFile(files, "owner")
            newest.read()
            newest.replace(b"epoch %d" % epoch)
        with pytest.raises(LedgerChanged):
            late.replace(b"late")
        assert len(files.names("owner")) == 1 and b"late" not in (HdfsLedgerFile(files, "owner").read() or b"")
    refused: list[int] = []

    def take(epoch: int, owner: HdfsLedgerFile) -> None:
        try:
            owner.replace(b"%d" % epoch)
        except LedgerChanged:
            refused.append(epoch)

    owners = [HdfsLedgerFile(files, "raced") for _ in range(4)]
    for owner in owners:
        owner.read()
    threads = [threading.Thread(target=take, args=pair) for pair in enumerate(owners)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 3 and HdfsLedgerFile(files, "raced").read() == b"%d" % ({0, 1, 2, 3} - set(refused)).pop()


def test_places_that_cannot_be_used(hdfs: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidSinkPath, match=r"webhdfs://namenode:9870"):
        FileSink("hdfs://namenode:8020/lake")
    with pytest.raises(ValueError, match="the options user, found password"):
        FileSink(f"{hdfs.web}/lake", storage_options={"password": "hidden"})
    with pytest.raises(SinkUnavailable, match=r"webhdfs://127.0.0.1:9/lake.*dfs.namenode.http-address"):
        opened(FileSink("webhdfs://127.0.0.1:9/lake"), 1)
    client, _ = _reader(hdfs.web)
    client.pipe_file("/taken", b"a file")
    with pytest.raises(SinkUnavailable, match="not a directory"):
        opened(FileSink(f"{hdfs.web}/taken/rows"), 1)
