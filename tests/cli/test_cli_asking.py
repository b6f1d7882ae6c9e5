"""`trigger`, `savepoint`, `stop`, `end-source`, `requests`: the request, the wait for the answer, and the output."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dagster_checkpoints.cli import requests as asking
from dagster_checkpoints.control.request_box import RequestBox
from dagster_checkpoints.control.requests import Answer, ControlRequest
from dagster_checkpoints.control.status import InstanceStatus, StageStatus


def done(request: ControlRequest, **changes: Any) -> Answer:
    return Answer(request_id=request.request_id, status="done", answered_at=datetime.now(UTC), **changes)


def failed(request: ControlRequest, reason: str, message: str, **changes: Any) -> Answer:
    return msgspec.structs.replace(done(request, **changes), status="failed", reason=reason, message=message)


def _savepoint_made(request: ControlRequest) -> Answer:
    return done(
        request,
        checkpoint_id=43,
        location="savepoints/savepoint-43-x",
        url="file:///s/savepoint-43-x",
        details={
            "roots": [],
            "finished_stages": ["history"],
            "duration": 61.234567890123456,
            **({"ended": ["live[0]"]} if request.kind == "end_source" else {}),
        },
    )


def test_a_savepoint_is_requested_and_waited_for(world: Any) -> None:
    world.run()
    seen = world.answering(_savepoint_made)
    document = world.json("savepoint", "--name", "nightly", "--deadline", "30")
    assert document["status"] == "done"
    assert (document["answer"]["checkpoint_id"], document["answer"]["url"]) == (43, "file:///s/savepoint-43-x")
    [request] = seen
    assert (request.kind, request.name, request.target, request.deadline_seconds) == ("savepoint", "nightly", "", 30.0)
    assert not request.recorded_by_asker and "dagster-checkpoints" in request.asked_by
    text = world.cli("savepoint").output
    assert "Savepoint 43 is complete; the pipeline runs on" in text and "file:///s/savepoint-43-x" in text
    assert re.search(r"^took +1 min 1 s$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("command", "asked", "part"),
    [
        (("trigger",), {"kind": "checkpoint"}, "Checkpoint 43 is complete"),
        (("stop",), {"kind": "stop", "drain": False}, "Suspended with savepoint 43; the next run resumes from it"),
        (("stop", "--drain"), {"kind": "stop", "drain": True}, "Drained with savepoint 43; the next run is a new start"),
        (("stop", "--drain", "--bounded", "finish"), {"drain": True, "bounded": "finish"}, "Drained with savepoint 43"),
        (("stop", "--name", "last"), {"kind": "stop", "name": "last"}, "Suspended"),
        (
            ("end-source", "live"),
            {"kind": "end_source", "stage": "live", "instance": None},
            "Source live has received the request",
        ),
        (
            ("end-source", "live", "--instance", "EWR"),
            {"stage": "live", "instance": "EWR"},
            "Source live[ewr] has received the request to end",
        ),
    ],
)
@pytest.mark.parametrize("corrupt_status", [False, True], ids=["without a status", "with a status that cannot be read"])
def test_every_command_reports_its_result(
    local: Any, command: tuple[str, ...], asked: dict[str, Any], part: str, corrupt_status: bool
) -> None:
    local.run()
    if corrupt_status:
        local.storage.store.put(local.storage.layout.status, b"{")
    seen = local.answering(_savepoint_made)
    assert part.lower() in local.cli(*command).output.lower()
    assert {name: getattr(seen[0], name) for name in asked} == asked


def test_the_end_of_a_source_that_had_ended_before_changes_nothing(local: Any) -> None:
    local.run()
    local.answering(done)
    assert "Source live had ended before: there was nothing to do" in local.cli("end-source", "live").output


def test_a_drain_names_the_bounded_sources_that_it_has_cut(local: Any) -> None:
    local.run()
    local.answering(lambda request: done(request, checkpoint_id=43, location="x", details={"cut": ["history[0]"]}))
    output = " ".join(local.cli("stop", "--drain").output.split())
    assert "Not read to their end: history[0] (--bounded finish reads bounded sources first)" in output
    assert "only with a drain" in local.cli("stop", "--bounded", "finish", code=2).stderr


def test_a_drain_names_the_sources_that_had_more_to_read(local: Any) -> None:
    local.run()
    local.answering(_savepoint_made)
    instances = [InstanceStatus(name=name, state="RUNNING", caught_up=name == "a") for name in "ab"]
    reader = StageStatus(name="hours", finished=False, instances=tuple(instances[1:]), inputs={"live": "pointwise"})
    live = StageStatus(name="live", finished=False, instances=tuple(instances), inputs={})
    local.status(stages=(live, reader))
    left = (
        "Not caught up when the drain was asked for: live[b]. What a source had not read when it ended is left, and the next run"
    )
    assert left in local.cli("stop", "--drain").stderr
    assert "caught up" not in local.cli("stop").stderr + local.cli("stop", "--drain", "--json").stderr
    local.status(stages=(msgspec.structs.replace(live, instances=tuple(instances[:1])), reader))
    assert "caught up" not in local.cli("stop", "--drain").stderr


def test_a_drain_waits_until_its_sources_have_caught_up(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    local.run()
    asked = local.answering(_savepoint_made)

    def status(number: int, *caught_up: bool | None, ended: bool = False) -> None:
        found = [InstanceStatus(name=str(n), state="RUNNING", caught_up=each) for n, each in enumerate(caught_up)]
        live = StageStatus(name="live", finished=False, instances=tuple(found), inputs={})
        last = InstanceStatus(name="0", state="RUNNING", end_of_data=ended, caught_up=None)
        history = StageStatus(name="history", finished=False, instances=(last,), inputs={})
        reader = StageStatus(name="hours", finished=False, instances=(last,), inputs={"live": "pointwise"})
        local.status(sequence=number, stages=(live, history, reader))

    steps: list[Any] = [
        lambda: None,
        lambda: status(6, True, False, ended=True),
        lambda: status(7, True, None, ended=True),
        lambda: status(8, True, True),
        lambda: status(9, True, True, ended=True),
    ]
    left, seen = iter(steps), []

    def sleeps(_: float) -> None:
        seen.append(len(asked))
        next(left, lambda: None)()

    monkeypatch.setattr(asking, "sleep", sleeps)
    status(4, True, True, ended=True)  # it may be older than the last file
    assert local.cli("stop", "--drain", "--when-caught-up").exit_code == 0
    assert [request.drain for request in asked] == [True] and seen[: len(steps)] == [0] * len(steps)
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(asking, "monotonic", lambda: next(clock))
    status(10, True, False)
    refused = local.cli("stop", "--drain", "--when-caught-up", "--deadline", "30", code=4).stderr
    assert "found live[1], history[0] not caught up; no drain was asked for" in " ".join(refused.split()) and len(asked) == 1
    assert "only for a drain" in local.cli("stop", "--when-caught-up", code=2).stderr


def test_a_drain_says_nothing_of_the_sources_of_an_earlier_run(local: Any) -> None:
    local.run()
    live = StageStatus(name="live", finished=False, instances=(InstanceStatus(name="0", state="RUNNING", caught_up=False),))
    local.status(stages=(live,))
    local.end()
    local.run()  # it has not written its status yet
    local.answering(_savepoint_made)
    assert "Not caught up" not in local.cli("stop", "--drain").stderr


def test_a_relative_target_is_relative_to_the_current_directory(
    local: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.run()
    seen = local.answering(_savepoint_made)
    monkeypatch.chdir(tmp_path)
    local.cli("savepoint", "--target", "mine", "--request-id", "a")
    local.cli("savepoint", "--target", "s3://bucket/prefix", "--request-id", "b")
    assert {r.request_id: r.target for r in seen} == {"a": str(tmp_path / "mine"), "b": "s3://bucket/prefix"}
    assert "that kind is not supported" in local.cli("savepoint", "--target", "ftp://x/y", code=2).stderr
    assert "an S3 URL has two slashes" in local.cli("stop", "--target", "s3:bucket/prefix", code=2).stderr
    assert len(seen) == 2
    assert "savepoint's name" in local.cli("savepoint", "--name", "a/b", code=2).stderr


def test_a_failed_request_is_reported_with_its_reason_and_the_savepoint_that_it_left(local: Any) -> None:
    local.run()
    local.answering(lambda r: failed(r, "TASK_FAILURE", "a commit raised", url="file:///s/savepoint-43-x"))
    result = local.cli("stop", code=1)
    assert "error: TASK_FAILURE: a commit raised" in result.stderr and "file:///s/savepoint-43-x" in result.stderr
    document = local.json("stop", "--request-id", "again", code=1)
    assert (
        document["error"] == "RequestFailed"
        and document["reason"] == "TASK_FAILURE"
        and document["url"] == "file:///s/savepoint-43-x"
    )
    document = local.json("requests", "again", code=1)
    assert document["answer"]["reason"] == "TASK_FAILURE"


def test_a_request_to_a_pipeline_that_is_not_running(local: Any) -> None:
    assert "found no pipeline of that name in it" in local.cli("savepoint", "--pipeline", "flights", code=6).stderr
    local.run()
    local.checkpoint(42)
    local.end("FAILED")
    result = local.cli("stop", "--drain", code=3)
    assert "is not running. Its latest job (1) ended FAILED" in result.stderr and "checkpoints/chk-42-1" in result.stderr
    assert local.json("trigger", code=3)["error"] == "NoRunningPipeline"


def test_a_dead_owner_is_detected(local: Any) -> None:
    local.run(lease_seconds=0.2)
    result = local.cli("trigger", code=3)
    assert "that run is dead" in result.stderr


def test_without_an_answer_in_time_the_request_stays_valid(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_GRACE_SECONDS", 0.0)
    local.run()
    result = local.cli("savepoint", "--deadline", "0.2", "--request-id", "slow", code=4)
    assert "request slow" in result.stderr and "stays valid" in result.stderr
    seen = local.answering(_savepoint_made)
    assert local.json("requests", "slow", "--wait")["answer"]["checkpoint_id"] == 43
    assert [request.request_id for request in seen] == ["slow"]


def test_a_request_without_waiting(local: Any) -> None:
    local.run()
    assert (
        "To see its answer: dagster-checkpoints requests later" in local.cli("stop", "--no-wait", "--request-id", "later").output
    )
    assert local.json("stop", "--no-wait", "--request-id", "later")["status"] == "asked"
    assert "used before" in local.cli("stop", "--drain", "--request-id", "later", code=2).stderr
    assert local.json("requests", "later")["answer"] is None
    assert "expected a request" in local.cli("requests", "other", code=6).stderr
    assert "needs a REQUEST_ID" in local.cli("requests", "--wait", code=2).stderr


def test_requests_are_listed_newest_first(world: Any) -> None:
    world.run()
    assert "There are no recent requests to flights" in world.cli("requests").output
    seen = world.answering(lambda r: failed(r, "CHECKPOINT_EXPIRED", "late") if r.kind == "checkpoint" else None)
    world.cli("trigger", "--request-id", "first", code=1)
    world.cli("savepoint", "--request-id", "second", "--no-wait")
    listed = world.json("requests")
    assert [(one["request"]["request_id"], one["answer"] and one["answer"]["reason"]) for one in listed] == [
        ("second", None),
        ("first", "CHECKPOINT_EXPIRED"),
    ]
    text = world.cli("requests").output
    assert "none yet" in text and "CHECKPOINT_EXPIRED" in text
    assert seen[0].request_id == "first"


def test_an_interrupted_wait_names_the_command_to_continue(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    local.run()

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(asking, "sleep", interrupted)
    result = local.cli("savepoint", "--request-id", "mine", code=130)
    assert "the request stays valid" in result.stderr and "dagster-checkpoints requests mine" in result.stderr


def test_a_request_to_a_run_that_ended_meanwhile(local: Any) -> None:
    local.run()
    local.cli("stop", "--request-id", "stop-1", "--no-wait")
    local.end("FAILED")
    assert "the run has ended" in local.cli("requests", "stop-1", "--wait", code=3).stderr
    local.run()
    RequestBox(local.storage.store, local.storage.layout).refuse_older(2)
    assert local.json("requests", "stop-1", code=3)["answer"]["reason"] == "NO_RUNNING_PIPELINE"


def test_a_terminal_shows_what_the_command_waits_for(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    local.run()
    local.status()
    shown: list[str] = []

    class Terminal:
        is_terminal = True

        def status(self, text: str) -> Terminal:
            shown.append(text)
            return self

        def update(self, text: str) -> None:
            shown.append(text)

        def __enter__(self) -> Terminal:
            return self

        def __exit__(self, *_: object) -> None: ...

    def later(request: ControlRequest) -> Answer | None:
        return _savepoint_made(request) if len(shown) > 1 else None

    real = asking.console
    monkeypatch.setattr(asking, "console", lambda *, error=False: Terminal() if error else real(error=error))
    local.answering(later)
    local.cli("savepoint", "--request-id", "mine")
    assert shown[0] == "Waiting for a savepoint, request mine"
    assert shown[1] == "Waiting for a savepoint, request mine (savepoint 44: 2 of 3 tasks)"
