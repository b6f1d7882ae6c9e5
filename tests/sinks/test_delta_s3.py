"""DeltaSink on S3: the server runs in another process, since the library's client keeps Python waiting during some requests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from dagster_checkpoints.sinks import DeltaSink, SinkUnavailable
from tests.sinks.sink_instance import check_commits_and_restores, opened, staged


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    """The storage options of a server with the bucket "lake"."""
    code = (
        "from resources.embedded_s3 import EmbeddedS3\n"
        "with EmbeddedS3('lake') as s3:\n"
        "    print(s3.endpoint_url, s3.environment['AWS_ACCESS_KEY_ID'], s3.environment['AWS_SECRET_ACCESS_KEY'], flush=True)\n"
        "    input()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-c", code], text=True, cwd=Path(__file__).parents[2], **pipes)  # type: ignore[call-overload]
    try:
        endpoint, key, secret = process.stdout.readline().split()
        yield {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
    finally:
        process.kill()
        process.communicate()


def test_rows_are_committed_taken_back_and_restored(server: dict[str, str], tmp_path: Path) -> None:
    url = "s3://lake/delays"

    def rows() -> list[int]:
        return sorted(DeltaTable(url, storage_options=server).to_pyarrow_table()["n"].to_pylist())

    check_commits_and_restores(
        lambda: DeltaSink(url, storage_options=server),
        rows,
        lambda table: write_deltalake(url, table, mode="append", storage_options=server),
        tmp_path,
    )


def test_rows_are_replaced_by_key(server: dict[str, str], tmp_path: Path) -> None:
    url = "s3://lake/by-key"
    write_deltalake(url, pa.table({"n": list(range(100))}), storage_options=server)
    sink = opened(DeltaSink(url, storage_options=server, key="n"), 1)
    for checkpoint_id in (7, 8, 7, 200):
        sink.commit(staged(sink, tmp_path, checkpoint_id))
    table = DeltaTable(url, storage_options=server)
    assert sorted(table.to_pyarrow_table()["n"].to_pylist()) == [*range(100), 200]
    assert len(table.file_uris()) == 4


def test_what_the_sink_is_not_told_comes_from_the_environment(
    server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.items():
        monkeypatch.setitem(os.environ, name, value)
    sink = opened(DeltaSink("s3a://lake/other"), 1)
    sink.commit(staged(sink, tmp_path, 1))
    assert DeltaTable("s3://lake/other").to_pyarrow_table()["n"].to_pylist() == [1]


def test_a_server_that_does_not_answer_is_named_without_credentials(server: dict[str, str]) -> None:
    away = {**server, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_SECRET_ACCESS_KEY": "hidden", "max_retries": "0"}
    with pytest.raises(SinkUnavailable, match=r"s3://lake/delays.*another attempt") as failed:
        opened(DeltaSink("s3://lake/delays", storage_options=away), 1)
    assert [part for part in ("hidden", "\x1b", "\n") if part in str(failed.value)] == []
    assert not failed.value.repeats
