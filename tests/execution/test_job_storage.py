"""The events that a job gets for storage's answers."""

from __future__ import annotations

from dataclasses import dataclass

from dagster_checkpoints.coordination.checkpoints import CompletedCheckpoint
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.execution.job_storage import beginning_chosen, ownership_answer
from dagster_checkpoints.execution.start_point import StartPoint
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state.metadata import CheckpointMetadata
from dagster_checkpoints.state.restore import RestorePlan
from tests.execution.storage_scripts import pointer

FINISHED = frozenset({TaskId("a", 0)})

PLAN = RestorePlan(CheckpointMetadata("p", 5), finished=FINISHED)


@dataclass(frozen=True)
class Read:
    """A checkpoint that was read."""

    plan: RestorePlan = PLAN
    location: str = "checkpoints/chk-5-1"


def test_a_new_start_restores_nothing() -> None:
    start: StartPoint[Read] = StartPoint(None, False, 1)
    assert beginning_chosen(start) == on.BeginningChosen(on.JobBeginning(None, 1))


def test_a_restart_begins_with_what_is_retained() -> None:
    kept, later = (CompletedCheckpoint(4, "d"),), (CompletedCheckpoint(6, "e"),)
    start = StartPoint(Read(), True, 7, pointer(5), kept, later)
    event = beginning_chosen(start)
    restored = on.RestorePoint(5, "checkpoints/chk-5-1", FINISHED)
    assert event == on.BeginningChosen(on.JobBeginning(restored, 7, kept, later))
    assert event.start.restored is not None and event.start.restored.state == Read()


def test_a_restart_waits_until_storage_confirms_the_ownership() -> None:
    assert ownership_answer(False, pointer(5)) == on.StorageSilent()
    assert ownership_answer(True, None) == on.OwnershipConfirmed()
    newest = pointer(5, epoch=3)
    assert ownership_answer(True, newest) == on.OwnershipConfirmed(CompletedCheckpoint(5, newest.location), 3)
