"""Savepoints and the end of a job in ``state.json``; every version of the file stays readable."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.errors import CorruptPipelineState, OutcomeUnknown, OwnershipLost, StorageUnavailable
from dagster_checkpoints.execution.pipeline_state import (
    CheckpointPointer,
    Job,
    Lease,
    Origin,
    Owner,
    PipelineState,
    describe_end,
    is_same_pipeline,
)
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.storage import CheckpointStorage
from dagster_checkpoints.storage.acquisition import PipelineNameTaken, check_origin
from dagster_checkpoints.storage.ownership import Ownership, decode_state, encode_state

LEASE = 30.0
STATE = "flights/state.json"
NOW = datetime(2025, 6, 1, 12, 8, 0, 250000, tzinfo=UTC)
EXAMPLES = Path(__file__).parent / "examples"


def _pointer(number: int, kind: str = "savepoint", location: str = "", **changes: Any) -> CheckpointPointer:
    given = {"epoch": 1, "job_id": 1, "completed_at": NOW, **changes}
    return CheckpointPointer(checkpoint_id=number, location=location or f"savepoints/savepoint-{number}-x", kind=kind, **given)


def _state(storage: CheckpointStorage) -> PipelineState:
    state = storage.read_state()
    assert state is not None
    return state


@pytest.fixture
def owner(storage: CheckpointStorage, alice: Owner) -> Ownership:
    owner = storage.acquire(alice, LEASE)
    owner.begin_job(resume=False)
    return owner


# -- versions


def test_version_1_stays_readable() -> None:
    state = decode_state((EXAMPLES / "state-version-1.json").read_bytes(), "example")
    assert (state.pipeline, state.epoch, state.highest_checkpoint_id) == ("flights", 3, 57)
    assert state.lease is not None and state.lease.owner == Owner(run_id="2f0c7d", host="alpha", pid=4711)
    assert state.newest == _pointer(42, "checkpoint", "checkpoints/chk-42-3", epoch=3, job_id=2)
    assert [pointer.checkpoint_id for pointer in state.retained] == [42, 41]
    assert (state.job.status, state.job.ended_by, state.job.savepoint) == ("RUNNING", "", "")
    finished = decode_state((EXAMPLES / "state-version-1-finished.json").read_bytes(), "example")
    assert (finished.lease, finished.job.status, finished.job.ended_by) == (None, "FINISHED", "")


def test_version_2_stays_readable() -> None:
    state = decode_state((EXAMPLES / "state-version-2.json").read_bytes(), "example")
    assert (state.job.status, state.job.ended_by) == ("FINISHED", "suspend")
    assert state.job.savepoint == "s3://elsewhere/savepoint-44-nightly"
    assert state.newest == _pointer(44, location=state.job.savepoint, epoch=4, job_id=2)
    assert [(pointer.checkpoint_id, pointer.claimed, pointer.ours) for pointer in state.retained] == [
        (44, False, False),
        (43, True, True),
        (42, False, True),
    ]


def test_version_3_stays_readable() -> None:
    state = decode_state((EXAMPLES / "state-version-3.json").read_bytes(), "example")
    assert (state.job.ended_by, state.job.stop_asked_by) == ("suspend", "termination")
    assert (state.job.run_id, state.job.begun_by) == ("run-3", "run-1")
    assert state.origin == Origin(code_location="flights", instance="0f1e", assets=("live", "team/hourly"))


def test_version_4_stays_readable() -> None:
    state = decode_state((EXAMPLES / "state-version-4.json").read_bytes(), "example")
    assert (state.job.stop_asked_by, state.job.most_instances) == ("caught_up", {})


def test_an_owner_continues_from_a_state_of_version_1(storage: CheckpointStorage, alice: Owner) -> None:
    storage.store.put(STATE, (EXAMPLES / "state-version-1-finished.json").read_bytes())
    owner = storage.acquire(alice, LEASE)
    assert (owner.epoch, owner.highest_checkpoint_id) == (5, 58)
    owner.begin_job(resume=False)
    owner.end_job("FINISHED", ended_by="end_of_data")
    found = json.loads(storage.store.get(STATE))
    assert (found["version"], found["job"]["ended_by"], found["job"]["job_id"]) == (5, "end_of_data", 3)


@pytest.mark.parametrize("name", [f"state-version-{version}.json" for version in range(1, 6)])
def test_a_truncated_state_is_never_misread(name: str) -> None:
    data = (EXAMPLES / name).read_bytes().rstrip()
    for end in range(0, len(data), 7):
        with pytest.raises(CorruptPipelineState):
            decode_state(data[:end], "here")


@pytest.mark.parametrize("name", [f"state-version-{version}.json" for version in range(1, 6)])
def test_a_state_with_a_damaged_name_is_never_misread(name: str) -> None:
    """The field of that name would have its default: without `newest` the next run would read all input again."""
    data = (EXAMPLES / name).read_bytes()
    fields = {field for struct in (PipelineState, Lease, Owner, CheckpointPointer, Job) for field in struct.__struct_fields__}
    for found in re.finditer(rb'"(\w+)":', data.partition(b'"origin"')[0]):
        if found[1].decode() not in fields:
            continue  # a stage in `most_instances`
        damaged = data[: found.start(1)] + bytes([data[found.start(1)] ^ 1]) + data[found.start(1) + 1 :]
        with pytest.raises(CorruptPipelineState):
            decode_state(damaged, "here")


def test_a_state_with_a_damaged_kind_is_never_misread() -> None:
    """A savepoint that counted as a checkpoint would be deleted when it is no longer retained."""
    data = (EXAMPLES / "state-version-2.json").read_bytes()
    with pytest.raises(CorruptPipelineState):
        decode_state(data.replace(b'"kind": "savepoint"', b'"kind": "ravepoint"'), "here")


@pytest.mark.parametrize("moment", ["2026-01-01T00:00:00", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-00:01"])
def test_a_state_with_a_time_that_is_none_in_utc_is_corrupt(moment: str) -> None:
    names = set()
    for example in EXAMPLES.glob("state-version-*.json"):
        data = example.read_bytes()
        for time in set(re.findall(rb'"\w+_at": "\d[^"]*"', data)):
            name = time.partition(b":")[0]
            names.add(name.decode())
            with pytest.raises(CorruptPipelineState, match=r"here, found \d+ bytes that are not"):
                decode_state(data.replace(time, name + f': "{moment}"'.encode()), "here")
    assert names == {f'"{name}_at"' for name in ("acquired", "renewed", "started", "ended", "completed")}


# -- savepoints


def test_a_reserved_id_is_not_given_twice(storage: CheckpointStorage, second: CheckpointStorage, owner: Ownership) -> None:
    owner.complete(6, "checkpoints/chk-6-1")
    owner.reserve(7)
    assert owner.highest_checkpoint_id == _state(second).highest_checkpoint_id == 7
    assert _state(second).newest is not None and _state(second).newest.checkpoint_id == 6  # type: ignore[union-attr]
    written = storage.store.puts  # type: ignore[attr-defined]
    owner.reserve(5)
    assert storage.store.puts == written and owner.highest_checkpoint_id == 7  # type: ignore[attr-defined]


def test_an_owner_that_lost_the_pipeline_reserves_nothing(owner: Ownership, second: CheckpointStorage, clock: Any) -> None:
    clock.now += LEASE
    with pytest.raises(OwnershipLost):
        owner.reserve(7)
    assert _state(second).highest_checkpoint_id == 0


def test_of_two_owners_the_old_one_reserves_nothing(
    storage: CheckpointStorage, owner: Ownership, second: CheckpointStorage, bob: Owner, clock: Any
) -> None:
    started = clock.now
    taken = second.acquire(bob, LEASE)
    clock.now = started  # as if the first owner's clock had stopped
    with pytest.raises(OwnershipLost, match="run-b on host beta"):
        owner.reserve(7)
    taken.reserve(7)
    assert _state(storage).highest_checkpoint_id == 7


@pytest.mark.parametrize("faults", [["lost answer"], ["lost request"], ["lost request", "lost answer"]])
def test_a_reservation_whose_answer_is_lost_is_recognised(owner: Ownership, faulty: Any, faults: list[str]) -> None:
    faulty.faults = list(faults)
    owner.reserve(7)
    assert owner.highest_checkpoint_id == 7
    faulty.faults = ["lost request"] * 3
    with pytest.raises(OutcomeUnknown):
        owner.reserve(8)
    assert owner.renew() and owner.highest_checkpoint_id == 7
    owner.reserve(8)
    assert owner.highest_checkpoint_id == 8


def test_a_claimed_savepoint_is_retained_until_it_is_forgotten(owner: Ownership, second: CheckpointStorage) -> None:
    elsewhere = _pointer(9, location="s3://elsewhere/savepoint-9-x", job_id=77, claimed=True)
    owner.begin_job(resume=False, restored=elsewhere)
    owner.begin_job(resume=True, restored=_state(second).newest)
    state = _state(second)
    assert state.newest == state.retained[0] and len(state.retained) == 1
    assert state.retained[0].claimed and state.retained[0].ours and state.retained[0].job_id == 2
    assert state.highest_checkpoint_id == 9
    owner.complete(10, "checkpoints/chk-10-1")
    owner.forget("s3://elsewhere/savepoint-9-x")
    state = _state(second)
    assert [pointer.checkpoint_id for pointer in state.retained] == [10]
    assert state.dropped_savepoints == ("s3://elsewhere/savepoint-9-x",)
    owner.renew()
    assert _state(second).dropped_savepoints == state.dropped_savepoints


def test_a_savepoint_that_is_about_to_be_deleted_is_no_longer_listed(owner: Ownership, second: CheckpointStorage) -> None:
    owner.complete(3, "checkpoints/chk-3-1")
    owner.complete(4, "checkpoints/chk-4-1")
    owner.forget("checkpoints/chk-3-1")
    assert [pointer.checkpoint_id for pointer in _state(second).retained] == [4]
    owner.forget("checkpoints/chk-4-1")
    state = _state(second)
    assert state.retained == () and state.newest is None


def test_a_savepoint_that_stays_is_listed_until_the_next_write(owner: Ownership, storage: Any, second: CheckpointStorage) -> None:
    owner.complete(3, "savepoints/savepoint-3-x", kind="savepoint")
    owner.complete(4, "checkpoints/chk-4-1")
    written = storage.store.puts
    owner.forget_savepoints({"checkpoints/chk-4-1"})
    assert storage.store.puts == written and [p.checkpoint_id for p in owner.retained] == [4]
    owner.renew()
    assert [pointer.checkpoint_id for pointer in _state(second).retained] == [4]


def test_of_two_owners_the_old_one_deletes_nothing_that_the_new_one_may_restore(
    storage: CheckpointStorage, owner: Ownership, second: CheckpointStorage, bob: Owner, clock: Any
) -> None:
    for checkpoint_id in (3, 4):
        owner.complete(checkpoint_id, storage.write_metadata(checkpoint_id, owner.epoch, b"metadata"))
    started = clock.now
    taken = second.acquire(bob, LEASE)
    clock.now = started  # as if the first owner's clock had stopped
    with pytest.raises(OwnershipLost, match="run-b on host beta"):
        storage.delete_checkpoint("checkpoints/chk-3-1")
    assert [pointer.checkpoint_id for pointer in taken.retained] == [4, 3]
    assert second.read_metadata("checkpoints/chk-3-1") == b"metadata"


def test_a_job_begun_from_a_savepoint_begins_there_again_after_a_crash(owner: Ownership, second: CheckpointStorage) -> None:
    owner.complete(3, "checkpoints/chk-3-1")
    assert owner.begin_job(resume=False, restored=_pointer(9, job_id=1)) == 2
    state = _state(second)
    assert state.newest == _pointer(9, job_id=2)
    assert [pointer.checkpoint_id for pointer in state.retained] == [3]  # an unclaimed savepoint is the user's
    assert owner.begin_job(resume=True, restored=_pointer(2, "checkpoint", "checkpoints/chk-2-1")) == 2
    state = _state(second)
    assert [pointer.checkpoint_id for pointer in state.retained] == [2, 3]  # a checkpoint is the system's
    assert state.newest == state.retained[0]


# -- the end of a job


def test_a_suspend_is_resumed_from_its_savepoint(owner: Ownership, storage: CheckpointStorage, second: Any, bob: Owner) -> None:
    owner.complete(3, "checkpoints/chk-3-1")
    owner.complete(4, "savepoints/savepoint-4-x", kind="savepoint")
    dropped = owner.end_job("FINISHED", keep_checkpoints=False, ended_by="suspend")
    assert [pointer.location for pointer in dropped] == ["checkpoints/chk-3-1"]
    owner.release("FINISHED")
    state = _state(second)
    assert (state.job.status, state.job.ended_by, state.job.savepoint) == ("FINISHED", "suspend", "savepoints/savepoint-4-x")
    assert state.newest is not None and state.retained == (state.newest,) and state.newest.checkpoint_id == 4
    assert "ended FINISHED by suspend at 20" in describe_end(state) and describe_end(state).endswith("savepoint-4-x")
    owner = second.acquire(bob, LEASE)
    owner.begin_job(resume=True, restored=owner.previous.newest)
    state = _state(storage)
    assert (state.job.job_id, state.job.status, state.job.ended_by, state.job.savepoint) == (1, "RUNNING", "", "")


@pytest.mark.parametrize(("ended_by", "kind", "named"), [("drain", "savepoint", True), ("end_of_data", "checkpoint", False)])
def test_an_ended_job_leaves_its_savepoint_and_nothing_to_resume(
    owner: Ownership, second: CheckpointStorage, ended_by: Any, kind: str, named: bool
) -> None:
    owner.complete(3, "checkpoints/chk-3-1")
    owner.complete(4, "s3://elsewhere/savepoint-4-x", kind=kind)
    dropped = owner.end_job("FINISHED", keep_checkpoints=False, ended_by=ended_by)
    assert [pointer.checkpoint_id for pointer in dropped] == ([3] if named else [4, 3])
    state = _state(second)
    assert (state.newest, state.retained, state.job.ended_by) == (None, (), ended_by)
    assert state.job.savepoint == ("s3://elsewhere/savepoint-4-x" if named else "")


def test_a_savepoint_that_the_job_began_from_is_not_the_one_that_stopped_it(owner: Ownership, second: CheckpointStorage) -> None:
    owner.begin_job(resume=False, restored=_pointer(9))
    owner.end_job("FINISHED", ended_by="drain")
    assert _state(second).job.savepoint == ""


def test_an_end_that_could_not_be_recorded_is_recorded_with_the_release(
    owner: Ownership, second: CheckpointStorage, faulty: Any
) -> None:
    owner.complete(4, "savepoints/savepoint-4-x", kind="savepoint")
    faulty.faults = ["unavailable"]
    with pytest.raises(StorageUnavailable):
        owner.end_job("FINISHED", ended_by="suspend")
    owner.release("FINISHED")
    state = _state(second)
    assert (state.job.ended_by, state.job.savepoint) == ("suspend", "savepoints/savepoint-4-x")


def test_a_stop_that_ended_otherwise_is_no_stop(owner: Ownership, second: CheckpointStorage, faulty: Any) -> None:
    faulty.faults = ["unavailable"]
    with pytest.raises(StorageUnavailable):
        owner.end_job("FINISHED", ended_by="suspend")
    owner.release("FAILED")
    state = _state(second)
    assert (state.job.status, state.job.ended_by, state.job.savepoint) == ("FAILED", "", "")


def test_the_state_records_the_runs_of_a_job_and_the_requester_of_its_stop(store: ObjectStore) -> None:
    """The run that chose the job's start point stays recorded while later runs continue from the newest checkpoint."""

    def run(name: str, **begin: Any) -> Job:
        with CheckpointStorage(store, "flights") as storage:
            owner = storage.acquire(Owner(run_id=name, host="a", pid=1), LEASE)
            owner.begin_job(**begin)
            owner.complete(owner.epoch, f"checkpoints/chk-{owner.epoch}-{owner.epoch}", kind="savepoint")
            owner.end_job("FINISHED", ended_by="suspend", stop_asked_by="termination" if name == "second" else "request")
            owner.release("FINISHED")
            return _state(storage).job

    first = run("first", resume=False)
    assert (first.run_id, first.begun_by, first.stop_asked_by) == ("first", "first", "request")
    second = run("second", resume=True)
    assert (second.run_id, second.begun_by, second.stop_asked_by) == ("second", "first", "termination")
    third = run("third", resume=True, named=True)
    assert (third.run_id, third.begun_by, third.stop_asked_by) == ("third", "third", "request")


