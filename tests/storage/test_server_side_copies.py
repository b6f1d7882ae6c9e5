"""Files that storage already holds are copied within it: none of their bytes passes through this process."""

from __future__ import annotations

import errno
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from dagster_checkpoints.errors import NotFound, OutcomeUnknown, StorageUnavailable
from dagster_checkpoints.execution.pipeline_state import Owner
from dagster_checkpoints.files.local import LocalStore
from dagster_checkpoints.files.s3 import S3Store
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.storage import CheckpointStorage
from resources.embedded_s3 import EmbeddedS3, Fault

MB = 1024 * 1024
PART = 5 * MB  # the smallest size that S3 accepts


class Requests:
    """The operations that a client requested from S3, and the bytes that it received."""

    def __init__(self, client: Any) -> None:
        self.operations: Counter[str] = Counter()
        client.meta.events.register("before-call.s3", self._count)

    def _count(self, model: Any, **_: Any) -> None:
        self.operations[model.name] += 1


@pytest.fixture
def client(s3: EmbeddedS3) -> Any:
    return s3.client(retries={"mode": "standard", "total_max_attempts": 1}, read_timeout=20)


@pytest.fixture
def parts(s3: EmbeddedS3, client: Any) -> S3Store:
    """A store that sends and copies in the smallest parts."""
    return S3Store(s3.bucket, f"root-{uuid4().hex}", client=client, multipart_bytes=PART, copy_bytes=PART)


@pytest.fixture
def elsewhere(s3: EmbeddedS3, client: Any) -> Iterator[str]:
    bucket = f"elsewhere-{uuid4().hex[:8]}"
    client.create_bucket(Bucket=bucket)
    yield bucket
    for found in client.list_objects_v2(Bucket=bucket).get("Contents", ()):
        client.delete_object(Bucket=bucket, Key=found["Key"])
    client.delete_bucket(Bucket=bucket)


def _source(directory: Path, contents: dict[str, bytes]) -> dict[str, Path]:
    directory.mkdir(exist_ok=True)
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return {name: directory / name for name in contents}


def _sibling(store: ObjectStore, name: str) -> ObjectStore:
    sibling = store.sibling(f"{store.url}{name}")
    assert sibling is not None
    return sibling


# -- both kinds


def test_an_object_is_copied_within_a_store_and_beside_it(store: ObjectStore) -> None:
    data = os.urandom(3 * MB)
    store.put("a/b", data)
    store.put("copy", b"in the way")
    for target, key in ((store, "copy"), (_sibling(store, "-beside"), "deep/copy"), (_sibling(store, "/below"), "copy")):
        for size in (None, len(data)):
            assert target.copy_from(store, "a/b", key, size)
            assert target.get(key) == data
    store.delete(["a/b"])
    assert store.get("copy") == data


def test_a_copy_of_an_empty_object(store: ObjectStore) -> None:
    store.put("empty", b"")
    assert store.copy_from(store, "empty", "copy") and store.get("copy") == b""


@pytest.mark.parametrize("size", [None, 1])
def test_a_missing_object_is_not_copied(store: ObjectStore, size: int | None) -> None:
    with pytest.raises(NotFound, match=f"{store.url}/absent"):
        store.copy_from(store, "absent", "copy", size)
    assert store.head("copy") is None


def test_stores_of_different_kinds_do_not_copy(s3_store: S3Store, tmp_path: Path) -> None:
    local = LocalStore(tmp_path)
    local.put("a", b"a")
    s3_store.put("a", b"a")
    assert not s3_store.copy_from(local, "a", "b") and not local.copy_from(s3_store, "a", "b")
    assert s3_store.head("b") is None and local.head("b") is None
    assert s3_store.sibling(str(tmp_path)) is None and local.sibling("s3://bucket/x") is None
    assert local.sibling("relative") is None


def test_servers_do_not_copy_from_one_another(parts: S3Store) -> None:
    with EmbeddedS3() as another:
        other = S3Store(another.bucket, "root", client=another.client())
        other.put("a", b"a")
        assert not parts.copy_from(other, "a", "b") and parts.head("b") is None


