"""One owner per pipeline: lease, take-over, fencing, and the commit point when answers get lost."""

from __future__ import annotations

import json
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_checkpoints.errors import (
    CorruptPipelineState,
    OutcomeUnknown,
    OwnershipLost,
    PipelineOwned,
    StorageError,
    StorageUnavailable,
    UnknownPipelineStateVersion,
)
from dagster_checkpoints.execution.pipeline_state import Owner
from dagster_checkpoints.storage import CheckpointStorage
from dagster_checkpoints.storage.ownership import LeaseRenewer, Ownership

LEASE = 30.0
STATE = "flights/state.json"


def _newest(storage: CheckpointStorage) -> int | None:
    state = storage.read_state()
    assert state is not None
    return state.newest.checkpoint_id if state.newest else None


def _known(owner: Ownership) -> int | None:
    return owner.newest.checkpoint_id if owner.newest else None


def test_the_first_owner_finds_nothing_before_it(storage: CheckpointStorage, alice: Owner) -> None:
    assert storage.read_state() is None
    owner = storage.acquire(alice, LEASE)
    assert (owner.epoch, owner.newest, owner.previous.highest_checkpoint_id) == (1, None, 0)
    assert owner.previous.job.status == "NONE"


def test_the_state_file_is_readable_json(storage: CheckpointStorage, alice: Owner) -> None:
    owner = storage.acquire(alice, LEASE)
    owner.begin_job(resume=False)
    owner.complete(7, "checkpoints/chk-7-1")
    text = storage.store.get(STATE).decode()
    assert '\n  "newest": {\n    "checkpoint_id": 7,' in text
    found = json.loads(text)
    assert found["lease"]["owner"] == {"run_id": "run-a", "host": "alpha", "pid": 1}
    assert found["job"]["status"] == "RUNNING"


def test_a_living_owner_is_not_disturbed(
    storage: CheckpointStorage, second: CheckpointStorage, alice: Owner, bob: Owner, clock: Any
) -> None:
    owner = storage.acquire(alice, LEASE)
    clock.on_sleep.append(owner.renew)
    with pytest.raises(PipelineOwned, match=r"'flights'.*run-a on host alpha \(process 1\) since 20.*alive"):
        second.acquire(bob, LEASE)
    clock.on_sleep.clear()
    assert owner.renew()
    owner.complete(1, "checkpoints/chk-1-1")


def test_a_released_pipeline_is_taken_at_once(
    storage: CheckpointStorage, second: CheckpointStorage, alice: Owner, bob: Owner, clock: Any
) -> None:
    owner = storage.acquire(alice, LEASE)
    owner.begin_job(resume=False)
    owner.complete(5, "checkpoints/chk-5-1")
    owner.release("FINISHED")
    owner.release("FAILED")  # no effect: the lease is released
    started = clock.now
    taken = second.acquire(bob, LEASE)
    assert clock.now == started
    assert taken.epoch == 2
    assert taken.previous.job.status == "FINISHED" and taken.previous.job.ended_at is not None
    assert taken.previous.newest is not None and taken.previous.newest.location == "checkpoints/chk-5-1"
    for action in (owner.renew, lambda: owner.complete(6, "checkpoints/chk-6-1"), owner.ensure):
        with pytest.raises(OwnershipLost):
            action()


def test_a_lease_released_while_it_is_watched_is_taken(
    storage: CheckpointStorage, second: CheckpointStorage, alice: Owner, bob: Owner, clock: Any
) -> None:
    owner = storage.acquire(alice, LEASE)
    started = clock.now
    clock.on_sleep.append(lambda: owner.release("CANCELED") if clock.now > started + 5 else None)
    assert second.acquire(bob, LEASE).epoch == 2
    assert clock.now < started + LEASE


def test_an_owner_that_does_not_renew_is_replaced_after_a_whole_lease_and_fenced(
    storage: CheckpointStorage, second: CheckpointStorage, alice: Owner, bob: Owner, clock: Any
) -> None:
    owner = storage.acquire(alice, LEASE)
    owner.begin_job(resume=False)
    owner.complete(1, "checkpoints/chk-1-1")
    started = clock.now
    taken = second.acquire(bob, LEASE)
    assert clock.now >= started + LEASE
    assert (taken.epoch, taken.previous.job.status) == (2, "RUNNING")
    clock.now = started  # as if the first owner's clock had stopped: only the conditional write protects
    with pytest.raises(OwnershipLost, match=r"taken over.*run-b on host beta"):
        owner.complete(2, "checkpoints/chk-2-1")
    assert owner.lost
    assert _newest(second) == 1
    with pytest.raises(OwnershipLost):
        owner.release("FAILED")
    taken.complete(2, "checkpoints/chk-2-2")
    assert _newest(second) == 2


