"""The coordinator's time for a checkpoint of many instances, which are acknowledged one by one."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from bench.environment import BenchFailed, Environment
from bench.measures import Measure, at_least, below
from dagster_checkpoints.coordination.checkpoints import TaskStatistics
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.coordinator import CheckpointCoordinator
from dagster_checkpoints.coordination.events import (
    Acknowledged,
    CoordinatorAction,
    MetadataWritten,
    NotifyTasks,
    TaskStateChanged,
    Tick,
    WriteMetadata,
)
from dagster_checkpoints.coordination.lifecycle import CheckpointCompletedNotice
from dagster_checkpoints.coordination.plan import TaskState
from dagster_checkpoints.pipeline import EdgePattern, ExecutionGraph, TaskId, Vertex, VertexEdge

PART = "Coordinator"
VERTICES = 100
SIZES = (10_000, 100_000)  # instances
ROUNDS = 3
ACKNOWLEDGEMENTS = 100_000.0  # per second
LINEAR = 20.0  # ten times the instances may take twice as long per instance: caches are finite


@dataclass(frozen=True)
class CheckpointTimes:
    """Seconds of one checkpoint: for all acknowledgements, and from the trigger to its completion."""

    acknowledging: float
    total: float


def measure(environment: Environment) -> Iterator[Measure]:
    totals = []
    for instances in SIZES:
        tasks, coordinator = running(VERTICES, instances // VERTICES)
        times = [checkpoint(tasks, coordinator, number) for number in range(1, ROUNDS + 1)]
        totals.append(median(t.total for t in times))
        rate = instances / median(t.acknowledging for t in times)
        what = f"Acknowledgements, {instances:,} instances"
        largest = instances == SIZES[-1]
        yield at_least(PART, what, rate, "/s", ACKNOWLEDGEMENTS) if largest else Measure(PART, what, rate, "/s")
        yield Measure(PART, f"Trigger to completed, {instances:,} instances", 1000 * totals[-1], "ms")
    yield below(PART, "time with 10 times the instances / time", totals[-1] / totals[-2], "", LINEAR)


def running(vertices: int, instances: int) -> tuple[list[TaskId], CheckpointCoordinator]:
    """A line of vertices joined ALL_TO_ALL, with all tasks running."""
    graph = ExecutionGraph(
        tuple(Vertex(f"v{v}", (f"v{v}",), instances) for v in range(vertices)),
        tuple(VertexEdge(v, v + 1, EdgePattern.ALL_TO_ALL) for v in range(vertices - 1)),
    )
    coordinator = CheckpointCoordinator(graph, CheckpointConfig(interval=1.0))
    tasks = [TaskId(vertex.name, index) for vertex in graph.vertices for index in range(instances)]
    for task in tasks:
        coordinator.handle(TaskStateChanged(task, TaskState.RUNNING), 0.0)
    return tasks, coordinator


def checkpoint(tasks: list[TaskId], coordinator: CheckpointCoordinator, number: int) -> CheckpointTimes:
    """Take one checkpoint, from the trigger to its completion."""
    events = [Acknowledged(task, number, None, TaskStatistics(new_bytes=1, total_bytes=10)) for task in tasks]
    gc.collect()
    now, last = float(number), list[CoordinatorAction]()
    began = time.perf_counter()
    coordinator.handle(Tick(), now)
    triggered = time.perf_counter()
    for event in events:
        last = coordinator.handle(event, now)
    acknowledged = time.perf_counter()
    if not isinstance(last[-1], WriteMetadata):
        raise BenchFailed(f"checkpoint {number} is not complete after {len(events)} acknowledgements: {last}")
    actions = coordinator.handle(MetadataWritten(number, f"chk-{number}"), now)
    completed = time.perf_counter()
    notice = CheckpointCompletedNotice(number)
    if not any(
        isinstance(action, NotifyTasks) and action.notice == notice and len(action.tasks) == len(tasks) for action in actions
    ):
        raise BenchFailed(f"checkpoint {number} was not completed for every task")
    return CheckpointTimes(acknowledged - triggered, completed - began)
