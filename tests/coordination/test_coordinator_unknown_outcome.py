"""A checkpoint with an unknown outcome may be the store's newest: no older one may replace it."""

from __future__ import annotations

import pytest

from dagster_checkpoints.coordination.checkpoints import CheckpointProperties, CompletedCheckpoint
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.coordinator import CheckpointCoordinator
from dagster_checkpoints.coordination.events import (
    Acknowledged,
    CheckpointFailed,
    CheckpointRequested,
    CheckpointTriggered,
    CoordinatorAction,
    Declined,
    DiscardStates,
    FailJob,
    MetadataOutcomeUnknown,
    TasksRestarting,
    TaskStateChanged,
    WriteMetadata,
)
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.plan import TaskState
from dagster_checkpoints.pipeline import ExecutionGraph, TaskId, Vertex

TASK = TaskId("V0", 0)
CHECKPOINT, SAVEPOINT = CheckpointProperties(), CheckpointProperties.for_savepoint()


def after_unknown_outcome_of_the_newer(
    older: CheckpointProperties, newer: CheckpointProperties = CHECKPOINT
) -> tuple[CheckpointCoordinator, list[CoordinatorAction]]:
    """Checkpoint 2 is acknowledged first, and the outcome of its write is unknown; then 1 is acknowledged."""
    config = CheckpointConfig(interval=None, max_concurrent=2, tolerable_failed_checkpoints=10)
    coordinator = CheckpointCoordinator(ExecutionGraph((Vertex("V0", ("v0",), 1),), ()), config)
    coordinator.handle(TaskStateChanged(TASK, TaskState.RUNNING), 0.0)
    coordinator.handle(CheckpointRequested("older", older), 1.0)
    coordinator.handle(CheckpointRequested("newer", newer), 2.0)
    coordinator.handle(Acknowledged(TASK, 2, "b"), 3.0)
    actions = coordinator.handle(MetadataOutcomeUnknown(2, "no answer"), 4.0)
    return coordinator, actions + coordinator.handle(Acknowledged(TASK, 1, "a"), 5.0)


def test_an_older_checkpoint_is_aborted() -> None:
    coordinator, actions = after_unknown_outcome_of_the_newer(CHECKPOINT)
    failed = [(a.checkpoint_id, a.reason) for a in actions if isinstance(a, CheckpointFailed)]
    assert failed == [(2, FailureReason.FINALIZE_CHECKPOINT_FAILURE), (1, FailureReason.CHECKPOINT_SUBSUMED)]
    assert "checkpoint 2 may have completed" in [a.message for a in actions if isinstance(a, CheckpointFailed)][1]
    assert not [a for a in actions if isinstance(a, WriteMetadata)]
    assert 2 not in [a.checkpoint_id for a in actions if isinstance(a, DiscardStates)]
    assert coordinator.pending_ids == ()


def test_an_older_savepoint_continues() -> None:
    _, actions = after_unknown_outcome_of_the_newer(SAVEPOINT)
    assert [a.checkpoint.checkpoint_id for a in actions if isinstance(a, WriteMetadata)] == [1]


@pytest.mark.parametrize("older", [CHECKPOINT, SAVEPOINT], ids=["checkpoint", "savepoint"])
def test_a_savepoint_subsumes_nothing_whatever_its_outcome(older: CheckpointProperties) -> None:
    coordinator, actions = after_unknown_outcome_of_the_newer(older, SAVEPOINT)
    assert [a.checkpoint_id for a in actions if isinstance(a, CheckpointFailed)] == [2]
    assert [a.checkpoint.checkpoint_id for a in actions if isinstance(a, WriteMetadata)] == [1]
    assert coordinator.pending_ids == (1,)


@pytest.mark.parametrize("stored", [True, False])
def test_a_checkpoint_that_turns_out_to_be_stored_resets_the_failure_count(stored: bool) -> None:
    config = CheckpointConfig(interval=None, tolerable_failed_checkpoints=1)
    coordinator = CheckpointCoordinator(ExecutionGraph((Vertex("V0", ("v0",), 1),), ()), config)

    def failing(declined: bool) -> tuple[int, list[CoordinatorAction]]:
        events = [TaskStateChanged(TASK, TaskState.RUNNING), CheckpointRequested("r")]
        begun = [a for event in events for a in coordinator.handle(event, 0.0)]
        (checkpoint_id,) = (a.checkpoint_id for a in begun if isinstance(a, CheckpointTriggered))
        if declined:
            return checkpoint_id, coordinator.handle(Declined(TASK, checkpoint_id), 0.0)
        coordinator.handle(Acknowledged(TASK, checkpoint_id, "s"), 0.0)
        return checkpoint_id, coordinator.handle(MetadataOutcomeUnknown(checkpoint_id, "no answer"), 0.0)

    unknown, _ = failing(declined=False)
    known = CompletedCheckpoint(unknown, "checkpoints/chk-1") if stored else None
    coordinator.handle(TasksRestarting(restored=known), 0.0)
    _, actions = failing(declined=True)
    assert any(isinstance(a, FailJob) for a in actions) != stored
    late = coordinator.handle(Acknowledged(TASK, unknown, "s"), 0.0)
    assert not [a for a in late if isinstance(a, DiscardStates)], "the store may name it"