HERE = Origin(code_location="flights", instance="one", assets=("a", "b", "c", "d"))


@pytest.mark.parametrize(
    ("found", "same"),
    [
        (HERE, True),
        (Origin(code_location="flights", instance="one", assets=("x/a", "x/b")), True),  # a key prefix was added
        (Origin(code_location="moved", instance="one", assets=("a", "b", "c", "d", "e", "f")), True),  # moved, and grown
        (Origin(code_location="moved", instance="two", assets=("a", "b")), True),
        (Origin(code_location="other", instance="one", assets=("x", "y", "z")), False),
        (Origin(code_location="other", instance="one", assets=("a", "y", "z")), False),  # one name in common by chance
        (Origin(code_location="flights", instance="two", assets=("x", "y")), False),  # both files have the same name
        (Origin(code_location="", instance="", assets=("x", "y")), True),  # the place of its definition is unknown
        (Origin(), True),
    ],
)
def test_another_pipeline_of_the_same_name_is_recognised(found: Origin, same: bool) -> None:
    assert is_same_pipeline(HERE, found) is same and is_same_pipeline(found, HERE) is same
    assert is_same_pipeline(Origin(), found), "a state of an earlier release is accepted"
    if not same:
        with pytest.raises(PipelineNameTaken, match=r"s3://bucket/etl.*'etl'.*'flights' of Dagster instance one.*a, b, c, d"):
            check_origin("etl", "s3://bucket/etl", HERE, found)


def test_encoding_is_stable() -> None:
    """Written by this release, byte for byte: a change of the format needs a new version or a default."""
    data = (EXAMPLES / "state-version-5.json").read_bytes()
    assert decode_state(data, "example").job.most_instances == {"hourly": 3}
    assert encode_state(decode_state(data, "example")) == data


def test_a_file_of_a_release_that_recorded_no_dropped_savepoints_is_read() -> None:
    written = json.loads((EXAMPLES / "state-version-3.json").read_bytes())
    assert written.pop("dropped_savepoints")
    assert decode_state(json.dumps(written).encode(), "example").dropped_savepoints == ()
