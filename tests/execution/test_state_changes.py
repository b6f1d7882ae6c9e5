"""How an owner's writes change a pipeline's state."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dagster_checkpoints.execution import state_changes as changes
from dagster_checkpoints.execution.pipeline_state import UNKNOWN_ORIGIN, Job
from tests.execution.storage_scripts import NOW, pointer, state


@pytest.mark.parametrize(("location", "newest", "retained"), [(5, 0, [4]), (4, 5, [5]), (3, 5, [5, 4])])
def test_a_forgotten_checkpoint_is_neither_newest_nor_retained(location: int, newest: int, retained: list[int]) -> None:
    found = changes.forgotten(state(pointer(5), pointer(4)), pointer(location).location)
    assert (found.newest.checkpoint_id if found.newest else 0) == newest
    assert [kept.checkpoint_id for kept in found.retained] == retained


def test_forgetting_without_a_newest_checkpoint_changes_nothing() -> None:
    before = state(pointer(4), newest=None)
    assert changes.forgotten(before, "x") == before


@pytest.mark.parametrize(
    ("restored", "dropped"),
    [
        (pointer(4), []),
        (pointer(3), [4]),
        (pointer(3, kind="savepoint"), [4]),
        (pointer(2), [4, 3]),
    ],
)
def test_checkpoints_that_were_passed_over_are_dropped_with_the_next_one(restored: Any, dropped: list[int]) -> None:
    users, other = pointer(5, kind="savepoint"), pointer(9, job_id=2)
    before = state(users, pointer(4), pointer(3), pointer(2), other, newest=restored)
    found = changes.completed(before, pointer(6))
    kept = (users, pointer(4), pointer(3), pointer(2), other)
    assert found.newest == pointer(6)
    assert found.retained == (pointer(6), *(old for old in kept if old.checkpoint_id not in dropped))


def test_a_claimed_savepoint_that_was_passed_over_is_dropped_too() -> None:
    claimed = pointer(5, kind="savepoint", claimed=True)
    found = changes.completed(state(claimed, pointer(4), newest=pointer(4)), pointer(6))
    assert found.retained == (pointer(6), pointer(4))


@pytest.mark.parametrize(("restored", "resume", "highest"), [(3, True, 5), (4, True, 4), (3, False, 4)])
def test_a_run_that_goes_back_reserves_an_id(restored: int, resume: bool, highest: int) -> None:
    before = state(pointer(4), pointer(3), highest_checkpoint_id=4)
    begun = changes.begun(
        before, resume=resume, restored=pointer(restored), at=NOW, named=True, origin=UNKNOWN_ORIGIN, instances={}
    )
    assert begun.highest_checkpoint_id == highest
    assert begun.retained == (pointer(4), pointer(3))


@pytest.mark.parametrize("resume", [True, False])
def test_a_job_that_begins_without_a_lease_names_no_run(resume: bool) -> None:
    before = state(owner=None, job=Job(job_id=1, status="FAILED", run_id="old", begun_by="old"))
    found = changes.begun(before, resume=resume, restored=None, at=NOW, named=True, origin=UNKNOWN_ORIGIN, instances={})
    assert (found.job.run_id, found.job.begun_by) == ("", "")


def test_a_claimed_savepoint_that_is_retained_no_longer_is_recorded_as_dropped() -> None:
    claimed, other = pointer(3, kind="savepoint", claimed=True), pointer(2, kind="savepoint", claimed=True)
    before = state(pointer(5), pointer(4), claimed, other)
    assert changes.with_dropped_savepoints(before, before) == before
    users = changes.forgotten(before, pointer(4).location)
    assert changes.with_dropped_savepoints(before, users) == users, "a checkpoint is no savepoint"
    first = changes.with_dropped_savepoints(before, changes.forgotten(before, claimed.location))
    assert first.dropped_savepoints == (claimed.location,)
    second = changes.with_dropped_savepoints(first, changes.forgotten(first, other.location))
    assert second.dropped_savepoints == (other.location, claimed.location)


def test_the_record_of_dropped_savepoints_is_bounded() -> None:
    many = msgspec.structs.replace(state(), dropped_savepoints=tuple(map(str, range(changes.KEPT_DROPPED_SAVEPOINTS))))
    claimed = pointer(3, kind="savepoint", claimed=True)
    after = changes.with_dropped_savepoints(msgspec.structs.replace(many, retained=(claimed,)), many)
    assert after.dropped_savepoints[:2] == (claimed.location, "0")
    assert len(after.dropped_savepoints) == changes.KEPT_DROPPED_SAVEPOINTS


def test_a_job_knows_how_many_instances_its_stages_have_had_and_another_job_does_not() -> None:
    def begin(before: Any, *, resume: bool, **instances: int) -> Any:
        return changes.begun(
            before, resume=resume, restored=None, at=NOW, named=False, origin=UNKNOWN_ORIGIN, instances=instances
        )

    first = begin(state(pointer(4)), resume=True, hours=3, live=1)
    assert first.job.most_instances == {"hours": 3}
    assert begin(first, resume=True, hours=1, days=2).job.most_instances == {"hours": 3, "days": 2}
    assert begin(first, resume=True, hours=5).job.most_instances == {"hours": 5}
    assert begin(first, resume=False, hours=1).job.most_instances == {}
