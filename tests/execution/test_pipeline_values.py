"""A pipeline's state as text, when two pipelines of one name are the same, and driving steps."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from dagster_checkpoints.execution.pipeline_state import (
    Job,
    Origin,
    PipelineState,
    describe_end,
    describe_owner,
    is_same_pipeline,
)
from dagster_checkpoints.execution.storage_steps import Steps, drive
from tests.execution.storage_scripts import pointer, state

ENDED = datetime(2026, 5, 1, 13, 0, 0, tzinfo=UTC)


def test_an_owner_in_words() -> None:
    at = "2026-05-01 12:30:15 UTC"
    assert describe_owner(state()) == f"owned by run run-a on host alpha (process 1) since {at}, last renewed {at}"
    assert describe_owner(state(owner=None)) == "not owned by any run"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "It has never run here, or its state.json was lost"),
        (state(job=Job()), "It has never run here"),
        (
            state(pointer(4)),
            "Its latest job (1) did not end by itself: its process has died; newest checkpoint: checkpoints/chk-4-1",
        ),
        (state(), "Its latest job (1) did not end by itself: its process has died; no checkpoint to resume from"),
        (state(job=Job(job_id=2, status="FAILED")), "Its latest job (2) ended FAILED; no checkpoint to resume from"),
        (
            state(pointer(4), job=Job(job_id=2, status="FINISHED", ended_by="end_of_data", ended_at=ENDED)),
            "Its latest job (2) ended FINISHED by end of data at 2026-05-01 13:00:00 UTC; newest checkpoint: checkpoints/chk-4-1",
        ),
        (
            state(pointer(4), job=Job(job_id=2, status="FINISHED", ended_by="drain", savepoint="savepoints/x")),
            "Its latest job (2) ended FINISHED by drain; savepoint: savepoints/x",
        ),
    ],
)
def test_an_end_in_words(found: PipelineState | None, text: str) -> None:
    assert describe_end(found) == text


def test_the_newest_and_the_retained_checkpoints_are_restorable() -> None:
    assert state(pointer(4), newest=pointer(9)).restorable_checkpoints == (pointer(4), pointer(9))
    assert state(pointer(4), newest=None).restorable_checkpoints == (pointer(4),)


def origin(assets: str, location: str = "here", instance: str = "one") -> Origin:
    return Origin(code_location=location, instance=instance, assets=tuple(assets))


@pytest.mark.parametrize(
    ("known", "found", "same"),
    [
        (origin("abcd"), origin("xyz"), True),  # from the same place
        (origin("abcd"), origin("abxy", "there"), True),
        (origin("abcd"), origin("axyz", "there"), False),
        (origin("abc"), origin("axy", "there"), False),
        (origin("abcd"), origin("axyz", instance="two"), False),
        (origin("abcd"), origin("a", "there"), True),  # counted from the smaller one
        (origin("abcd"), origin("xyz", ""), True),
        (origin("abcd", ""), origin("xyz"), True),
        (origin("abcd", instance=""), origin("xyz"), True),
        (origin(""), origin("xyz", "there"), True),
        (origin("abcd"), origin("", "there"), True),
    ],
)
def test_which_pipelines_of_one_name_are_one(known: Origin, found: Origin, same: bool) -> None:
    assert is_same_pipeline(known, found) is same


def test_the_values_of_a_later_run_take_precedence() -> None:
    assert origin("ab").then(Origin()) == origin("ab")
    assert origin("ab").then(origin("c", "there", "two")) == origin("c", "there", "two")


def test_steps_are_sent_answers_and_errors() -> None:
    seen: list[Any] = []

    def steps() -> Steps[str]:
        seen.append((yield 1))
        try:
            yield 2
        except KeyError as error:
            seen.append(error)
        return "result"

    error = KeyError("no")

    def perform(request: int) -> str:
        if request == 2:
            raise error
        return "answer"

    assert drive(steps(), perform) == "result"
    assert seen == ["answer", error]


def test_an_error_that_the_steps_do_not_expect_comes_out() -> None:
    def steps() -> Steps[None]:
        yield 1

    def perform(request: int) -> None:
        raise ValueError("unexpected")

    with pytest.raises(ValueError, match="unexpected"):
        drive(steps(), perform)
