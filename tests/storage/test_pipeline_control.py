"""The requester's side: whether a pipeline is running, how the answer arrives, and the error when no answer can come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.control import NoRunningPipeline, PipelineControl, RequestFailed, RequestTimedOut
from dagster_checkpoints.control.request_box import RequestBox
from dagster_checkpoints.control.requests import Answer, ControlRequest
from dagster_checkpoints.errors import InvalidRequest, RequestConflict, StorageUnavailable, UnknownRequest
from dagster_checkpoints.execution.pipeline_state import Owner
from dagster_checkpoints.files.local import LocalStore
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.storage import CheckpointStorage

LEASE = 30.0
NOW = datetime(2025, 1, 1, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """Other tests of requests cover the kinds of stores."""
    return LocalStore(tmp_path / "root")


@pytest.fixture
def box(second: CheckpointStorage) -> RequestBox:
    """The owner's storage."""
    return RequestBox(second.store, second.layout)


@pytest.fixture
def control(storage: CheckpointStorage, clock: Any) -> PipelineControl:
    """The control of a process whose connection can fail."""
    return PipelineControl(storage, asked_by="a test", monotonic=clock.monotonic, sleep=clock.sleep, poll=4.0)


@pytest.fixture
def running(second: CheckpointStorage, alice: Owner, clock: Any) -> CheckpointStorage:
    """The pipeline, with an owner that renews its lease while time passes."""
    owner = second.acquire(alice, LEASE)
    owner.begin_job(resume=False)
    clock.on_sleep.append(owner.renew)
    return second


def _answer(request_id: str, status: Any = "done", **changes: Any) -> Answer:
    return Answer(request_id=request_id, status=status, answered_at=NOW, **changes)


def test_every_request_reaches_the_owner_as_it_was_asked(control: PipelineControl, running: CheckpointStorage, box: Any) -> None:
    handles = [
        control.checkpoint(request_id="c", deadline=5),
        control.savepoint(request_id="s", target="/tmp/x", name="n", recorded_by_asker=True),
        control.stop(drain=True, request_id="d"),
        control.stop(drain=False, request_id="p", target="s3://bucket/x", name="m"),
        control.end_source("live", "EWR", request_id="e"),
        control.end_source("live", request_id="a"),
    ]
    found: dict[str, ControlRequest] = {request.request_id: request for request in box.open_requests(1)}
    assert [found[handle.request_id] for handle in handles] == [handle.request for handle in handles]
    assert (found["c"].kind, found["c"].deadline_seconds, found["c"].asked_by) == ("checkpoint", 5, "a test")
    assert (found["s"].target, found["s"].name, found["s"].recorded_by_asker) == ("/tmp/x", "n", True)
    assert (found["d"].kind, found["d"].drain, found["p"].drain) == ("stop", True, False)
    assert (found["e"].stage, found["e"].instance, found["a"].instance) == ("live", "EWR", None)


def test_ids_are_generated_unless_given(control: PipelineControl, running: CheckpointStorage, box: Any) -> None:
    ids = {control.end_source("live").request_id for _ in range(3)} | {control.checkpoint().request_id}
    assert len(ids) == 4 and {request.request_id for request in box.open_requests(1)} == ids


def test_an_answer_is_waited_for(control: PipelineControl, running: CheckpointStorage, box: Any, clock: Any) -> None:
    handle = control.savepoint()
    assert handle.poll() is None
    started = clock.now

    def owner() -> None:
        if clock.now > started + 100:
            box.answer(_answer(handle.request_id, checkpoint_id=7, url="file:///x"))
        elif clock.now > started + 20:
            box.answer(_answer(handle.request_id, "accepted"))

    clock.on_sleep.append(owner)
    assert handle.wait(600).checkpoint_id == 7
    assert started + 100 < clock.now < started + 105
    assert handle.wait(0).checkpoint_id == 7


def test_a_failure_names_its_cause_and_the_savepoint_that_it_left(control: PipelineControl, running: Any, box: Any) -> None:
    handle = control.stop(drain=False)
    box.answer(_answer(handle.request_id, "failed", reason="TASK_FAILURE", message="a commit raised", url="s3://b/savepoint-7"))
    with pytest.raises(RequestFailed, match=r"TASK_FAILURE: a commit raised.*s3://b/savepoint-7") as caught:
        handle.wait(10)
    assert (caught.value.reason, caught.value.message, caught.value.url) == (
        "TASK_FAILURE",
        "a commit raised",
        "s3://b/savepoint-7",
    )


