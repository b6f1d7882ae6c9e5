"""The order of deletions, and which files a sweep keeps."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints.errors import OwnershipLost, StorageUnavailable
from dagster_checkpoints.execution.checkpoint_deletion import (
    DeleteFiles,
    DeleteMetadata,
    DeleteSavepoint,
    DeleteSavepointFiles,
    DeleteSavepointMetadata,
    DeleteUnnamed,
    DiscardFiles,
    DiscardMetadata,
    DiscardPendingFiles,
    DiscardSavepoint,
    ForgetCheckpoint,
    FoundMetadata,
    HasMetadata,
    IncompleteMark,
    IsRegistered,
    ListFiles,
    ListMetadata,
    ListSavepointDirectories,
    MarkIncomplete,
    ReadMark,
    RemoveMarkIfEmpty,
    SweepFiles,
    SweepMetadata,
    SweepSavepoints,
    delete_checkpoint,
    delete_files,
    delete_savepoint,
    discard_states,
    sweep,
    sweep_files,
    sweep_metadata,
    sweep_savepoints,
)
from dagster_checkpoints.execution.shared_files import SharedName
from tests.execution.storage_scripts import Clock, follow, owned, pointer, state


def test_a_checkpoint_is_listed_no_more_before_it_is_deleted() -> None:
    forget, metadata = (ForgetCheckpoint("c"), None), (DeleteMetadata("c"), None)
    assert follow(delete_checkpoint("c", savepoint=False), forget, metadata, (DiscardFiles("c"), 3)) == 3
    assert follow(delete_checkpoint("c", savepoint=True), forget, (DeleteSavepoint("c"), None)) == 0
    with pytest.raises(StorageUnavailable):  # it may still be listed: nothing is deleted
        follow(delete_checkpoint("c", savepoint=False), (ForgetCheckpoint("c"), StorageUnavailable("away")))


def test_an_aborted_checkpoint() -> None:
    steps = (DiscardSavepoint(7), None), (DiscardMetadata(7), None), (DiscardPendingFiles(7), 2)
    assert follow(discard_states(7, lambda: None), *steps) == 2
    with pytest.raises(StorageUnavailable):  # with its metadata it is a checkpoint still, and has its files
        follow(discard_states(7, lambda: None), steps[0], (DiscardMetadata(7), StorageUnavailable("away")))

    def may_delete() -> None:
        raise OwnershipLost("another run owns the pipeline")

    with pytest.raises(OwnershipLost):  # which may be restoring from what was not completed here
        follow(discard_states(7, may_delete), steps[0])


def test_a_savepoint_is_none_without_its_metadata() -> None:
    rest = [
        (DeleteSavepointMetadata(), None),
        (DeleteSavepointFiles(), None),
        (DeleteSavepointMetadata(), None),
        (RemoveMarkIfEmpty(), None),
    ]
    follow(delete_savepoint(own=True), (MarkIncomplete(), None), *rest)
    follow(delete_savepoint(own=False), *rest)


@pytest.mark.parametrize(("count", "sizes"), [(0, []), (1, [1]), (500, [500]), (501, [500, 1])])
def test_ownership_is_checked_before_each_deletion(count: int, sizes: list[int]) -> None:
    names = [f"{n:04}" for n in range(count)]
    checks: list[int] = []
    batches = [tuple(names[500 * n : 500 * n + size]) for n, size in enumerate(sizes)]
    follow(delete_files(set(names), lambda: checks.append(1)), *[(DeleteFiles(batch), None) for batch in batches])
    assert len(checks) == len(sizes)

    def refuse() -> None:
        raise OwnershipLost("taken over")

    if count:
        with pytest.raises(OwnershipLost):
            follow(delete_files(names, refuse))


@pytest.mark.parametrize("files", [True, False])
def test_files_are_swept_last_and_only_if_all_checkpoints_could_be_read(files: bool) -> None:
    last = [(SweepFiles(), 1)] if files else []
    follow(sweep(files), (SweepSavepoints(), 1), (SweepMetadata(), 1), *last)


@pytest.mark.parametrize(
    ("mark", "complete", "swept"),
    [
        (IncompleteMark("flights", 2), False, True),
        (IncompleteMark("flights", 0), False, True),
        (IncompleteMark("flights", 2), True, False),
        (IncompleteMark("flights", 3), None, False),  # this owner's
        (IncompleteMark("flights", 4), None, False),  # a later owner's
        (IncompleteMark("other", 2), None, False),
        (None, None, False),
    ],
)
def test_a_savepoint_is_swept_only_if_it_has_the_mark_of_an_earlier_owner(mark: Any, complete: Any, swept: bool) -> None:
    owner = owned(Clock(), state(epoch=3))
    exchanges: list[tuple[Any, Any]] = [(ListSavepointDirectories(), ["a"]), (ReadMark("a"), mark)]
    if complete is not None:
        exchanges.append((HasMetadata("a"), complete))
    if swept:
        exchanges.append((DeleteSavepoint("a"), None))
    assert follow(sweep_savepoints(owner, "flights"), *exchanges) == swept


def test_a_sweep_checks_every_savepoint() -> None:
    marks = [
        (ReadMark("a"), None),
        (ReadMark("b"), IncompleteMark("flights", 1)),
        (HasMetadata("b"), False),
        (DeleteSavepoint("b"), None),
    ]
    more = [(ReadMark("c"), IncompleteMark("flights", 1)), (HasMetadata("c"), False), (DeleteSavepoint("c"), None)]
    listed = (ListSavepointDirectories(), ["a", "b", "c"])
    assert follow(sweep_savepoints(owned(Clock(), state(epoch=3)), "flights"), listed, *marks, *more) == 2


@pytest.mark.parametrize(
    ("location", "epoch", "registered", "swept"),
    [
        ("checkpoints/chk-9-2", 2, False, True),
        ("checkpoints/chk-9-2", 2, True, False),
        ("checkpoints/chk-9-3", 3, False, False),
        ("checkpoints/chk-9-4", 4, False, False),
        ("checkpoints/chk-5-2", 2, False, False),  # retained
        ("checkpoints/chk-6-2", 2, False, False),  # the newest
    ],
)
def test_metadata_is_swept_only_if_an_earlier_owner_wrote_it_in_vain(
    location: str, epoch: int, registered: bool, swept: bool
) -> None:
    owner = owned(Clock(), state(pointer(5, epoch=2), epoch=3, newest=pointer(6, epoch=2)))
    exchanges: list[tuple[Any, Any]] = [(ListMetadata(), [FoundMetadata(location, epoch)]), (IsRegistered(location), registered)]
    deleted = [(DeleteMetadata(location), None)] if swept else []
    assert follow(sweep_metadata(owner), *exchanges, *deleted) == swept


def test_a_sweep_checks_all_metadata() -> None:
    owner = owned(Clock(), state(epoch=3))
    first = [(IsRegistered("a"), False), (DeleteMetadata("a"), None), (IsRegistered("b"), True)]
    last = [(IsRegistered("c"), False), (DeleteMetadata("c"), None)]
    assert follow(sweep_metadata(owner), (ListMetadata(), [FoundMetadata(n, 1) for n in "abc"]), *first, *last) == 2


def test_an_owner_that_has_lost_the_pipeline_sweeps_nothing() -> None:
    clock = Clock()
    owner = owned(clock, state(epoch=3))
    clock.seconds = owner.deadline
    marks = [(ListSavepointDirectories(), ["a"]), (ReadMark("a"), IncompleteMark("flights", 1)), (HasMetadata("a"), False)]
    with pytest.raises(OwnershipLost):
        follow(sweep_savepoints(owner, "flights"), *marks)
    with pytest.raises(OwnershipLost):
        follow(sweep_metadata(owner), (ListMetadata(), [FoundMetadata("a", 1)]), (IsRegistered("a"), False))


def test_files_of_later_owners_stay() -> None:
    found = [SharedName("a", 0), SharedName("b", 3), SharedName("c", 4), SharedName("b", 2)]
    unnamed = (DeleteUnnamed(frozenset({"a", "b-3", "b-2"})), 2)
    assert follow(sweep_files(3), (ListFiles(), found), unnamed) == 2
