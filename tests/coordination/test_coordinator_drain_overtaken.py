"""A drain while tasks are ending: a task that ends on its own in between does not fail it."""

from __future__ import annotations

from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.coordinator import CheckpointCoordinator
from dagster_checkpoints.coordination.events import (
    Acknowledged,
    CheckpointTriggered,
    CoordinatorAction,
    CoordinatorEvent,
    Declined,
    EndOfDataReached,
    MetadataWritten,
    RequestCompleted,
    RequestNotCompleted,
    StopRequested,
    TaskStateChanged,
    WriteMetadata,
)
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.plan import TaskState
from dagster_checkpoints.pipeline import ExecutionGraph, TaskId, Vertex

ONE, OTHER = TaskId("V0", 0), TaskId("V1", 0)


def draining(*events: CoordinatorEvent) -> tuple[CheckpointCoordinator, list[CoordinatorAction]]:
    """Two tasks that have reached their end of data when the drain comes; the drain replaces the final checkpoint, 1."""
    graph = ExecutionGraph((Vertex("V0", ("v0",), 1), Vertex("V1", ("v1",), 1)), ())
    coordinator = CheckpointCoordinator(graph, CheckpointConfig(interval=None))
    before = [TaskStateChanged(task, TaskState.RUNNING) for task in (ONE, OTHER)]
    ended = [EndOfDataReached(task) for task in (ONE, OTHER)]
    actions = [a for event in (*before, *ended, StopRequested("r", drain=True), *events) for a in coordinator.handle(event, 0.0)]
    return coordinator, actions


def test_the_savepoint_is_taken_again_without_the_ended_tasks() -> None:
    finished = TaskStateChanged(ONE, TaskState.FINISHED)
    coordinator, actions = draining(finished, Acknowledged(OTHER, 3), MetadataWritten(3, "savepoints/savepoint-3"))
    assert [a.checkpoint_id for a in actions if isinstance(a, CheckpointTriggered)] == [1, 2, 3]
    assert [a.checkpoint.checkpoint_id for a in actions if isinstance(a, WriteMetadata)] == [3]
    assert [a.request_id for a in actions if isinstance(a, RequestCompleted)] == ["r"]
    assert not [a for a in actions if isinstance(a, RequestNotCompleted)]
    assert coordinator.stopping == "r"


def test_a_task_that_declines_because_it_closes_fails_the_drain() -> None:
    declined = Declined(ONE, 2, FailureReason.CHECKPOINT_DECLINED_TASK_CLOSING)
    _, actions = draining(declined, TaskStateChanged(ONE, TaskState.FINISHED))
    assert [a.request_id for a in actions if isinstance(a, RequestNotCompleted)] == ["r"]
    assert [a.checkpoint_id for a in actions if isinstance(a, CheckpointTriggered)] == [1, 2]


def test_without_running_tasks_the_job_has_ended_on_its_own() -> None:
    _, actions = draining(TaskStateChanged(ONE, TaskState.FINISHED), TaskStateChanged(OTHER, TaskState.FINISHED))
    answers = [(a.request_id, a.reason) for a in actions if isinstance(a, RequestNotCompleted)]
    assert answers == [("r", FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN)]
