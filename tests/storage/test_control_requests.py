"""Requests and answers: requested once, read once, answered once, although messages get lost or are corrupt."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dagster_checkpoints.control.request_box import LIST_SECONDS, TICK_SECONDS, RequestBox
from dagster_checkpoints.control.requests import Answer, ControlRequest
from dagster_checkpoints.errors import (
    CorruptAnswer,
    CorruptRequest,
    InvalidRequest,
    OutcomeUnknown,
    RequestConflict,
    StorageUnavailable,
)
from dagster_checkpoints.files.local import LocalStore
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.storage.layout import Layout

NOW = datetime(2025, 1, 1, tzinfo=UTC)
LAYOUT = Layout("flights")


def _request(request_id: str = "one", **changes: Any) -> ControlRequest:
    given: dict[str, Any] = {"kind": "savepoint", "epoch": 3, "deadline_seconds": 60.0, "asked_by": "me", "asked_at": NOW}
    return ControlRequest(request_id=request_id, **{**given, **changes})


def _answer(request_id: str = "one", status: Any = "done", **changes: Any) -> Answer:
    return Answer(request_id=request_id, status=status, answered_at=NOW, **changes)


def _ids(requests: list[ControlRequest]) -> list[str]:
    return [request.request_id for request in requests]


@pytest.fixture
def asker(store: ObjectStore) -> RequestBox:
    return RequestBox(store, LAYOUT)


@pytest.fixture
def owner(faulty: Any) -> RequestBox:
    return RequestBox(faulty, LAYOUT)


def test_a_request_reaches_its_owner_and_the_answer_its_requester(asker: RequestBox, owner: RequestBox) -> None:
    request = _request(target="s3://bucket/somewhere", name="before-release", recorded_by_asker=True)
    assert asker.ask(request) == request
    assert owner.open_requests(2) == owner.open_requests(4) == []
    assert owner.open_requests(3) == [request]
    assert asker.read_answer("one") is None
    accepted = _answer(status="accepted", message="checkpoint 7 is under way")
    owner.answer(accepted)
    assert asker.read_answer("one") == accepted and not accepted.final
    assert owner.open_requests(3) == [request]
    done = _answer(checkpoint_id=7, location="savepoints/savepoint-7-x", url="file:///x", details={"bytes": 12})
    owner.answer(done)
    assert asker.read_answer("one") == done and done.final
    assert owner.open_requests(3) == []


def test_requests_come_oldest_first(asker: RequestBox, owner: RequestBox) -> None:
    for number, request_id in enumerate(("c", "a", "b")):
        asker.ask(_request(request_id, asked_at=NOW + timedelta(seconds=number)))
    assert _ids(owner.open_requests(3)) == ["c", "a", "b"]


def test_requests_with_the_same_id_are_one_request(asker: RequestBox, owner: RequestBox) -> None:
    first = asker.ask(_request())
    # Another time, another requester, another owner's epoch: the same request.
    assert asker.ask(_request(epoch=4, asked_by="another", asked_at=NOW + timedelta(days=1))) == first
    owner.answer(_answer())
    assert asker.ask(_request()) == first
    assert owner.open_requests(3) == []


@pytest.mark.parametrize("change", [{"kind": "stop"}, {"name": "other"}, {"target": "/elsewhere"}])
def test_an_id_that_is_used_for_something_else_is_refused(asker: RequestBox, change: dict[str, Any]) -> None:
    asker.ask(_request())
    with pytest.raises(RequestConflict, match=f"'one' was used before, by me.*{next(iter(change))}="):
        asker.ask(_request(**change))


def test_concurrent_requests_with_one_id_are_one_request(store: ObjectStore) -> None:
    barrier = threading.Barrier(6)

    def ask(number: int) -> ControlRequest:
        barrier.wait(10)
        return RequestBox(store, LAYOUT).ask(_request(asked_by=str(number)))

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, range(6)))
    assert len(set(answers)) == 1


@pytest.mark.parametrize("faults", [["lost answer"], ["lost request"], ["lost request", "lost answer"]])
def test_a_request_whose_files_get_lost_is_carried_out_once(owner: RequestBox, faulty: Any, faults: list[str]) -> None:
    faulty.faults = list(faults)
    assert owner.ask(_request()) == _request()
    faulty.faults = list(faults)
    assert owner.answer(_answer(message="first")) == _answer(message="first")
    assert owner.answer(_answer(message="second")) == _answer(message="first")
    assert owner.read_answer("one") == _answer(message="first")


def test_a_request_with_an_unknown_outcome_may_be_repeated(owner: RequestBox, faulty: Any) -> None:
    faulty.faults = ["lost request", "lost request", "lost answer"]
    with pytest.raises(OutcomeUnknown):
        owner.ask(_request())
    assert owner.ask(_request()) == _request()


def test_polling_is_one_listing_or_less(store: ObjectStore, clock: Any) -> None:
    """Where the store shows without a listing that nothing has changed, the requests are listed once a second."""
    calls: list[str] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            found = getattr(store, name)
            if callable(found):
                calls.append(name)
            return found

    asker, owner = RequestBox(store, LAYOUT), RequestBox(Counting(), LAYOUT, clock.monotonic)
    for number in range(5):
        asker.ask(_request(str(number)))
    for number in range(3):
        asker.answer(_answer(str(number)))
    assert _ids(owner.open_requests(3)) == ["3", "4"]
    assert calls == ["change_mark", "list", "get", "get"]
    clock.sleep(2 * TICK_SECONDS)
    owner.open_requests(3)
    calls.clear()
    for _ in range(4):
        clock.sleep(LIST_SECONDS / 4)
        assert _ids(owner.open_requests(3)) == ["3", "4"]
    marked = store.change_mark(LAYOUT.requests) is not None
    assert calls == [*["change_mark"] * 4, "list"] if marked else ["change_mark", "list"] * 4


STEPS = st.tuples(st.sampled_from(["ask", "answer", "look"]), st.sampled_from([0.0, 0.003, 0.02, 0.2, 1.0]))


@settings(max_examples=50)
@given(steps=st.lists(STEPS, max_size=8))
@example(steps=[("look", 0.2), ("ask", 0.0), ("look", 0.0), ("ask", 0.003), ("look", 0.2)])
def test_a_file_system_with_ticks_hides_no_request(tmp_path_factory: Any, steps: list[tuple[str, float]]) -> None:
    """Several changes within a tick leave the same mark: each is found by a look that comes a tick later, or by the next one."""
    now, tick, asked, open_ids = 100.0, 0.01, 0, set[str]()

    class Ticking(LocalStore):
        def change_mark(self, prefix: str) -> str | None:
            return str(changed_at // tick)

    store, changed_at = Ticking(tmp_path_factory.mktemp("ticks")), now
    asker, owner = RequestBox(store, LAYOUT), RequestBox(store, LAYOUT, lambda: now)
    for action, seconds in steps:
        match action:
            case "ask":
                asker.ask(_request(str(asked)))
                open_ids.add(str(asked))
                asked, changed_at = asked + 1, now
            case "answer" if open_ids:
                asker.answer(_answer(open_ids.pop()))
                changed_at = now
            case _:
                found = set(_ids(owner.open_requests(3)))
                if now - changed_at >= tick:  # the first look after the tick of the last change
                    assert found == open_ids
        now += seconds
    now += tick
    assert set(_ids(owner.open_requests(3))) == open_ids


BROKEN = [
    b"",
    b"{",
    b"\xff\xfe\x00",
    b"[]",
    b"[" * 100_000,
    b'{"request_id": "bad"}',
    msgspec.json.encode(_request("bad")).replace(b"savepoint", b"explode"),
    msgspec.json.encode(_request("bad")).replace(b"00Z", b"00"),  # a time without a time zone
    msgspec.json.encode(_request("bad", version=2)),
    msgspec.json.encode(_request("other")),
    msgspec.json.encode(_request("bad", target="relative/path")),
    msgspec.json.encode(_request("bad", name="../../escape")),
    msgspec.json.encode(_request("bad", kind="end_source")),
    msgspec.json.encode(_request("bad", deadline_seconds=-1.0)),
]


@pytest.mark.parametrize("store", ["local"], indirect=True)
@pytest.mark.parametrize("content", BROKEN)
def test_a_corrupt_request_is_refused_and_disturbs_no_other(
    asker: RequestBox, owner: RequestBox, store: Any, content: bytes
) -> None:
    store.put("flights/requests/bad.json", content)
    asker.ask(_request("fine"))
    assert _ids(owner.open_requests(3)) == ["fine"]
    answer = asker.read_answer("bad")
    assert answer is not None and (answer.status, answer.reason) == ("failed", "INVALID_REQUEST")
    assert len(answer.message) > 30
    assert _ids(owner.open_requests(3)) == ["fine"]


def test_a_corrupt_request_that_cannot_be_answered_disturbs_no_other(asker: RequestBox, owner: RequestBox, faulty: Any) -> None:
    asker.ask(_request("fine"))
    faulty.inner.put("flights/requests/bad.json", b"?")
    faulty.faults = ["unavailable"]
    assert _ids(owner.open_requests(3)) == ["fine"]
    assert asker.read_answer("bad") is None
    owner.open_requests(3)
    assert asker.read_answer("bad") is not None


def test_files_of_other_programs_are_not_touched(
    asker: RequestBox, owner: RequestBox, store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("readme.txt", "with space.json", "sub/one.json", ".json"):
        store.put(f"flights/requests/{name}", b"?")
    asker.ask(_request())
    for _ in range(2):
        assert _ids(owner.open_requests(3)) == ["one"]
    assert len([message for message in caplog.messages if "Ignoring" in message]) == 4
    assert store.get("flights/requests/readme.txt") == b"?"


@pytest.mark.parametrize("store", ["local"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"request_id": ""}, "request id"),
        ({"request_id": "a/b"}, "request id.*'a/b'"),
        ({"request_id": "x.answer"}, "not ending with"),
        ({"request_id": "x" * 129}, "at most 128"),
        ({"name": "a b"}, "savepoint's name"),
        ({"name": ".."}, "savepoint's name"),
        ({"target": "here"}, "relative path"),
        ({"target": "gs://bucket"}, "not supported"),
        ({"target": "s3://"}, "no bucket"),
        ({"target": "file://host/x"}, "three slashes"),
        ({"target": "/t\udcff"}, "target that is text in UTF-8"),
        ({"kind": "end_source", "stage": "s\udcff"}, "stage that is text in UTF-8"),
        ({"kind": "end_source", "stage": "s", "instance": "\udcff"}, "instance that is text in UTF-8"),
        ({"asked_by": "\udcff"}, "asked_by that is text in UTF-8"),
        ({"kind": "checkpoint", "name": "x"}, "only with a savepoint"),
        ({"kind": "end_source"}, "name of the source"),
        ({"stage": "flights"}, "only with end_source"),
        ({"drain": True}, "only with a stop"),
        ({"kind": "stop", "bounded": "finish"}, "only with a drain"),
        ({"deadline_seconds": 0.0}, "deadline"),
        ({"deadline_seconds": float("nan")}, "deadline"),
    ],
)
def test_a_request_that_no_pipeline_could_carry_out_is_not_written(
    asker: RequestBox, store: Any, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidRequest, match=text):
        asker.ask(_request(**changes))
    assert list(store.list("flights/")) == []


@pytest.mark.parametrize("store", ["local"], indirect=True)
@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"version": 2}', b"[" * 100_000])
def test_an_unreadable_file_is_named(asker: RequestBox, owner: RequestBox, store: Any, content: bytes) -> None:
    store.put("flights/requests/one.json", content)
    with pytest.raises(CorruptRequest, match=f"{store.url}/flights/requests/one.json"):
        asker.read_request("one")
    with pytest.raises(CorruptRequest):
        asker.ask(_request())
    store.put("flights/requests/one.answer.json", content)
    with pytest.raises(CorruptAnswer, match=f"{store.url}/flights/requests/one.answer.json"):
        asker.read_answer("one")
    assert owner.open_requests(3) == []  # a final answer exists, with any content


def test_requests_to_dead_owners_are_refused_by_the_next(asker: RequestBox, owner: RequestBox) -> None:
    for epoch in (1, 2, 3, 4):
        asker.ask(_request(f"to-{epoch}", epoch=epoch))
    owner.answer(_answer("to-1"))
    owner.answer(_answer("to-2", "accepted"))
    assert owner.refuse_older(3, "Savepoint x was complete.") == ["to-2"]
    answer = asker.read_answer("to-2")
    assert answer is not None and answer.reason == "NO_RUNNING_PIPELINE"
    assert "epoch 2" in answer.message and answer.message.endswith("Savepoint x was complete.")
    assert _ids(owner.open_requests(3)) == ["to-3"] and _ids(owner.open_requests(4)) == ["to-4"]
    assert owner.refuse_older(3) == []


def test_answered_requests_are_swept_after_a_while(tmp_path: Any) -> None:
    import os

    store = LocalStore(tmp_path)
    box = RequestBox(store, LAYOUT)
    for name in ("old", "new", "open"):
        box.ask(_request(name))
    for name in ("old", "new"):
        box.answer(_answer(name, "accepted"))
        box.answer(_answer(name))
    old = tmp_path / "flights/requests/old.answer.json"
    os.utime(old, (old.stat().st_atime, old.stat().st_mtime - 3600))
    assert box.sweep(7200) == 0
    assert box.sweep(1800) == 1
    assert sorted(path.name for path in old.parent.iterdir()) == [
        "new.accepted.json",
        "new.answer.json",
        "new.json",
        "open.json",
    ]
    assert _ids(box.open_requests(3)) == ["open"]
    assert box.sweep(0) == 1 and box.sweep(0) == 0


def test_unavailable_storage_is_reported(owner: RequestBox, faulty: Any) -> None:
    faulty.away = True
    with pytest.raises(StorageUnavailable):
        owner.open_requests(3)
    faulty.away = False
    owner.ask(_request())
    assert _ids(owner.open_requests(3)) == ["one"]


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "accept", "answer", "poll", "restart", "break"]),
        st.integers(0, 3),
        st.sampled_from(["fine", "lost answer", "lost request", "unavailable"]),
    ),
    max_size=25,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_STEPS)
def test_no_request_is_open_twice_after_any_lost_answer(faulty: Any, steps: list[tuple[str, int, str]]) -> None:
    """A request that was reported as sent is open until it is answered, and never again; the first final answer stays."""
    faulty.inner.delete([info.key for info in faulty.inner.list("flights/requests/")])
    box = RequestBox(faulty, LAYOUT)
    asked: set[int] = set()
    maybe: set[int] = set()
    answered: dict[int, set[str]] = {}
    for turn, (action, number, fault) in enumerate(steps):
        name = f"r{number}"
        if action == "restart":
            box = RequestBox(faulty, LAYOUT)
            continue
        if action == "break":
            faulty.inner.put(f"flights/requests/broken{number}.json", b"?")
            continue
        faulty.faults = [fault] * 3 if action in ("ask", "answer", "accept") and fault != "fine" else []
        try:
            if action == "ask":
                box.ask(_request(name))
                asked.add(number)
            elif action == "accept":
                box.answer(_answer(name, "accepted"))
            elif action == "answer":
                stands = box.answer(_answer(name, message=str(turn)))
                answered.setdefault(number, {stands.message})
                assert stands.message in answered[number]
                answered[number] = {stands.message}
        except OutcomeUnknown:
            if action == "ask":
                maybe.add(number)
            elif action == "answer" and number not in answered:
                answered[number] = {str(turn), "none"}  # until the next read
        except StorageUnavailable:
            pass
        faulty.faults = []
        for number_, messages in answered.items():
            final = box.read_answer(f"r{number_}")
            stands_now = final.message if final is not None and final.final else "none"
            assert stands_now in messages
            answered[number_] = {stands_now}
        answered = {key: value for key, value in answered.items() if value != {"none"}}
        found = {int(one.request_id[1:]) for one in box.open_requests(3)}
        assert asked - answered.keys() <= found <= (asked | maybe) - answered.keys()
        asked |= found
