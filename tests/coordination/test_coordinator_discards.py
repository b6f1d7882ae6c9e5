"""The files of an aborted checkpoint are discarded, also if no task had acknowledged."""

from __future__ import annotations

from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.coordinator import CheckpointCoordinator
from dagster_checkpoints.coordination.events import CheckpointRequested, Declined, DiscardStates, TaskStateChanged
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.plan import TaskState
from dagster_checkpoints.pipeline import ExecutionGraph, TaskId, Vertex


def test_a_partial_upload_is_discarded_even_if_no_task_had_acknowledged() -> None:
    graph = ExecutionGraph((Vertex("V0", ("v0",), 1),), ())
    coordinator = CheckpointCoordinator(graph, CheckpointConfig(interval=None))
    coordinator.handle(TaskStateChanged(TaskId("V0", 0), TaskState.RUNNING), 0.0)
    coordinator.handle(CheckpointRequested("r"), 1.0)
    actions = coordinator.handle(Declined(TaskId("V0", 0), 1, FailureReason.IO_EXCEPTION, "half of it is stored"), 2.0)
    assert [(a.checkpoint_id, dict(a.states)) for a in actions if isinstance(a, DiscardStates)] == [(1, {})]
