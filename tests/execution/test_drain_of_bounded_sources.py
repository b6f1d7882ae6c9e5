"""A drain that reads bounded sources to their end first, and one that cuts them and says so."""

from __future__ import annotations

import pytest

from dagster_checkpoints.coordination.events import CheckpointTriggered, EndOfDataReached, Tick
from dagster_checkpoints.execution import job_actions as do
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.execution.job_events import TaskFailure
from dagster_checkpoints.execution.job_requests import AnswerRequest, SourceInstance, WaitingDrain
from dagster_checkpoints.execution.sources import SourceEnds
from dagster_checkpoints.execution.task_events import EndInput, SourceEnded
from dagster_checkpoints.pipeline import TaskId
from tests.execution.job_harness import ALL, BROKEN, A, B, Job, pick, sent

FUSED = TaskId("hourly", 0)


def running() -> Job:
    job = Job()
    job.begin()
    return job


def to_the_end(job: Job) -> AnswerRequest:
    """The tasks reach the end of their data, the savepoint completes, the job ends; the answer to the drain."""
    for task in ALL:
        actions = job.report(EndOfDataReached(task))
    [triggered] = pick(actions, CheckpointTriggered)
    job.complete(triggered.checkpoint_id, finished=True)
    job.finish()
    job.do(on.TasksStopped())
    job.do(on.JobEndRecorded())
    [answer] = pick(job.do(on.WorkEnded()), AnswerRequest)
    return answer


def test_a_drain_waits_until_bounded_sources_have_been_read_while_the_others_go_on() -> None:
    job = running()
    assert sent(job.ask("stop", drain=True, bounded="finish")) == []
    assert job.machine.requests.waiting_drain == WaitingDrain("stop", ("history[0]",))
    actions = job.report(SourceEnded(A))
    assert ((A, B), EndInput()) in sent(actions)
    assert pick(actions, do.SourcesCut) == []
    assert job.machine.requests.waiting_drain is None
    answer = to_the_end(job)
    assert answer.done and answer.cut == ()


def test_a_drain_that_cuts_bounded_sources_names_them() -> None:
    job = running()
    actions = job.ask("stop", drain=True)
    assert ((A, B), EndInput()) in sent(actions)
    assert pick(actions, do.SourcesCut) == [do.SourcesCut(("history[0]",))]
    assert to_the_end(job).cut == ("history[0]",)


def test_a_drain_behind_the_end_of_bounded_sources_cuts_nothing() -> None:
    job = running()
    job.report(SourceEnded(A))
    assert pick(job.ask("stop", drain=True), do.SourcesCut) == []
    assert to_the_end(job).cut == ()


def test_the_drain_of_the_run_itself_waits_for_bounded_sources() -> None:
    job = running()
    assert job.do(on.DrainRequested()) == []
    actions = job.report(SourceEnded(A))
    assert ((A, B), EndInput()) in sent(actions)
    assert pick(actions, do.SourcesCut) == []


def test_sources_that_are_built_again_while_the_drain_waits_read_what_is_there_and_end() -> None:
    job = running()
    job.do(on.DrainRequested())
    job.report(TaskFailure(B, BROKEN))
    job.do(on.TasksStopped())
    job.do(Tick(), after=5.0)
    actions = job.confirm(epoch=0)
    assert actions[-1] == do.Deploy(2, None, frozenset({("live", "EWR")}))
    assert pick(actions, do.SourcesCut) == []
    job.deploy()
    job.run_tasks()
    assert sent(job.ask("stop", drain=True, bounded="finish")) == []
    assert job.machine.requests.waiting_drain == WaitingDrain("stop", ("history[0]",)), "it is read to its end all the same"


def test_sources_that_restart_behind_the_drain_of_the_run_are_read_to_their_end_again() -> None:
    """Found by the simulator: the drain that was asked for next ended them before that, although it should wait."""
    job = running()
    job.do(on.DrainRequested())
    assert ((A, B), EndInput()) in sent(job.report(SourceEnded(A)))
    job.report(TaskFailure(B, BROKEN))
    job.do(on.TasksStopped())
    job.do(Tick(), after=5.0)
    assert job.confirm(epoch=0)[-1] == do.Deploy(2, None, frozenset({("live", "EWR")}))
    job.deploy()
    job.run_tasks()
    assert sent(job.ask("stop", drain=True, bounded="finish")) == []
    assert job.machine.requests.waiting_drain == WaitingDrain("stop", ("history[0]",))


def test_a_source_that_was_asked_to_end_is_not_cut_by_the_drain() -> None:
    job = running()
    job.do(on.EndSourceRequested("history"))
    assert pick(job.ask("stop", drain=True), do.SourcesCut) == []


def test_the_end_of_a_source_that_has_ended_already_names_no_instance() -> None:
    job = running()
    job.report(SourceEnded(A))
    [answer] = pick(job.ask("end_source", stage="history"), AnswerRequest)
    assert answer.done and answer.ended == ()
    [answer] = pick(job.ask("end_source", stage="live"), AnswerRequest)
    assert answer.done and answer.ended != ()


def test_a_source_that_restarts_is_waited_for_again() -> None:
    job = running()
    job.report(SourceEnded(A))
    job.report(TaskFailure(A, BROKEN))
    job.do(on.TasksStopped())
    assert sent(job.ask("stop", drain=True, bounded="finish")) == []
    job.do(Tick(), after=5.0)
    job.confirm(epoch=0)
    job.deploy()
    job.run_tasks()
    assert job.machine.requests.waiting_drain == WaitingDrain("stop", ("history[0]",))
    assert ((A, B), EndInput()) in sent(job.report(SourceEnded(A)))


def test_a_drain_that_waits_too_long_names_what_it_waited_for() -> None:
    job = running()
    job.ask("stop", drain=True, bounded="finish", seconds=60.0)
    [answer] = pick(job.do(Tick(), after=60.0), AnswerRequest)
    assert not answer.done and answer.cut == ()
    assert answer.message == (
        "not done within its deadline of 60 s: it waited for bounded sources to be read to their end: history[0]"
    )
    assert sent(job.report(SourceEnded(A))) == [], "the job goes on"


@pytest.mark.parametrize(
    ("reports", "unread"),
    [
        ([], ["history", "archive"]),
        ([SourceEnded(FUSED, "history")], ["archive"]),
        ([SourceEnded(FUSED, "live")], ["history", "archive"]),
        ([SourceEnded(FUSED, "history"), SourceEnded(FUSED, "archive")], []),
        ([SourceEnded(FUSED)], []),
    ],
)
def test_fused_sources_end_one_by_one(reports: list[SourceEnded], unread: list[str]) -> None:
    ends = SourceEnds()
    for report in reports:
        ends.take(report)
    sources = [SourceInstance(name, "0", FUSED, bounded=True) for name in ("history", "archive")]
    assert [source.stage for source in ends.unread(sources, set())] == unread
    assert ends.unread(sources, {FUSED}) == ()
    ends.stopped({"hourly"})
    assert [source.stage for source in ends.unread(sources, set())] == ["history", "archive"]
