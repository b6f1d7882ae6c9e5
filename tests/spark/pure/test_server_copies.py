"""Whether the S3 server copies between work directory and storage: tried with the bytes that both clients see. Without Spark."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_checkpoints.files.local import LocalStore
from dagster_checkpoints.files.s3 import S3Store
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.spark.errors import SnapshotError
from dagster_checkpoints.spark.files.hadoop_path import FileStatus, HadoopPath
from dagster_checkpoints.spark.files.server_copies import SMALLEST_SERVER_COPY, server_copy_target, try_server_copies
from dagster_checkpoints.spark.snapshots.pinned_queries import RemoteSource
from resources.embedded_s3 import EmbeddedS3


class PathOnS3(HadoopPath):
    """A path whose client is boto3 instead of S3A; with `secret` it encrypts what it writes."""

    def __truediv__(self, part: str, /) -> PathOnS3:
        return PathOnS3(self._system, f"{self._url}/{part}")

    def write_text(self, data: str, encoding: str = "utf-8") -> int:
        text = data[::-1] if self._system.secret else data
        self._system.store.put(self.object_key, text.encode(encoding))
        return len(data)

    def read_text(self, encoding: str = "utf-8") -> str:
        return str(self._system.store.get(self.object_key).decode(encoding))

    def sha256(self) -> str:
        self._system.hashed.append(self.name)
        if self._system.store.head(self.object_key) is None:
            raise FileNotFoundError(str(self))
        return hashlib.sha256(self._system.store.get(self.object_key)).hexdigest()


@pytest.fixture(scope="module")
def s3() -> Iterator[EmbeddedS3]:
    with EmbeddedS3() as server:
        yield server


@pytest.fixture
def storage(s3: EmbeddedS3) -> S3Store:
    s3.heal()
    return S3Store(s3.bucket, "root", client=s3.client())


@pytest.fixture
def folder(s3: EmbeddedS3, storage: S3Store) -> PathOnS3:
    system: Any = SimpleNamespace(store=S3Store(s3.bucket, client=s3.client()), bucket=None, secret=False, hashed=[])
    return PathOnS3(system, f"s3a://{s3.bucket}/work dir/ü/epoch-1-proof")


def test_one_server_copies_both_ways_and_leaves_nothing_in_the_storage(storage: S3Store, folder: PathOnS3) -> None:
    assert server_copy_target(folder) is None
    assert try_server_copies(folder, storage) == ""
    assert list(storage.list()) == []
    target = server_copy_target(folder)
    assert target is not None and target.folder == "work dir/ü/epoch-1-proof"
    (folder / "file").write_text("text")
    assert target.hash_of(f"{target.folder}/file") == hashlib.sha256(b"text").hexdigest()


@pytest.mark.parametrize(("key", "found"), [("root/.probe-", "to the storage"), ("epoch-1-proof/back", "to the work directory")])
def test_a_server_that_refuses_one_way_is_not_asked_again(
    s3: EmbeddedS3, storage: S3Store, folder: PathOnS3, key: str, found: str
) -> None:
    with s3.fault("answer", method="PUT", key=key, status=403, code="AccessDenied"):
        assert try_server_copies(folder, storage).endswith(found)
    assert server_copy_target(folder) is None and list(storage.list()) == []


def test_other_places_and_clients_are_told_by_name(s3: EmbeddedS3, storage: S3Store, folder: PathOnS3, tmp_path: Path) -> None:
    absent = PathOnS3(folder.system, "s3a://absent-bucket/work")
    cases: list[tuple[Any, ObjectStore, str]] = [
        (tmp_path, storage, "the work directory is not on s3a://"),
        (PathOnS3(folder.system, "hdfs://namenode/work"), storage, "the work directory is not on s3a://"),
        (folder, LocalStore(tmp_path), f"the storage is not in S3: {tmp_path.as_uri()}"),
    ]
    for place, store, text in cases:
        assert try_server_copies(place, store) == text
    with s3.fault("answer", method="PUT", key="root/.probe-", status=400, code="InvalidRequest"):
        assert "StorageUnavailable: cannot copy to" in try_server_copies(folder, storage)
    folder.system.secret = True  # type: ignore[attr-defined]
    assert try_server_copies(folder, storage) == "the storage's client does not see the bytes that Spark writes"
    assert server_copy_target(folder) is None and server_copy_target(absent) is None


def test_a_large_file_is_hashed_by_the_server_or_by_sparks_client(
    s3: EmbeddedS3, storage: S3Store, folder: PathOnS3, tmp_path: Path
) -> None:
    data = b"x" * SMALLEST_SERVER_COPY
    client, hashed = s3.client(), folder.system.hashed  # type: ignore[attr-defined]
    keys = {name: (folder / name).object_key for name in ("known", "unknown", "small", "gone")}
    client.put_object(Bucket=s3.bucket, Key=keys["known"], Body=data, ChecksumAlgorithm="SHA256")
    client.put_object(Bucket=s3.bucket, Key=keys["unknown"], Body=data)

    def source(name: str, size: int = len(data)) -> RemoteSource:
        return RemoteSource(FileStatus(folder / name, size, 0, '"etag"'), tmp_path / name)

    assert source("known").stored() is source("known").sha256() is None, "before the server was tried"
    assert try_server_copies(folder, storage) == ""
    assert source("small", len(data) - 1).stored() is source("small", 10).sha256() is None
    stored = source("known").stored()
    assert stored is not None and (stored.key, stored.etag) == (keys["known"], '"etag"')
    expected = hashlib.sha256(data).hexdigest()
    assert source("known").sha256() == expected and hashed == []
    assert source("unknown").sha256() == expected and hashed == ["unknown"]
    with pytest.raises(SnapshotError, match=r"ü/epoch-1-proof/gone to exist until it is stored.*minBatchesToRetain"):
        source("gone").sha256()
