"""The start of a run, for each value of restore_from and each state of storage."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from dagster_checkpoints.coordination.checkpoints import CheckpointProperties, CompletedCheckpoint
from dagster_checkpoints.errors import StorageError, StorageUnavailable
from dagster_checkpoints.execution.pipeline_state import CheckpointPointer, Job, PipelineState
from dagster_checkpoints.execution.start_point import (
    ListSavepoints,
    NamedPlace,
    NamedSavepoint,
    NothingToRestoreError,
    ReadRestorable,
    RegisterFiles,
    ResolveName,
    RestorableCheckpoint,
    StartPoint,
    choose_start,
    completed_checkpoint,
    has_ended_before,
    is_job_over,
    is_repeated_start,
)
from dagster_checkpoints.state.claim import ClaimMode
from dagster_checkpoints.state.errors import CorruptMetadata, RestoreError
from tests.execution.storage_scripts import follow, pointer, state

URL = "file:///storage"
STOPS = CheckpointProperties.for_savepoint(stops_job=True)


@dataclass(frozen=True)
class Options:
    restore_from: str = "latest"
    allow_older_checkpoint: bool = False
    claim_mode: ClaimMode = ClaimMode.NO_CLAIM


def choose(
    previous: PipelineState, options: Options, *exchanges: tuple[Any, Any], unusable: Collection[str] = ()
) -> StartPoint[str]:
    return follow(choose_start(previous, previous.retained, options, URL, unusable), *exchanges)


def registered(*pointers: CheckpointPointer) -> list[tuple[Any, Any]]:
    return [(RegisterFiles(p.location), None) for p in pointers if p.kind != "savepoint"]


def read(found: CheckpointPointer, own: bool = True) -> tuple[Any, Any]:
    answer = RestorableCheckpoint(f"restored {found.location}", found, f"{URL}/{found.location}", found.kind == "savepoint", own)
    return ReadRestorable(found.location), answer


def plain(*pointers: CheckpointPointer) -> tuple[CompletedCheckpoint, ...]:
    return tuple(CompletedCheckpoint(p.checkpoint_id, p.location) for p in pointers)


C4, C5, C6 = pointer(4), pointer(5), pointer(6)
S5 = pointer(5, kind="savepoint")
NAMED_C5 = (ResolveName("checkpoints/chk-5-1"), NamedPlace(C5.location, False))


@pytest.mark.parametrize(
    ("status", "ended_by", "over"),
    [
        ("NONE", "", True),
        ("RUNNING", "", False),
        ("FINISHED", "end_of_data", True),
        ("FINISHED", "drain", True),
        ("FINISHED", "suspend", False),
        ("FAILED", "", False),
        ("CANCELED", "", False),
        ("SUSPENDED", "", False),
    ],
)
def test_the_latest_checkpoint_is_resumed_unless_its_job_has_ended(status: Any, ended_by: Any, over: bool) -> None:
    previous = state(C4, job=Job(job_id=1, status=status, ended_by=ended_by))
    assert is_job_over(previous) is over
    start = choose(previous, Options(), *registered(C4), *([] if over else [read(C4)]))
    if over:
        assert start == StartPoint(None, False, 1, passed_over=plain(C4), sweep=True)
    else:
        assert start == StartPoint("restored checkpoints/chk-4-1", True, 5, C4, plain(C4), (), True)


def test_a_new_start() -> None:
    assert choose(state(), Options()) == StartPoint(None, False, 1, sweep=True)
    begun = StartPoint[str](None, False, 1, passed_over=plain(C4), sweep=True)
    assert choose(state(C4), Options("none"), *registered(C4)) == begun


CLAIMED_8, OTHER_9, USERS_3 = (
    pointer(8, kind="savepoint", claimed=True, job_id=1),
    pointer(9, job_id=2),
    pointer(3, kind="savepoint", job_id=2),
)


@pytest.mark.parametrize(
    ("restored", "own", "resume", "passed_over"),
    [
        (None, True, False, (CLAIMED_8, OTHER_9, pointer(4, job_id=3))),
        (pointer(4, job_id=3), True, True, (CLAIMED_8, OTHER_9)),
        (pointer(6, kind="savepoint", job_id=3), True, True, (CLAIMED_8, OTHER_9)),
        (pointer(6, kind="savepoint", job_id=3), False, False, (CLAIMED_8, OTHER_9, pointer(4, job_id=3))),
        (USERS_3, True, False, (CLAIMED_8, OTHER_9, pointer(4, job_id=3))),
        (CLAIMED_8, True, False, (OTHER_9, pointer(4, job_id=3))),
    ],
)
def test_checkpoints_of_other_jobs_are_of_no_use_to_a_job(
    restored: CheckpointPointer | None, own: bool, resume: bool, passed_over: tuple[CheckpointPointer, ...]
) -> None:
    """They are refused, so the first checkpoint of the job deletes them. The user's savepoints stay."""
    previous = state(CLAIMED_8, OTHER_9, USERS_3, pointer(4, job_id=3), job=Job(job_id=3, status="FAILED"))
    files = registered(*previous.retained)
    if restored is None:
        start = choose(previous, Options("none"), *files)
    else:
        named = (ResolveName("s3://x/y"), NamedPlace(restored.location, restored.kind == "savepoint"))
        start = choose(previous, Options("s3://x/y"), *files, named, read(restored, own))
    assert start.resume is resume and start.passed_over == plain(*passed_over)


