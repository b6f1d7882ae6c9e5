"""The parts of a job's driver that need no Spark: its requesters, and the events for an action that raises."""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_checkpoints.control.requests import Answer, ControlRequest
from dagster_checkpoints.coordination.checkpoints import CompletedCheckpoint
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.retention import JobStatus
from dagster_checkpoints.errors import StorageUnavailable
from dagster_checkpoints.execution import job_actions as do
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.execution.job_events import Failure, JobOutcome
from dagster_checkpoints.execution.job_phases import JobPhase
from dagster_checkpoints.execution.job_requests import AnswerRequest, Request, RequestReceived
from dagster_checkpoints.spark.errors import JobFailedError
from dagster_checkpoints.spark.job.attempt_driver import AttemptDriver
from dagster_checkpoints.spark.job.job_driver import JobDriver, _error
from dagster_checkpoints.spark.job.requests import Requesters
from dagster_checkpoints.spark.job.runtime import DeploymentCanceled, QueuedRequest, Runtime, failure_of


class Destinations:
    """Accepts the destination of every savepoint, except for the target `mars`."""

    def __init__(self) -> None:
        self.registered: list[tuple[str, str]] = []

    def register(self, request_id: str, destination: Any) -> None:
        if destination.target == "mars":
            raise StorageUnavailable("no road to mars")
        self.registered.append((request_id, destination.target))


def requesters() -> tuple[Requesters, Destinations]:
    destinations = Destinations()
    storage: Any = SimpleNamespace(url_of=lambda location: f"s3://lake/{location}")
    return Requesters(storage, destinations), destinations  # type: ignore[arg-type]


def queued(answers: list[Answer], kind: Any = "savepoint", request_id: str = "r", **what: Any) -> QueuedRequest:
    request = ControlRequest(
        request_id=request_id,
        kind=kind,
        epoch=1,
        deadline_seconds=30.0,
        asked_by="a test",
        asked_at=datetime.now(UTC),
        **{name: value for name, value in what.items() if name != "termination"},
    )
    return QueuedRequest(request, answers.append, 12.5, what.get("termination", False))


def test_requests_reach_the_machine_and_answers_reach_all_requesters() -> None:
    found, destinations = requesters()
    first: list[Answer] = []
    second: list[Answer] = []
    received = found.receive(queued(first, "stop", drain=True, target="s3://x", termination=True), is_open=False)
    assert received == RequestReceived(Request("r", "stop", 30.0, drain=True, asked_by="termination"), 1, 12.5)
    again = found.receive(queued(second, "stop", drain=True, target="mars"), is_open=True)
    assert again is not None and again.requester == 2
    assert destinations.registered == [("r", "s3://x")], "the first request names the destination"
    request = found.open_request("r")
    assert request is not None and request.target == "s3://x"
    found.answer(AnswerRequest("r", (1, 2), checkpoint_id=4, location="savepoints/s"))
    assert first == second and len(first) == 1
    assert (first[0].status, first[0].checkpoint_id, first[0].url) == ("done", 4, "s3://lake/savepoints/s")
    assert first[0].details == {} and found.open_request("r") is None


def test_a_savepoint_with_an_unusable_destination_is_answered_at_once() -> None:
    found, _ = requesters()
    answers: list[Answer] = []
    assert found.receive(queued(answers, target="mars"), is_open=False) is None
    assert [(a.status, a.reason, a.message, a.url) for a in answers] == [("failed", "IO_EXCEPTION", "no road to mars", "")]
    assert found.open_request("r") is None


