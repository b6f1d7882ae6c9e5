"""FileSink on S3: files are uploaded under hidden names, and the server copies them when a checkpoint completes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import boto3
import pyarrow.dataset as ds
import pytest
from pyarrow import fs

from dagster_checkpoints.sinks import FileSink, InvalidSinkPath, SinkFenced, SinkPathInUse, SinkUnavailable
from dagster_checkpoints.sinks.base import AtNewStart
from resources.embedded_s3 import EmbeddedS3
from tests.sinks.staged_files import context, opened, staged
from tests.sinks.suites import TargetConformance


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[EmbeddedS3]:
    """A server with the bucket "lake"; the environment leads to it, also in the processes that the suite kills."""
    with EmbeddedS3("lake") as s3, pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment.items():
            patch.setenv(name, value)
        yield s3


def _read(url: str, format: str = "parquet") -> list[int]:
    place = url.removeprefix("s3://")
    store = fs.S3FileSystem(
        endpoint_override=os.environ["AWS_ENDPOINT_URL_S3"],
        access_key=os.environ["AWS_ACCESS_KEY_ID"],
        secret_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        region="us-east-1",
    )
    if store.get_file_info(place).type == fs.FileType.NotFound:
        return []
    table = ds.dataset(place, filesystem=store, format=format).to_table()
    return table["n"].to_pylist() if "n" in table.column_names else []


class TestJsonFilesInS3(TargetConformance):
    """The rows of a checkpoint are one file: its copy appears as a whole."""

    crash_points = 1

    def make_sink(self, folder: Path) -> FileSink:
        return FileSink(_url(folder), "json")

    def read(self, folder: Path) -> Sequence[int]:
        return _read(_url(folder), "json")


def _url(folder: Path) -> str:
    return f"s3://lake/{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"


def test_an_s3a_url_means_the_same_place() -> None:
    assert FileSink("s3a://lake/delays/").location == FileSink("s3://lake/delays").uri == "s3://lake/delays"


def test_partitions_and_a_copy_that_was_interrupted(server: EmbeddedS3, tmp_path: Path) -> None:
    url = "s3://lake/interrupted"
    sink = opened(FileSink(url, partition_by="day", manifest=True), 1)
    sink.start_new()
    transaction = staged(sink, tmp_path, 1, 1, 2, 3)
    client = boto3.client("s3")

    def keys() -> list[str]:
        return [each["Key"] for each in client.list_objects_v2(Bucket="lake", Prefix="interrupted/").get("Contents", ())]

    assert [key for key in keys() if not key.startswith("interrupted/_")] == []
    with server.fault("answer", method="PUT", key=" 1/part-", times=None), pytest.raises(SinkUnavailable):
        sink.commit(transaction)
    assert not any("_manifests" in key for key in keys())
    sink.commit(transaction)
    sink.commit(transaction)
    assert sorted(_read(url)) == [1, 1, 2, 2, 3, 3]
    assert {key.split("/")[1] for key in keys() if key.endswith(".parquet")} == {"day=é+%2F 0", "day=é+%2F 1"}
    assert [key for key in keys() if "/staged/" in key] == []
    assert len([key for key in keys() if "_manifests" in key]) == 1
    sink.commit(staged(sink, tmp_path, 2, 7))
    again = FileSink(url, partition_by="day", manifest=True)
    for epoch, restored, rows in ((2, 1, [1, 1, 2, 2, 3, 3]), (3, 2, [1, 1, 2, 2, 3, 3, 7, 7])):
        opened(again, epoch).recover([], restored=restored)
        assert sorted(_read(url)) == rows and len([key for key in keys() if "_manifests" in key]) == restored
    with pytest.raises(SinkFenced, match=r"epoch 1.*epoch 3"):
        sink.commit(transaction)


@pytest.mark.parametrize("choice", ["refuse", "keep", "replace"])
def test_folders_that_the_console_has_created_are_no_files(tmp_path: Path, choice: AtNewStart) -> None:
    client = boto3.client("s3")
    for key in ("", "day=1/", "_dagster_checkpoints/", "_dagster_checkpoints/0/staged/"):
        client.put_object(Bucket="lake", Key=f"by-hand-{choice}/{key}", Body=b"")
    sink = FileSink(f"s3://lake/by-hand-{choice}", at_new_start=choice)
    for job in (1, 2) if choice == "replace" else (1,):
        sink.check_new_start(context(job=job, epoch=job))
        instance = sink.new_instance()
        instance.open(context(job=job, epoch=job))
        instance.start_new()
        instance.commit(staged(instance, tmp_path, 1, job))
        assert _read(f"s3://lake/by-hand-{choice}") == [job, job]


def test_a_file_of_another_program_whose_name_has_an_empty_part_is_named(tmp_path: Path) -> None:
    boto3.client("s3").put_object(Bucket="lake", Key="others//rows.parquet", Body=b"")
    with pytest.raises(SinkPathInUse, match=r"found other ones \(/rows\.parquet\)"):
        FileSink("s3://lake/others").check_new_start(context())


def test_a_server_that_does_not_answer_and_a_bucket_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    away = FileSink("s3://lake/delays", storage_options={"endpoint_url": "http://127.0.0.1:9", "region_name": "us-east-1"})
    missing = FileSink("s3://nowhere/delays")
    for sink, kind, expected in ((away, SinkUnavailable, "127.0.0.1:9"), (missing, InvalidSinkPath, "no bucket 'nowhere'")):
        with pytest.raises(kind, match=expected) as failed:
            opened(sink, 1)
        assert "hidden" not in str(failed.value) and failed.value.repeats is (sink is missing)