@pytest.mark.parametrize(
    "restore_from", ["4", "chk-4", "checkpoints/chk-4-1", "chk-4-1", "s3://bucket/flights/checkpoints/chk-4-1"]
)
def test_an_older_checkpoint_passes_over_the_later_ones(restore_from: str) -> None:
    claimed = pointer(7, kind="savepoint", claimed=True)
    stop = pointer(8, kind="savepoint")
    previous = state(stop, claimed, C6, C4, pointer(3), pointer(9, job_id=2), highest_checkpoint_id=11)
    name = restore_from if "/" in restore_from else f"checkpoints/{restore_from}"
    named = [] if restore_from in ("4", "chk-4") else [(ResolveName(name), NamedPlace(C4.location, False))]
    start = choose(previous, Options(restore_from), *registered(*previous.retained), *named, read(C4))
    assert start.resume and start.next_checkpoint_id == 12
    assert start.retained == (*plain(pointer(3)), *plain(C4))
    assert start.passed_over == plain(pointer(9, job_id=2), claimed, C6)  # the user's savepoint stays


def test_a_checkpoint_that_cannot_be_read_stays_and_keeps_the_files_of_all() -> None:
    registers = [(RegisterFiles(C5.location), None), (RegisterFiles(C4.location), CorruptMetadata("no"))]
    start = choose(state(C5, C4), Options(), *registers, read(C5))
    assert not start.sweep and start.retained == plain(C5)
    gone = [(RegisterFiles(C5.location), None), (RegisterFiles(C4.location), StorageError("gone"))]
    assert not choose(state(C5, C4), Options("none"), *gone).sweep


def test_a_savepoint_is_not_registered_its_files_are_its_own() -> None:
    start = choose(state(S5), Options(), read(S5))
    assert start.sweep and start.resume and start.pointer is not None and not start.pointer.claimed
    assert start.retained == (CompletedCheckpoint(5, S5.location, STOPS),)


def test_without_storage_nothing_is_chosen() -> None:
    away = StorageUnavailable("away")
    with pytest.raises(StorageUnavailable):
        choose(state(C5, C4), Options(allow_older_checkpoint=True), (RegisterFiles(C5.location), away))
    with pytest.raises(StorageUnavailable):
        choose(state(C5, C4), Options(allow_older_checkpoint=True), *registered(C5, C4), (ReadRestorable(C5.location), away))