def test_without_an_answer_in_time_the_request_stays_valid(control: PipelineControl, running: Any, box: Any, clock: Any) -> None:
    handle = control.checkpoint()
    started = clock.now
    with pytest.raises(RequestTimedOut, match=f"{handle.request_id}.*'flights'.*within 45 s.*stays valid"):
        handle.wait(45)
    assert clock.now == pytest.approx(started + 45)
    assert [request.request_id for request in box.open_requests(1)] == [handle.request_id]
    box.answer(_answer(handle.request_id))
    assert control.handle(handle.request_id).wait(1).final


@pytest.mark.parametrize("seconds", [0.02, 2.0])
def test_an_answer_is_looked_for_as_often_as_the_storage_allows(
    storage: CheckpointStorage, running: Any, clock: Any, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """0.02 s in a directory; a store that bills each look says more."""
    if seconds != LocalStore("anywhere").poll_seconds:
        monkeypatch.setattr(LocalStore, "poll_seconds", seconds)
    looks: list[float] = []
    clock.on_sleep.append(lambda: looks.append(clock.now))
    control = PipelineControl(storage, asked_by="a test", monotonic=clock.monotonic, sleep=clock.sleep)
    with pytest.raises(RequestTimedOut):
        control.checkpoint().wait(20)
    assert max(later - earlier for earlier, later in pairwise(looks)) == pytest.approx(seconds)


def test_a_repeated_request_is_one_request(control: PipelineControl, running: Any, box: Any) -> None:
    first = control.savepoint(request_id="nightly")
    again = control.savepoint(request_id="nightly")
    assert first.request == again.request
    with pytest.raises(RequestConflict, match="nightly"):
        control.stop(request_id="nightly", drain=False)
    box.answer(_answer("nightly"))
    assert control.savepoint(request_id="nightly").wait(1).final
    assert box.open_requests(1) == []


def test_a_request_repeated_after_the_end_finds_its_answer(control: PipelineControl, running: Any, box: Any) -> None:
    control.stop(request_id="stop", drain=False)
    box.answer(_answer("stop", checkpoint_id=3))
    running.ownership.release("FINISHED")
    assert control.stop(request_id="stop", drain=False).wait(1).checkpoint_id == 3
    with pytest.raises(NoRunningPipeline, match=r"'flights'.*not running.*FINISHED"):
        control.stop(request_id="another", drain=False)


def test_a_pipeline_that_is_not_running_gets_no_request(
    control: PipelineControl, storage: CheckpointStorage, alice: Owner, box: Any
) -> None:
    with pytest.raises(NoRunningPipeline, match=f"'flights' \\({storage.url}\\) is not running. It has never run here"):
        control.checkpoint()
    owner = storage.acquire(alice, LEASE)
    owner.begin_job(resume=False)
    owner.complete(1, "checkpoints/chk-1-1")
    owner.release("FAILED")
    with pytest.raises(NoRunningPipeline, match=r"job \(1\) ended FAILED at 20.*checkpoints/chk-1-1"):
        control.savepoint()
    assert not list(storage.store.list("flights/requests/"))


def test_a_run_that_ends_without_an_answer_is_noticed(
    control: PipelineControl, running: CheckpointStorage, clock: Any, bob: Owner
) -> None:
    handle = control.savepoint()
    started = clock.now
    clock.on_sleep[:] = [lambda: running.ownership.release("FINISHED") if running.ownership and clock.now > started + 5 else None]
    with pytest.raises(NoRunningPipeline, match=rf"{handle.request_id}.*the run has ended.*ended FINISHED"):
        handle.wait(600)
    assert clock.now < started + 5 + LEASE
    clock.on_sleep.clear()
    running.acquire(bob, LEASE)
    with pytest.raises(NoRunningPipeline, match=r"epoch 1\) has ended.*owned by run run-b on host beta"):
        control.handle(handle.request_id).wait(600)


def test_an_answer_written_just_before_the_end_is_not_missed(
    control: PipelineControl, running: CheckpointStorage, box: Any, clock: Any
) -> None:
    handle = control.stop(drain=True)
    read_state, calls = running.read_state, list[int]()

    def ends_meanwhile() -> Any:
        if not calls:
            box.answer(_answer(handle.request_id, location="savepoints/savepoint-1-x"))
            assert running.ownership is not None
            clock.on_sleep.clear()
            running.ownership.release("FINISHED")
        calls.append(1)
        return read_state()

    control._storage.read_state = ends_meanwhile  # type: ignore[method-assign]
    assert handle.wait(600).location == "savepoints/savepoint-1-x"
    assert calls == [1]


def test_a_killed_owner_is_detected_after_a_lease_without_renewal(
    control: PipelineControl, running: CheckpointStorage, clock: Any
) -> None:
    clock.on_sleep.clear()  # SIGKILL
    handle, started = control.savepoint(), clock.now
    with pytest.raises(NoRunningPipeline, match=r"run-a on host alpha.*dead.*whole 30 s.*no checkpoint to resume from"):
        handle.wait(600)
    assert started + LEASE <= clock.now <= started + 2 * LEASE


def test_a_slow_owner_that_renews_is_not_declared_dead(control: PipelineControl, running: Any, box: Any, clock: Any) -> None:
    handle, started = control.savepoint(), clock.now
    clock.on_sleep.append(lambda: box.answer(_answer(handle.request_id)) if clock.now > started + 10 * LEASE else None)
    assert handle.wait(20 * LEASE).final


def test_a_request_refused_by_the_next_owner_says_that_it_was_not_carried_out(
    control: PipelineControl, running: CheckpointStorage, box: Any, bob: Owner, clock: Any
) -> None:
    handle = control.checkpoint()
    clock.on_sleep.clear()
    owner = running.acquire(bob, LEASE)
    box.refuse_older(owner.epoch, "How the earlier run ended.")
    with pytest.raises(NoRunningPipeline, match="How the earlier run ended"):
        handle.wait(600)


def test_storage_may_be_unavailable_for_some_time(
    control: PipelineControl, running: Any, box: Any, clock: Any, faulty: Any
) -> None:
    handle, started = control.checkpoint(), clock.now
    box.answer(_answer(handle.request_id))
    faulty.away = True
    clock.on_sleep.append(lambda: setattr(faulty, "away", clock.now < started + 2 * LEASE))
    assert handle.wait(600).final
    faulty.away = True
    clock.on_sleep.pop()
    with pytest.raises(RequestTimedOut, match="The last read of the storage failed: injected"):
        handle.wait(5)
    with pytest.raises(StorageUnavailable):
        handle.poll()


def test_an_unknown_request_id_is_reported(control: PipelineControl, running: Any) -> None:
    handle = control.handle("never-asked")
    for action in (handle.poll, lambda: handle.wait(5), lambda: handle.request):
        with pytest.raises(UnknownRequest, match=r"'never-asked'.*'flights'"):
            action()
    with pytest.raises(InvalidRequest, match="request id"):
        control.handle("a/b")


def test_an_invalid_request_is_refused_before_storage_is_read(control: PipelineControl) -> None:
    actions: tuple[Callable[[], object], ...] = (
        lambda: control.savepoint(target="here"),
        lambda: control.savepoint(name="a/b"),
        lambda: control.stop(drain=True, request_id="?"),
        lambda: control.end_source(""),
        lambda: control.checkpoint(deadline=0),
    )
    for action in actions:
        with pytest.raises(InvalidRequest):
            action()


def test_state_and_status_are_read_from_outside(control: PipelineControl, running: CheckpointStorage) -> None:
    state = control.state()
    assert state is not None and state.lease is not None and state.lease.owner.run_id == "run-a"
    assert control.status() is None


def test_concurrent_requesters_and_an_owner_lose_no_request(s3_store: Any, alice: Owner) -> None:
    """Several processes send requests, with real clocks, while the owner polls and answers."""
    store = s3_store
    owner_storage = CheckpointStorage(store, "flights")
    epoch = owner_storage.acquire(alice, 60.0).epoch
    box, stop, seen = RequestBox(store, owner_storage.layout), threading.Event(), list[str]()

    def own() -> None:
        while not stop.is_set():
            for request in box.open_requests(epoch):
                seen.append(request.request_id)
                box.answer(_answer(request.request_id, message=request.stage))

    owner = threading.Thread(target=own)
    owner.start()
    answers: dict[str, str] = {}

    def ask(number: int) -> None:
        control = PipelineControl(CheckpointStorage(store, "flights"), asked_by=str(number), poll=0.01)
        for turn in range(4):
            stage = f"stage-{number}-{turn}"
            answers[stage] = control.end_source(stage).wait(60).message

    askers = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in askers:
        thread.start()
    for thread in askers:
        thread.join(120)
    stop.set()
    owner.join(60)
    assert len(answers) == 12 and all(stage == message for stage, message in answers.items())
    assert len(seen) == len(set(seen)) == 12
