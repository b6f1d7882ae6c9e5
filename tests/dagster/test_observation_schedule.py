"""How often a running pipeline is observed: limits for runs of any length, with a manual clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagster_checkpoints import CheckpointCoordinatorResource
from dagster_checkpoints.plugin.event_schedules import ObservationSchedule

DAY = 24 * 60 * 60
DEFAULT = CheckpointCoordinatorResource().observe_every
PAGE = Path(__file__).parents[2] / "docs" / "dagster.md"


def observed(schedule: ObservationSchedule, seconds: range, changes: bool = True) -> list[int]:
    """The times at which a subject is observed that is checked every second."""
    return [now for now in seconds if schedule.due("stage", now if changes else "the same", float(now)) is not None]


def test_a_day_has_as_many_observations_as_the_setting_says() -> None:
    schedule = ObservationSchedule(DEFAULT)
    first, second, third = (len(observed(schedule, range(day * DAY, (day + 1) * DAY))) for day in range(3))
    assert (first, second, third) == (297, 288, 288)
    description = " ".join(str(CheckpointCoordinatorResource.model_fields["observe_every"].description).split())
    assert f"at most {first} for each of them on the first day of a run, and {second} on every other day" in description
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"at most {first} events on the first day and {second} on every other day" in page


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (300.0, [0, 30, 60, 90, 120, 150, 180, 210, 240, 270, 570]),  # often at the start, which users watch
        (60.0, [0, 30, 60, 90, 120, 150, 180, 210, 240, 270, 330, 390, 450, 510, 570]),
        (100.0, [0, 30, 60, 90, 120, 150, 180, 210, 240, 270, 370, 470, 570]),
        (5.0, list(range(0, 600, 5))),  # never slower at the beginning than later
        (0.0, list(range(600))),
    ],
)
def test_when_a_subject_that_changes_is_observed(every: float, expected: list[int]) -> None:
    assert observed(ObservationSchedule(every), range(600)) == expected


def test_a_subject_that_does_not_change_is_observed_rarely() -> None:
    schedule = ObservationSchedule(DEFAULT)
    assert observed(schedule, range(DAY), changes=False) == list(range(0, DAY, 3600))
    assert schedule.due("stage", "a change", float(DAY)) is not None


def test_subjects_do_not_share_their_due_times() -> None:
    schedule = ObservationSchedule(300.0)
    assert schedule.due("one", 1, 0.0) == 0
    assert schedule.due("other", 1, 10.0) == 0
    assert [schedule.may_be_due(subject, 30.0) for subject in ("one", "other", "third")] == [True, False, True]


def test_skipped_observations_are_counted_and_urgent_ones_are_never_skipped() -> None:
    schedule = ObservationSchedule(300.0)
    assert [schedule.due("checkpoints", number, float(number)) for number in range(3)] == [0, None, None]
    assert schedule.made("checkpoints", 3, 3.0) == 2
    assert schedule.due("checkpoints", 32, 32.0) is None, "the pause counts from the last observation"
    assert schedule.due("checkpoints", 33, 33.0) == 1