@pytest.mark.parametrize("error", [RestoreError("does not fit"), StorageError("gone")])
def test_an_older_one_is_tried_only_where_it_is_allowed(error: Exception) -> None:
    other_job, later = pointer(2, job_id=9), pointer(6)
    previous = state(C5, other_job, C4, later)
    fails = (ReadRestorable(C5.location), error)
    with pytest.raises(type(error)):
        choose(previous, Options(), *registered(*previous.retained), fails)
    for restore_from in ("latest", "5"):
        start = choose(previous, Options(restore_from, True), *registered(*previous.retained), fails, read(C4))
        assert start.pointer == C4 and start.passed_over == plain(other_job, C5, later)
    named = (ResolveName("checkpoints/x"), NamedPlace(C5.location, False))
    start = choose(previous, Options("x", True), *registered(*previous.retained), named, fails, read(C4))
    assert start.pointer == C4
    with pytest.raises(type(error), match=str(error)):
        second = (ReadRestorable(C4.location), RestoreError("the second"))
        choose(previous, Options("latest", True), *registered(*previous.retained), fails, second)


def test_a_corrupt_checkpoint_is_not_tried_again() -> None:
    start = choose(state(C5, C4), Options(), *registered(C5, C4), read(C4), unusable=[C5.location])
    assert start.pointer == C4
    with pytest.raises(
        NothingToRestoreError, match=r"None of the checkpoints in file:///storage can be restored: .*chk-5-1, .*chk-4-1"
    ):
        choose(state(C5, C4), Options(), *registered(C5, C4), unusable=[C5.location, C4.location])


def listed(*savepoints: tuple[int, str]) -> tuple[Any, Sequence[NamedSavepoint]]:
    return ListSavepoints(), [NamedSavepoint(*found) for found in savepoints]


def test_an_id_that_is_not_retained_may_be_a_savepoints() -> None:
    savepoint = pointer(7, kind="savepoint")
    start = choose(state(C4), Options("7"), *registered(C4), listed((6, "a"), (7, savepoint.location)), read(savepoint))
    assert start.pointer == savepoint and start.retained[-1].is_savepoint
    with pytest.raises(NothingToRestoreError, match=r"'7' fits several savepoints: a, b. Name one"):
        choose(state(C4), Options("7"), *registered(C4), listed((7, "a"), (7, "b")))
    with pytest.raises(NothingToRestoreError, match=r"Retained checkpoints: 6, 4; savepoints: a, b. Name one"):
        choose(state(C6, C4), Options("chk-7"), *registered(C6, C4), listed((6, "a"), (2, "b")))
    with pytest.raises(NothingToRestoreError) as found:
        choose(state(), Options("7"), listed())
    assert str(found.value) == (
        "restore_from: '7' asks for a checkpoint that file:///storage does not hold. Retained checkpoints: none; savepoints: "
        "none. Name one of these, or restore from 'latest' or 'none'."
    )


def test_a_savepoint_of_this_job_elsewhere_begins_a_new_one() -> None:
    previous = state(C6, C4, highest_checkpoint_id=6)
    named = (ResolveName("/copies/savepoint-5"), NamedPlace(S5.location, True))
    start = choose(previous, Options("/copies/savepoint-5"), *registered(C6, C4), named, read(S5, own=False))
    assert not start.resume and start.next_checkpoint_id == 6
    assert start.retained == (CompletedCheckpoint(5, S5.location, STOPS),) and start.passed_over == plain(C6, C4)


