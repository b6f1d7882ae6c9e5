"""A savepoint's directory: self-contained, verified, deleted completely, never mixed with other files."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_checkpoints.errors import (
    AlreadyExists,
    CheckpointDiscarded,
    CorruptStateFile,
    InvalidKey,
    InvalidRequest,
    InvalidStorageUrl,
    MissingCheckpoint,
    MissingSavepoint,
    MissingStateFile,
    OutcomeUnknown,
    OwnershipLost,
    StateFileChanged,
    StorageError,
    StorageUnavailable,
)
from dagster_checkpoints.execution.pipeline_state import CheckpointPointer, Owner
from dagster_checkpoints.state.metadata import StateFile
from dagster_checkpoints.storage import CheckpointStorage
from dagster_checkpoints.storage.savepoints import SavepointDirectory
from dagster_checkpoints.storage.state_files import StoredFile

LEASE = 30.0
NOW = datetime(2025, 1, 1, tzinfo=UTC)
BIG = 9 * 1024 * 1024


@pytest.fixture
def owned(storage: CheckpointStorage, alice: Owner) -> CheckpointStorage:
    storage.acquire(alice, LEASE).begin_job(resume=False)
    return storage


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


def _write(directory: Path, contents: Mapping[str, bytes]) -> dict[str, Path]:
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return {name: directory / name for name in contents}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sizes(stored: Mapping[str, StoredFile]) -> dict[str, int]:
    return {file.sha256: file.size for file in stored.values()}


def _files(stored: Mapping[str, StoredFile]) -> list[StateFile]:
    return [StateFile(f"restored/{name}", one.sha256, one.size) for name, one in stored.items()]


def _keys(storage: CheckpointStorage, prefix: str) -> set[str]:
    return {info.key.removeprefix(prefix) for info in storage.store.list(prefix)}


def _shared(storage: CheckpointStorage) -> set[str]:
    return _keys(storage, "flights/shared/")


def _metadata(storage: CheckpointStorage) -> set[str]:
    return _keys(storage, "flights/checkpoints/")


def _complete(storage: CheckpointStorage, source: Path, number: int = 7, name: str = "x", target: str = "") -> SavepointDirectory:
    """A complete savepoint of two files."""
    directory = storage.savepoint_directory(number, name, target)
    stored = directory.upload_files(_write(source, {"a": b"a", "b": b"bb"}))
    directory.write_metadata(b"metadata of %d" % number, _sizes(stored))
    return directory


# -- writing and reading


def test_a_savepoint_is_complete_in_itself(
    owned: CheckpointStorage, second: CheckpointStorage, source: Path, tmp_path: Path
) -> None:
    directory = owned.savepoint_directory(43, "nightly")
    paths = _write(source, {"a": b"aaa", "empty": b"", "same": b"aaa", "big": os.urandom(BIG)})
    stored = directory.upload_files(paths)
    assert {name: one.size for name, one in stored.items()} == {"a": 3, "empty": 0, "same": 3, "big": BIG}
    assert sum(one.uploaded for one in stored.values()) == 3
    with pytest.raises(MissingSavepoint):
        second.open_savepoint(directory.location)
    location = directory.write_metadata(b"metadata", _sizes(stored))
    assert location == directory.location and directory.own
    assert location.startswith("savepoints/savepoint-43-nightly-") and directory.url == owned.url_of(location)
    state = {f"state/{_sha256(path.read_bytes())}" for path in paths.values()}
    assert _keys(owned, f"flights/{location}/") == {"_metadata", *state}
    assert _shared(owned) == set()
    found = second.open_savepoint(location)
    assert found.read_metadata() == b"metadata" == second.read_metadata(location)
    assert found.verify(_sizes(stored)) == []
    found.fetch_state(_files(stored), tmp_path / "there")
    for name, path in paths.items():
        assert (tmp_path / "there" / "restored" / name).read_bytes() == path.read_bytes()


def test_a_savepoint_of_no_state_is_its_metadata(owned: CheckpointStorage) -> None:
    directory = owned.savepoint_directory(1, "")
    assert directory.upload_files({}) == {}
    directory.write_metadata(b"metadata", {})
    assert _keys(owned, f"flights/{directory.location}/") == {"_metadata"}
    assert [(one.checkpoint_id, one.name) for one in owned.list_savepoints()] == [(1, "")]


def test_tasks_that_share_files_store_each_once(owned: CheckpointStorage, source: Path) -> None:
    directory = owned.savepoint_directory(1, "x")
    paths = _write(source, {f"f{n}": b"%d" % n * 1000 for n in range(8)})
    barrier = threading.Barrier(4)

    def task(_: int) -> dict[str, StoredFile]:
        barrier.wait(10)
        return directory.upload_files(paths)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(task, range(4)))
    assert sum(one.uploaded for result in results for one in result.values()) == 8
    assert len({tuple(_sizes(result).items()) for result in results}) == 1
    directory.write_metadata(b"", _sizes(results[0]))
    assert directory.verify(_sizes(results[0])) == []


def test_a_failed_upload_can_be_tried_again(owned: CheckpointStorage, source: Path, faulty: Any) -> None:
    directory = owned.savepoint_directory(1, "x")
    paths = _write(source, {f"f{n}": b"%d" % n for n in range(20)})
    faulty.faults[:] = ["fine"] * 5 + ["unavailable"]
    with pytest.raises(StorageUnavailable):
        directory.upload_files(paths)
    stored = directory.upload_files(paths)
    directory.write_metadata(b"", _sizes(stored))
    assert directory.verify(_sizes(stored)) == []


def test_a_file_that_changes_while_it_is_stored_is_refused(owned: CheckpointStorage, source: Path, faulty: Any) -> None:
    big = _write(source, {"big": os.urandom(BIG)})
    put_file = faulty.inner.put_file

    def meddle(key: str, path: Path) -> None:
        with path.open("ab") as file:
            file.write(b"more")
        put_file(key, path)

    faulty.inner.put_file = meddle
    with pytest.raises(StateFileChanged, match=str(big["big"])):
        owned.savepoint_directory(1, "x").upload_files(big)


def test_metadata_is_written_only_when_every_file_is_there(owned: CheckpointStorage, source: Path) -> None:
    directory = owned.savepoint_directory(1, "x")
    stored = directory.upload_files(_write(source, {"a": b"a", "b": b"bb"}))
    absent = _sha256(b"absent")
    with pytest.raises(MissingStateFile, match=f"3 state files in {directory.url}/state/, found 1 missing: {absent}"):
        directory.write_metadata(b"", {**_sizes(stored), absent: 6})
    with pytest.raises(CorruptStateFile, match=rf"expected 3 bytes at {directory.url}/state/\w+, found 2"):
        directory.write_metadata(b"", {**_sizes(stored), _sha256(b"bb"): 3})
    assert owned.list_savepoints() == []
    directory.write_metadata(b"1", _sizes(stored))
    directory.write_metadata(b"1", _sizes(stored))  # again, after an answer was lost
    with pytest.raises(AlreadyExists, match="never changes"):
        directory.write_metadata(b"2", _sizes(stored))
    assert directory.read_metadata() == b"1"


@pytest.mark.parametrize("faults", [["lost answer"], ["lost request"], ["lost request", "lost answer"]])
def test_metadata_whose_answer_is_lost_is_recognised(owned: CheckpointStorage, faulty: Any, faults: list[str]) -> None:
    directory = owned.savepoint_directory(1, "x")
    faulty.faults[:] = faults
    assert directory.write_metadata(b"metadata", {}) == directory.location
    assert owned.open_savepoint(directory.location).read_metadata() == b"metadata"


@pytest.mark.parametrize("faults", [["lost request"] * 3, ["lost request", "unavailable"]])
def test_metadata_with_an_unknown_outcome_is_reported(owned: CheckpointStorage, faulty: Any, faults: list[str]) -> None:
    directory = owned.savepoint_directory(1, "x")
    faulty.faults[:] = faults
    with pytest.raises(OutcomeUnknown):
        directory.write_metadata(b"metadata", {})


# -- files that storage holds already


def test_files_in_shared_are_copied_by_the_store(store: Any, alice: Owner, source: Path, tmp_path: Path) -> None:
    storage = CheckpointStorage(store, "flights")
    owner = storage.acquire(alice, LEASE)
    paths = _write(source, {"a": b"a", "b": b"b" * 1000, "big": os.urandom(BIG)})
    stored = storage.upload_files(1, paths)
    owner.complete(1, storage.write_metadata(1, 1, b""))
    new = _write(source, {"new": b"new"})
    for target in ("", str(tmp_path / "elsewhere") if "file:" in store.url else f"{store.url}-elsewhere"):
        directory = storage.savepoint_directory(2, "x", target)
        result = directory.upload_files({**paths, **new})
        assert {name: one.uploaded for name, one in result.items()} == {"a": False, "b": False, "big": False, "new": True}
        directory.write_metadata(b"", _sizes(result))
        assert directory.verify(_sizes(result)) == []
    assert _shared(storage) == {f"{sha256}-1" for sha256 in _sizes(stored)}


def test_a_file_is_not_deleted_while_it_is_copied(owned: CheckpointStorage, source: Path, faulty: Any) -> None:
    paths = _write(source, {"a": b"a"})
    owned.upload_files(1, paths)
    copy_from, deleted = faulty.copy_from, []

    def copy_slowly(*given: Any) -> bool:
        deleted.append(owned.discard_states(1))
        assert _shared(owned) == {f"{_sha256(b'a')}-1"}
        return bool(copy_from(*given))

    faulty.copy_from = copy_slowly
    directory = owned.savepoint_directory(2, "x")
    stored = directory.upload_files(paths)
    assert deleted == [0] and not stored["a"].uploaded
    assert _shared(owned) == set()  # no checkpoint names it: it was deleted after the copy
    directory.write_metadata(b"", _sizes(stored))
    assert directory.verify(_sizes(stored)) == []
    assert owned.upload_files(3, paths)["a"].uploaded


def test_where_the_store_cannot_copy_the_bytes_are_sent(owned: CheckpointStorage, source: Path, faulty: Any) -> None:
    paths = _write(source, {"a": b"a", "b": b"b"})
    owned.upload_files(1, paths)
    owned.store.delete([f"flights/shared/{_sha256(b'a')}-1"])  # by another program
    copy_from = faulty.copy_from
    faulty.copy_from = lambda source, source_key, *rest: _sha256(b"b") not in source_key and copy_from(source, source_key, *rest)
    stored = owned.savepoint_directory(2, "x").upload_files(paths)
    assert [one.uploaded for one in stored.values()] == [True, True]


def test_a_savepoint_into_another_kind_of_storage(s3_store: Any, alice: Owner, source: Path, tmp_path: Path) -> None:
    storage = CheckpointStorage(s3_store, "flights")
    storage.acquire(alice, LEASE)
    paths = _write(source, {"a": b"a"})
    storage.upload_files(1, paths)
    directory = storage.savepoint_directory(2, "x", str(tmp_path / "local"))
    stored = directory.upload_files(paths)
    assert stored["a"].uploaded and not directory.own
    directory.write_metadata(b"metadata", _sizes(stored))
    assert (tmp_path / "local" / directory.url.rpartition("/")[2] / "_metadata").read_bytes() == b"metadata"


# -- directories of users


def _somewhere(storage: CheckpointStorage, tmp_path: Path) -> str:
    return str(tmp_path / "some where") if "file:" in storage.url else f"{storage.store.url}-elsewhere/deep"


def test_a_savepoint_anywhere_is_named_by_its_url(
    owned: CheckpointStorage, second: CheckpointStorage, source: Path, tmp_path: Path
) -> None:
    directory = _complete(owned, source, 7, "x", _somewhere(owned, tmp_path))
    assert directory.location == directory.url and not directory.own
    assert owned.is_savepoint(directory.location) and owned.url_of(directory.location) == directory.url
    for name in (directory.url, f"{directory.url}/", f"{directory.url}/_metadata"):
        assert second.open_savepoint(name).read_metadata() == b"metadata of 7"
        assert second.open_savepoint(name).location == directory.location
    assert second.read_metadata(directory.location) == b"metadata of 7"
    assert second.list_savepoints() == [] and _keys(owned, "flights/") == {"state.json"}
    directory.delete()
    with pytest.raises(MissingSavepoint):
        second.open_savepoint(directory.url)


def test_a_copied_savepoint_restores_under_any_name(owned: CheckpointStorage, source: Path, tmp_path: Path) -> None:
    directory = _complete(owned, source)
    copied = tmp_path / "50% off" / "renamed"
    for info in owned.store.list(f"flights/{directory.location}/"):
        path = copied / info.key.removeprefix(f"flights/{directory.location}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(owned.store.get(info.key))
    for name in (str(copied), copied.as_uri(), f"{copied}/_metadata"):
        found = owned.open_savepoint(name)
        assert (found.url, found.own) == (copied.as_uri(), False)
        assert found.read_metadata() == b"metadata of 7"
        assert found.verify({_sha256(b"a"): 1, _sha256(b"bb"): 2}) == []
    # In the pipeline's own savepoints/ it is the pipeline's own again.
    for path in copied.rglob("*"):
        if path.is_file():
            owned.store.put(f"flights/savepoints/savepoint-8-back/{path.relative_to(copied).as_posix()}", path.read_bytes())
    assert [(one.checkpoint_id, one.name) for one in owned.list_savepoints()] == [(8, "back"), (7, "x")]
    assert owned.open_savepoint("savepoints/savepoint-8-back").own


@pytest.mark.parametrize("name", ["savepoint-8-my copy (2)", "März 50%20", "what?#1"])
def test_a_copy_in_the_own_savepoints_may_have_any_name(owned: CheckpointStorage, tmp_path: Path, name: str) -> None:
    owned.store.put(f"flights/savepoints/{name}/_metadata", b"metadata of 8")
    found = owned.open_savepoint(f"savepoints/{name}")
    names = [found.url, owned.url_of(found.location), f"{found.url}/_metadata"]
    if "file:" in owned.url:
        names += [str(tmp_path / "root" / "flights" / "savepoints" / name)]
    for other in names:
        again = owned.open_savepoint(other)
        assert (again.location, again.own, again.url) == (f"savepoints/{name}", True, found.url)
    assert [each.url for each in owned.list_savepoints()] == [found.url] * name.startswith("savepoint-")


def test_the_own_savepoints_may_be_named_as_a_target(owned: CheckpointStorage, source: Path) -> None:
    directory = _complete(owned, source, target=f"{owned.url}/savepoints/")
    assert directory.own and directory.location.startswith("savepoints/savepoint-7-x-")
    for inside in ("", "/shared", "/savepoints/deeper", "/checkpoints"):
        with pytest.raises(InvalidStorageUrl, match="outside the pipeline's own"):
            owned.savepoint_directory(1, "x", f"{owned.url}{inside}")


@pytest.mark.parametrize(
    ("name", "target", "error", "text"),
    [
        ("a/b", "", InvalidRequest, "'a/b'.*directory's name"),
        ("..", "", InvalidRequest, "directory's name"),
        ("a b", "", InvalidRequest, "directory's name"),
        ("x" * 129, "", InvalidRequest, "at most 128"),
        ("x", "relative/path", InvalidStorageUrl, "relative path would mean another directory in each process"),
        ("x", "~/home", InvalidStorageUrl, "relative path"),
        ("x", "gs://bucket/x", InvalidStorageUrl, "that kind is not supported"),
        ("x", "s3://", InvalidStorageUrl, "no bucket"),
        ("x", "s3://bucket/a/../b", InvalidStorageUrl, "'..' parts"),
        ("x", "file://host/path", InvalidStorageUrl, "three slashes"),
        ("x", " ", InvalidStorageUrl, "empty"),
    ],
)
def test_an_invalid_name_or_target_of_a_savepoint_is_refused(
    owned: CheckpointStorage, name: str, target: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        owned.savepoint_directory(1, name, target)


def test_the_check_reports_whether_a_target_can_be_written(owned: CheckpointStorage, source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    in_the_way = str(tmp_path / "file" / "x") if "file:" in owned.url else "s3://no-such-bucket/x"
    with pytest.raises(StorageUnavailable, match=r"Not a directory|no bucket 'no-such-bucket'"):
        owned.savepoint_directory(1, "x", in_the_way).check()
    directory = owned.savepoint_directory(1, "x", _somewhere(owned, tmp_path))
    directory.check()
    with pytest.raises(MissingSavepoint):
        owned.open_savepoint(directory.url)
    assert directory.upload_files(_write(source, {"a": b"a"}))["a"].uploaded  # a restore does not use it up


@pytest.mark.parametrize("location", ["savepoints/savepoint-9-none", "savepoints/../state.json", "savepoints/x/../../y"])
def test_the_error_for_a_missing_savepoint_names_the_existing_ones(owned: CheckpointStorage, source: Path, location: str) -> None:
    there = _complete(owned, source).location
    owned.savepoint_directory(8, "unfinished").upload_files(_write(source, {"a": b"a"}))
    if ".." in location:
        with pytest.raises(InvalidKey):
            owned.open_savepoint(location)
        return
    for action in (owned.open_savepoint, owned.read_metadata):
        with pytest.raises(
            MissingSavepoint, match=f"{owned.url}/{location}/_metadata, found none. Savepoints there: {there}."
        ) as it:
            action(location)
    assert "unfinished" not in str(it.value) and isinstance(it.value, MissingCheckpoint)


def test_the_error_for_a_directory_of_savepoints_names_the_savepoints_in_it(
    owned: CheckpointStorage, source: Path, tmp_path: Path
) -> None:
    target = _somewhere(owned, tmp_path)
    directory = _complete(owned, source, target=target)
    for near in (directory.url.rpartition("/")[0], f"{directory.url}-typo", target):
        with pytest.raises(MissingSavepoint, match=f"found none. Savepoints there: .*{directory.url}"):
            owned.open_savepoint(near)
    unfinished = owned.savepoint_directory(8, "x", target)
    unfinished.upload_files(_write(source, {"a": b"a"}))
    with pytest.raises(MissingSavepoint, match=f"never completed, .* Savepoints there: {directory.url}. Name one"):
        owned.open_savepoint(unfinished.url)


@pytest.mark.parametrize("location", ["checkpoints/chk-1-1", "nonsense", "", "/"])
def test_a_location_that_cannot_be_a_savepoint_is_refused(owned: CheckpointStorage, location: str) -> None:
    with pytest.raises((InvalidKey, MissingSavepoint)):
        owned.open_savepoint(location)


def test_a_checkpoint_is_distinguished_from_a_savepoint_by_its_name(owned: CheckpointStorage) -> None:
    url = owned.url
    assert [
        owned.is_savepoint(name) for name in ("savepoints/savepoint-1-x", f"{url}/savepoints/y", "/backup/z", "s3://b/z")
    ] == [True] * 4
    assert [owned.is_savepoint(name) for name in ("checkpoints/chk-1-1", f"{url}/checkpoints/chk-1-1/_metadata", "nonsense")] == [
        False
    ] * 3
    assert not owned.is_savepoint("s3://elsewhere/flights/checkpoints/chk-1-1")
    with pytest.raises(InvalidKey, match="to restore elsewhere, take a savepoint"):
        owned.read_metadata("s3://elsewhere/flights/checkpoints/chk-1-1")


# -- damage


def _damage(storage: CheckpointStorage, directory: SavepointDirectory, how: str) -> None:
    key = f"flights/{directory.location}/state/{_sha256(b'bb')}"
    match how:
        case "missing":
            storage.store.delete([key])
        case "flipped":
            storage.store.put(key, b"bB")
        case "truncated":
            storage.store.put(key, b"b")
        case "longer":
            storage.store.put(key, b"bbb")


@pytest.mark.parametrize(
    ("how", "found", "error"),
    [
        ("missing", "no object", MissingStateFile),
        ("flipped", f"2 bytes with sha256 {_sha256(b'bB')}", CorruptStateFile),
        ("truncated", "1 bytes with sha256", CorruptStateFile),
        ("longer", "3 bytes with sha256", CorruptStateFile),
    ],
)
def test_damage_is_found_and_named(
    owned: CheckpointStorage, source: Path, tmp_path: Path, how: str, found: str, error: type[Exception]
) -> None:
    directory = _complete(owned, source)
    _damage(owned, directory, how)
    files = {_sha256(b"a"): 1, _sha256(b"bb"): 2}
    (problem,) = owned.open_savepoint(directory.location).verify(files)
    assert (problem.sha256, problem.where) == (_sha256(b"bb"), f"{directory.url}/state/{_sha256(b'bb')}")
    assert problem.expected.startswith("2 bytes") and problem.found.startswith(found)
    with pytest.raises(error, match=f"savepoint {directory.url}: state file restored/b.*{found}.*copy of the savepoint"):
        directory.fetch_state([StateFile("restored/b", _sha256(b"bb"), 2)], tmp_path / "there")
    assert not (tmp_path / "there" / "restored" / "b").exists()
    with pytest.raises(error if how != "flipped" else AlreadyExists):
        directory.write_metadata(b"other", files)


# -- deletion


def test_a_savepoint_is_deleted_whole_and_nothing_else(owned: CheckpointStorage, source: Path) -> None:
    kept = _complete(owned, source, 6)
    gone = _complete(owned, source, 7)
    for notes in ("notes.txt", "state/notes.txt"):
        owned.store.put(f"flights/{gone.location}/{notes}", b"somebody else's")
    owned.open_savepoint(gone.location).delete()
    owned.savepoint_directory(7, "x").delete()  # no savepoint
    gone.delete()
    assert _keys(owned, f"flights/{gone.location}/") == {"notes.txt", "state/notes.txt"}
    assert [one.location for one in owned.list_savepoints()] == [kept.location]
    assert kept.verify({_sha256(b"a"): 1, _sha256(b"bb"): 2}) == []


def test_an_aborted_savepoint_leaves_nothing_even_of_uploads_under_way(
    owned: CheckpointStorage, source: Path, faulty: Any
) -> None:
    directory = owned.savepoint_directory(1, "x")
    paths = _write(source, {"a": b"a", "b": b"b"})
    directory.upload_files({"a": paths["a"]})
    put = faulty.inner.put

    def aborted_meanwhile(*given: Any) -> str:
        etag = str(put(*given))
        if "/state/" in given[0]:
            faulty.inner.put = put
            directory.delete()
            put(*given)  # as if it had been written only now
        return etag

    faulty.inner.put = aborted_meanwhile
    with pytest.raises(CheckpointDiscarded, match=directory.url):
        directory.upload_files({"b": paths["b"]})
    with pytest.raises(CheckpointDiscarded):
        directory.upload_files(paths)
    assert _keys(owned, "flights/savepoints/") == set()


@pytest.mark.parametrize("by", ["its writer", "another"])
def test_an_interrupted_deletion_is_no_savepoint_and_is_swept(
    owned: CheckpointStorage, second: CheckpointStorage, source: Path, bob: Owner, faulty: Any, by: str
) -> None:
    directory = _complete(owned, source)
    delete, calls = faulty.inner.delete, []

    def once(keys: Any) -> None:
        calls.append(keys)
        if len(calls) == 2:
            raise StorageUnavailable("injected")
        delete(keys)

    faulty.inner.delete = once
    with pytest.raises(StorageUnavailable):
        (directory if by == "its writer" else owned.open_savepoint(directory.location)).delete()
    faulty.inner.delete = delete
    assert owned.list_savepoints() == [] and _keys(owned, "flights/savepoints/") != set()
    owned.ownership.release()  # type: ignore[union-attr]
    second.acquire(bob, LEASE)
    second.sweep(files=False)
    assert _keys(owned, "flights/savepoints/") == set()


def test_a_file_that_arrives_during_a_sweep_is_deleted_by_the_next_one(
    owned: CheckpointStorage, second: CheckpointStorage, source: Path, bob: Owner
) -> None:
    begun = owned.savepoint_directory(8, "begun")
    begun.upload_files(_write(source, {"a": b"a"}))
    second.acquire(bob, LEASE)
    late = f"flights/{begun.location}/state/{_sha256(b'b')}"  # of the earlier owner, which was suspended
    kind: Any = type(second.store)
    delete = kind.delete

    def and_then_one_arrives(store: Any, keys: Any) -> None:
        keys = list(keys)
        delete(store, keys)
        if any("/state/" in key for key in keys) and not arrived:
            arrived.append(late)
            store.put(late, b"b")

    arrived: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kind, "delete", and_then_one_arrives)
        second.sweep(files=False)
    assert {key.rpartition("/")[2] for key in _keys(owned, "flights/savepoints/")} == {"_incomplete", _sha256(b"b")}
    second.sweep(files=False)
    assert _keys(owned, "flights/savepoints/") == set()


def test_a_claimed_savepoint_is_deleted_like_a_checkpoint(
    owned: CheckpointStorage, second: CheckpointStorage, source: Path, tmp_path: Path
) -> None:
    owner = owned.ownership
    assert owner is not None
    for directory in (_complete(owned, source), _complete(owned, source, target=_somewhere(owned, tmp_path))):
        pointer = CheckpointPointer(
            checkpoint_id=7, location=directory.location, kind="savepoint", epoch=1, job_id=1, completed_at=NOW, claimed=True
        )
        owned.register(directory.location, [_sha256(b"a")])  # it names no file in shared/
        owner.begin_job(resume=False, restored=pointer)
        assert [one.location for one in second.list_checkpoints()] == [directory.location]
        assert owned.delete_checkpoint(directory.location) == 0
        with pytest.raises(MissingSavepoint):
            owned.open_savepoint(directory.location)
        owner.renew()
        assert second.list_checkpoints() == []
        state = second.read_state()
        assert state is not None and state.newest is None


# -- files that killed runs leave behind


def test_only_incomplete_savepoints_of_a_killed_run_are_swept(
    owned: CheckpointStorage, second: CheckpointStorage, source: Path, bob: Owner
) -> None:
    complete = _complete(owned, source)
    files = _write(source, {"a": b"a"})
    begun = owned.savepoint_directory(8, "begun")
    begun.upload_files(files)
    store = owned.store
    copied = "flights/savepoints/savepoint-9-copied"  # a user's incomplete copy: its metadata is missing
    store.put(f"{copied}/state/{_sha256(b'a')}", b"a")
    store.put("flights/savepoints/notes.txt", b"")
    store.put("flights/savepoints/odd/_incomplete", b"?")
    other = "flights/savepoints/savepoint-10-other"  # an incomplete copy of another pipeline's savepoint
    store.put(f"{other}/_incomplete", store.get(f"flights/{begun.location}/_incomplete").replace(b"flights", b"trains"))
    before = _keys(owned, "flights/savepoints/")
    owned.sweep(files=False)
    assert _keys(owned, "flights/savepoints/") == before  # they are this owner's
    owner = second.acquire(bob, LEASE)
    own = second.savepoint_directory(11, "own")
    own.upload_files(files)
    now = _keys(owned, "flights/savepoints/")
    second.sweep(files=False)
    gone = {key for key in now if key.startswith(begun.location.removeprefix("savepoints/"))}
    assert len(gone) == 2 and _keys(owned, "flights/savepoints/") == now - gone and before < now
    assert complete.verify({_sha256(b"a"): 1}) == [] and owner.epoch == 2
    second.sweep(files=False)
    assert _keys(owned, "flights/savepoints/") == now - gone


def test_a_process_without_ownership_sweeps_nothing(
    owned: CheckpointStorage, second: CheckpointStorage, clock: Any, source: Path
) -> None:
    with pytest.raises(OwnershipLost, match="acquire"):
        second.sweep(files=False)
    owned.write_metadata(1, 0, b"")
    clock.now += LEASE
    with pytest.raises(OwnershipLost):
        owned.sweep(files=False)
    owned.store.put("flights/savepoints/savepoint-1-x/_incomplete", b'{"pipeline": "flights", "epoch": 0}')
    with pytest.raises(OwnershipLost):
        owned.sweep(files=False)
    assert len(_keys(owned, "flights/savepoints/")) == 1 and len(_metadata(owned)) == 1


def test_files_that_an_owner_stores_after_a_sweep_are_deleted_by_the_next_one(
    owned: CheckpointStorage, second: CheckpointStorage, source: Path, bob: Owner
) -> None:
    directory = owned.savepoint_directory(1, "x")
    directory.upload_files(_write(source, {"a": b"a"}))
    second.acquire(bob, LEASE)
    second.sweep(files=False)
    assert _keys(second, "flights/savepoints/") == set()
    directory.upload_files(_write(source, {"b": b"b"}))  # the old owner has not found out yet
    assert _keys(second, "flights/savepoints/") != set()
    second.sweep(files=False)
    assert _keys(second, "flights/savepoints/") == set()


@pytest.mark.parametrize("pause", ["before listing", "before writing", "after writing"])
def test_an_owner_that_was_swept_does_not_complete_its_savepoint(
    owned: CheckpointStorage, second: CheckpointStorage, source: Path, bob: Owner, clock: Any, faulty: Any, pause: str
) -> None:
    """The owner pauses between two steps, while another owner takes over and sweeps."""
    directory = owned.savepoint_directory(1, "x")
    stored = directory.upload_files(_write(source, {"a": b"a"}))
    inner, started = faulty.inner, clock.now
    list_, put, swept = inner.list, inner.put, list[bool]()

    def take_over() -> None:
        inner.list, inner.put = list_, put
        second.acquire(bob, LEASE)
        second.sweep(files=False)
        swept.append(not _keys(second, "flights/savepoints/"))
        clock.now = started  # the old owner's clock stopped

    def pausing_list(*given: Any) -> Any:
        take_over()
        return list_(*given)

    def pausing_put(*given: Any) -> Any:
        if pause == "after writing":
            put(*given)
        take_over()
        return "etag" if pause == "after writing" else put(*given)

    if pause == "before listing":
        inner.list = pausing_list
    else:
        inner.put = pausing_put
    with pytest.raises((OwnershipLost, MissingStateFile)):
        directory.write_metadata(b"", _sizes(stored))
    assert swept == [pause != "after writing"]
    directory.delete()
    assert second.list_savepoints() == [] and _keys(second, "flights/savepoints/") == set()


def test_metadata_that_was_never_completed_is_swept(
    owned: CheckpointStorage, second: CheckpointStorage, source: Path, bob: Owner
) -> None:
    owner = owned.ownership
    assert owner is not None
    for number in (1, 2, 3):
        owned.upload_files(number, _write(source, {"f": b"%d" % number}))
        owned.write_metadata(number, 1, b"%d" % number)
    for number in (1, 2):
        owner.complete(number, f"checkpoints/chk-{number}-1")
    owned.sweep(files=False)
    assert len(_metadata(owned)) == 3  # of this owner, which may be completing the last one
    owner.release("FAILED")
    second.acquire(bob, LEASE)
    second.write_metadata(3, 2, b"own")
    second.register("checkpoints/chk-1-1", [f"{_sha256(b'1')}-1"])
    second.sweep(files=False)  # the other retained one may be unreadable, but it is retained
    assert _metadata(second) == {"chk-3-2/_metadata", "chk-2-1/_metadata", "chk-1-1/_metadata"}
    assert len(_shared(second)) == 3
    second.register("checkpoints/chk-2-1", [f"{_sha256(b'2')}-1"])
    second.sweep(files=True)
    assert _shared(second) == {f"{_sha256(b'1')}-1", f"{_sha256(b'2')}-1"}


def test_metadata_of_the_restored_savepoint_is_not_swept(owned: CheckpointStorage, second: CheckpointStorage, bob: Owner) -> None:
    owned.write_metadata(1, 1, b"named by restore_from, though no longer retained")
    second.acquire(bob, LEASE)
    second.register("checkpoints/chk-1-1", [])
    second.sweep(files=False)
    assert _metadata(second) == {"chk-1-1/_metadata"}


# -- random histories


_SAVEPOINT_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["checkpoint", "savepoint", "abort", "discard", "delete", "sweep"]),
        st.sets(st.integers(0, 5), min_size=1),
        st.sampled_from(["fine", "unavailable", "lost answer"]),
    ),
    max_size=14,
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_SAVEPOINT_STEPS)
def test_savepoints_and_checkpoints_never_harm_each_other(
    store: Any, alice: Owner, tmp_path: Path, steps: list[tuple[str, set[int], str]]
) -> None:
    """Complete savepoints stay whole, shared/ holds exactly the files that pending checkpoints name, and no other files stay."""
    store.delete([info.key for info in store.list("flights/")])

    class Flaky:
        fault = "fine"

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def copy_from(self, source: Any, *rest: Any) -> bool:
            self._fail()
            return bool(store.copy_from(store, *rest))

        def put(self, *given: Any) -> str:
            self._fail()
            return str(store.put(*given))

        def _fail(self) -> None:
            fault, self.fault = self.fault, "fine"
            if fault != "fine":
                raise StorageUnavailable("injected") if fault == "unavailable" else OutcomeUnknown("injected")

    flaky = Flaky()
    storage = CheckpointStorage(flaky, "flights")
    storage.acquire(alice, 600.0)
    (tmp_path / "files").mkdir(exist_ok=True)
    paths = _write(tmp_path / "files", {f"f{n}": b"%d" % n for n in range(6)})
    pending: dict[int, set[str]] = {}
    complete: list[tuple[SavepointDirectory, dict[str, int]]] = []
    for number, (action, chosen, fault) in enumerate(steps, start=1):
        wanted = {f"f{n}": paths[f"f{n}"] for n in chosen}
        flaky.fault = fault if action in ("checkpoint", "savepoint") else "fine"
        if action == "checkpoint":
            try:
                pending[number] = set(_sizes(storage.upload_files(number, wanted)))
            except StorageError:
                storage.discard_states(number)
        elif action in ("savepoint", "abort"):
            directory = storage.savepoint_directory(number, "x")
            try:
                files = _sizes(directory.upload_files(wanted))
                if action == "abort":
                    raise StorageUnavailable("given up")
                directory.write_metadata(b"", files)
                complete.append((directory, files))
            except StorageError:
                directory.delete()
        elif action == "discard" and pending:
            storage.discard_states(min(pending))
            del pending[min(pending)]
        elif action == "delete" and complete:
            complete.pop(0)[0].delete()
        elif action == "sweep":
            storage.sweep(files=True)
        flaky.fault = "fine"
        assert _shared(storage) == {f"{sha256}-1" for named in pending.values() for sha256 in named}
        assert {one.location for one in storage.list_savepoints()} == {directory.location for directory, _ in complete}
        for directory, files in complete:
            assert directory.verify(files) == []
    expected = {f"{d.location.removeprefix('savepoints/')}/{name}" for d, files in complete for name in _contents(files)}
    assert _keys(storage, "flights/savepoints/") == expected
    storage.close()


def _contents(files: Mapping[str, int]) -> list[str]:
    return ["_metadata", *(f"state/{sha256}" for sha256 in files)]
