"""How an owner writes `state.json`: each outcome of a conditional write, and which writes never happen."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.errors import (
    OutcomeUnknown,
    OwnershipLost,
    Precondition,
    StorageUnavailable,
    WriteConflict,
)
from dagster_checkpoints.execution.ownership import OwnershipSteps
from dagster_checkpoints.execution.pipeline_state import Job, Origin, PipelineState
from dagster_checkpoints.execution.storage_steps import ReadState, ReplaceState, Steps, StoredState, drive
from tests.execution.storage_scripts import BOB, LEASE, NOW, Clock, follow, owned, pointer, state

UNKNOWN = OutcomeUnknown("no answer")
CHANGED = Precondition("changed")
AWAY = StorageUnavailable("away")


class File:
    """A `state.json` whose writes fail as given; keeps the written states."""

    def __init__(self, stored: PipelineState, *faults: str) -> None:
        self.stored = StoredState(stored, "v1")
        self.faults = list(faults)
        self.requests: list[Any] = []

    def __call__(self, request: Any) -> Any:
        self.requests.append(request)
        if isinstance(request, ReadState):
            return self.stored
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "lost request":
            raise OutcomeUnknown("no answer")
        if request.expected != self.stored.version:
            raise Precondition("changed")
        self.stored = StoredState(request.state, f"v{len(self.requests) + 1}")
        if fault == "lost answer":
            raise OutcomeUnknown("no answer")
        return self.stored.version


def test_a_renewal_replaces_the_version_that_was_seen_last() -> None:
    clock, before = Clock(), state()
    owner = owned(clock, before)
    clock.seconds += 10
    wanted = msgspec.structs.replace(before, token="token-1", lease=msgspec.structs.replace(before.lease, renewals=1))
    assert follow(owner.renew(), (ReplaceState("v1", wanted), "v2")) is True
    assert owner.state == wanted
    assert owner.deadline == clock.seconds + LEASE * 0.9
    again = msgspec.structs.replace(before, token="token-2", lease=msgspec.structs.replace(before.lease, renewals=2))
    assert follow(owner.renew(), (ReplaceState("v2", again), "v3")) is True


def test_a_renewal_records_its_time() -> None:
    later = NOW + timedelta(seconds=10)
    clock = Clock()
    owner = owned(clock, state(), values=msgspec.structs.replace(clock.values(), wall=lambda: later))
    follow(owner.renew(), (ReplaceState, "v2"))
    assert owner.state.lease is not None
    assert (owner.state.lease.acquired_at, owner.state.lease.renewed_at) == (NOW, later)


def test_the_deadline_counts_from_before_the_write_was_sent() -> None:
    clock = Clock()
    owner = owned(clock, state())

    def slow(request: Any) -> str:
        clock.seconds += 20
        return "v2"

    drive(owner.renew(), slow)
    assert owner.deadline == 1000.0 + LEASE * 0.9


@pytest.mark.parametrize("faults", [["lost answer"], ["lost request"], ["lost request", "lost answer"], ["lost answer", ""]])
def test_a_write_whose_answer_is_lost_lands_once(faults: list[str]) -> None:
    file = File(state(), *faults)
    owner = owned(Clock(), file.stored.state)
    found = drive(owner.complete(3, "checkpoints/chk-3-3", "checkpoint"), file)
    assert file.stored.state.retained == (found,) and owner.state == file.stored.state
    writes = [request for request in file.requests if isinstance(request, ReplaceState)]
    assert len({request.state.token for request in writes}) == 1  # the same write each time


def test_after_three_unknown_outcomes_the_write_is_in_doubt() -> None:
    owner = owned(Clock(), state())
    with pytest.raises(OutcomeUnknown, match="no answer"):
        follow(owner.complete(3, "x", "checkpoint"), *[(ReplaceState, UNKNOWN)] * 3)


def test_an_unknown_outcome_is_not_resolved_behind_the_deadline() -> None:
    clock = Clock()
    owner = owned(clock, state())

    def late(request: Any) -> Any:
        assert clock.seconds < owner.deadline, "nothing more is sent"
        clock.seconds = owner.deadline
        raise OutcomeUnknown("late")

    with pytest.raises(OutcomeUnknown, match="late"):
        drive(owner.complete(3, "x", "checkpoint"), late)


@pytest.mark.parametrize("error", [AWAY, WriteConflict("409")])
def test_a_failure_after_an_unknown_outcome_may_have_landed(error: Exception) -> None:
    owner = owned(Clock(), state())
    with pytest.raises(type(error)):
        follow(owner.complete(3, "x", "checkpoint"), (ReplaceState, error))
    with pytest.raises(OutcomeUnknown) as found:
        follow(owner.complete(3, "x", "checkpoint"), (ReplaceState, UNKNOWN), (ReplaceState, error))
    assert str(found.value) == str(error) and found.value.__cause__ is error


def test_an_earlier_write_in_doubt_that_has_landed_is_built_upon() -> None:
    owner = owned(Clock(), state())
    landed = msgspec.structs.replace(owner.state, token="of a write in doubt", highest_checkpoint_id=9)
    follow(owner.renew(), (ReplaceState, CHANGED), (ReadState(), StoredState(landed, "v5")), (ReplaceState, "v6"))
    assert owner.state.highest_checkpoint_id == 9
    follow(owner.renew(), (ReplaceState("v6", _next(owner, "token-3")), "v7"))


def _next(owner: OwnershipSteps, token: str) -> PipelineState:
    lease = owner.state.lease
    assert lease is not None
    return msgspec.structs.replace(
        owner.state, token=token, lease=msgspec.structs.replace(lease, renewals=lease.renewals + 1, renewed_at=NOW)
    )


def test_a_write_that_is_always_refused_fails() -> None:
    owner = owned(Clock(), state())

    def refuse(request: Any) -> Any:
        if isinstance(request, ReadState):
            return StoredState(msgspec.structs.replace(owner.state, token="another"), "v9")
        raise Precondition("changed")

    with pytest.raises(
        OutcomeUnknown, match=r"flights/state.json could not be replaced in 8 attempts although it carries this run's epoch"
    ):
        drive(owner.complete(3, "x", "checkpoint"), refuse)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, r"pipeline 'flights' \(epoch 3\) is lost: file:///storage/flights/state.json was deleted"),
        (
            StoredState(state(epoch=4, owner=BOB), "v2"),
            r"taken over: expected epoch 3 in file.*, found epoch 4, .*run-b on host beta.*UTC\. "
            r"This run did not renew its lease in time; it stops and commits nothing$",
        ),
    ],
)
def test_a_pipeline_that_is_another_runs_is_lost_for_good(found: StoredState | None, text: str) -> None:
    owner = owned(Clock(), state())
    with pytest.raises(OwnershipLost, match=text):
        follow(owner.renew(), (ReplaceState, CHANGED), (ReadState(), found))
    assert owner.lost
    for procedure in _writes(owner):
        with pytest.raises(OwnershipLost, match=text):
            follow(procedure())


def test_a_refused_write_that_cannot_be_read_back_is_in_doubt() -> None:
    owner = owned(Clock(), state())
    with pytest.raises(OutcomeUnknown, match="has changed and cannot be read back: away"):
        follow(owner.complete(3, "x", "checkpoint"), (ReplaceState, CHANGED), (ReadState(), AWAY))
    assert not owner.lost


@pytest.mark.parametrize("error", [AWAY, WriteConflict("409"), UNKNOWN])
def test_a_renewal_without_an_answer_is_no_loss_before_the_deadline(error: Exception) -> None:
    clock = Clock()
    owner = owned(clock, state())
    times = 3 if error is UNKNOWN else 1
    assert follow(owner.renew(), *[(ReplaceState, error)] * times) is False

    def late(request: Any) -> Any:
        clock.seconds = owner.deadline
        raise error

    with pytest.raises(OwnershipLost) as found:
        drive(owner.renew(), late)
    assert str(found.value) == (
        "the ownership of pipeline 'flights' (epoch 3) could not be renewed within its lease of 30 s; another run may own the "
        f"pipeline now, so this one stops. The last renewal failed: {error}"
    )


def test_an_owner_that_was_suspended_names_no_failure_of_before() -> None:
    clock = Clock()
    owner = owned(clock, state())
    assert follow(owner.renew(), (ReplaceState, AWAY)) is False
    assert follow(owner.renew(), (ReplaceState, "v2")) is True
    clock.seconds = owner.deadline
    with pytest.raises(OwnershipLost, match=r"so this one stops\. Was storage not reachable, or was this process suspended\?$"):
        owner.ensure()


def _writes(owner: OwnershipSteps) -> list[Callable[[], Steps[Any]]]:
    return [
        lambda: owner.begin_job(resume=False),
        lambda: owner.reserve(99),
        owner.renew,
        lambda: owner.complete(99, "x", "checkpoint"),
        lambda: owner.forget("x"),
        lambda: owner.end_job("FINISHED", keep_checkpoints=True, ended_by="", stop_asked_by=""),
    ]


@pytest.mark.parametrize("number", range(6))
def test_no_request_is_made_after_the_deadline_or_a_release(number: int) -> None:
    clock = Clock()
    owner = owned(clock, state())
    clock.seconds = owner.deadline - 0.001
    owner.ensure()
    assert not owner.lost
    clock.seconds = owner.deadline
    assert owner.lost
    with pytest.raises(OwnershipLost, match="could not be renewed"):
        follow(_writes(owner)[number]())
    clock.seconds -= 1
    assert owner.lost  # for good
    with pytest.raises(OwnershipLost, match="could not be renewed"):
        follow(owner.release("FAILED"))
    released = owned(Clock(), state())
    follow(released.release(None), (ReplaceState, "v2"))
    with pytest.raises(OwnershipLost, match="was released by this run"):
        follow(_writes(released)[number]())


def test_a_release_is_written_once_and_frees_the_lease() -> None:
    clock = Clock()
    owner = owned(clock, state())
    follow(owner.release("CANCELED"), (ReplaceState, "v2"))
    assert owner.state.lease is None and owner.released
    assert owner.state.job == Job(job_id=1, status="CANCELED", ended_at=NOW)
    follow(owner.release("FAILED"))
    clock.seconds = owner.deadline + 1
    assert not owner.lost


def test_a_release_after_the_end_leaves_the_job_as_it_has_ended() -> None:
    owner = owned(Clock(), state())
    follow(owner.end_job("FINISHED", keep_checkpoints=True, ended_by="end_of_data", stop_asked_by=""), (ReplaceState, "v2"))
    assert owner.released is False
    ended = owner.state.job
    follow(owner.release(None), (ReplaceState, "v3"))
    assert owner.state.job == ended == Job(job_id=1, status="FINISHED", ended_at=NOW, ended_by="end_of_data")
    assert owner.state.lease is None


def test_a_job_begins() -> None:
    suspended = Job(
        job_id=7,
        status="FINISHED",
        ended_at=NOW,
        ended_by="suspend",
        savepoint="savepoints/savepoint-4",
        stop_asked_by="request",
        run_id="old",
        begun_by="old",
    )
    owner = owned(Clock(), state(pointer(4), job=suspended))
    assert follow(owner.begin_job(resume=True), (ReplaceState, "v2")) == 7
    assert owner.state.job == Job(job_id=7, status="RUNNING", run_id="run-a", begun_by="old")
    assert owner.state.newest == pointer(4)
    assert follow(owner.begin_job(resume=True, named=True, origin=Origin(instance="i")), (ReplaceState, "v3")) == 7
    assert owner.state.job.begun_by == "run-a" and owner.state.origin.instance == "i"
    assert follow(owner.begin_job(resume=False), (ReplaceState, "v4")) == 8
    assert owner.state.job == Job(job_id=8, status="RUNNING", started_at=NOW, run_id="run-a", begun_by="run-a")
    assert owner.state.newest is None and owner.state.retained == (pointer(4),)


def test_a_job_begins_from_its_restored_checkpoint() -> None:
    owner = owned(Clock(), state(pointer(4), pointer(3)))
    follow(owner.begin_job(resume=True, restored=pointer(3, job_id=55)), (ReplaceState, "v2"))
    assert owner.state.newest == pointer(3) and owner.state.retained == (pointer(4), pointer(3))
    savepoint = pointer(9, kind="savepoint", job_id=55)
    follow(owner.begin_job(resume=False, restored=savepoint), (ReplaceState, "v3"))
    assert owner.state.newest == msgspec.structs.replace(savepoint, job_id=2)
    assert owner.state.retained == (pointer(4), pointer(3))  # it is the user's
    unlisted = pointer(2, job_id=2)
    follow(owner.begin_job(resume=True, restored=unlisted), (ReplaceState, "v4"))
    assert owner.state.retained[0] == unlisted == owner.state.newest


def test_an_id_is_reserved_once() -> None:
    owner = owned(Clock(), state(highest_checkpoint_id=6))
    follow(owner.reserve(6))
    follow(owner.reserve(7), (ReplaceState, "v2"))
    assert owner.state.highest_checkpoint_id == 7 and not owner.state.retained
    assert owner.has_later(6) and not owner.has_later(7)


def test_sinks_settle_a_checkpoint_that_an_earlier_run_has_passed_over() -> None:
    """Its rows were taken back: the last one that was completed is not to be restored as if nothing had happened since."""
    owner = owned(Clock(), state(pointer(4), pointer(3), highest_checkpoint_id=4))
    assert owner.has_later(3) and not owner.has_later(4)
    follow(owner.begin_job(resume=True, restored=pointer(3)), (ReplaceState, "v2"))
    assert owner.has_later(4) and owner.first_id_after(3) == owner.first_id_after(4) == 5
    follow(owner.complete(5, "checkpoints/chk-5-3", "checkpoint"), (ReplaceState, "v3"))
    assert not owner.has_later(5) and owner.first_id_after(5) == 6


def test_a_completed_checkpoint_is_the_newest() -> None:
    owner = owned(Clock(), state(pointer(4), job=Job(job_id=2, status="RUNNING")))
    found = follow(owner.complete(5, "checkpoints/chk-5-3", "checkpoint"), (ReplaceState, "v2"))
    assert found == pointer(5, epoch=3, job_id=2)
    assert owner.state.newest == found and owner.retained == (found, pointer(4))
    assert owner.state.highest_checkpoint_id == 5
    assert owner.in_use == {"checkpoints/chk-5-3", "checkpoints/chk-4-1"}


def test_a_claimed_savepoint_is_retained_as_the_pipelines_own() -> None:
    savepoint = pointer(9, kind="savepoint")
    owner = owned(Clock(), state(pointer(4), savepoint, job=Job(job_id=2, status="FAILED")))
    claimed = msgspec.structs.replace(savepoint, claimed=True)
    assert claimed.ours and not savepoint.ours
    follow(owner.begin_job(resume=True, restored=claimed), (ReplaceState, "v2"))  # in one write with the job's beginning
    ours = msgspec.structs.replace(claimed, job_id=2)
    assert owner.retained == (ours, pointer(4)) and owner.state.newest == ours
    other = pointer(11, kind="savepoint", claimed=True, job_id=77)  # of another pipeline
    follow(owner.begin_job(resume=False, restored=other), (ReplaceState, "v3"))
    assert owner.retained == (msgspec.structs.replace(other, job_id=3), ours, pointer(4))
    assert owner.state.newest == owner.retained[0] and owner.state.highest_checkpoint_id == 11


def test_a_checkpoint_is_removed_from_the_list_before_its_deletion() -> None:
    owner = owned(Clock(), state(pointer(5), pointer(4)))
    follow(owner.forget("checkpoints/chk-4-1"), (ReplaceState, "v2"))
    assert owner.state.retained == (pointer(5),)
    follow(owner.forget("checkpoints/chk-4-1"))  # not listed: no request
    follow(owner.forget("checkpoints/chk-5-1"), (ReplaceState, "v3"))
    assert owner.state.newest is None


def test_a_forget_that_fails_is_made_up_by_the_next_write() -> None:
    owner = owned(Clock(), state(pointer(5), pointer(4)))
    with pytest.raises(StorageUnavailable):
        follow(owner.forget("checkpoints/chk-4-1"), (ReplaceState, AWAY))
    assert owner.retained == (pointer(5),) and owner.state.retained == (pointer(5), pointer(4))
    follow(owner.renew(), (ReplaceState, "v2"))
    assert owner.state.retained == (pointer(5),)


def test_savepoints_that_the_coordinator_retains_no_longer_are_forgotten_with_the_next_write() -> None:
    kept, gone, claimed = pointer(5, kind="savepoint"), pointer(4, kind="savepoint"), pointer(3, kind="savepoint", claimed=True)
    owner = owned(Clock(), state(pointer(6), kept, gone, claimed))
    owner.forget_savepoints({kept.location})
    assert owner.retained == (pointer(6), kept, claimed)  # a checkpoint, and one of the system's own, are deleted otherwise
    follow(owner.renew(), (ReplaceState, "v2"))
    assert owner.state.retained == (pointer(6), kept, claimed)


@pytest.mark.parametrize(
    ("keep", "ended_by", "dropped", "newest", "savepoint"),
    [
        (True, "end_of_data", [], 0, ""),
        (False, "end_of_data", [4, 2], 0, ""),
        (False, "drain", [4, 2], 0, "savepoints/savepoint-7"),
        (False, "suspend", [4, 2], 7, "savepoints/savepoint-7"),
        (True, "suspend", [], 7, "savepoints/savepoint-7"),
    ],
)
def test_a_jobs_end(keep: bool, ended_by: Any, dropped: list[int], newest: int, savepoint: str) -> None:
    users, claimed = pointer(3, kind="savepoint"), pointer(2, kind="savepoint", claimed=True)
    owner = owned(Clock(), state(pointer(4), users, claimed))
    if ended_by in ("drain", "suspend"):
        follow(owner.complete(7, "savepoints/savepoint-7", "savepoint"), (ReplaceState, "v2"))
    ended = owner.end_job("FINISHED", keep_checkpoints=keep, ended_by=ended_by, stop_asked_by="request")
    assert [p.checkpoint_id for p in follow(ended, (ReplaceState, "v3"))] == dropped
    job = owner.state.job
    assert (job.status, job.ended_at, job.ended_by, job.savepoint) == ("FINISHED", NOW, ended_by, savepoint)
    assert job.stop_asked_by == ("request" if savepoint else "")
    expected_newest = (4 if keep else 0) if ended_by == "end_of_data" else newest if ended_by == "suspend" or keep else 0
    assert (owner.state.newest.checkpoint_id if owner.state.newest else 0) == expected_newest
    if keep:
        assert len(owner.state.retained) >= 3
    elif ended_by == "suspend":
        assert [p.checkpoint_id for p in owner.retained] == [7]
    else:
        assert owner.retained == ()


def test_an_end_that_could_not_be_recorded_is_recorded_with_the_release() -> None:
    owner = owned(Clock(), state(pointer(4)))
    follow(owner.complete(7, "savepoints/savepoint-7", "savepoint"), (ReplaceState, "v2"))
    with pytest.raises(StorageUnavailable):
        ended = owner.end_job("FINISHED", keep_checkpoints=False, ended_by="drain", stop_asked_by="termination")
        follow(ended, (ReplaceState, AWAY))
    follow(owner.release("FINISHED"), (ReplaceState, "v3"))
    job = owner.state.job
    assert (job.ended_by, job.savepoint, job.stop_asked_by) == ("drain", "savepoints/savepoint-7", "termination")
    assert owner.state.retained == ()
    assert owner.state.newest is not None  # kept, because the deletion does not happen


def test_another_end_than_the_one_that_could_not_be_recorded_has_no_savepoint() -> None:
    owner = owned(Clock(), state(pointer(4)))
    with pytest.raises(StorageUnavailable):
        ended = owner.end_job("FINISHED", keep_checkpoints=True, ended_by="drain", stop_asked_by="request")
        follow(ended, (ReplaceState, AWAY))
    follow(owner.release("FAILED"), (ReplaceState, "v3"))
    assert owner.state.job == Job(job_id=1, status="FAILED", ended_at=NOW)


def test_a_savepoint_is_that_of_a_stop_only_if_this_owner_has_completed_it() -> None:
    owner = owned(Clock(), state(pointer(4, kind="savepoint")))
    ended = owner.end_job("FINISHED", keep_checkpoints=True, ended_by="suspend", stop_asked_by="")
    follow(ended, (ReplaceState, "v2"))
    assert owner.state.job.savepoint == ""


def test_an_owner_vouches_for_earlier_listed_and_its_own_checkpoints() -> None:
    owner = owned(Clock(), state(epoch=3), previous=state(pointer(4), epoch=2))
    assert owner.vouches_for("checkpoints/chk-4-1", 1)
    assert not owner.vouches_for("checkpoints/chk-3-1", 1)
    assert owner.vouches_for("checkpoints/chk-3-3", 3)


@given(st.lists(st.sampled_from(["", "lost answer", "lost request"]), max_size=12))
def test_whatever_gets_lost_the_newest_never_goes_back(faults: list[str]) -> None:
    file = File(state(), *faults)
    owner = owned(Clock(), file.stored.state)
    newest = 0
    for checkpoint_id in range(1, 6):
        try:
            drive(owner.complete(checkpoint_id, f"checkpoints/chk-{checkpoint_id}-3", "checkpoint"), file)
        except OutcomeUnknown:
            continue
        found = file.stored.state.newest
        assert found is not None and found.checkpoint_id == checkpoint_id > newest
        newest = checkpoint_id
    while not drive(owner.renew(), file):  # its own outcome may be unknown as well
        continue
    assert owner.state == file.stored.state


def test_a_run_of_months_does_not_remember_what_it_has_deleted() -> None:
    owner = owned(Clock(), state(pointer(1), epoch=1))
    tracemalloc.start()
    try:
        for number in range(2, 6_000):
            if number == 3_000:
                before = tracemalloc.get_traced_memory()[0]
            follow(owner.complete(number, pointer(number).location, "checkpoint"), (ReplaceState, f"v{number}"))
            follow(owner.forget(pointer(number - 1).location), (ReplaceState, f"w{number}"))
        assert tracemalloc.get_traced_memory()[0] - before < 100_000
    finally:
        tracemalloc.stop()
    assert [each.checkpoint_id for each in owner.retained] == [5_999]


def test_what_was_forgotten_while_storage_was_away_is_left_out_of_the_next_state_that_is_stored() -> None:
    clock = Clock()
    owner = owned(clock, state(pointer(5), pointer(4)))
    with pytest.raises(StorageUnavailable):
        follow(owner.forget(pointer(4).location), (ReplaceState, AWAY))
    landed = msgspec.structs.replace(state(pointer(5), pointer(4)), token="of a write whose answer was lost")
    refused = (ReplaceState, CHANGED)
    assert follow(owner.renew(), refused, (ReadState(), StoredState(landed, "v2")), (ReplaceState, "v3"))
    assert owner.state.retained == (pointer(5),)
