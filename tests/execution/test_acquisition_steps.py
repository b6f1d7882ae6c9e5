"""How a run becomes the owner, for each stored state and each outcome of its write."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dagster_checkpoints.errors import (
    AlreadyExists,
    OutcomeUnknown,
    OwnershipLost,
    PipelineOwned,
    Precondition,
    StorageUnavailable,
    WriteConflict,
)
from dagster_checkpoints.execution.acquisition import AnnounceWatch, CheckOwnerGone, Sleep, acquire, shares_kernel
from dagster_checkpoints.execution.pipeline_state import Lease, Owner, PipelineState, describe_owner
from dagster_checkpoints.execution.storage_steps import CreateState, ReadState, ReplaceState, StoredState, drive
from dagster_checkpoints.execution.unlisted_checkpoints import ListUnlisted, UnlistedFiles
from tests.execution.storage_scripts import ALICE, BOB, LEASE, NOW, PLACE, Clock, follow, pointer, state

READ = ReadState()
FIRST = (ListUnlisted(), UnlistedFiles())
UNKNOWN = OutcomeUnknown("no answer")
FREE = StoredState(state(pointer(4), owner=None, history="abc"), "v1")
OWNED = StoredState(state(pointer(4), owner=ALICE), "v1")
GONE, ALIVE = (CheckOwnerGone(ALICE), True), (CheckOwnerGone(ALICE), False)


def taken(previous: PipelineState, token: int = 1, **fields: Any) -> PipelineState:
    lease = Lease(owner=BOB, seconds=LEASE, acquired_at=NOW, renewed_at=NOW)
    return msgspec.structs.replace(previous, epoch=previous.epoch + 1, token=f"token-{token}", lease=lease, **fields)


def asleep(clock: Clock, seconds: float) -> Any:
    """A wait of that length, which moves the clock."""

    class Slept(Sleep):
        def __eq__(self, other: object) -> bool:
            clock.seconds += seconds
            return isinstance(other, Sleep) and other.seconds == pytest.approx(seconds)

        __hash__ = None  # type: ignore[assignment]

    return (Slept(seconds), None)


def test_the_first_owner_creates_the_file() -> None:
    clock = Clock()
    new = PipelineState(pipeline="flights", epoch=0, token="")
    wanted = taken(new, history="token-2")
    owner = follow(acquire(PLACE, BOB, LEASE, clock.values()), (READ, None), FIRST, (CreateState(wanted), "v1"))
    assert (owner.state, owner.epoch, owner.previous) == (wanted, 1, new)
    assert owner.deadline == clock.seconds + LEASE * 0.9


def test_the_history_of_a_new_file_is_eight_characters_of_a_token() -> None:
    values = msgspec.structs.replace(Clock().values(), new_token=lambda: "0123456789abcdef")
    assert follow(acquire(PLACE, BOB, LEASE, values), (READ, None), FIRST, (CreateState, "v1")).state.history == "01234567"


def test_a_pipeline_without_an_owner_is_taken_at_once() -> None:
    owner = follow(acquire(PLACE, BOB, LEASE, Clock().values()), (READ, FREE), (ReplaceState("v1", taken(FREE.state)), "v2"))
    assert owner.previous == FREE.state and owner.epoch == 4
    lease = msgspec.structs.replace(owner.state.lease, renewals=1)
    renewed = msgspec.structs.replace(owner.state, token="token-2", lease=lease)
    follow(owner.renew(), (ReplaceState("v2", renewed), "v3"))
    follow(owner.release(None), (ReplaceState, "v4"))
    with pytest.raises(OwnershipLost, match=r"^the ownership of pipeline 'flights' \(epoch 4\) was released by this run$"):
        owner.ensure()


def test_an_owner_whose_process_is_gone_is_replaced_at_once() -> None:
    watch = (AnnounceWatch(OWNED.state, 0.0), None)
    steps = acquire(PLACE, BOB, LEASE, Clock().values())
    assert follow(steps, (READ, OWNED), GONE, watch, (ReplaceState, "v2")).epoch == 4


def test_a_silent_owner_is_watched_for_its_whole_lease() -> None:
    clock = Clock()
    looks = [x for _ in range(10) for x in (asleep(clock, 3.0), ALIVE, (READ, OWNED))]
    watch = (AnnounceWatch(OWNED.state, LEASE), None)
    owner = follow(acquire(PLACE, BOB, 12.0, clock.values()), (READ, OWNED), ALIVE, watch, *looks, (ReplaceState, "v2"))
    assert owner.epoch == 4 and clock.seconds == 1000.0 + LEASE
    assert owner.deadline == clock.seconds + 12.0 * 0.9  # of its own lease


@pytest.mark.parametrize(
    ("poll", "lease", "same_kernel", "expected"),
    [
        (None, 0.2, False, 0.05),
        (None, 50.0, False, 5.0),
        (7.0, 30.0, False, 7.0),
        (None, 30.0, True, 1.0),
        (0.5, 30.0, True, 0.5),
    ],
)
def test_how_often_the_lease_of_another_owner_is_read(
    poll: float | None, lease: float, same_kernel: bool, expected: float
) -> None:
    found = Owner(run_id="a", host="h", pid=1, boot_id="b", namespaces="n", started=5)
    asks = Owner(run_id="b", host="h", pid=2, boot_id="b" if same_kernel else "c", namespaces="n", started=6)
    held = msgspec.structs.replace(OWNED.state, lease=Lease(owner=found, seconds=lease, acquired_at=NOW, renewed_at=NOW))
    steps = acquire(PLACE, asks, LEASE, Clock().values(), poll)
    follow(
        steps,
        (READ, StoredState(held, "v1")),
        (CheckOwnerGone(found), False),
        (AnnounceWatch(held, lease), None),
        (Sleep(expected), None),
        (CheckOwnerGone(found), True),
        (ReplaceState, "v2"),
    )


def test_the_last_read_is_at_the_end_of_the_lease() -> None:
    clock = Clock()
    steps = acquire(PLACE, BOB, LEASE, clock.values(), poll=20.0)
    looks = (asleep(clock, 20.0), ALIVE, (READ, OWNED), asleep(clock, 10.0), ALIVE, (READ, OWNED))
    follow(steps, (READ, OWNED), ALIVE, (AnnounceWatch, None), *looks, (ReplaceState, "v2"))


@pytest.mark.parametrize("missed", [None, StorageUnavailable("away")])
def test_a_missed_read_of_the_lease_is_harmless(missed: Any) -> None:
    clock = Clock()
    steps = acquire(PLACE, BOB, LEASE, clock.values(), poll=LEASE)
    exchanges = ((READ, OWNED), ALIVE, (AnnounceWatch, None), asleep(clock, LEASE), ALIVE, (READ, missed))
    assert follow(steps, *exchanges, (ReplaceState("v1", taken(OWNED.state, history="token-2")), "v2")).epoch == 4


def test_an_owner_that_renews_is_alive() -> None:
    renewed = StoredState(msgspec.structs.replace(OWNED.state, token="renewed"), "v2")
    steps = acquire(PLACE, BOB, LEASE, Clock().values())
    exchanges = ((READ, OWNED), ALIVE, (AnnounceWatch, None), (Sleep, None), ALIVE, (READ, renewed), ALIVE)
    with pytest.raises(PipelineOwned) as found:
        follow(steps, *exchanges)
    assert str(found.value) == (
        f"pipeline 'flights' in file:///storage is {describe_owner(renewed.state)}, and that run is alive: it has just renewed "
        "its lease. Only one run at a time may own a pipeline: terminate that one, or wait for it"
    )


@pytest.mark.parametrize("gone", [True, False])
def test_a_lease_that_was_freed_or_whose_new_owner_is_gone_is_taken(gone: bool) -> None:
    changed = msgspec.structs.replace(OWNED.state, token="changed", history="abc")
    found = StoredState(changed if gone else msgspec.structs.replace(changed, lease=None), "v7")
    steps = acquire(PLACE, BOB, LEASE, Clock().values())
    look = ((READ, OWNED), ALIVE, (AnnounceWatch, None), (Sleep, None), ALIVE, (READ, found))
    end = (GONE,) if gone else ()
    owner = follow(steps, *look, *end, (ReplaceState("v7", taken(found.state)), "v8"))
    assert owner.previous == found.state


@pytest.mark.parametrize("error", [UNKNOWN, Precondition("changed"), AlreadyExists("there")])
def test_a_write_that_has_landed_without_an_answer_is_recognised(error: Exception) -> None:
    steps = acquire(PLACE, BOB, LEASE, Clock().values())
    landed = StoredState(taken(FREE.state), "v5")
    owner = follow(steps, (READ, FREE), (ReplaceState, error), (READ, landed))
    follow(owner.renew(), (ReplaceState, "v6"))
    assert owner.epoch == 4


def test_a_write_that_has_not_landed_is_tried_again_from_the_stored_state() -> None:
    clock = Clock()
    steps = acquire(PLACE, BOB, LEASE, clock.values())
    other = StoredState(msgspec.structs.replace(FREE.state, token="other", epoch=8), "v5")
    exchanges = ((READ, FREE), (ReplaceState, Precondition("changed")), (READ, other), (READ, other))
    assert follow(steps, *exchanges, (ReplaceState("v5", taken(other.state, 2)), "v6")).epoch == 9
    gone = acquire(PLACE, BOB, LEASE, clock.values())
    assert follow(gone, (READ, FREE), (ReplaceState, UNKNOWN), (READ, None), (READ, None), FIRST, (CreateState, "v1")).epoch == 1


def test_a_write_that_cannot_be_read_back_is_in_doubt() -> None:
    away = StorageUnavailable("away")
    with pytest.raises(OutcomeUnknown, match="no answer"):
        follow(acquire(PLACE, BOB, LEASE, Clock().values()), (READ, FREE), (ReplaceState, UNKNOWN), (READ, away))
    with pytest.raises(StorageUnavailable, match="away"):
        follow(acquire(PLACE, BOB, LEASE, Clock().values()), (READ, FREE), (ReplaceState, Precondition("no")), (READ, away))


@pytest.mark.parametrize("error", [StorageUnavailable("away"), WriteConflict("409")])
def test_a_write_that_certainly_failed_is_an_error(error: Exception) -> None:
    with pytest.raises(type(error)):
        follow(acquire(PLACE, BOB, LEASE, Clock().values()), (READ, FREE), (ReplaceState, error))


def test_acquisition_fails_if_the_owner_changes_again_and_again() -> None:
    rounds = [(READ, FREE), (ReplaceState, Precondition("no")), (READ, FREE)] * 5
    with pytest.raises(PipelineOwned) as found:
        follow(acquire(PLACE, BOB, LEASE, Clock().values()), *rounds)
    assert str(found.value) == (
        "pipeline 'flights' in file:///storage changed hands 5 times while this run tried to own it. Start fewer runs of this "
        "pipeline at the same time"
    )


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_lease_without_a_length_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="more than 0 seconds"):
        drive(acquire(PLACE, BOB, seconds, Clock().values()), lambda request: None)


def test_a_lease_may_be_shorter_than_a_second() -> None:
    clock = Clock()
    owner = follow(acquire(PLACE, BOB, 0.5, clock.values()), (READ, FREE), (ReplaceState, "v2"))
    assert owner.deadline == clock.seconds + 0.5 * 0.9


FULL = Owner(run_id="a", host="h", pid=1, boot_id="b", namespaces="n", started=5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"pid": 9, "run_id": "z", "started": 9}, True),
        ({"host": "other"}, False),
        ({"boot_id": "other"}, False),
        ({"namespaces": "other"}, False),
    ],
)
def test_which_process_can_check_whether_an_owner_is_gone(changes: dict[str, Any], expected: bool) -> None:
    assert shares_kernel(FULL, msgspec.structs.replace(FULL, **changes)) is expected


@pytest.mark.parametrize("unknown", [{"boot_id": ""}, {"namespaces": ""}, {"started": 0}])
def test_an_owner_with_incomplete_identity_cannot_be_checked(unknown: dict[str, Any]) -> None:
    found = msgspec.structs.replace(FULL, **unknown)
    assert not shares_kernel(found, found)
