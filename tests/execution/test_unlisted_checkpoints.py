"""The start of a run for which storage records no job, for what storage holds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dagster_checkpoints.coordination.checkpoints import CompletedCheckpoint
from dagster_checkpoints.execution.acquisition import acquire
from dagster_checkpoints.execution.pipeline_state import CheckpointPointer, Job, PipelineState
from dagster_checkpoints.execution.start_point import (
    ListSavepoints,
    NamedPlace,
    NamedSavepoint,
    NothingToRestoreError,
    ReadRestorable,
    ResolveName,
    RestorableCheckpoint,
    StartPoint,
    choose_start,
)
from dagster_checkpoints.execution.storage_steps import CreateState, ReadState, ReplaceState, StoredState
from dagster_checkpoints.execution.unlisted_checkpoints import (
    ListUnlisted,
    PipelineStateMissing,
    UnlistedCheckpoint,
    UnlistedFiles,
)
from dagster_checkpoints.state.claim import ClaimMode
from tests.execution.storage_scripts import BOB, LEASE, PLACE, Clock, follow, pointer, state
from tests.execution.test_start_point import URL, Options, plain, read, registered

READ = ReadState()
CHK_42, CHK_43, CHK_9 = (UnlistedCheckpoint(epoch, n, f"checkpoints/chk-{n}-{epoch}") for n, epoch in ((42, 3), (43, 3), (9, 4)))
SAVEPOINT_44 = UnlistedCheckpoint(3, 44, "savepoints/savepoint-44")
UNREADABLE = UnlistedCheckpoint(0, 0, "savepoints/savepoint-99")
NO_JOB = StoredState(state(owner=None, epoch=2, job=Job(), history="abc"), "v1")


def files(*checkpoints: UnlistedCheckpoint, shared_epoch: int = 0) -> UnlistedFiles:
    return UnlistedFiles(checkpoints, shared_epoch)


@pytest.mark.parametrize(
    ("found", "newest_first", "highest_epoch"),
    [
        (files(), [], 0),
        (files(shared_epoch=7), [], 7),
        (files(CHK_42, CHK_43), [CHK_43, CHK_42], 3),
        (files(CHK_9, CHK_43, shared_epoch=2), [CHK_9, CHK_43], 4),
        (files(CHK_42, SAVEPOINT_44, shared_epoch=9), [SAVEPOINT_44, CHK_42], 9),
        (files(UNREADABLE, CHK_42), [CHK_42, UNREADABLE], 3),
    ],
)
def test_the_newest_has_the_latest_owner_and_then_the_highest_id(
    found: UnlistedFiles, newest_first: list[UnlistedCheckpoint], highest_epoch: int
) -> None:
    assert list(found.newest_first) == newest_first
    assert found.highest_epoch == highest_epoch
    for at, each in enumerate(newest_first):
        assert list(found.later_than(each.location)) == [later.location for later in newest_first[:at]]
    assert found.later_than("elsewhere") == ()


@pytest.mark.parametrize(("before", "found"), [(None, "no such file"), (NO_JOB, "a file that records no job")])
def test_a_run_that_does_not_name_its_start_is_refused_and_writes_nothing(before: StoredState | None, found: str) -> None:
    with pytest.raises(PipelineStateMissing) as refused:
        follow(acquire(PLACE, BOB, LEASE, Clock().values()), (READ, before), (ListUnlisted(), files(CHK_42, CHK_43)))
    assert refused.value.repeats
    assert str(refused.value) == (
        f"expected file:///storage/flights/state.json, which says where pipeline 'flights' continues, found {found}, although "
        "storage holds checkpoints or savepoints of the pipeline, newest first: checkpoints/chk-43-3, checkpoints/chk-42-3. A "
        "run that ignored them would read all input again, and the sinks would hold rows twice, or lose those that they replace. "
        "If you have a copy of the lost state.json (a bucket with versioning keeps it), put it back. Otherwise launch the run "
        "with restore_from: 'checkpoints/chk-43-3', which continues there. To begin again from the start, launch it with "
        "restore_from: 'none': the run deletes the old checkpoints, savepoints stay, and "
        "at_new_start of the sinks decides about their rows"
    )


def test_a_savepoint_may_be_from_before_the_end_of_its_job() -> None:
    """A finished job has deleted its checkpoints."""
    savepoint = files(UnlistedCheckpoint(3, 44, "savepoints/savepoint-44-3"))
    text = r"continues there, unless the job has finished since: its later rows would come twice\. To begin again"
    with pytest.raises(PipelineStateMissing, match=text):
        follow(acquire(PLACE, BOB, LEASE, Clock().values()), (READ, None), (ListUnlisted(), savepoint))


def test_of_many_only_some_are_named() -> None:
    many = files(*(UnlistedCheckpoint(1, n, f"checkpoints/chk-{n}-1") for n in range(1, 9)))
    with pytest.raises(PipelineStateMissing, match=r"newest first: checkpoints/chk-8-1, .*, checkpoints/chk-4-1 and 3 more\."):
        follow(acquire(PLACE, BOB, LEASE, Clock().values()), (READ, None), (ListUnlisted(), many))


@pytest.mark.parametrize(
    ("before", "found", "named", "epoch", "job"),
    [
        (None, files(), False, 1, 0),
        (None, files(shared_epoch=6), False, 1007, 1006),
        (None, files(CHK_42, shared_epoch=6), True, 1007, 1006),
        (NO_JOB, files(), False, 3, 0),
        (NO_JOB, files(CHK_9), True, 1005, 1004),
        (NO_JOB, files(UnlistedCheckpoint(1, 5, "checkpoints/chk-5-1")), True, 3, 1),
    ],
)
def test_an_owner_uses_no_number_of_the_lost_state_again(
    before: StoredState | None, found: UnlistedFiles, named: bool, epoch: int, job: int
) -> None:
    write = CreateState if before is None else ReplaceState
    steps = acquire(PLACE, BOB, LEASE, Clock().values(), start_named=named)
    owner = follow(steps, (READ, before), (ListUnlisted(), found), (write, "v2"))
    assert (owner.epoch, owner.state.job.job_id, owner.unlisted) == (epoch, job, found)
    assert owner.state.job.status == "NONE", "a job that is not begun"
    assert follow(owner.begin_job(resume=False), (ReplaceState, "v3")) == job + 1


def choose(restore_from: str, found: UnlistedFiles, *exchanges: tuple[Any, Any], **options: Any) -> StartPoint[str]:
    previous = PipelineState(pipeline="flights", epoch=4, token="", job=Job(job_id=4))
    return follow(choose_start(previous, (), Options(restore_from, **options), URL, (), found), *exchanges)


def named(found: CheckpointPointer) -> tuple[Any, Any]:
    return ResolveName(found.location), NamedPlace(found.location, found.kind == "savepoint")


C43 = pointer(43, epoch=3, job_id=2)
S44 = pointer(44, kind="savepoint", epoch=3, job_id=2)


@pytest.mark.parametrize("asked", ["43", "chk-43", "checkpoints/chk-43-3"])
def test_the_newest_checkpoint_begins_a_new_job(asked: str) -> None:
    exchanges = [] if asked in ("43", "chk-43") else [named(C43)]
    start = choose(asked, files(CHK_42, CHK_43), *exchanges, read(C43))
    assert start == StartPoint("restored checkpoints/chk-43-3", False, 44, C43, plain(C43), (), True)


def test_a_savepoint_is_restored_as_before() -> None:
    start = choose(S44.location, files(CHK_43, SAVEPOINT_44), named(S44), read(S44))
    assert (start.resume, start.pointer, start.next_checkpoint_id) == (False, S44, 45)
    claims = choose(S44.location, files(SAVEPOINT_44), named(S44), read(S44), claim_mode=ClaimMode.CLAIM)
    assert claims.pointer == msgspec.structs.replace(S44, claimed=True) and claims.retained == (
        CompletedCheckpoint(44, S44.location),
    )
    by_number = choose("44", files(CHK_43, SAVEPOINT_44), read(S44))
    assert by_number == start
    elsewhere = choose("44", files(CHK_43), (ListSavepoints(), [NamedSavepoint(44, S44.location)]), read(S44, own=False))
    assert elsewhere.pointer == S44


@pytest.mark.parametrize(("chosen", "later"), [(C43, SAVEPOINT_44), (C43, CHK_9), (S44, CHK_9)])
def test_an_older_one_is_refused_its_later_rows_could_not_be_taken_back(
    chosen: CheckpointPointer, later: UnlistedCheckpoint
) -> None:
    found = files(CHK_43, SAVEPOINT_44, later)
    with pytest.raises(NothingToRestoreError, match=f"is older than {later.location}.* Restore '{later.location}', or 'none'"):
        choose(chosen.location, found, named(chosen), read(chosen))


def test_a_copy_of_an_older_savepoint_outside_of_the_directory_is_the_users_choice() -> None:
    copied = msgspec.structs.replace(S44, location="/copies/savepoint-44")
    start = choose(copied.location, files(CHK_9), named(copied), read(copied, own=False))
    assert not start.resume and start.pointer == copied


def test_a_new_start_that_the_run_asks_for() -> None:
    assert choose("none", files(CHK_42, CHK_43)) == StartPoint(None, False, 1, sweep=True)


def test_a_job_that_began_from_a_checkpoint_of_the_lost_state_is_resumed_from_it() -> None:
    """Before it has a checkpoint of its own. state.json says that the checkpoint is the new job's; its metadata names the old."""
    listed = pointer(43, epoch=3, job_id=5)
    previous = state(listed, epoch=5, job=Job(job_id=5, status="RUNNING"), highest_checkpoint_id=0)
    start = follow(choose_start(previous, previous.retained, Options(), URL), *registered(listed), read(C43))
    assert start.resume and start.pointer == listed and start.next_checkpoint_id == 44


def test_a_job_without_a_recorded_checkpoint_never_resumes_a_savepoint_of_job_0() -> None:
    zero = pointer(44, kind="savepoint", job_id=4)
    answer = RestorableCheckpoint("restored", zero, f"{URL}/{zero.location}", True, True)
    start = choose(zero.location, files(SAVEPOINT_44), named(zero), (ReadRestorable(zero.location), answer))
    assert not start.resume
