"""A checkpoint whose outcome is unknown may be the store's newest: no older one may take its place."""

from __future__ import annotations

from dagster_checkpoints.coordination import (
    Acknowledged,
    CheckpointConfig,
    CheckpointCoordinator,
    CheckpointFailed,
    CheckpointProperties,
    CheckpointRequested,
    CoordinatorAction,
    DiscardStates,
    FailureReason,
    MetadataOutcomeUnknown,
    TaskState,
    TaskStateChanged,
    WriteMetadata,
)
from dagster_checkpoints.pipeline import ExecutionGraph, TaskId, Vertex

TASK = TaskId("V0", 0)


def after_unknown_outcome_of_the_newer(older: CheckpointProperties) -> tuple[CheckpointCoordinator, list[CoordinatorAction]]:
    """Checkpoint 2 is acknowledged first, and nobody knows whether it was written; then 1 is acknowledged."""
    config = CheckpointConfig(interval=None, max_concurrent=2, tolerable_failed_checkpoints=10)
    coordinator = CheckpointCoordinator(ExecutionGraph((Vertex("V0", ("v0",), 1),), ()), config)
    coordinator.handle(TaskStateChanged(TASK, TaskState.RUNNING), 0.0)
    coordinator.handle(CheckpointRequested("older", older), 1.0)
    coordinator.handle(CheckpointRequested("newer"), 2.0)
    coordinator.handle(Acknowledged(TASK, 2, "b"), 3.0)
    actions = coordinator.handle(MetadataOutcomeUnknown(2, "no answer"), 4.0)
    return coordinator, actions + coordinator.handle(Acknowledged(TASK, 1, "a"), 5.0)


def test_an_older_checkpoint_is_given_up() -> None:
    coordinator, actions = after_unknown_outcome_of_the_newer(CheckpointProperties())
    failed = [(a.checkpoint_id, a.reason) for a in actions if isinstance(a, CheckpointFailed)]
    assert failed == [(2, FailureReason.FINALIZE_CHECKPOINT_FAILURE), (1, FailureReason.CHECKPOINT_SUBSUMED)]
    assert "checkpoint 2 may have completed" in [a.message for a in actions if isinstance(a, CheckpointFailed)][1]
    assert not [a for a in actions if isinstance(a, WriteMetadata)]
    assert 2 not in [a.checkpoint_id for a in actions if isinstance(a, DiscardStates)]
    assert coordinator.pending_ids == ()


def test_an_older_savepoint_goes_on() -> None:
    _, actions = after_unknown_outcome_of_the_newer(CheckpointProperties.for_savepoint())
    assert [a.checkpoint.checkpoint_id for a in actions if isinstance(a, WriteMetadata)] == [1]