def test_folders_are_one_level(store: ObjectStore) -> None:
    for key in ("a/x", "a/y/z", "b/x", "c", "a-1/x"):
        store.put(key, b"")
    assert sorted(store.folders()) == ["a", "a-1", "b"]
    assert list(store.folders("a/")) == ["y"]
    assert list(store.folders("c/")) == list(store.folders("absent/")) == []


# -- local


@pytest.mark.parametrize("error", [errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP])
@pytest.mark.parametrize("after", [0, 1000])
def test_where_the_kernel_does_not_copy_python_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, after: int
) -> None:
    store, data = LocalStore(tmp_path), os.urandom(3 * MB)
    store.put("a", data)
    original, left = os.copy_file_range, [after]

    def refuse(source: int, target: int, count: int) -> int:
        if not left[0]:
            raise OSError(error, os.strerror(error))
        some, left[0] = left[0], 0
        return original(source, target, some)

    monkeypatch.setattr(os, "copy_file_range", refuse)
    assert store.copy_from(store, "a", "b") and store.get("b") == data


def test_a_copy_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"a" * 1000)
    original, calls = os.copy_file_range, list[int]()

    def full(source: int, target: int, count: int) -> int:
        calls.append(count)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(source, target, 10)

    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(StorageUnavailable, match=r"b: .*No space left"):
        store.copy_from(store, "a", "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_copy_is_no_link(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"aaa")
    store.copy_from(store, "a", "b")
    with (tmp_path / "a").open("r+b") as file:
        file.write(b"X")
    assert store.get("b") == b"aaa"


# -- S3


def test_a_savepoint_downloads_nothing(client: Any, parts: S3Store, elsewhere: str, tmp_path: Path, alice: Owner) -> None:
    storage = CheckpointStorage(parts, "flights")
    storage.acquire(alice, 600.0)
    small = {f"f{n}": b"%d" % n * 1000 for n in range(10)}
    paths = _source(tmp_path / "source", {**small, "big": os.urandom(2 * PART + 100)})
    storage.upload_files(1, paths)
    for target in ("", f"s3://{elsewhere}/savepoints"):
        requests = Requests(client)
        directory = storage.savepoint_directory(2, "x", target)
        stored = directory.upload_files(paths)
        directory.write_metadata(b"metadata", {one.sha256: one.size for one in stored.values()})
        assert [name for name, one in stored.items() if one.uploaded] == []
        done = dict(requests.operations)
        # The mark, the metadata and, in the pipeline's own directory, the ownership are written; only a listing is read.
        assert done.pop("PutObject") == (3 if directory.own else 2)
        assert done.pop("CopyObject") == 10
        assert done.pop("UploadPartCopy") == 3
        assert done.pop("ListObjectsV2") == 1
        assert done == {"HeadObject": 1, "CreateMultipartUpload": 1, "CompleteMultipartUpload": 1, "DeleteObjects": 1}
        assert directory.verify({one.sha256: one.size for one in stored.values()}) == []


def test_new_bytes_are_sent_in_parallel_parts(client: Any, parts: S3Store, tmp_path: Path, alice: Owner) -> None:
    storage = CheckpointStorage(parts, "flights")
    storage.acquire(alice, 600.0)
    requests = Requests(client)
    directory = storage.savepoint_directory(2, "x")
    # boto3 makes parts of at least 8 MB here.
    stored = directory.upload_files(_source(tmp_path / "source", {"big": os.urandom(17 * MB), "small": b"s"}))
    assert requests.operations["UploadPart"] == 3 and requests.operations["PutObject"] == 2
    assert directory.verify({one.sha256: one.size for one in stored.values()}) == []


def test_a_large_object_is_copied_in_parts_also_when_its_size_is_not_known(client: Any, parts: S3Store) -> None:
    data = os.urandom(PART + 1)
    parts.put("a", data)
    requests = Requests(client)
    assert parts.copy_from(parts, "a", "b")
    assert requests.operations["UploadPartCopy"] == 2 and requests.operations["GetObject"] == 0
    assert hashlib.sha256(parts.get("b")).digest() == hashlib.sha256(data).digest()


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (501, "NotImplemented"), (405, "MethodNotAllowed")])
def test_a_server_that_will_not_copy_gets_the_bytes(
    s3: EmbeddedS3, parts: S3Store, tmp_path: Path, alice: Owner, status: int, code: str
) -> None:
    storage = CheckpointStorage(parts, "flights")
    storage.acquire(alice, 600.0)
    paths = _source(tmp_path / "source", {"a": b"a"})
    storage.upload_files(1, paths)
    directory = storage.savepoint_directory(2, "x")
    refused = s3.inject(Fault("answer", "PUT", "/state/", 1, status, code))
    stored = directory.upload_files(paths)
    assert refused.hits == 1 and stored["a"].uploaded
    assert directory.verify({stored["a"].sha256: 1}) == []


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault("answer", "PUT", "/copy", None, 503, "SlowDown"), StorageUnavailable),
        (Fault("answer", "PUT", "/copy", None, 500, "InternalError"), OutcomeUnknown),
        (Fault("lose_answer", "PUT", "/copy", None), OutcomeUnknown),
        (Fault("drop", "PUT", "/copy", None), OutcomeUnknown),
    ],
)
def test_a_failed_copy_reports_whether_its_outcome_is_known(
    s3: EmbeddedS3, parts: S3Store, fault: Fault, error: type[Exception]
) -> None:
    parts.put("a", b"a")
    s3.inject(fault)
    with pytest.raises(error) as caught:
        parts.copy_from(parts, "a", "copy", 1)
    assert type(caught.value) is error and f"{parts.url}/copy" in str(caught.value)


