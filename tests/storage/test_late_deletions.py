"""Successive owners of a pipeline: a late deletion by an earlier owner never hits a file that a later owner needs."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.execution.pipeline_state import Owner
from dagster_checkpoints.files.local import LocalStore
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    QuerySnapshot,
    StageMetadata,
    StateFile,
    TaskSnapshot,
)
from dagster_checkpoints.state.metadata_file import decode, encode
from dagster_checkpoints.storage import CheckpointStorage

LEASE = 30.0


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _shared(storage: CheckpointStorage) -> set[str]:
    return {info.key.removeprefix("flights/shared/") for info in storage.store.list("flights/shared/")}


class Run:
    """A run's use of storage: files are letters, their content is their name."""

    def __init__(self, storage: CheckpointStorage, folder: Path, owner: Owner) -> None:
        self.storage = storage
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.owner = storage.acquire(owner, LEASE)
        if self.owner.previous.records_nothing:
            self.owner.begin_job(resume=False)
        self.uploaded = ""

    def upload(self, number: int, letters: str) -> list[StateFile]:
        paths = {letter: self.folder / letter for letter in letters}
        for letter, path in paths.items():
            if not path.exists():
                path.write_text(letter)
        stored = self.storage.upload_files(number, paths)
        self.uploaded += "".join(letter for letter, one in stored.items() if one.uploaded)
        return [StateFile(letter, one.sha256, one.size, one.stored_by) for letter, one in stored.items()]

    def complete(self, number: int, letters: str) -> str:
        location = self.write(number, self.upload(number, letters))
        self.owner.complete(number, location)
        return location

    def write(self, number: int, files: Iterable[StateFile]) -> str:
        task = TaskSnapshot(query=QuerySnapshot(0, tuple(files)))
        metadata = CheckpointMetadata(
            "flights", number, (StageMetadata("live", 1, ("0",)),), (ChainMetadata("live", ("live",), {0: task}),)
        )
        return self.storage.write_metadata(number, self.owner.epoch, encode(metadata))

    def restore(self, location: str) -> str:
        """Register the retained checkpoints, fetch a checkpoint's files and record them as known. Returns their letters."""
        for retained in {location, *(pointer.location for pointer in self.owner.retained)}:
            self.storage.register(retained, self.read(retained).files())
        letters = self.fetch(location)
        self.storage.known(location, self.read(location).files())
        return letters

    def read(self, location: str) -> CheckpointMetadata:
        return decode(self.storage.read_metadata(location), location)

    def files(self, location: str) -> list[StateFile]:
        query = self.read(location).chains[0].tasks[0].query
        assert query is not None
        return list(query.files)

    def fetch(self, location: str) -> str:
        """Verifies size and sha256 of every file."""
        files = self.files(location)
        self.storage.fetch_state(files, self.folder / "fetched", checkpoint=location)
        return "".join(sorted(file.path for file in files))

    def names(self, location: str) -> dict[str, int]:
        """The epoch in each file's name."""
        return {file.path: file.stored_by for file in self.files(location)}


def _pause_before_deleting_state(faulty: Any, meanwhile: Callable[[], None]) -> None:
    """Delay the next request to delete from ``shared/`` until ``meanwhile`` has run."""
    inner = faulty.inner
    delete = inner.delete

    def late(keys: Iterable[str]) -> None:
        keys = list(keys)
        if any("/shared/" in key for key in keys):
            inner.delete = delete
            meanwhile()
        delete(keys)

    inner.delete = late