def test_an_owner_stops_by_its_own_clock_before_its_lease_ends(storage: CheckpointStorage, alice: Owner, clock: Any) -> None:
    owner = storage.acquire(alice, LEASE)
    assert owner.deadline < clock.now + LEASE
    clock.now = owner.deadline
    assert owner.lost
    for action in (owner.ensure, owner.renew, lambda: owner.complete(1, "checkpoints/chk-1-1")):
        with pytest.raises(OwnershipLost, match="could not be renewed"):
            action()
    assert _newest(storage) is None


def test_the_deadline_counts_from_before_the_renewal_was_sent(
    storage: CheckpointStorage, alice: Owner, clock: Any, faulty: Any
) -> None:
    owner = storage.acquire(alice, LEASE)
    put, sent = faulty.inner.put, clock.now

    def slow(*arguments: Any) -> str:
        clock.now += 10
        return str(put(*arguments))

    faulty.inner.put = slow
    owner.renew()
    assert owner.deadline <= sent + LEASE


def test_renewals_bridge_an_outage_but_not_a_longer_one(
    storage: CheckpointStorage, alice: Owner, clock: Any, faulty: Any
) -> None:
    owner = storage.acquire(alice, LEASE)
    faulty.away = True
    assert owner.renew() is False
    with pytest.raises(StorageUnavailable):
        owner.complete(1, "checkpoints/chk-1-1")
    clock.now += LEASE / 2
    faulty.away = False
    assert owner.renew() is True
    faulty.away = True
    clock.now += LEASE
    with pytest.raises(OwnershipLost):
        owner.renew()


@pytest.mark.parametrize("faults", [["lost answer"], ["lost request"], ["lost request", "lost answer"]])
def test_a_completion_with_a_lost_answer_is_recognised(
    storage: CheckpointStorage, second: CheckpointStorage, alice: Owner, faulty: Any, faults: list[str]
) -> None:
    owner = storage.acquire(alice, LEASE)
    owner.begin_job(resume=False)
    faulty.faults = list(faults)
    owner.complete(3, "checkpoints/chk-3-1")
    assert _newest(second) == 3
    assert owner.renew()
    owner.complete(4, "checkpoints/chk-4-1")
    assert [found.checkpoint_id for found in second.list_checkpoints()] == [4, 3]


def test_a_completion_with_an_unknown_outcome_is_known_after_the_next_renewal(
    storage: CheckpointStorage, second: CheckpointStorage, alice: Owner, faulty: Any
) -> None:
    owner = storage.acquire(alice, LEASE)
    put = faulty.inner.put

    def cut(*arguments: Any) -> str:
        put(*arguments)
        faulty.away = True  # it was written, and all later requests fail
        raise OutcomeUnknown("injected")

    faulty.inner.put = cut
    with pytest.raises(OutcomeUnknown):
        owner.complete(3, "checkpoints/chk-3-1")
    assert _known(owner) is None
    faulty.inner.put, faulty.away = put, False
    assert owner.renew()
    assert _known(owner) == 3
    assert _newest(second) == 3


def test_a_completion_that_was_not_written_leaves_no_trace(
    storage: CheckpointStorage, second: CheckpointStorage, alice: Owner, faulty: Any
) -> None:
    owner = storage.acquire(alice, LEASE)
    faulty.faults = ["lost request"] * 3
    with pytest.raises(OutcomeUnknown):
        owner.complete(3, "checkpoints/chk-3-1")
    assert owner.renew()
    assert owner.newest is None and _newest(second) is None


def test_an_acquisition_whose_answer_is_lost_is_recognised(
    storage: CheckpointStorage, second: CheckpointStorage, alice: Owner, bob: Owner, faulty: Any, clock: Any
) -> None:
    faulty.faults = ["lost answer"]
    owner = storage.acquire(alice, LEASE)
    owner.complete(1, "checkpoints/chk-1-1")
    owner.release("FINISHED")
    faulty.faults = ["lost request"]
    owner = storage.acquire(bob, LEASE)
    assert owner.epoch == 2 and owner.renew()


def test_a_release_whose_answer_is_lost_is_recognised(
    storage: CheckpointStorage, second: CheckpointStorage, alice: Owner, faulty: Any
) -> None:
    owner = storage.acquire(alice, LEASE)
    faulty.faults = ["lost answer"]
    owner.release("SUSPENDED")
    state = second.read_state()
    assert state is not None and state.lease is None and state.job.status == "SUSPENDED"