def test_conflicting_conditional_writes_are_tried_again(s3: EmbeddedS3, parts: S3Store, tmp_path: Path, alice: Owner) -> None:
    storage = CheckpointStorage(S3Store(s3.bucket, parts.prefix, client=s3.client(), sleep=lambda _: None), "flights")
    owner = storage.acquire(alice, 600.0)
    conflicts = [s3.conflict(2, "state.json")]
    owner.reserve(7)
    directory = storage.savepoint_directory(7, "x")
    stored = directory.upload_files(_source(tmp_path / "source", {"a": b"a"}))
    conflicts += [s3.conflict(2, "_metadata"), s3.conflict(1, "state.json")]
    location = directory.write_metadata(b"metadata", {one.sha256: one.size for one in stored.values()})
    assert [conflict.hits for conflict in conflicts] == [2, 2, 1]
    assert owner.highest_checkpoint_id == 7 and storage.open_savepoint(location).read_metadata() == b"metadata"


def test_a_target_that_cannot_be_written_is_named(s3: EmbeddedS3, parts: S3Store, elsewhere: str, alice: Owner) -> None:
    storage = CheckpointStorage(parts, "flights")
    storage.acquire(alice, 600.0)
    actions: dict[str, Callable[[], object]] = {
        r"aws s3 mb s3://absent-bucket": storage.savepoint_directory(1, "x", "s3://absent-bucket/y").check,
        rf"s3://{elsewhere}/y/savepoint-1-x-.*s3:PutObject.*bucket '{elsewhere}'": storage.savepoint_directory(
            1, "x", f"s3://{elsewhere}/y"
        ).check,
    }
    with s3.fault("answer", key=elsewhere, status=403, code="AccessDenied"):
        for text, action in actions.items():
            with pytest.raises(StorageUnavailable, match=text):
                action()


def test_a_target_in_s3_for_storage_that_is_local(
    s3: EmbeddedS3, client: Any, elsewhere: str, tmp_path: Path, alice: Owner
) -> None:
    def open_elsewhere(url: str) -> ObjectStore:
        return S3Store(*url.removeprefix("s3://").split("/", 1), client=client)

    storage = CheckpointStorage(LocalStore(tmp_path / "root"), "flights", open_elsewhere=open_elsewhere)
    storage.acquire(alice, 600.0)
    paths = _source(tmp_path / "source", {"a": b"a"})
    storage.upload_files(1, paths)
    directory = storage.savepoint_directory(2, "x", f"s3://{elsewhere}/backup")
    stored = directory.upload_files(paths)
    assert stored["a"].uploaded
    directory.write_metadata(b"metadata", {stored["a"].sha256: 1})
    assert storage.open_savepoint(directory.url).read_metadata() == b"metadata"