@pytest.mark.parametrize(
    ("listed_as", "resume"),
    [
        (pointer(7, kind="savepoint"), True),  # the job has stopped with it, in the directory that the request named
        (pointer(7, kind="savepoint", claimed=True), False),  # of another storage, whose job has the same number
        (pointer(7, kind="savepoint", job_id=4), False),  # an earlier job has stopped with it
        (None, False),
    ],
)
@pytest.mark.parametrize("restore_from", ["latest", "s3://archive/savepoint-7"])
def test_a_job_goes_on_from_the_savepoint_that_it_was_stopped_with_elsewhere(
    restore_from: str, listed_as: CheckpointPointer | None, resume: bool
) -> None:
    elsewhere = "s3://archive/savepoint-7"
    newest = msgspec.structs.replace(pointer(7, kind="savepoint"), location=elsewhere)
    entries = [msgspec.structs.replace(listed_as, location=elsewhere)] if listed_as is not None else []
    previous = state(*entries, C6, newest=newest, highest_checkpoint_id=9)
    named = [] if restore_from == "latest" else [(ResolveName(elsewhere), NamedPlace(elsewhere, True))]
    start = choose(previous, Options(restore_from), *registered(C6), *named, read(newest, own=False))
    assert start.resume is resume and start.next_checkpoint_id == (10 if resume else 8)
    assert (CompletedCheckpoint(6, C6.location) in start.retained) is resume


def test_a_savepoint_by_its_name() -> None:
    named = (ResolveName("savepoints/savepoint-5-x"), NamedPlace(S5.location, True))
    other = pointer(5, kind="savepoint", job_id=8)
    start = choose(state(C6), Options("savepoint-5-x"), *registered(C6), named, read(S5))
    assert start.resume and start.passed_over == plain(C6) and start.next_checkpoint_id == 7
    start = choose(state(C6), Options("savepoint-5-x"), *registered(C6), named, (ReadRestorable(S5.location), read(other)[1]))
    assert not start.resume and start.passed_over == plain(C6)


def test_a_checkpoint_of_an_earlier_job_is_refused() -> None:
    earlier = pointer(4, job_id=3)
    with pytest.raises(NothingToRestoreError) as found:
        choose(state(C6, earlier), Options("4"), *registered(C6, earlier), read(earlier))
    assert str(found.value) == (
        "expected a checkpoint of the pipeline's latest job (1), found that file:///storage/checkpoints/chk-4-1 is of job 3. The "
        "later job has aborted the transactions that the earlier one had not committed, and its own rows are in the sinks: a "
        "restore of the earlier one would lose or repeat rows. Restore a savepoint of the earlier job, which is self-contained, "
        "or a checkpoint of the latest one"
    )


def test_a_checkpoint_with_the_same_id_is_not_passed_over() -> None:
    twin = pointer(5, epoch=2)
    start = choose(state(C6, twin, C5), Options("chk-5-1"), *registered(C6, twin, C5), NAMED_C5, read(C5))
    assert start.retained == plain(twin, C5) and start.passed_over == plain(C6)


@pytest.mark.parametrize(
    ("mode", "was_claimed", "claims"),
    [(ClaimMode.NO_CLAIM, False, False), (ClaimMode.CLAIM, False, True), (ClaimMode.NO_CLAIM, True, True)],
)
def test_a_claim(mode: ClaimMode, was_claimed: bool, claims: bool) -> None:
    savepoint = pointer(5, kind="savepoint", claimed=was_claimed)
    start = choose(state(savepoint), Options("latest", False, mode), read(savepoint))
    assert start.pointer is not None and start.pointer.claimed is claims
    assert start.retained == ((plain(savepoint)) if claims else (CompletedCheckpoint(5, savepoint.location, STOPS),))


@pytest.mark.parametrize(
    ("asked_by", "savepoint", "own", "claims"),
    [
        ("caught_up", S5.location, True, True),
        ("request", S5.location, True, False),
        ("termination", S5.location, True, False),
        ("caught_up", "savepoints/savepoint-9-x", True, False),  # an older one of the user
        ("caught_up", S5.location, False, False),  # a copy of it
    ],
)
def test_the_savepoint_of_a_burst_belongs_to_the_pipeline(asked_by: Any, savepoint: str, own: bool, claims: bool) -> None:
    job = Job(job_id=1, status="FINISHED", ended_by="suspend", stop_asked_by=asked_by, savepoint=savepoint)
    start = choose(state(S5, job=job), Options("latest"), read(S5, own))
    assert start.pointer is not None and start.pointer.claimed is claims


