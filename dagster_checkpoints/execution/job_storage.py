"""What storage's answers mean to a job: the events that its machine receives for the chosen start and the newest checkpoint.

Values only. Must not know how storage is asked.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from dagster_checkpoints.execution.job_events import (
    BeginningChosen,
    JobBeginning,
    OwnershipConfirmed,
    RestorePoint,
    StorageSilent,
)
from dagster_checkpoints.execution.pipeline_state import CheckpointPointer
from dagster_checkpoints.execution.start_point import StartPoint, completed_checkpoint
from dagster_checkpoints.state.restore import RestorePlan


class RestoredCheckpoint(Protocol):
    """A checkpoint that was read and fits the pipeline."""

    @property
    def plan(self) -> RestorePlan: ...
    @property
    def location(self) -> str: ...


R = TypeVar("R", bound=RestoredCheckpoint)


def restore_point(restored: RestoredCheckpoint) -> RestorePoint:
    """The part of a restored checkpoint that the job machine knows."""
    plan = restored.plan
    return RestorePoint(plan.checkpoint_id, restored.location, frozenset(plan.finished), plan.ending, restored)


def beginning_chosen(start: StartPoint[R]) -> BeginningChosen:
    """The event for the start that was chosen."""
    return BeginningChosen(
        JobBeginning(
            None if start.restored is None else restore_point(start.restored),
            start.next_checkpoint_id,
            start.retained,
            start.passed_over,
        )
    )


def ownership_answer(renewed: bool, newest: CheckpointPointer | None) -> OwnershipConfirmed | StorageSilent:
    """The event for a renewal that a restart has asked for.

    Args:
        renewed: False if storage did not say that this run still owns the pipeline.
        newest: the newest completed checkpoint, as storage names it since that renewal; None without one.
    """
    if not renewed:
        return StorageSilent()
    if newest is None:
        return OwnershipConfirmed()
    return OwnershipConfirmed(completed_checkpoint(newest), newest.epoch)
