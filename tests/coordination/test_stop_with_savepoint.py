"""The stop's own machine: for every state and event, the answer and whether it names the savepoint."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.coordination.errors import UnexpectedEvent
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.stop_with_savepoint import (
    AllTasksFinished,
    AnswerDone,
    AnswerFailed,
    FailOver,
    JobCanceled,
    JobFailed,
    SavepointCompleted,
    SavepointFailed,
    StopEvent,
    StopState,
    StopWithSavepoint,
    TaskFailed,
)

EVENTS: dict[str, StopEvent] = {
    "created": SavepointCompleted(7, "savepoints/savepoint-7-x"),
    "failed": SavepointFailed(FailureReason.CHECKPOINT_EXPIRED, "too slow"),
    "over": SavepointFailed(FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN, "every task has finished"),
    "task failed": TaskFailed("the disk is full"),
    "finished": AllTasksFinished(),
    "canceled": JobCanceled(),
    "job failed": JobFailed("no more attempts"),
}
CREATED = StopState.SAVEPOINT_CREATED
SHUTDOWN = FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN
RULE = "a savepoint has one outcome. Send the answers of the stop's own request only."


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize(
    ("events", "state", "reason", "fails_over", "words"),
    [
        ("created", CREATED, None, "never", ""),
        ("created, finished", StopState.FINAL, None, "never", ""),
        ("task failed", StopState.WAITING_FOR_SAVEPOINT, None, "never", ""),
        ("task failed, failed", StopState.FINAL, FailureReason.CHECKPOINT_EXPIRED, "drain", "too slow"),
        ("task failed, created", CREATED, None, "never", ""),
        ("failed", StopState.FINAL, FailureReason.CHECKPOINT_EXPIRED, "drain", "too slow"),
        ("finished", StopState.FINAL, SHUTDOWN, "never", "every task has finished before the savepoint"),
        # The job has ended on its own: there is nothing to restart.
        ("over", StopState.FINAL, SHUTDOWN, "never", "every task has finished"),
        ("canceled", StopState.FINAL, SHUTDOWN, "never", "the job was canceled before the savepoint"),
        ("job failed", StopState.FINAL, FailureReason.JOB_FAILURE, "never", "no more attempts"),
        ("created, task failed", StopState.FINAL, FailureReason.TASK_FAILURE, "always", "the disk is full"),
        ("created, canceled", StopState.FINAL, SHUTDOWN, "never", "the job was canceled"),
        ("created, job failed", StopState.FINAL, FailureReason.JOB_FAILURE, "never", "no more attempts"),
    ],
)
def test_every_outcome(
    drain: bool, events: str, state: StopState, reason: FailureReason | None, fails_over: str, words: str
) -> None:
    stop = StopWithSavepoint("r", drain)
    actions = [action for name in events.split(", ") for action in stop.handle(EVENTS[name])]
    created = "created" in events
    assert (stop.request_id, stop.drain) == ("r", drain)
    assert stop.state is state
    assert (stop.savepoint == EVENTS["created"]) == created
    answers = [action for action in actions if not isinstance(action, FailOver)]
    assert len(answers) == (state is StopState.FINAL)
    for answer in answers:
        if isinstance(answer, AnswerFailed):
            assert answer.reason is reason
            assert answer.message == words or (created and answer.message.startswith(f"{words} (after savepoint 7 "))
            # The caller's error names the savepoint, if there is one.
            assert answer.location == ("savepoints/savepoint-7-x" if created else None)
            assert ("savepoint 7" in answer.message) == ("savepoints/savepoint-7-x" in answer.message) == created
        else:
            assert reason is None
            assert answer == AnswerDone(7, "savepoints/savepoint-7-x")
    expected = fails_over == "always" or (fails_over == "drain" and drain)
    fail_overs = actions[len(answers) :]
    assert [type(action) for action in fail_overs] == [FailOver] * expected
    assert all(isinstance(action, FailOver) and words in action.message for action in fail_overs)


def test_the_fail_over_after_the_savepoint_names_it_and_its_cause() -> None:
    stop = StopWithSavepoint("r", drain=False)
    stop.handle(EVENTS["created"])
    fail_over = stop.handle(EVENTS["task failed"])[-1]
    assert isinstance(fail_over, FailOver)
    assert "the disk is full" in fail_over.message and "savepoints/savepoint-7-x" in fail_over.message


@pytest.mark.parametrize("name", list(EVENTS))
def test_after_the_answer_nothing_matters(name: str) -> None:
    stop = StopWithSavepoint("r", drain=True)
    stop.handle(EVENTS["failed"])
    assert stop.handle(EVENTS[name]) == []
    assert stop.state is StopState.FINAL


@pytest.mark.parametrize("name", ["created", "failed", "over"])
def test_a_second_outcome_of_the_savepoint_is_refused(name: str) -> None:
    stop = StopWithSavepoint("r", drain=False)
    stop.handle(EVENTS["created"])
    with pytest.raises(UnexpectedEvent, match=f"savepoint 7 .*{re.escape(repr(EVENTS[name]))}: {re.escape(RULE)}$"):
        stop.handle(EVENTS[name])


@given(drain=st.booleans(), names=st.lists(st.sampled_from(sorted(EVENTS)), max_size=8))
def test_in_any_order_there_is_one_answer_and_it_is_the_truth(drain: bool, names: list[str]) -> None:
    stop = StopWithSavepoint("r", drain)
    created = answered = False
    for name in names:
        second = created and not answered and name in ("created", "failed", "over")
        if second:
            with pytest.raises(UnexpectedEvent):
                stop.handle(EVENTS[name])
            continue
        actions = stop.handle(EVENTS[name])
        created |= name == "created" and not answered
        answers = [action for action in actions if not isinstance(action, FailOver)]
        assert len(answers) <= (not answered)
        assert len(actions) - len(answers) <= len(answers), "the job fails over with the answer, and once"
        for answer in answers:
            assert isinstance(answer, AnswerDone) == (created and name == "finished")
        ends = name in ("finished", "canceled", "job failed") or (created and name == "task failed")
        assert answered or len(answers) == (ends or (not created and name in ("failed", "over")))
        answered |= bool(answers)
        assert (stop.savepoint is not None) == created
        assert (stop.state is StopState.FINAL) == answered
