"""`state.json` is gone: what a run that does not name its start may ignore, and what it refuses to ignore."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dagster_checkpoints.errors import OwnershipLost
from dagster_checkpoints.execution.pipeline_state import Owner
from dagster_checkpoints.execution.unlisted_checkpoints import PipelineStateMissing
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    QuerySnapshot,
    StageInstanceSnapshot,
    StageMetadata,
    TaskSnapshot,
)
from dagster_checkpoints.state.metadata_file import encode
from dagster_checkpoints.storage import CheckpointStorage

SHA = "ab" * 32
STATE = "flights/state.json"
CHECKPOINT = "flights/checkpoints/chk-42-3/_metadata"
SAVEPOINT = "flights/savepoints/savepoint-43-nightly-0a1b2c/_metadata"


def keys(store: ObjectStore) -> set[str]:
    return {info.key for info in store.list()}


@pytest.mark.parametrize(
    ("files", "newest"),
    [
        ([CHECKPOINT], "checkpoints/chk-42-3"),
        ([CHECKPOINT, f"flights/shared/{SHA}-3", "flights/status.json"], "checkpoints/chk-42-3"),
        ([CHECKPOINT, "flights/checkpoints/chk-9-4/_metadata", "flights/checkpoints/chk-43-3/_metadata"], "checkpoints/chk-9-4"),
        ([SAVEPOINT], "savepoints/savepoint-43-nightly-0a1b2c"),
        (["flights/savepoints/a copy of mine/_metadata"], "savepoints/a copy of mine"),
        ([SAVEPOINT, "flights/savepoints/savepoint-43-nightly-0a1b2c/_incomplete"], "savepoints/savepoint-43-nightly-0a1b2c"),
    ],
)
def test_checkpoints_without_a_state_are_not_ignored(
    storage: CheckpointStorage, store: ObjectStore, alice: Owner, files: list[str], newest: str
) -> None:
    for file in files:
        store.put(file, b"{}")
    with pytest.raises(PipelineStateMissing) as refused:
        storage.acquire(alice)
    for part in (f"{store.url}/{STATE}", "no such file", f"newest first: {newest}", f"restore_from: {newest!r}", "'none'"):
        assert part in str(refused.value)
    assert keys(store) == set(files), "a refused run has written nothing"
    assert storage.describe_unlisted(None) == str(refused.value)


@pytest.mark.parametrize(
    ("others", "imported"),
    [
        ([], True),
        ([f"flights/savepoints/savepoint-1-imported-0a1b2c/state/{SHA}"], True),
        ([SAVEPOINT], False),
        ([CHECKPOINT], False),
        (["flights/status.json"], False),  # of a run: state.json was lost, or never written
        ([f"flights/shared/{SHA}-3"], False),
    ],
)
def test_imported_savepoints_alone_are_no_loss(
    storage: CheckpointStorage, store: ObjectStore, alice: Owner, others: list[str], imported: bool
) -> None:
    task = TaskSnapshot(stages={"live": StageInstanceSnapshot()}, query=QuerySnapshot(4, imported_from="file:///chk"))
    stages, chains = (StageMetadata("live", 1, ("0",)),), (ChainMetadata("live", ("live",), {0: task}),)
    made = CheckpointMetadata("flights", 1, stages, chains, kind="savepoint", job_id="0")
    store.put("flights/savepoints/savepoint-1-imported-0a1b2c/_metadata", encode(made))
    for file in others:
        store.put(file, b"{}")
    with pytest.raises(PipelineStateMissing) as refused:
        storage.acquire(alice)
    text = str(refused.value)
    assert ("is imported, not started yet" in text, "lost" in text) == (imported, not imported)
    assert "restore_from: 'savepoints/savepoint-1-imported-0a1b2c'" in text or not imported
    assert storage.describe_unlisted(None) == text


@pytest.mark.parametrize(
    "file",
    [
        "flights/status.json",
        "flights/requests/a.json",
        f"flights/shared/{SHA}-3",
        f"flights/savepoints/savepoint-4-x-0a1b2c/state/{SHA}",
        "flights/savepoints/savepoint-4-x-0a1b2c/_incomplete",
        "flights/notes/_metadata",
        "flights/_metadata",
        "flights/savepoints/_metadata",
        "flights/checkpoints/old/_metadata",
        "flights2/checkpoints/chk-42-3/_metadata",
    ],
)
def test_files_that_no_restart_could_begin_from_do_not_matter(
    storage: CheckpointStorage, store: ObjectStore, alice: Owner, file: str
) -> None:
    store.put(file, b"{}")
    assert storage.describe_unlisted(None) == ""
    assert storage.acquire(alice).epoch == (1004 if "shared" in file else 1)


def test_a_run_that_names_its_start_owns_the_pipeline_under_an_unused_epoch(
    storage: CheckpointStorage, second: CheckpointStorage, store: ObjectStore, alice: Owner, bob: Owner
) -> None:
    for file in (CHECKPOINT, SAVEPOINT, f"flights/shared/{SHA}-5"):
        store.put(file, b"{}")
    owner = storage.acquire(alice, start_named=True)
    assert owner.epoch == 1006, "files carry the epochs up to 5, and later owners may have opened sinks alone"
    owner.release(None)
    with pytest.raises(PipelineStateMissing, match="a file that records no job"):
        second.acquire(bob)  # the run before has named a start, and has not begun there
    owner = second.acquire(bob, start_named=True)
    owner.begin_job(resume=False)
    second.sweep(files=True)
    assert keys(store) == {STATE, SAVEPOINT}, "the files of the old job are deleted; a user's savepoint stays"
    owner.release(None)
    assert storage.acquire(alice).previous.job.job_id == 1006, (
        "with a job on record, nothing is asked; no job number is used twice"
    )


@pytest.mark.parametrize("job", [False, True])
def test_a_first_start_that_was_killed_is_repeated(
    storage: CheckpointStorage, second: CheckpointStorage, store: ObjectStore, alice: Owner, bob: Owner, clock: Any, job: bool
) -> None:
    owner = storage.acquire(alice, 30.0)
    if job:  # the metadata is written, and state.json does not name it: the checkpoint was never complete
        owner.begin_job(resume=False)
        store.put("flights/checkpoints/chk-1-1/_metadata", b"{}")
    assert second.acquire(bob, 30.0).newest is None


def test_an_owner_does_not_take_the_state_of_another_history_for_its_own(
    storage: CheckpointStorage, second: CheckpointStorage, store: ObjectStore, alice: Owner, bob: Owner
) -> None:
    owner = storage.acquire(alice)
    owner.begin_job(resume=False)
    store.delete([STATE])
    other = second.acquire(bob)
    other.begin_job(resume=False)
    assert other.epoch == owner.epoch
    with pytest.raises(OwnershipLost):
        owner.complete(1, "checkpoints/chk-1-1")
    assert other.renew() and other.newest is None


class CountedStore:
    """Counts the listings of a store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.lists = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def list(self, prefix: str = "") -> Iterator[Any]:
        self.lists += 1
        return self._store.list(prefix)


def test_only_a_start_without_a_recorded_job_lists_the_directory(store: ObjectStore, alice: Owner) -> None:
    counted = CountedStore(store)
    lists = []
    for _ in range(3):
        with CheckpointStorage(counted, "flights") as storage:  # type: ignore[arg-type]
            owner = storage.acquire(alice)
            owner.begin_job(resume=bool(lists))
            owner.release(None)
        lists.append(counted.lists)
    assert lists == [1, 1, 1]