@pytest.mark.parametrize("deletes", ["aborted", "subsumed", "swept", "lent"])
def test_a_deletion_that_arrives_after_a_takeover_deletes_no_file_of_the_new_owner(
    storage: CheckpointStorage, second: CheckpointStorage, tmp_path: Path, alice: Owner, bob: Owner, faulty: Any, deletes: str
) -> None:
    first = Run(storage, tmp_path / "a", alice)
    old = first.complete(1, "ax") if deletes == "subsumed" else ""
    first.upload(2, "x" if deletes in ("aborted", "lent") else "")
    first.complete(3, "a")
    if deletes == "swept":
        for name in (_sha256(b"x"), f"{_sha256(b'x')}-1"):  # no checkpoint names it
            storage.store.put(f"flights/shared/{name}", b"x")
    taken: list[str] = []

    def take_over() -> None:
        later = Run(second, tmp_path / "b", bob)
        assert later.restore("checkpoints/chk-3-1") == "a"
        taken.append(later.complete(4, "ax"))

    def copy_slowly(*given: Any) -> bool:
        storage.discard_states(2)
        return bool(copy_from(*given))

    copy_from, faulty.copy_from = faulty.copy_from, copy_slowly
    _pause_before_deleting_state(faulty, take_over)
    actions: dict[str, Callable[[], object]] = {
        "aborted": lambda: storage.discard_states(2),
        "subsumed": lambda: storage.delete_checkpoint(old),
        "swept": lambda: storage.sweep(files=True),
        "lent": lambda: storage.savepoint_directory(4, "x").upload_files({"x": first.folder / "x"}),
    }
    actions[deletes]()
    later = Run(second, tmp_path / "c", bob)
    assert [later.fetch(pointer.location) for pointer in later.owner.retained] == ["ax", "a"]
    assert later.names(taken[0]) == {"a": 1, "x": 2}
    assert _shared(second) == {f"{_sha256(b'a')}-1", f"{_sha256(b'x')}-2"}


def test_a_sweep_by_an_owner_that_lost_the_pipeline_does_not_delete_later_files(
    storage: CheckpointStorage, second: CheckpointStorage, tmp_path: Path, alice: Owner, bob: Owner, clock: Any
) -> None:
    """A suspended machine: its clock stopped, so the lease seems valid; the files that it lists are the new owner's."""
    Run(storage, tmp_path / "a", alice)
    began = clock.now
    later = Run(second, tmp_path / "b", bob)
    location = later.complete(1, "ab")
    clock.now = began
    storage.sweep(files=True)
    assert later.fetch(location) == "ab" and _shared(second) == later.read(location).files()


def test_restored_files_keep_their_names_and_are_not_uploaded_again(
    storage: CheckpointStorage, faulty: Any, tmp_path: Path, alice: Owner, bob: Owner
) -> None:
    first = Run(storage, tmp_path / "1", alice)
    location = first.complete(1, "ab")
    first.owner.release("FAILED")
    for epoch, restored, letters, new in ((2, "ab", "abc", "c"), (3, "abc", "abcd", "d"), (4, "abcd", "acde", "e")):
        with CheckpointStorage(faulty, "flights") as opened:
            run = Run(opened, tmp_path / str(epoch), bob)
            assert run.owner.epoch == epoch and run.restore(location) == restored
            before, location = location, run.complete(epoch, letters)
            run.complete(epoch + 10, letters)  # the same bytes again
            opened.delete_checkpoint(f"checkpoints/chk-{epoch + 10}-{epoch}")
            assert run.uploaded == new
            assert opened.delete_checkpoint(before) == (1 if epoch == 4 else 0)
            assert _shared(opened) == run.read(location).files()
            opened.sweep(files=True)
            savepoint = opened.savepoint_directory(epoch + 20, "x")
            stored = savepoint.upload_files({letter: run.folder / letter for letter in letters})
            assert not any(one.uploaded or one.stored_by for one in stored.values())  # copied from any name
            assert savepoint.verify({one.sha256: one.size for one in stored.values()}) == []
            assert run.names(location) == {letter: "?abcde".index(letter) - 1 or 1 for letter in letters}
            assert _shared(opened) == run.read(location).files()
            run.owner.release("FAILED")


def test_a_restored_file_that_was_deleted_is_stored_again_under_the_new_owners_name(
    storage: CheckpointStorage, second: CheckpointStorage, tmp_path: Path, alice: Owner, bob: Owner
) -> None:
    location = Run(storage, tmp_path / "a", alice).complete(1, "ab")
    later = Run(second, tmp_path / "b", bob)
    later.restore(location)
    later.complete(2, "a")
    assert second.delete_checkpoint(location) == 1
    assert later.names(later.complete(3, "ab")) == {"a": 1, "b": 2} and later.uploaded == "b"