@pytest.mark.parametrize(
    ("status", "ended_by", "asked_by", "over"),
    [
        ("FAILED", "", "", False),
        ("CANCELED", "", "", False),
        ("RUNNING", "", "", False),
        ("FINISHED", "end_of_data", "", True),
        ("FINISHED", "drain", "request", True),
        ("FINISHED", "suspend", "request", True),
        ("FINISHED", "suspend", "caught_up", True),
        ("FINISHED", "suspend", "termination", False),  # a pod was evicted
    ],
)
def test_a_retry_does_not_continue_a_job_that_a_request_has_ended(status: Any, ended_by: Any, asked_by: Any, over: bool) -> None:
    """As the recovery sensor does not; the run that the retry repeats may have failed after the end of its job."""
    job = Job(job_id=1, status=status, ended_by=ended_by, stop_asked_by=asked_by, run_id="first")
    assert has_ended_before({"first", "retry"}, state(S5, job=job)) is over
    assert not has_ended_before({"launched by a person"}, state(S5, job=job))


def test_a_savepoint_that_was_claimed_and_replaced_is_not_restored() -> None:
    """The owner that claimed it may be paused in the middle of its deletion."""
    previous = state(C6, dropped_savepoints=(S5.location,))
    named = (ResolveName("savepoints/savepoint-5-x"), NamedPlace(S5.location, True))
    with pytest.raises(NothingToRestoreError, match=r"'savepoint-5-x'.*has claimed this savepoint.*Restore from 'latest'"):
        choose(previous, Options("savepoint-5-x"), *registered(C6), named)
    assert choose(previous, Options("latest"), *registered(C6), read(C6)).resume


def test_a_checkpoint_is_never_claimed() -> None:
    start = choose(state(C4), Options("latest", False, ClaimMode.CLAIM), *registered(C4), read(C4))
    assert start.pointer is not None and not start.pointer.claimed


def test_the_completed_checkpoint_of_a_pointer() -> None:
    assert completed_checkpoint(C4) == CompletedCheckpoint(4, C4.location)
    assert completed_checkpoint(S5) == CompletedCheckpoint(5, S5.location, STOPS)
    assert completed_checkpoint(pointer(5, kind="savepoint", claimed=True)) == CompletedCheckpoint(5, S5.location)


@pytest.mark.parametrize(
    ("restore_from", "begun_by", "earlier", "repeated"),
    [
        ("none", "a", ("a", "b"), True),
        ("4", "b", ("a", "b"), True),
        ("latest", "a", ("a",), False),
        ("none", "c", ("a", "b"), False),
        ("none", "", ("", "a"), False),
        ("none", "a", (), False),
    ],
)
def test_a_retry_of_a_run_that_has_begun_the_job(
    restore_from: str, begun_by: str, earlier: tuple[str, ...], repeated: bool
) -> None:
    job = Job(job_id=3, status="FAILED", begun_by=begun_by)
    assert is_repeated_start(restore_from, earlier, state(job=job)) is repeated
    over = Job(job_id=3, status="FINISHED", ended_by="drain", begun_by=begun_by)
    if repeated:
        with pytest.raises(NothingToRestoreError) as found:
            is_repeated_start(restore_from, earlier, state(job=over))
        assert str(found.value) == (
            f"restore_from: '{restore_from}'. Run {begun_by}, which this run repeats, has begun job 3 there, and that job is "
            "FINISHED: it cannot be continued, and a second start from there would repeat its rows. To run the pipeline again, "
            "launch a new run instead of a retry or re-execution."
        )
    else:
        assert not is_repeated_start(restore_from, earlier, state(job=over))
