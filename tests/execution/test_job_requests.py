"""The requests to a running job: when they are passed on, their outcomes, and that each is answered once."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.coordination.checkpoints import CheckpointProperties, CompletedCheckpoint
from dagster_checkpoints.coordination.events import CheckpointRequested, DrainBegan, RequestWithdrawn, StopRequested
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.retention import JobStatus
from dagster_checkpoints.coordination.stop_with_savepoint import FailOver, StopState
from dagster_checkpoints.execution.job_requests import (
    AnswerRequest,
    EndSources,
    JobRequests,
    Request,
    RequestReceived,
    SourceInstance,
    Stopped,
    ToCoordinator,
)
from dagster_checkpoints.execution.pipeline_state import StopAskedBy
from dagster_checkpoints.pipeline import TaskId

SOURCES = (
    SourceInstance("history", "0", TaskId("history", 0)),
    SourceInstance("live", "EWR", TaskId("live", 0)),
    SourceInstance("live", "JFK", TaskId("live", 1)),
)
SAVEPOINT = CompletedCheckpoint(7, "savepoints/s-7", CheckpointProperties.for_savepoint(stops_job=True))
Kind = Literal["checkpoint", "savepoint", "stop", "end_source"]


def requests_with(*requests: Request, at: float = 10.0) -> JobRequests:
    found = JobRequests("flights")
    for number, request in enumerate(requests, 1):
        found.receive(RequestReceived(request, number, at))
    return found


def stop(drain: bool = False, *, asked_by: StopAskedBy = "request") -> JobRequests:
    """A stop that the coordinator has accepted."""
    found = requests_with(Request("s", "stop", 60.0, drain=drain, asked_by=asked_by))
    found.advance("s", 10.0, SOURCES)
    found.stop_accepted("s")
    return found


def answers(actions: Any) -> list[AnswerRequest]:
    return [action for action in actions if isinstance(action, AnswerRequest)]


@pytest.mark.parametrize(
    ("request_", "event"),
    [
        (Request("r", "checkpoint", 1.0), CheckpointRequested("r", CheckpointProperties())),
        (Request("r", "savepoint", 1.0), CheckpointRequested("r", CheckpointProperties.for_savepoint(request_id="r"))),
        (
            Request("r", "stop", 1.0),
            StopRequested("r", False, CheckpointProperties.for_savepoint(stops_job=True, request_id="r")),
        ),
        (
            Request("r", "stop", 1.0, drain=True),
            StopRequested("r", True, CheckpointProperties.for_savepoint(stops_job=True, request_id="r")),
        ),
    ],
)
def test_a_request_waits_until_all_tasks_run_and_is_passed_on_once(request_: Request, event: Any) -> None:
    requests = requests_with(request_)
    assert requests.advance("r", 10.0, None) == []
    assert requests.is_waiting("r") and requests.is_open("r") and requests.due_ids(10.0) == ("r",)
    assert requests.advance("r", 10.5, SOURCES) == [ToCoordinator(event)]
    assert not requests.is_waiting("r") and requests.is_open("r")
    assert requests.advance("r", 10.5, SOURCES) == []
    overdue = 10.0 + request_.deadline_seconds
    assert requests.due_ids(overdue - 0.1) == () and requests.due_ids(overdue) == ("r",)
    requests.advance("r", overdue, SOURCES)
    assert requests.due_ids(overdue) == ()  # withdrawn once


def test_a_request_that_waits_too_long_is_answered_at_its_deadline() -> None:
    requests = requests_with(Request("r", "checkpoint", 2.5))
    assert requests.next_deadline() == 12.5
    assert requests.advance("r", 12.4, None) == []
    message = "not done within its deadline of 2.5 s"
    expected = AnswerRequest("r", (1,), FailureReason.CHECKPOINT_EXPIRED, message)
    assert requests.advance("r", 12.5, SOURCES) == [expected]
    assert not expected.done
    assert requests.next_deadline() is None
    assert requests.advance("r", 12.5, SOURCES) == []
    assert requests.due_ids(12.5) == () and not requests.is_open("r") and not requests.is_waiting("r")


def test_a_request_that_was_passed_on_is_withdrawn_at_its_deadline_once() -> None:
    requests = requests_with(Request("r", "savepoint", 30.0), Request("later", "checkpoint", 90.0))
    assert requests.advance("r", 11.0, SOURCES)
    assert requests.next_deadline() == 40.0
    withdrawn = RequestWithdrawn("r", "not done within its deadline of 30 s")
    assert requests.advance("r", 39.9, SOURCES) == []
    assert requests.advance("r", 40.0, None) == [ToCoordinator(withdrawn)]
    assert requests.advance("r", 41.0, SOURCES) == []
    assert requests.next_deadline() == 100.0
    assert requests.failed("r", FailureReason.CHECKPOINT_EXPIRED, "the deadline passed", restarting=False) == [
        AnswerRequest("r", (1,), FailureReason.CHECKPOINT_EXPIRED, "the deadline passed")
    ]


def test_the_same_request_again_is_done_once_and_answered_to_every_requester() -> None:
    request = Request("r", "checkpoint", 60.0)
    requests = requests_with(request, request)
    requests.receive(RequestReceived(request, 9, 50.0))
    assert requests.next_deadline() == 70.0, "the deadline counts from the first"
    assert len(requests.advance("r", 50.0, SOURCES)) == 1
    completed = CompletedCheckpoint(4, "chk-4")
    answer = AnswerRequest("r", (1, 2, 9), checkpoint_id=4, location="chk-4", checkpoint=completed)
    assert answer.done
    assert requests.completed("r", completed) == [answer]
    assert requests.completed("r", completed) == []
    assert requests.failed("r", FailureReason.IO_EXCEPTION, "late", restarting=False) == []


def test_a_request_to_stop_is_a_suspend_of_a_user_by_default() -> None:
    request = Request("r", "stop", 1.0)
    assert (request.drain, request.asked_by, request.stage, request.instance) == (False, "request", "", None)
    assert Stopped(True, 1, "s").asked_by == "request"
    assert not EndSources().stops_job


# The end of a source


@pytest.mark.parametrize(
    ("stage", "instance", "ended"),
    [("live", None, ("live[EWR]", "live[JFK]")), ("live", "JFK", ("live[JFK]",)), ("history", None, ("history[0]",))],
)
def test_a_source_ends_and_the_answer_names_its_instances(stage: str, instance: str | None, ended: Any) -> None:
    requests = requests_with(Request("e", "end_source", 60.0, stage=stage, instance=instance))
    assert requests.advance("e", 10.0, SOURCES) == [EndSources(stage, instance), AnswerRequest("e", (1,), ended=ended)]


@pytest.mark.parametrize(
    ("stage", "instance", "found"),
    [("delays", None, "'delays'"), ("live", "LGA", "'live[LGA]'"), ("history", "EWR", "'history[EWR]'")],
)
def test_a_stage_that_is_not_a_source_cannot_be_ended(stage: str, instance: str | None, found: str) -> None:
    requests = requests_with(Request("e", "end_source", 60.0, stage=stage, instance=instance))
    [answer] = answers(requests.advance("e", 10.0, SOURCES))
    assert answer.reason is FailureReason.TRIGGER_CHECKPOINT_FAILURE
    assert answer.message == (
        f"expected a source of pipeline 'flights', found {found}; its sources are history[0], live[EWR], live[JFK]"
    )


def test_no_single_source_is_ended_during_a_stop() -> None:
    requests = stop()
    requests.receive(RequestReceived(Request("e", "end_source", 60.0, stage="live"), 2, 10.0))
    expected = AnswerRequest(
        "e", (2,), FailureReason.CHECKPOINT_COORDINATOR_SUSPEND, "a stop with savepoint is under way (request s)"
    )
    assert requests.advance("e", 10.0, SOURCES) == [expected]


# The stop


def test_a_drain_ends_the_sources_when_it_is_accepted_and_a_suspend_does_not() -> None:
    for drain, actions in ((True, [EndSources(stops_job=True)]), (False, [])):
        requests = requests_with(Request("s", "stop", 60.0, drain=drain))
        requests.advance("s", 10.0, SOURCES)
        assert requests.stop is None
        assert requests.stop_accepted("s") == actions
        assert requests.stop is not None
        assert (requests.stop.request_id, requests.stop.drain) == ("s", drain)


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("asked_by", ["request", "termination", "caught_up"])
def test_a_stop_is_answered_when_the_job_has_ended(drain: bool, asked_by: StopAskedBy) -> None:
    requests = stop(drain, asked_by=asked_by)
    assert requests.completed("s", SAVEPOINT) == []
    assert requests.stopped == Stopped(drain, 7, "savepoints/s-7", asked_by)
    assert requests.stop is not None and requests.stop.state is StopState.SAVEPOINT_CREATED
    assert requests.all_finished() == []
    assert requests.stop is None and not requests.is_open("s")
    answer = AnswerRequest("s", (1,), checkpoint_id=7, location="savepoints/s-7")
    assert requests.close(JobStatus.FINISHED, "") == [answer]
    assert requests.close(JobStatus.FINISHED, "") == []
    assert requests.stopped == Stopped(drain, 7, "savepoints/s-7", asked_by)


def test_an_answered_stop_that_completes_nevertheless_is_a_stop() -> None:
    requests = stop(drain=True)
    requests._open.clear()
    assert requests.completed("s", SAVEPOINT) == []
    assert requests.stopped == Stopped(True, 7, "savepoints/s-7")


def test_another_request_that_completes_during_a_stop_is_answered_at_once() -> None:
    requests = stop()
    requests.receive(RequestReceived(Request("c", "checkpoint", 60.0), 5, 10.0))
    completed = CompletedCheckpoint(6, "chk-6")
    assert requests.completed("c", completed) == [
        AnswerRequest("c", (5,), checkpoint_id=6, location="chk-6", checkpoint=completed)
    ]
    assert requests.stopped is None and requests.stop is not None
    assert requests.failed("d", FailureReason.IO_EXCEPTION, "", restarting=False) == []
    assert requests.stop is not None


@pytest.mark.parametrize(
    ("drain", "restarting", "fails_over"), [(False, False, False), (True, False, True), (False, True, False), (True, True, False)]
)
def test_a_stop_whose_savepoint_fails(drain: bool, restarting: bool, fails_over: bool) -> None:
    requests = stop(drain)
    actions = requests.failed("s", FailureReason.CHECKPOINT_EXPIRED, "too slow", restarting=restarting)
    expected: list[Any] = [AnswerRequest("s", (1,), FailureReason.CHECKPOINT_EXPIRED, "too slow")]
    assert actions == [*expected, FailOver("the drain's savepoint failed: too slow")] if fails_over else actions == expected
    assert requests.stop is None and requests.stopped is None


def test_a_task_that_fails_before_the_savepoint_leaves_the_stop_as_it_is() -> None:
    requests = stop()
    assert requests.attempt_failed("wings") == []
    assert requests.stop is not None
    assert JobRequests("flights").attempt_failed("wings") == []


@pytest.mark.parametrize("drain", [False, True])
def test_a_task_that_fails_after_the_savepoint_fails_the_stop_and_names_it(drain: bool) -> None:
    requests = stop(drain)
    requests.completed("s", SAVEPOINT)
    [answer] = requests.attempt_failed("wings")
    assert isinstance(answer, AnswerRequest)
    assert (answer.reason, answer.location) == (FailureReason.TASK_FAILURE, "savepoints/s-7")
    assert "wings" in answer.message and "savepoints/s-7" in answer.message
    assert requests.stop is None and requests.stopped is None


def test_all_tasks_that_finish_before_the_savepoint_fail_the_stop() -> None:
    requests = stop()
    [answer] = requests.all_finished()
    assert isinstance(answer, AnswerRequest)
    assert answer.reason is FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN
    assert requests.stop is None
    assert requests.all_finished() == [] and requests.close(JobStatus.FINISHED, "") == []


# The stop with which a terminated run ends

TERMINATION = Request("t", "stop", 60.0, asked_by="termination")
EXPIRED = FailureReason.CHECKPOINT_EXPIRED


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("asked_by", ["request", "caught_up"])
@pytest.mark.parametrize("outcome", ["the job ends", "the savepoint fails", "a task fails", "canceled", "overdue"])
def test_a_termination_waits_for_the_end_of_another_stop(drain: bool, asked_by: StopAskedBy, outcome: str) -> None:
    requests = stop(drain, asked_by=asked_by)
    requests.receive(RequestReceived(TERMINATION, 2, 11.0))
    assert requests.advance("t", 11.0, SOURCES) == [], "it is not refused, and the other stop continues"
    match outcome:
        case "the job ends":
            requests.completed("s", SAVEPOINT)
            requests.all_finished()
            answered = answers(requests.close(JobStatus.FINISHED, ""))
            assert sorted(answered, key=lambda answer: answer.request_id) == [
                AnswerRequest("s", (1,), checkpoint_id=7, location="savepoints/s-7"),
                AnswerRequest("t", (2,), checkpoint_id=7, location="savepoints/s-7"),
            ]
            assert requests.stopped is not None and requests.stopped.asked_by == asked_by
        case "the savepoint fails" | "a task fails":
            if outcome == "a task fails":
                requests.completed("s", SAVEPOINT)
                requests.attempt_failed("wings")
            else:
                requests.failed("s", EXPIRED, "too slow", restarting=False)
            [action] = requests.advance("t", 12.0, SOURCES)
            properties = CheckpointProperties.for_savepoint(stops_job=True, request_id="t")
            assert action == ToCoordinator(StopRequested("t", False, properties)), "the job goes on, and is stopped"
        case "canceled":
            [_, answer] = answers(requests.close(JobStatus.CANCELED, ""))
            assert (answer.request_id, answer.reason) == ("t", FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN)
        case "overdue":
            message = "not done within its deadline of 60 s"
            assert requests.advance("t", 71.0, SOURCES) == [AnswerRequest("t", (2,), EXPIRED, message)]
            assert requests.stop is not None


# A drain without a savepoint


DRAIN = [ToCoordinator(DrainBegan()), EndSources()]


def test_a_drain_ends_every_source_once() -> None:
    requests = JobRequests("flights")
    assert requests.advance_drain(()) == []
    requests.drain()
    assert requests.advance_drain(()) == DRAIN
    assert requests.advance_drain(()) == []


def test_a_drain_waits_for_bounded_sources() -> None:
    requests = JobRequests("flights")
    requests.drain()
    assert requests.advance_drain(SOURCES[:1]) == []
    assert requests.advance_drain(()) == DRAIN


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("restarting", [False, True])
def test_a_drain_waits_behind_a_stop_and_begins_when_it_has_failed(drain: bool, restarting: bool) -> None:
    requests = stop(drain)
    requests.drain()
    assert requests.advance_drain(()) == [], "it still waits"
    requests.failed("s", FailureReason.IO_EXCEPTION, "full", restarting=restarting)
    assert requests.advance_drain(()) == DRAIN


# The end of the job


@pytest.mark.parametrize(
    ("status", "message", "text"),
    [
        (JobStatus.FINISHED, "", "FINISHED"),
        (JobStatus.CANCELED, "", "CANCELED"),
        (JobStatus.FAILED, "wings", "FAILED"),
        (None, "", "before it began"),
    ],
)
def test_open_requests_are_answered_at_the_end(status: JobStatus | None, message: str, text: str) -> None:
    requests = requests_with(Request("a", "checkpoint", 60.0), Request("b", "stop", 60.0))
    requests.advance("a", 10.0, SOURCES)
    reason = FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN
    assert requests.close(status, message) == [
        AnswerRequest("a", (1,), reason, f"the pipeline's run has ended {text}"),
        AnswerRequest("b", (2,), reason, f"the pipeline's run has ended {text}"),
    ]


@pytest.mark.parametrize("completed", [False, True])
@pytest.mark.parametrize(
    ("status", "message", "reason", "text"),
    [
        (JobStatus.CANCELED, "", FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN, "the job was canceled"),
        (JobStatus.FAILED, "wings", FailureReason.JOB_FAILURE, "wings"),
        (JobStatus.FAILED, "", FailureReason.JOB_FAILURE, "FAILED"),
    ],
)
def test_a_stop_that_the_end_of_the_job_overtakes(
    completed: bool, status: JobStatus, message: str, reason: FailureReason, text: str
) -> None:
    requests = stop()
    if completed:
        requests.completed("s", SAVEPOINT)
    [answer] = requests.close(status, message)
    assert isinstance(answer, AnswerRequest)
    assert answer.reason is reason and answer.message.startswith(text)
    assert answer.location == ("savepoints/s-7" if completed else "")
    assert requests.stop is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["checkpoint", "savepoint", "stop", "end_source"]),
            st.integers(0, 3),
            st.sampled_from(["request", "termination"]),
        ),
        max_size=8,
    ),
    st.data(),
)
def test_every_requester_is_answered_once_whatever_happens(
    requested: list[tuple[Kind, int, StopAskedBy]], data: st.DataObject
) -> None:
    requests, answered = JobRequests("flights"), list[int]()
    for number, (kind, name, asked_by) in enumerate(requested):
        request = Request(f"r{name}", kind, 5.0, stage="live", asked_by=asked_by)
        requests.receive(RequestReceived(request, number, float(number)))
    for now in range(data.draw(st.integers(0, 12))):
        actions: list[Any] = []
        for request_id in requests.due_ids(float(now)):
            actions += requests.advance(request_id, float(now), SOURCES if data.draw(st.booleans()) else None)
        for action in list(actions):
            if isinstance(action, ToCoordinator) and isinstance(action.event, CheckpointRequested | StopRequested):
                accepted = isinstance(action.event, StopRequested) and data.draw(st.booleans()) and requests.stop is None
                if accepted:
                    actions += requests.stop_accepted(action.event.request_id)
                elif data.draw(st.booleans()):
                    reason = FailureReason.IO_EXCEPTION
                    actions += requests.failed(action.event.request_id, reason, "", restarting=data.draw(st.booleans()))
        if requests.stop is not None and requests.stop.savepoint is None and data.draw(st.booleans()):
            actions += requests.completed(requests.stop.request_id, SAVEPOINT)
        if data.draw(st.booleans()):
            actions += data.draw(st.sampled_from([requests.all_finished, lambda: requests.attempt_failed("x")]))()
        answered += [number for answer in answers(actions) for number in answer.requesters]
    answered += [number for answer in answers(requests.close(JobStatus.FINISHED, "")) for number in answer.requesters]
    assert sorted(answered) == list(range(len(requested)))
