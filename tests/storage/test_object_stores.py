"""The contract of the object store, for both kinds of store."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_checkpoints.errors import AlreadyExists, InvalidKey, InvalidStorageUrl, NotFound, Precondition
from dagster_checkpoints.files.local import LocalStore
from dagster_checkpoints.files.s3 import S3Store
from dagster_checkpoints.files.store import ObjectStore, UpdateVersion
from dagster_checkpoints.storage import open_store


def test_a_written_object_is_read_back(store: ObjectStore) -> None:
    store.put("a/b", b"hello")
    assert store.get("a/b") == b"hello"
    assert b"".join(store.stream("a/b", 2)) == b"hello"
    info = store.head("a/b")
    assert info is not None and (info.key, info.size) == ("a/b", 5)


def test_empty_objects_are_objects(store: ObjectStore) -> None:
    store.put("empty", b"", "create")
    assert store.get("empty") == b""
    with pytest.raises(AlreadyExists):
        store.put("empty", b"", "create")


def test_a_missing_object_is_not_found(store: ObjectStore) -> None:
    store.put("folder/object", b"")
    for key in ("nothing", "folder"):
        with pytest.raises(NotFound, match=key):
            store.get(key)
        with pytest.raises(NotFound):
            list(store.stream(key))
    assert store.head("nothing") is None


def test_create_refuses_an_existing_object_and_leaves_it(store: ObjectStore) -> None:
    store.put("key", b"first", "create")
    with pytest.raises(AlreadyExists, match="key"):
        store.put("key", b"first", "create")
    with pytest.raises(AlreadyExists):
        store.put("key", b"second", "create")
    assert store.get("key") == b"first"


def test_update_needs_the_current_version(store: ObjectStore) -> None:
    old = store.put("key", b"1", "create")
    new = store.put("key", b"2", UpdateVersion(old))
    with pytest.raises(Precondition, match="key"):
        store.put("key", b"3", UpdateVersion(old))
    assert store.get_with_etag("key") == (b"2", new)
    store.delete(["key"])
    with pytest.raises(Precondition):
        store.put("key", b"4", UpdateVersion(new))
    assert store.head("key") is None


def test_list_is_by_prefix_and_in_order(store: ObjectStore) -> None:
    keys = ["p/a", "p/a-b", "p/aa/c", "p/b/x/y", "q/a", "pa"]
    for key in keys:
        store.put(key, b"x")
    assert [info.key for info in store.list()] == sorted(keys)
    assert [info.key for info in store.list("p/")] == ["p/a", "p/a-b", "p/aa/c", "p/b/x/y"]
    assert [info.key for info in store.list("p/a")] == ["p/a", "p/a-b", "p/aa/c"]
    assert [info.key for info in store.list("none/at/all")] == []


def test_list_continues_after_a_page(s3_store: S3Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: s3_store.put(f"many/{n:04d}", b""), range(1005)))
    assert [info.key for info in s3_store.list("many/")] == [f"many/{n:04d}" for n in range(1005)]
    s3_store.delete([f"many/{n:04d}" for n in range(1005)])
    assert list(s3_store.list("many/")) == []


def test_the_marks_of_folders_are_no_objects(s3_store: S3Store) -> None:
    for key in ("", "a/", "a/b/"):
        s3_store._client.put_object(Bucket=s3_store.bucket, Key=f"marked/{key}", Body=b"")
    store = s3_store.sibling(f"s3://{s3_store.bucket}/marked")
    assert store is not None
    store.put("a/c", b"")
    assert [info.key for prefix in ("", "a/") for info in store.list(prefix)] == ["a/c", "a/c"]
    store.delete(info.key for info in store.list())
    assert list(store.list()) == [] and list(store.folders()) == ["a"]


def test_delete_is_idempotent(store: ObjectStore) -> None:
    store.put("a/b/c", b"")
    store.put("a/d", b"")
    store.delete(["a/b/c", "not/there"])
    store.delete(["a/b/c"])
    store.delete([])
    assert [info.key for info in store.list()] == ["a/d"]


def test_files_of_any_size(store: ObjectStore, tmp_path: Path) -> None:
    if isinstance(store, S3Store):  # the smallest size that S3 takes in parts
        store = S3Store(store.bucket, store.prefix, client=store._client, multipart_bytes=5 * 1024 * 1024)
    source = tmp_path / "source"
    for size in (0, 1, 5 * 1024 * 1024, 9 * 1024 * 1024 + 17):
        source.write_bytes(os.urandom(size))
        store.put_file("file", source)
        assert b"".join(store.stream("file")) == source.read_bytes()


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", ".", "..", "a/../b", "a/./b", "a\\b", "a\0b", ".~tmp-1", "a/.~lock"])
def test_keys_that_could_leave_the_root_are_refused(store: ObjectStore, key: str) -> None:
    actions: list[Callable[[], object]] = [
        lambda: store.get(key),
        lambda: store.put(key, b""),
        lambda: store.head(key),
        lambda: store.delete([key]),
    ]
    for action in actions:
        with pytest.raises(InvalidKey):
            action()


def test_check_leaves_nothing_behind(store: ObjectStore) -> None:
    store.check()
    assert list(store.list()) == []


def _race(count: int, action: Callable[[int], object]) -> list[object]:
    """Run ``action(0..count-1)`` at the same time; returns results and errors."""
    barrier = threading.Barrier(count)

    def run(number: int) -> object:
        barrier.wait(10)
        try:
            return action(number)
        except (AlreadyExists, Precondition) as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_of_racing_creates_exactly_one_wins(store: ObjectStore) -> None:
    for turn in range(30):
        results = _race(3, lambda n, turn=turn: store.put(f"race/{turn}", b"%d" % n, "create"))  # type: ignore[misc]
        winners = [n for n, result in enumerate(results) if isinstance(result, str)]
        assert len(winners) == 1
        assert store.get(f"race/{turn}") == b"%d" % winners[0]


def test_of_racing_updates_exactly_one_wins(store: ObjectStore) -> None:
    etag = store.put("race", b"start")
    for turn in range(30):
        results = _race(
            3,
            lambda n, turn=turn, etag=etag: store.put("race", b"%d-%d" % (turn, n), UpdateVersion(etag)),  # type: ignore[misc]
        )
        winners = [n for n, result in enumerate(results) if isinstance(result, str)]
        assert len(winners) == 1
        data, etag = store.get_with_etag("race")
        assert data == b"%d-%d" % (turn, winners[0])
        assert etag == results[winners[0]]


def test_updates_under_contention_lose_nothing(store: ObjectStore) -> None:
    store.put("counter", b"0")

    def increment(_: int) -> None:
        for _ in range(10):
            while True:
                data, etag = store.get_with_etag("counter")
                try:
                    store.put("counter", b"%d" % (int(data) + 1), UpdateVersion(etag))
                    break
                except Precondition:
                    continue

    _race(4, increment)
    assert store.get("counter") == b"40"


_KEYS = st.sampled_from(["a", "b", "d/a", "d/e/a"])
_STEPS = st.tuples(st.sampled_from(["create", "overwrite", "update", "stale", "delete"]), _KEYS, st.binary(max_size=3))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(_STEPS, max_size=15))
def test_a_store_behaves_as_a_dictionary(store: ObjectStore, steps: list[tuple[str, str, bytes]]) -> None:
    store.delete(["a", "b", "d/a", "d/e/a"])
    model: dict[str, bytes] = {}
    etags: dict[str, str] = {}
    for number, (action, key, content) in enumerate(steps):
        data = b"%d:" % number + content
        try:
            if action == "delete":
                store.delete([key])
                model.pop(key, None)
                continue
            if action == "update":
                etag = store.put(key, data, UpdateVersion(etags.get(key, '"none"')))
                assert key in model
            elif action == "stale":
                store.put(key, data, UpdateVersion('"0123"'))
                raise AssertionError("a wrong version was accepted")
            else:
                etag = store.put(key, data, "create" if action == "create" else "overwrite")
                assert action == "overwrite" or key not in model
            model[key], etags[key] = data, etag
        except AlreadyExists:
            assert action == "create" and key in model
        except Precondition:
            assert action == "stale" or key not in model
    assert {info.key: store.get(info.key) for info in store.list()} == model


def test_urls(tmp_path: Path) -> None:
    assert open_store(str(tmp_path)).url == tmp_path.as_uri()
    assert open_store(f"{tmp_path.as_uri()}/with%20space").url == f"{tmp_path.as_uri()}/with%20space"
    for path in ("relative/path", "backup:2024", "C:/checkpoints", "C:\\checkpoints"):
        assert isinstance(open_store(path), LocalStore)
    assert open_store(f"FILE://{tmp_path}").url == tmp_path.as_uri()
    assert open_store("S3://bucket/a", endpoint_url="http://127.0.0.1:1", region_name="eu-central-1").url == "s3://bucket/a"
    bucket = open_store("s3://bucket/a/b/", endpoint_url="http://127.0.0.1:1", region_name="eu-central-1")
    assert bucket.url == "s3://bucket/a/b"
    assert open_store("s3://bucket", client_factory=lambda: bucket._client).url == "s3://bucket"  # type: ignore[attr-defined]


@pytest.mark.parametrize("url", ["", "  ", "s3://", "s3:///x", "gs://bucket", "s3://b/../c", "file://host/path"])
def test_urls_that_mean_nothing_are_refused(url: str) -> None:
    with pytest.raises(InvalidStorageUrl, match="expected a storage URL"):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "correction"),
    [
        ("s3:b", "two slashes: s3://b"),
        ("s3:/b/c", "two slashes: s3://b/c"),
        ("s3a://b/c", "Hadoop's name for S3. Write s3://b/c"),
        ("hdfs:/x", r"not supported \(hdfs:\).* a directory of this name is ./hdfs:/x"),
        ("HDFS:x", r"not supported \(hdfs:\)"),
        ("gs://b", r"not supported \(gs:\)"),
        ("backup:/2024", r"not supported \(backup:\)"),
        ("file:x", "three slashes and an absolute path: file:///x"),
    ],
)
def test_a_url_that_would_have_been_a_local_directory_is_refused_with_the_right_spelling(url: str, correction: str) -> None:
    with pytest.raises(InvalidStorageUrl, match=correction):
        open_store(url)
