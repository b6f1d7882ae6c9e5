"""How often a running stage is materialized: limits for runs of any length, with a manual clock."""

from __future__ import annotations

import pytest

from dagster_checkpoints import CheckpointCoordinatorResource
from dagster_checkpoints.plugin.event_schedules import CommitSchedule

DAY = 24 * 60 * 60


@pytest.mark.parametrize(
    ("every", "interval", "expected"),
    [(60.0, 5, 1440), (60.0, 90, 960), (0.0, 5, 17_280), (None, 5, 0), (7.0, 5, 8640)],
)
def test_a_day_has_as_many_reports_as_the_setting_says(every: float | None, interval: int, expected: int) -> None:
    schedule = CommitSchedule(every)
    assert sum(schedule.committed("sales", float(now)) for now in range(0, DAY, interval)) == expected


def test_the_default_is_a_minute() -> None:
    assert CheckpointCoordinatorResource().materialize_every == 60.0


def test_a_held_commit_is_reported_when_it_is_due_without_another_commit() -> None:
    schedule = CommitSchedule(60.0)
    assert schedule.committed("sales", 0.0) and schedule.committed("stock", 10.0)
    assert not schedule.committed("sales", 20.0) and not schedule.committed("stock", 20.0)
    assert not schedule.may_be_due(59.0) and schedule.due(59.0) == []
    assert schedule.may_be_due(60.0)
    assert schedule.due(60.0) == ["sales"]
    assert schedule.due(69.0) == [] and schedule.due(70.0) == ["stock"]
    assert not schedule.may_be_due(1000.0), "nothing was committed since"


def test_held_commits_are_hurried_by_a_report_of_their_reader() -> None:
    schedule = CommitSchedule(60.0)
    assert schedule.committed("sales", 0.0) and not schedule.hurried("sales", 5.0), "nothing is held"
    assert not schedule.committed("sales", 10.0)
    assert schedule.hurried("sales", 20.0) and not schedule.hurried("sales", 21.0)
    assert not schedule.committed("sales", 79.0) and schedule.may_be_due(80.0)
    schedule.last_committed("sales")
    assert not schedule.hurried("sales", 90.0), "its end follows"


def test_the_last_commit_of_a_stage_waits_for_its_end_or_that_of_the_run() -> None:
    schedule = CommitSchedule(60.0)
    assert schedule.committed("sales", 0.0)
    schedule.committed("sales", 10.0)
    schedule.last_committed("sales")
    schedule.last_committed("stock")
    assert not schedule.may_be_due(1000.0) and schedule.due(1000.0) == []
    schedule.stage_ended("sales")
    assert schedule.run_ended() == ["stock"]
    assert schedule.run_ended() == []


def test_without_the_setting_not_even_the_end_of_the_run_reports_a_commit() -> None:
    schedule = CommitSchedule(None)
    assert not schedule.committed("sales", 0.0)
    schedule.last_committed("stock")
    assert not schedule.may_be_due(1e9)
    assert schedule.run_ended() == []