def test_answers_hold_the_details_of_a_checkpoint_or_an_ended_source() -> None:
    found, _ = requesters()
    answers: list[Answer] = []
    for number, kind in enumerate(("checkpoint", "end_source"), 1):
        what = {"stage": "live"} if kind == "end_source" else {}
        assert found.receive(queued(answers, kind, str(number), **what), is_open=False)
    checkpoint = CompletedCheckpoint(3, "chk-3", triggered_at=1.0, completed_at=1.5, fully_finished=frozenset("ba"), roots=("c",))
    found.answer(AnswerRequest("1", (1,), checkpoint_id=3, location="chk-3", checkpoint=checkpoint))
    found.answer(AnswerRequest("2", (2,), ended=("live[EWR]",)))
    found.answer(AnswerRequest("3", (), FailureReason.CHECKPOINT_EXPIRED, "late"))
    assert [a.details for a in answers] == [
        {"roots": ["c"], "finished_stages": ["a", "b"], "duration": 0.5},
        {"ended": ["live[EWR]"]},
    ]


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (do.BeginJob(), [on.FatalError]),
        (do.StartTasks(), [on.FatalError]),
        (do.StopTasks(), [on.FatalError, on.TasksStopped]),
        (do.EndJob(False, "end_of_data"), [on.JobEndNotRecorded]),
        (do.FinishWork(), []),
        (do.Release(JobStatus.FINISHED), []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_action_that_raises_has_a_result_that_ends_the_job(action: Any, expected: list[type]) -> None:
    driver: Any = SimpleNamespace(_runtime=SimpleNamespace(log=logging.getLogger("test")))
    error = RuntimeError("the JVM is gone")
    events = JobDriver._failed(driver, action, error)
    assert [type(event) for event in events] == expected
    assert all(event.failure.error is error for event in events if isinstance(event, on.FatalError))


def test_the_error_of_a_job_is_the_original_one_or_says_why_there_is_no_other_attempt() -> None:
    cause = RuntimeError("wings")
    assert _error(JobOutcome(JobStatus.CANCELED)) is None
    assert _error(JobOutcome(JobStatus.FAILED, "wings", failure_of(cause))) is cause
    too_many = _error(JobOutcome(JobStatus.FAILED, "too many", Failure("too many")))
    assert isinstance(too_many, JobFailedError) and str(too_many) == "too many"
    given_up = _error(JobOutcome(JobStatus.FAILED, "no other attempt. wings", failure_of(cause), given_up=True))
    assert isinstance(given_up, JobFailedError) and str(given_up) == "no other attempt. wings"
    assert given_up.__cause__ is cause


@pytest.mark.parametrize(
    ("phase", "partly", "stop", "reported"),
    [
        (JobPhase.RUNNING, False, None, ["running"]),
        (JobPhase.RUNNING, False, "s", ["stopping"]),
        (JobPhase.RESTARTING, False, None, ["restarting"]),  # the delay may be longer than a status may be old
        (JobPhase.READING, False, None, ["restarting"]),  # storage does not answer
        (JobPhase.CONFIRMING, True, None, ["restarting"]),
        (JobPhase.CONFIRMING, False, None, []),  # of the first attempt: it starts
        (JobPhase.CLOSING, False, None, []),
    ],
)
def test_a_job_that_waits_reports_its_status(phase: JobPhase, partly: bool, stop: str | None, reported: list[str]) -> None:
    found: list[str] = []
    machine = SimpleNamespace(phase=phase, runs_partly=partly, requests=SimpleNamespace(stop=stop))
    driver: Any = SimpleNamespace(machine=machine, _status=SimpleNamespace(report=lambda phase, job: found.append(phase)))
    JobDriver._report_status(driver)
    assert found == reported


def test_spark_is_not_started_for_a_job_that_was_cancelled_while_it_waited_for_the_lease() -> None:
    canceled = threading.Event()
    canceled.set()
    started: list[str] = []
    runtime: Any = SimpleNamespace(canceled=canceled, on_event=started.append)
    runtime.check_canceled = lambda: Runtime.check_canceled(runtime)
    session: Any = partial(started.append, "Spark")
    uploads: Any = None
    driver = AttemptDriver(runtime, session, uploads)
    with pytest.raises(DeploymentCanceled):
        driver.prepare()
    assert started == [] and not driver.is_prepared