def test_the_watched_file_may_be_unavailable_for_some_time(
    storage: CheckpointStorage, alice: Owner, bob: Owner, faulty: Any, clock: Any
) -> None:
    storage.acquire(alice, LEASE)
    started = clock.now

    def flicker() -> None:
        faulty.away = clock.now < started + LEASE / 2

    clock.on_sleep.append(flicker)
    assert storage.acquire(bob, LEASE).epoch == 2


def test_a_renewal_at_the_last_moment_beats_the_take_over(
    storage: CheckpointStorage, second: CheckpointStorage, alice: Owner, bob: Owner, clock: Any, store: Any
) -> None:
    owner = storage.acquire(alice, LEASE)
    real_put = store.put
    done: list[bool] = []

    def late(key: str, data: bytes, mode: Any = "overwrite") -> str:
        if b"run-b" in data and not done:
            done.append(True)
            clock.now = owner.deadline - 1
            owner.renew()
            clock.on_sleep.append(owner.renew)
        return str(real_put(key, data, mode))

    store.put = late
    with pytest.raises(PipelineOwned):
        second.acquire(bob, LEASE)
    assert done and owner.renew()


def test_a_new_start_forgets_the_newest_checkpoint_and_a_resumption_does_not(storage: CheckpointStorage, alice: Owner) -> None:
    owner = storage.acquire(alice, LEASE)
    assert owner.begin_job(resume=False) == 1
    owner.complete(41, "checkpoints/chk-41-1")
    owner.release("FAILED")
    owner = storage.acquire(alice, LEASE)
    assert owner.begin_job(resume=True) == 1
    assert owner.newest is not None and owner.newest.checkpoint_id == 41
    owner.release("FINISHED")
    owner = storage.acquire(alice, LEASE)
    assert owner.begin_job(resume=False) == 2
    assert owner.newest is None and owner.previous.highest_checkpoint_id == 41
    owner.complete(1, "checkpoints/chk-1-3")
    owner.release("CANCELED")
    state = storage.read_state()
    assert state is not None and state.highest_checkpoint_id == 41
    assert [found.location for found in state.retained] == ["checkpoints/chk-1-3", "checkpoints/chk-41-1"]


def test_a_job_that_continues_from_an_older_checkpoint_does_not_return_to_the_newer(
    storage: CheckpointStorage, alice: Owner
) -> None:
    owner = storage.acquire(alice, LEASE)
    owner.begin_job(resume=False)
    for number in (1, 2):
        owner.complete(number, f"checkpoints/chk-{number}-1")
    owner.release("FAILED")
    owner = storage.acquire(alice, LEASE)
    assert owner.begin_job(resume=True, restored=owner.previous.retained[1]) == 1
    assert _known(owner) == 1 and _newest(storage) == 1
    assert [found.checkpoint_id for found in storage.list_checkpoints()] == [2, 1]


def test_of_many_that_race_one_owns_the_pipeline(store: Any, clock: Any) -> None:
    storages = [CheckpointStorage(store, "flights", monotonic=clock.monotonic, sleep=clock.sleep) for _ in range(4)]
    barrier = threading.Barrier(4)

    def acquire(number: int) -> object:
        barrier.wait(10)
        try:
            owner = storages[number].acquire(Owner(run_id=str(number), host="h", pid=number), 1e9, poll=1.0)
        except PipelineOwned as error:
            return error
        return owner.epoch

    # The losers watch an owner that renews; in this test it renews once.
    clock.on_sleep.append(lambda: [s.ownership.renew() for s in storages if s.ownership is not None])
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(acquire, range(4)))
    assert sorted(type(result).__name__ for result in results) == ["PipelineOwned"] * 3 + ["int"]


def test_completions_and_renewals_at_the_same_time(storage: CheckpointStorage, alice: Owner) -> None:
    owner = storage.acquire(alice, LEASE)
    stop = threading.Event()
    failures: list[BaseException] = []

    def renew() -> None:
        try:
            while not stop.is_set():
                assert owner.renew()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=renew)
    thread.start()
    for number in range(1, 26):
        owner.complete(number, f"checkpoints/chk-{number}-1")
    stop.set()
    thread.join()
    assert failures == []
    assert [found.checkpoint_id for found in storage.list_checkpoints()] == list(range(25, 0, -1))


