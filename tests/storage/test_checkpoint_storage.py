"""State files and metadata: incremental, verified, deleted only when no checkpoint names them."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dagster_checkpoints.errors import (
    AlreadyExists,
    CheckpointDiscarded,
    CorruptStateFile,
    InvalidKey,
    MissingCheckpoint,
    MissingStateFile,
    OwnershipLost,
    StateFileChanged,
    StorageUnavailable,
)
from dagster_checkpoints.execution.pipeline_state import Owner
from dagster_checkpoints.state.metadata import StateFile
from dagster_checkpoints.storage import CheckpointStorage
from dagster_checkpoints.storage import state_files as state_files_module
from dagster_checkpoints.storage.state_files import StoredFile

LEASE = 30.0
T = TypeVar("T")


@pytest.fixture
def owned(storage: CheckpointStorage, alice: Owner) -> CheckpointStorage:
    storage.acquire(alice, LEASE)
    return storage


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


def _write(directory: Path, **contents: bytes) -> dict[str, Path]:
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return {name: directory / name for name in contents}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _names(*contents: bytes, epoch: int = 1) -> set[str]:
    """The names of files with these contents, stored by the owner of that epoch."""
    return {f"{_sha256(content)}-{epoch}" for content in contents}


def _shared(storage: CheckpointStorage) -> set[str]:
    return {info.key.rpartition("/")[2] for info in storage.store.list("flights/shared/")}


def _metadata(storage: CheckpointStorage) -> set[str]:
    return {info.key.removeprefix("flights/checkpoints/") for info in storage.store.list("flights/checkpoints/")}


def _files(stored: dict[str, StoredFile]) -> list[StateFile]:
    return [StateFile(f"restored/{name}", one.sha256, one.size, one.stored_by) for name, one in stored.items()]


def _complete(storage: CheckpointStorage, number: int, paths: dict[str, Path]) -> tuple[str, list[StateFile]]:
    """A completed checkpoint: its location and files."""
    owner = storage.ownership
    assert owner is not None
    files = _files(storage.upload_files(number, paths))
    location = storage.write_metadata(number, owner.epoch, b"")
    owner.complete(number, location)
    return location, files


def test_files_are_stored_and_restored(owned: CheckpointStorage, source: Path, tmp_path: Path) -> None:
    paths = _write(source, a=b"aaa", empty=b"", same=b"aaa", big=os.urandom(9 * 1024 * 1024))
    stored = owned.upload_files(1, paths)
    assert list(stored) == list(paths)
    assert stored["a"] == StoredFile(_sha256(b"aaa"), 3, stored["a"].uploaded, stored_by=1)
    assert _shared(owned) == _names(*(path.read_bytes() for path in paths.values())) == {file.name for file in _files(stored)}
    owned.fetch_state(_files(stored), tmp_path / "there")
    for name, path in paths.items():
        assert (tmp_path / "there" / "restored" / name).read_bytes() == path.read_bytes()
    assert len(list((tmp_path / "there" / "restored").iterdir())) == 4


def test_only_new_files_are_uploaded(owned: CheckpointStorage, source: Path, faulty: Any) -> None:
    owned.upload_files(1, _write(source, a=b"a", b=b"b"))
    before = faulty.puts
    stored = owned.upload_files(2, _write(source, a=b"a", b=b"b", c=b"c"))
    assert faulty.puts == before + 1
    assert {name: one.uploaded for name, one in stored.items()} == {"a": False, "b": False, "c": True}


def test_files_that_are_known_are_named_without_another_thread_and_stay_with_the_newer_checkpoint(
    owned: CheckpointStorage, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = _write(source, a=b"a", b=b"b")
    first = owned.upload_files(1, paths)
    monkeypatch.setattr("dagster_checkpoints.storage.checkpoints.run_all", lambda executor, function, items: [*items])
    again = owned.upload_files(2, paths)
    assert {name: (one.sha256, one.size, one.stored_by) for name, one in again.items()} == {
        name: (one.sha256, one.size, one.stored_by) for name, one in first.items()
    }
    assert owned.discard_states(1) == 0, "the second checkpoint names them"
    assert owned.discard_states(2) == 2


def test_a_verified_file_that_retained_metadata_names_is_not_uploaded_again(
    owned: CheckpointStorage, second: CheckpointStorage, source: Path, bob: Owner
) -> None:
    location, [file] = _complete(owned, 1, _write(source, a=b"a"))
    second.acquire(bob, LEASE)
    second.register(location, [file.name])
    # That metadata names a file does not prove that the file is whole: only a verified file is not uploaded again.
    unverified = second.upload_files(3, _write(source, a=b"a"))
    assert [one.uploaded for one in unverified.values()] == [True]
    assert second.discard_states(3) == 1
    second.known(location, [file.name])
    again = second.upload_files(2, _write(source, a=b"a", b=b"b"))
    assert {name: (one.uploaded, one.stored_by) for name, one in again.items()} == {"a": (False, 1), "b": (True, 2)}
    assert _shared(second) == _names(b"a") | _names(b"b", epoch=2)


def test_files_that_were_hashed_are_not_read_again(
    owned: CheckpointStorage, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned.upload_files(1, _write(source, a=b"a"))
    (source / "link").hardlink_to(source / "a")
    read: list[Path] = []
    original = state_files_module._hash

    def counting(path: Path, stat: os.stat_result) -> Any:
        read.append(path)
        return original(path, stat)

    monkeypatch.setattr(state_files_module, "_hash", counting)
    stored = owned.upload_files(2, {"link": source / "link", "b": _write(source, b=b"b")["b"]})
    assert read == [source / "b"]
    assert stored["link"].sha256 == _sha256(b"a")


def test_a_failed_upload_can_be_tried_again(owned: CheckpointStorage, source: Path, faulty: Any) -> None:
    paths = _write(source, **{f"f{n}": b"%d" % n for n in range(20)})
    faulty.faults = ["fine"] * 5 + ["unavailable"]
    with pytest.raises(StorageUnavailable):
        owned.upload_files(1, paths)
    owned.upload_files(1, paths)
    assert _shared(owned) == _names(*(b"%d" % n for n in range(20)))


def test_a_file_that_changes_while_it_is_uploaded_is_refused(owned: CheckpointStorage, source: Path, faulty: Any) -> None:
    big = _write(source, big=os.urandom(9 * 1024 * 1024))
    put_file = faulty.inner.put_file

    def meddle(key: str, path: Path) -> None:
        with path.open("ab") as file:
            file.write(b"more")
        put_file(key, path)

    faulty.inner.put_file = meddle
    with pytest.raises(StateFileChanged, match=str(big["big"])):
        owned.upload_files(1, big)
    assert _shared(owned) == set()


def test_a_local_file_that_vanished_is_named(owned: CheckpointStorage, source: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        owned.upload_files(1, {"gone": source / "gone"})


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda data: data[:-1], "found 2999 bytes"),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "found 3000 bytes with sha256"),
    ],
)
def test_a_corrupt_file_is_refused_and_named(
    owned: CheckpointStorage, source: Path, tmp_path: Path, damage: Any, found: str
) -> None:
    stored = owned.upload_files(1, _write(source, fine=b"fine", bad=os.urandom(3000)))
    bad = _files(stored)[1].name
    owned.store.put(f"flights/shared/{bad}", damage(owned.store.get(f"flights/shared/{bad}")))
    with pytest.raises(CorruptStateFile) as caught:
        owned.fetch_state(_files(stored), tmp_path / "there", checkpoint="checkpoints/chk-1-1")
    for part in (
        "chk-1-1",
        "restored/bad",
        f"{owned.store.url}/flights/shared/{bad}",
        "3000 bytes",
        found,
        "older",
    ):
        assert part in str(caught.value)
    assert [p.name for p in (tmp_path / "there" / "restored").iterdir()] in ([], ["fine"])


def test_a_missing_file_is_refused_and_named(owned: CheckpointStorage, source: Path, tmp_path: Path) -> None:
    stored = owned.upload_files(1, _write(source, lost=b"lost"))
    owned.store.delete([f"flights/shared/{_files(stored)[0].name}"])
    with pytest.raises(MissingStateFile, match=r"chk-1-1.*restored/lost.*4 bytes.*no object"):
        owned.fetch_state(_files(stored), tmp_path / "there", checkpoint="checkpoints/chk-1-1")


@pytest.mark.parametrize("path", ["../escaped", "/etc/escaped", "a/../../escaped", ""])
def test_a_file_cannot_be_restored_outside_its_directory(
    owned: CheckpointStorage, source: Path, tmp_path: Path, path: str
) -> None:
    stored = owned.upload_files(1, _write(source, a=b"a"))["a"]
    with pytest.raises(InvalidKey):
        owned.fetch_state([StateFile(path, stored.sha256, stored.size, stored.stored_by)], tmp_path / "there")
    assert not (tmp_path / "escaped").exists()


def test_metadata_is_created_once(owned: CheckpointStorage) -> None:
    location = owned.write_metadata(42, 1, b"metadata")
    assert location == "checkpoints/chk-42-1"
    assert owned.write_metadata(42, 1, b"metadata") == location  # a repetition after a lost answer
    with pytest.raises(AlreadyExists, match="never changes"):
        owned.write_metadata(42, 1, b"different")
    assert owned.store.get("flights/checkpoints/chk-42-1/_metadata") == b"metadata"


def test_metadata_is_read_by_location_or_url(owned: CheckpointStorage) -> None:
    location = owned.write_metadata(42, 1, b"metadata")
    url = owned.url_of(location)
    for name in (location, f"{location}/", url, f"{url}/", f"{url}/_metadata"):
        assert owned.read_metadata(name) == b"metadata"
    with pytest.raises(MissingCheckpoint, match=r"chk-41-1/_metadata.*checkpoints/chk-42-1"):
        owned.read_metadata("checkpoints/chk-41-1")
    with pytest.raises(InvalidKey, match="expected a checkpoint below"):
        owned.read_metadata("s3://elsewhere/flights/checkpoints/chk-1-1")
    with pytest.raises(InvalidKey):
        owned.read_metadata("../other/checkpoints/chk-1-1")


def test_a_checkpoint_with_written_metadata_is_not_completed(owned: CheckpointStorage) -> None:
    owner = owned.ownership
    assert owner is not None
    with pytest.raises(MissingCheckpoint, match=r"There is no checkpoint: start without restoring"):
        owned.read_metadata("checkpoints/chk-8-1")
    for number in (9, 10):
        owned.write_metadata(number, 1, b"")
    owner.complete(9, "checkpoints/chk-9-1")
    assert [found.checkpoint_id for found in owned.list_checkpoints()] == [9]
    with pytest.raises(MissingCheckpoint, match=r"Checkpoints there: checkpoints/chk-10-1, checkpoints/chk-9-1\."):
        owned.read_metadata("checkpoints/chk-8-1")


def test_deleting_a_checkpoint_keeps_files_that_another_names(
    owned: CheckpointStorage, second: CheckpointStorage, source: Path
) -> None:
    owner = owned.ownership
    assert owner is not None
    for number, contents in ((1, {"a": b"a", "b": b"b"}), (2, {"b": b"b", "c": b"c"})):
        owned.upload_files(number, _write(source, **contents))
        owner.complete(number, owned.write_metadata(number, 1, b""))
    assert owned.delete_checkpoint("checkpoints/chk-1-1") == 1
    assert _shared(owned) == _names(b"b", b"c")
    assert _metadata(owned) == {"chk-2-1/_metadata"}
    assert [found.checkpoint_id for found in owned.list_checkpoints()] == [2]
    owner.renew()
    assert [found.checkpoint_id for found in second.list_checkpoints()] == [2]


def test_an_aborted_checkpoint_leaves_no_files_that_only_it_names(owned: CheckpointStorage, source: Path) -> None:
    owned.upload_files(1, _write(source, a=b"a"))
    owned.upload_files(2, _write(source, a=b"a", b=b"b"))
    assert owned.discard_states(2) == 1
    assert owned.discard_states(2) == 0
    assert _shared(owned) == _names(b"a")
    assert owned.upload_files(3, _write(source, b=b"b"))["b"].uploaded
    assert _shared(owned) == _names(b"a", b"b")


def test_metadata_of_an_aborted_checkpoint_is_deleted_and_that_of_others_stays(owned: CheckpointStorage, source: Path) -> None:
    _complete(owned, 1, _write(source, a=b"a"))
    owned.upload_files(2, _write(source, b=b"b"))
    owned.write_metadata(2, 1, b"")  # and storage does not answer when it is to be completed
    for _ in range(2):
        owned.discard_metadata(2)
        assert _metadata(owned) == {"chk-1-1/_metadata"}


def test_files_of_a_dead_owner_are_swept(owned: CheckpointStorage, second: CheckpointStorage, source: Path, bob: Owner) -> None:
    [kept] = _files(owned.upload_files(1, _write(source, kept=b"kept")))
    owned.upload_files(2, _write(source, orphan=b"orphan"))
    owned.store.put(f"flights/shared/{_sha256(b'older')}", b"older")  # by a release without epochs in names
    second.acquire(bob, LEASE)
    second.upload_files(3, _write(source, pending=b"pending", orphan=b"orphan"))
    second.register("checkpoints/chk-1-1", {kept.name})
    second.sweep(files=True)
    assert _shared(second) == _names(b"kept") | _names(b"pending", b"orphan", epoch=2)


def test_files_of_other_programs_stay(owned: CheckpointStorage) -> None:
    theirs = {"readme.txt", f"copies/{'0' * 64}", f"{'0' * 64}-x", f"{'0' * 64}-0"}
    for name in theirs:
        owned.store.put(f"flights/shared/{name}", b"somebody else's")
    owned.store.put("flights/shared/" + "0" * 64, b"orphan")
    owned.sweep(files=True)
    assert {info.key.removeprefix("flights/shared/") for info in owned.store.list("flights/shared/")} == theirs


def test_an_owner_that_lost_the_pipeline_deletes_nothing(owned: CheckpointStorage, source: Path, clock: Any) -> None:
    owned.upload_files(1, _write(source, a=b"a"))
    owned.write_metadata(1, 1, b"")
    clock.now += LEASE
    actions: tuple[Callable[[], object], ...] = (
        lambda: owned.discard_states(1),
        lambda: owned.delete_checkpoint("checkpoints/chk-1-1"),
        lambda: owned.sweep(files=True),
    )
    for action in actions:
        with pytest.raises(OwnershipLost):
            action()
    owned.store.put("flights/shared/" + "0" * 64, b"orphan")
    with pytest.raises(OwnershipLost):
        owned.sweep(files=True)
    assert len(_shared(owned)) == 2 and len(_metadata(owned)) == 1


def _answered(call: Callable[[], T]) -> T:
    """The result of a call, which is repeated if the server is too busy to answer in time."""
    for _ in range(9):
        with suppress(StorageUnavailable):
            return call()
    return call()


@pytest.mark.parametrize("seed", range(3))
def test_uploads_and_deletions_at_the_same_time_lose_nothing_that_is_named(
    owned: CheckpointStorage, source: Path, seed: int
) -> None:
    """Tasks upload overlapping files for several checkpoints while older ones are discarded."""
    print(f"seed {seed}")
    paths = list(_write(source, **{f"f{n}": b"%d" % n for n in range(6)}).values())
    errors: list[BaseException] = []

    def task(number: int) -> None:
        chance = random.Random(f"{seed}-{number}")
        try:
            for turn in range(12):
                checkpoint_id = number * 100 + turn
                chosen = chance.sample(paths, 3)
                stored = _answered(lambda id=checkpoint_id, some=chosen: owned.upload_files(id, some))
                missing = {file.name for file in _files(stored)} - _answered(lambda: _shared(owned))
                assert not missing
                if chance.random() < 0.9:
                    _answered(lambda id=checkpoint_id: owned.discard_states(id))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=task, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert _shared(owned) == owned.shared_state.referenced()


def test_a_checkpoint_aborted_during_its_upload_leaves_no_false_memory(
    owned: CheckpointStorage, source: Path, faulty: Any
) -> None:
    """The file was stored and deleted before its uploader got the answer: the next checkpoint uploads it again."""
    put = faulty.inner.put

    def aborted_meanwhile(*arguments: Any) -> str:
        etag = str(put(*arguments))
        faulty.inner.put = put
        assert owned.discard_states(1) == 1
        return etag

    faulty.inner.put = aborted_meanwhile
    paths = _write(source, a=b"a")
    owned.upload_files(1, paths)
    with pytest.raises(CheckpointDiscarded, match="checkpoint_id=1"):
        owned.upload_files(1, paths)
    assert owned.upload_files(2, paths)["a"].uploaded
    assert _shared(owned) == _names(b"a")


@pytest.mark.parametrize("faults", [["lost answer"], ["lost request", "lost answer"]])
def test_metadata_whose_answer_is_lost_is_recognised(owned: CheckpointStorage, faulty: Any, faults: list[str]) -> None:
    faulty.faults = list(faults)
    assert owned.write_metadata(1, 1, b"metadata") == "checkpoints/chk-1-1"
    assert owned.read_metadata("checkpoints/chk-1-1") == b"metadata"


def test_a_finished_job_leaves_no_checkpoint_and_no_pointer_to_one(
    owned: CheckpointStorage, second: CheckpointStorage, source: Path
) -> None:
    owner = owned.ownership
    assert owner is not None
    owner.begin_job(resume=False)
    for number in (1, 2):
        owned.upload_files(number, _write(source, a=b"%d" % number))
        owner.complete(number, owned.write_metadata(number, 1, b""))
    dropped = owner.end_job("FINISHED", keep_checkpoints=False)
    assert [pointer.checkpoint_id for pointer in dropped] == [2, 1]
    state = second.read_state()  # the state after a crash at this moment
    assert state is not None and state.lease is not None
    assert (state.newest, state.retained, state.job.status) == (None, (), "FINISHED")
    for pointer in dropped:
        owned.delete_checkpoint(pointer.location)
    owner.release()
    state = second.read_state()
    assert state is not None and state.lease is None and state.job.status == "FINISHED"
    assert [info.key for info in owned.store.list()] == ["flights/state.json"]


def test_the_newest_checkpoint_is_unlisted_before_it_is_deleted(
    owned: CheckpointStorage, second: CheckpointStorage, faulty: Any
) -> None:
    owner = owned.ownership
    assert owner is not None
    owner.complete(1, owned.write_metadata(1, 1, b""))
    faulty.faults = ["unavailable"]
    with pytest.raises(StorageUnavailable):
        owned.delete_checkpoint("checkpoints/chk-1-1")
    assert owned.read_metadata("checkpoints/chk-1-1") == b""
    owned.delete_checkpoint("checkpoints/chk-1-1")
    state = second.read_state()
    assert state is not None and state.newest is None and state.highest_checkpoint_id == 1


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "ü"])
def test_a_pipeline_name_that_cannot_be_a_directory_is_refused(store: Any, name: str) -> None:
    with pytest.raises(InvalidKey, match="pipeline name"):
        CheckpointStorage(store, name)


def test_pipelines_can_share_a_root(store: Any, alice: Owner, source: Path) -> None:
    storages = [CheckpointStorage(store, name) for name in ("flights", "flights2")]
    for opened in storages:
        owner = opened.acquire(alice, LEASE)
        opened.upload_files(1, _write(source, a=b"a"))
        owner.complete(1, opened.write_metadata(1, owner.epoch, opened.pipeline.encode()))
        opened.store.put(f"{opened.pipeline}/shared/{'0' * 64}", b"orphan")
    storages[0].sweep(files=True)
    assert storages[0].read_metadata("checkpoints/chk-1-1") == b"flights"
    assert [len(list(store.list(f"{opened.pipeline}/shared/"))) for opened in storages] == [1, 2]