def test_a_file_that_is_no_longer_listed_is_stored_again(
    storage: CheckpointStorage, second: CheckpointStorage, tmp_path: Path, alice: Owner, bob: Owner, faulty: Any
) -> None:
    """An explicitly named checkpoint that the earlier owner was deleting when it lost the pipeline."""
    first = Run(storage, tmp_path / "a", alice)
    location = first.complete(1, "a")
    delete, lost = faulty.inner.delete, list[list[str]]()
    faulty.inner.delete = lambda keys: lost.append(list(keys))
    storage.delete_checkpoint(location)
    faulty.inner.delete = delete
    later = Run(second, tmp_path / "b", bob)
    assert later.owner.retained == () and later.restore(location) == "a"
    taken = later.complete(2, "a")
    for keys in lost:
        delete(keys)
    assert later.fetch(taken) == "a" and later.uploaded == "a" and _shared(second) == {f"{_sha256(b'a')}-2"}


def test_checkpoints_of_a_release_without_epochs_in_names_are_restored_and_deleted(
    storage: CheckpointStorage, tmp_path: Path, alice: Owner, bob: Owner
) -> None:
    run = Run(storage, tmp_path / "a", alice)
    for letter in "abc":
        storage.store.put(f"flights/shared/{_sha256(letter.encode())}", letter.encode())
    files = [StateFile(letter, _sha256(letter.encode()), 1) for letter in "ab"]
    location = run.write(1, files)
    assert b"stored_by" not in storage.read_metadata(location)
    run.owner.complete(1, location)
    run.owner.release("FAILED")
    with CheckpointStorage(storage.store, "flights") as opened:
        later = Run(opened, tmp_path / "b", bob)
        assert later.restore(location) == "ab"
        opened.sweep(files=True)
        assert _shared(opened) == {_sha256(b"a"), _sha256(b"b")}
        newest = later.complete(2, "bd")
        assert later.names(newest) == {"b": 0, "d": 2} and later.uploaded == "d"
        assert opened.delete_checkpoint(location) == 1  # a
        assert _shared(opened) == {_sha256(b"b"), f"{_sha256(b'd')}-2"}
        last = later.complete(3, "d")
        assert opened.delete_checkpoint(newest) == 1 and later.fetch(last) == "d"
        assert _shared(opened) == {f"{_sha256(b'd')}-2"}


class Suspended(Exception):
    """The process sleeps for a long time in the middle of a request."""


@pytest.mark.parametrize("seed", range(12))
def test_listed_checkpoints_stay_complete_whenever_owners_are_suspended(tmp_path: Path, clock: Any, seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    store = LocalStore(tmp_path / "root")
    late: list[list[str]] = []
    number = 0

    class Sleepy:
        """Some deletions arrive at any later time, after their sender has lost the pipeline."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def delete(self, keys: Iterable[str]) -> None:
            keys = list(keys)
            if keys and chance.random() < 0.3:
                late.append(keys)
                raise Suspended
            store.delete(keys)

    for epoch in range(1, 9):
        with CheckpointStorage(Sleepy(), "flights", monotonic=clock.monotonic, sleep=clock.sleep) as storage:
            run = Run(storage, tmp_path / str(epoch), Owner(run_id=str(epoch), host="x", pid=epoch))
            listed = run.owner.retained
            try:
                if listed:
                    run.restore(chance.choice(listed).location)
                storage.sweep(files=True)
                for _ in range(6):
                    number += 1
                    letters = chance.sample("abcdef", 3)
                    if chance.random() < 0.3:
                        run.upload(number, "".join(letters))
                        storage.discard_states(number)
                    else:
                        run.complete(number, "".join(letters))
                    while len(run.owner.retained) > 2:
                        storage.delete_checkpoint(run.owner.retained[-1].location)
                    if late and chance.random() < 0.3:
                        store.delete(late.pop(chance.randrange(len(late))))
                    for pointer in run.owner.retained:
                        run.fetch(pointer.location)
            except Suspended:
                continue
    for keys in late:
        store.delete(keys)
    with CheckpointStorage(store, "flights", monotonic=clock.monotonic, sleep=clock.sleep) as storage:
        run = Run(storage, tmp_path / "last", Owner(run_id="last", host="x", pid=9))
        for pointer in run.owner.retained:
            run.restore(pointer.location)
        storage.sweep(files=True)
        named = frozenset[str]().union(*(run.read(pointer.location).files() for pointer in run.owner.retained))
        assert _shared(storage) == named and run.owner.retained