def test_the_renewer_renews_until_the_loss_and_reports_it_once(
    storage: CheckpointStorage, store: Any, alice: Owner, bob: Owner
) -> None:
    reported = threading.Event()
    losses: list[StorageError] = []
    owner = CheckpointStorage(store, "flights").acquire(alice, 6.0)

    def on_lost(error: StorageError) -> None:
        losses.append(error)
        reported.set()

    with LeaseRenewer(owner, on_lost):
        data = store.get(STATE)
        deadline = threading.Event()
        while store.get(STATE) == data:
            assert not deadline.wait(0.02) and not reported.is_set()
        store.put(STATE, data.replace(b'"epoch": 1', b'"epoch": 2'))
        assert reported.wait(20)
    assert len(losses) == 1 and isinstance(losses[0], OwnershipLost)


def test_an_error_that_is_none_of_storage_is_told_as_well(
    storage: CheckpointStorage, alice: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = storage.acquire(alice, 3.0)
    told: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def renew() -> bool:
        raise ValueError("of a library")

    monkeypatch.setattr(owner, "renew", renew)
    with LeaseRenewer(owner, told.put):
        assert isinstance(told.get(timeout=30), ValueError)


def test_the_end_of_the_lease_is_told_also_while_storage_neither_carries_out_a_renewal_nor_refuses_it(
    storage: CheckpointStorage, store: Any, alice: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = CheckpointStorage(store, "flights").acquire(alice, 0.3)
    told: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    answered, ended = threading.Event(), threading.Event()

    def renew() -> bool:
        answered.wait(60)
        ended.set()
        raise OwnershipLost("when storage has answered")

    monkeypatch.setattr(owner, "renew", renew)
    with LeaseRenewer(owner, told.put):
        error = told.get(timeout=30)
        assert isinstance(error, OwnershipLost) and "within its lease of 0.3 s" in str(error) and not ended.is_set()
        answered.set()
        assert ended.wait(30)
    assert told.empty()


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 1}', b"[]", b"\xff\xfe", b'{"version": "1"}'])
def test_a_state_that_cannot_be_read_is_refused_and_left(storage: CheckpointStorage, alice: Owner, content: bytes) -> None:
    storage.store.put(STATE, content)
    with pytest.raises(CorruptPipelineState, match=f"{storage.store.url}/{STATE}"):
        storage.acquire(alice, LEASE)
    assert storage.store.get(STATE) == content


def test_a_state_of_a_newer_release_is_refused(storage: CheckpointStorage, alice: Owner) -> None:
    storage.store.put(STATE, b'{"version": 6, "anything": "else"}')
    with pytest.raises(UnknownPipelineStateVersion, match=r"version 5 or older.*found version 6"):
        storage.acquire(alice, LEASE)


def test_a_state_deleted_under_its_owner_ends_the_ownership(storage: CheckpointStorage, alice: Owner) -> None:
    owner = storage.acquire(alice, LEASE)
    storage.store.delete([STATE])
    with pytest.raises(OwnershipLost, match="was deleted"):
        owner.complete(1, "checkpoints/chk-1-1")


_ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["renew", "complete", "silence", "restart"]),
        st.sampled_from(["fine", "lost answer", "lost request", "unavailable"]),
    ),
    max_size=12,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=_ACTIONS)
def test_a_completed_checkpoint_stays_completed_after_any_lost_answers(
    storage: CheckpointStorage, faulty: Any, clock: Any, alice: Owner, actions: list[tuple[str, str]]
) -> None:
    """A completion that was reported to an owner is found, a refused one is not, and epochs grow."""
    faulty.inner.delete([STATE])
    owner, completed, in_doubt, epoch = storage.acquire(alice, LEASE), 0, set[int](), 1
    for number, (action, fault) in enumerate(actions, start=1):
        if action == "silence":
            clock.now += LEASE / 3
            continue
        if action == "restart":
            owner = storage.acquire(alice, LEASE)
            assert owner.epoch > epoch
            epoch = owner.epoch
        faulty.faults = [fault] * (3 if fault == "lost request" else 1)
        try:
            if action == "complete":
                owner.complete(number, f"checkpoints/chk-{number}-{epoch}")
                completed, in_doubt = number, set()
            elif owner.renew():
                newest = owner.newest.checkpoint_id if owner.newest else 0
                assert newest == completed or newest in in_doubt
                completed, in_doubt = newest, set()
        except OutcomeUnknown:
            in_doubt.add(number)
        except (StorageUnavailable, OwnershipLost):
            pass
        faulty.faults = []
        found = _newest(storage) or 0
        assert found == completed or found in in_doubt
