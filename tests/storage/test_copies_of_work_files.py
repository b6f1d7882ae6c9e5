"""Files of a work directory in the same S3: the server copies them to the storage and back, and each copy is checked."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from dagster_checkpoints.errors import CorruptStateFile, MissingStateFile, StateFileChanged
from dagster_checkpoints.execution.pipeline_state import Owner
from dagster_checkpoints.files.local import LocalStore
from dagster_checkpoints.files.s3 import S3Store
from dagster_checkpoints.state.metadata import StateFile
from dagster_checkpoints.storage import CheckpointStorage
from dagster_checkpoints.storage.state_files import CopyTarget, FileIdentity, StoredObject
from resources.embedded_s3 import EmbeddedS3, Fault

MB = 1024 * 1024
PART = 5 * MB  # the smallest size that S3 accepts


@dataclass(frozen=True)
class WorkFile:
    """A file of the work directory, as Spark's client sees it."""

    bucket: S3Store
    key: str
    data: bytes
    folder: Path
    etag: str = ""
    reads: list[str] = field(default_factory=list)

    def identity(self) -> FileIdentity:
        return FileIdentity((self.key, self.etag), len(self.data))

    def local(self) -> AbstractContextManager[Path]:
        self.reads.append(self.key)
        copy = self.folder / self.key.replace("/", "-")
        copy.write_bytes(self.data)
        return nullcontext(copy)

    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def stored(self) -> StoredObject:
        return StoredObject(self.bucket, self.key, self.etag)


@pytest.fixture
def client(s3: EmbeddedS3) -> Any:
    return s3.client(retries={"mode": "standard", "total_max_attempts": 1}, read_timeout=20)


@pytest.fixture
def work(client: Any) -> Iterator[S3Store]:
    name = f"work-{uuid4().hex[:8]}"
    client.create_bucket(Bucket=name)
    yield S3Store(name, client=client)
    for found in client.list_objects_v2(Bucket=name).get("Contents", ()):
        client.delete_object(Bucket=name, Key=found["Key"])
    client.delete_bucket(Bucket=name)


@pytest.fixture
def store(s3: EmbeddedS3, client: Any) -> S3Store:
    return S3Store(s3.bucket, f"root-{uuid4().hex}", client=client, multipart_bytes=PART, copy_bytes=PART)


@pytest.fixture
def storage(store: S3Store, alice: Owner) -> Iterator[CheckpointStorage]:
    with CheckpointStorage(store, "flights") as storage:
        storage.acquire(alice, 600.0)
        yield storage


@pytest.fixture
def operations(client: Any) -> Counter[str]:
    counted: Counter[str] = Counter()

    def count(model: Any, **_: Any) -> None:
        counted[model.name] += 1

    client.meta.events.register("before-call.s3", count)
    return counted


def file_of(work: S3Store, folder: Path, data: bytes, *, other: bytes | None = None) -> WorkFile:
    """A file of the work directory; the bucket holds `other` bytes of it if they are given."""
    key = f"job 1/state/ü/{uuid4().hex}.sst"
    return WorkFile(work, key, data, folder, work.put(key, data if other is None else other))


def test_the_server_copies_what_the_work_directory_holds(
    storage: CheckpointStorage, work: S3Store, tmp_path: Path, operations: Counter[str]
) -> None:
    files = {f"f{n}": file_of(work, tmp_path, os.urandom(size)) for n, size in enumerate((100, MB, PART + 100))}
    operations.clear()
    stored = storage.upload_files(1, files)
    assert not any(file.reads for file in files.values())
    assert not {"PutObject", "UploadPart", "GetObject"} & set(operations)
    assert (operations["CopyObject"], operations["UploadPartCopy"]) == (2, 2)
    for name, file in files.items():
        assert stored[name].uploaded and stored[name].sha256 == file.sha256()
        assert storage.store.get(f"flights/shared/{file.sha256()}-1") == file.data
    assert not any(one.uploaded for one in storage.upload_files(2, files).values())
    directory = storage.savepoint_directory(3, "x")
    saved = directory.upload_files(files)
    assert directory.verify({one.sha256: one.size for one in saved.values()}) == []
    assert not any(file.reads for file in files.values())


@pytest.mark.parametrize(
    ("method", "status", "code"), [("PUT", 403, "AccessDenied"), ("PUT", 501, "NotImplemented"), ("PUT", 404, "NoSuchKey")]
)
def test_where_the_server_does_not_copy_the_bytes_are_sent(
    s3: EmbeddedS3, storage: CheckpointStorage, work: S3Store, tmp_path: Path, method: str, status: int, code: str
) -> None:
    file = file_of(work, tmp_path, b"a" * 1000)
    refused = s3.inject(Fault("answer", method, "/shared/", 1, status, code))
    stored = storage.upload_files(1, {"a": file})
    assert refused.hits == 1 and file.reads == [file.key]
    assert storage.store.get(f"flights/shared/{stored['a'].sha256}-1") == file.data


def test_a_local_storage_gets_the_bytes(work: S3Store, tmp_path: Path, alice: Owner) -> None:
    file = file_of(work, tmp_path, b"a" * 1000)
    with CheckpointStorage(LocalStore(tmp_path / "root"), "flights") as storage:
        storage.acquire(alice, 600.0)
        stored = storage.upload_files(1, {"a": file})
        assert storage.store.get(f"flights/shared/{stored['a'].sha256}-1") == file.data
    assert file.reads == [file.key]


