"""When a run asks itself for a checkpoint, because its sources begin at their present end."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import pytest

from dagster_checkpoints.control.requests import Answer
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.spark.job.run_sources import SourcePositions
from dagster_checkpoints.spark.tasks.messages import TaskFirstBatch, TaskQueryStarted

A, B, C = TaskId("a", 0), TaskId("a", 1), TaskId("c", 0)


@pytest.fixture
def positions() -> SourcePositions:
    return SourcePositions(3, 600.0, logging.getLogger("run"))


def first(task: TaskId, rows: int = 0) -> TaskFirstBatch:
    return TaskFirstBatch(task, rows, 0.1, None)


def test_a_checkpoint_is_asked_for_when_the_last_of_them_has_begun(positions: SourcePositions) -> None:
    positions.deployed({A, C}, None)
    assert [positions.began(report) for report in (TaskQueryStarted(A), first(B), first(A), first(A, 5))] == [None] * 4
    due = positions.began(first(C, 2))
    assert due is not None and not due.termination
    assert (due.request.kind, due.request.epoch, due.request.deadline_seconds) == ("checkpoint", 3, 600.0)
    assert positions.began(first(C, 7)) is None, "its first batch with rows"


def test_nothing_is_asked_for_if_the_position_of_each_is_known(positions: SourcePositions) -> None:
    positions.deployed(set(), None)
    assert positions.began(first(A)) is None


def test_what_restarts_is_waited_for_again_under_another_id(positions: SourcePositions) -> None:
    positions.deployed({A, C}, None)
    positions.began(first(A))
    positions.deployed({A}, {"a"})  # a region restarts; the other has not begun
    assert positions.began(first(C)) is None
    one = positions.began(first(A))
    positions.deployed({A, C}, None)
    positions.deployed({C}, None)
    other = positions.began(first(C))
    assert one is not None and other is not None and one.request.request_id != other.request.request_id


@pytest.mark.parametrize("status", ["done", "failed"])
def test_a_checkpoint_that_fails_is_warned_of(positions: SourcePositions, caplog: pytest.LogCaptureFixture, status: str) -> None:
    positions.deployed({A}, None)
    due = positions.began(first(A))
    assert due is not None
    answer = {"request_id": due.request.request_id, "status": status, "message": "no storage", "answered_at": datetime.now(UTC)}
    due.respond(Answer(**answer))
    assert ("no storage. After a failure" in caplog.text) is (status == "failed")