def test_an_object_that_changed_is_not_stored_under_the_hash_of_its_earlier_bytes(
    s3: EmbeddedS3, storage: CheckpointStorage, work: S3Store, tmp_path: Path
) -> None:
    changed = file_of(work, tmp_path, b"a" * 1000, other=b"b" * 1000)
    with pytest.raises(StateFileChanged, match="not to change while a checkpoint uploads it"):
        storage.upload_files(1, {"a": changed})
    # A server that compares the version, which moto does not.
    file = file_of(work, tmp_path, b"c" * 1000)
    refused = s3.inject(Fault("answer", "PUT", "/shared/", 1, 412, "PreconditionFailed"))
    with pytest.raises(StateFileChanged):
        storage.upload_files(1, {"c": file})
    assert refused.hits == 1
    assert list(storage.store.list("flights/shared/")) == [] and not changed.reads and not file.reads


def test_the_version_is_a_condition_of_every_copy(store: S3Store, work: S3Store, client: Any) -> None:
    asked: list[tuple[str, str]] = []

    def note(model: Any, params: Any, **_: Any) -> None:
        conditions = [params["headers"].get(name) for name in ("x-amz-copy-source-if-match", "If-Match")]
        asked.append((model.name, next((found for found in conditions if found), "")))

    data = os.urandom(PART + 1)
    etag = work.put("a", data)
    client.meta.events.register("before-call.s3", note)
    assert store.copy_from(work, "a", "small", 100, etag=etag) and store.copy_from(work, "a", "large", len(data), etag=etag)
    named = {name for name, condition in asked if condition == etag}
    assert {"CopyObject", "UploadPartCopy"} <= named


# -- restores


def state_files(stored: dict[str, Any]) -> list[StateFile]:
    return [StateFile(f"state/0/{name}.sst", one.sha256, one.size, one.stored_by) for name, one in stored.items()]


@pytest.fixture
def asked_hashes() -> list[str]:
    return []


@pytest.fixture
def target(work: S3Store, asked_hashes: list[str]) -> CopyTarget:
    def hash_of(key: str) -> str:
        asked_hashes.append(key)
        return hashlib.sha256(work.get(key)).hexdigest()

    return CopyTarget(S3Store(work.bucket, client=work._client, copy_bytes=PART), "attempt 2/ü", hash_of)


@pytest.mark.parametrize("kind", ["checkpoint", "savepoint"])
def test_a_restore_is_copied_and_verified_by_the_server(
    storage: CheckpointStorage, work: S3Store, target: CopyTarget, asked_hashes: list[str], tmp_path: Path, kind: str
) -> None:
    contents = {"small": os.urandom(1000), "large": os.urandom(PART + 100)}
    paths = {}
    for name, data in contents.items():
        paths[name] = tmp_path / name
        paths[name].write_bytes(data)
    directory = storage.savepoint_directory(1, "x")
    stored = storage.upload_files(1, paths) if kind == "checkpoint" else directory.upload_files(paths)
    files = state_files(stored)
    left = storage.copy_state(files, target, checkpoint="chk-1") if kind == "checkpoint" else directory.copy_state(files, target)
    assert left == []
    for file, data in zip(files, contents.values(), strict=True):
        assert work.get(f"attempt 2/ü/{file.path}") == data
    assert asked_hashes == ["attempt 2/ü/state/0/large.sst"], "of a copy in parts the server knows no hash of the whole"


def test_a_damaged_or_missing_file_is_named_and_leaves_no_copy(
    storage: CheckpointStorage, work: S3Store, target: CopyTarget, tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(b"a" * 1000)
    files = state_files(storage.upload_files(1, {"a": tmp_path / "a"}))
    key = f"flights/shared/{files[0].name}"
    storage.store.put(key, b"b" * 1000)
    with pytest.raises(CorruptStateFile, match=rf"chk-1: state file state/0/a.sst at {storage.store.url}/{key} is corrupt"):
        storage.copy_state(files, target, checkpoint="chk-1")
    storage.store.put(key, b"a" * 999)
    with pytest.raises(CorruptStateFile, match=r"expected 1000 bytes .*, found 999"):
        storage.copy_state(files, target, checkpoint="chk-1")
    storage.store.delete([key])
    with pytest.raises(MissingStateFile, match=r"chk-1: state file state/0/a\.sst is missing"):
        storage.copy_state(files, target, checkpoint="chk-1")
    assert list(work.list()) == []


def test_files_that_the_server_may_not_copy_are_left_to_be_fetched(
    s3: EmbeddedS3, storage: CheckpointStorage, target: CopyTarget, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    files = state_files(storage.upload_files(1, {name: tmp_path / name for name in ("a", "b")}))
    with s3.fault("answer", key="a.sst", status=403, code="AccessDenied"):
        assert storage.copy_state(files, target, checkpoint="chk-1") == files[:1]


def test_the_hash_of_an_object_is_known_if_its_writer_asked_for_one(store: S3Store, client: Any) -> None:
    data = b"x" * 1000
    wanted = {"none": {}, "hashed": {"ChecksumAlgorithm": "SHA256"}, "other": {"ChecksumAlgorithm": "CRC32"}}
    found = {}
    for name, options in wanted.items():
        client.put_object(Bucket=store.bucket, Key=f"{store.prefix}/{name}", Body=data, **options)
        info = store.head(name)
        assert info is not None
        found[name] = info.sha256
    assert found == {"none": None, "hashed": hashlib.sha256(data).hexdigest(), "other": None}
    store.copy_from(store, "none", "copy", len(data), hashed=True)
    copied = store.head("copy")
    assert copied is not None and copied.sha256 == found["hashed"]
