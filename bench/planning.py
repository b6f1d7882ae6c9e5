"""The time to compute the plan of a checkpoint, by the size of the execution graph."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

from bench.environment import BenchFailed, Environment
from bench.measures import Measure, below
from dagster_checkpoints.coordination.plan import NotAllRunning, TaskState, TaskStateTable, compute_plan
from dagster_checkpoints.pipeline import EdgePattern, ExecutionGraph, TaskId, Vertex, VertexEdge

PART = "Plan of a checkpoint"
SIZES = ((10, 100), (100, 100), (100, 1_000), (1_000, 1_000))  # vertices, instances of each
LIMIT_MS = 1_000.0
LINEAR = 20.0  # ten times the instances may take twice as long per instance: caches are finite


def measure(environment: Environment) -> Iterator[Measure]:
    took = []
    for vertices, instances in SIZES:
        states = half_finished(vertices, instances)
        took.append(median([_seconds(states) for _ in range(3)]))
        what = f"{vertices * instances:,} instances ({vertices:,} x {instances:,}, ALL_TO_ALL)"
        largest = (vertices, instances) == SIZES[-1]
        measured = 1000 * took[-1]
        yield below(PART, what, measured, "ms", LIMIT_MS) if largest else Measure(PART, what, measured, "ms")
    yield below(PART, "time with 10 times the instances / time", took[-1] / took[-2], "", LINEAR)


def half_finished(vertices: int, instances: int) -> TaskStateTable:
    """A line of vertices: the first third is finished, the next third half finished, all other instances are running."""
    graph = ExecutionGraph(
        tuple(Vertex(f"v{v}", (f"v{v}",), instances) for v in range(vertices)),
        tuple(VertexEdge(v, v + 1, EdgePattern.ALL_TO_ALL) for v in range(vertices - 1)),
    )
    states = TaskStateTable(graph)
    for v in range(vertices):
        finished = instances if 3 * v < vertices else instances // 2 if 3 * v < 2 * vertices else 0
        for index in range(instances):
            states.set(TaskId(f"v{v}", index), TaskState.FINISHED if index < finished else TaskState.RUNNING)
    return states


def _seconds(states: TaskStateTable) -> float:
    began = time.perf_counter()
    plan = compute_plan(states)
    seconds = time.perf_counter() - began
    if isinstance(plan, NotAllRunning) or len(plan.finished) + len(plan.wait) != states.total:
        raise BenchFailed(f"the plan does not cover the graph: {plan}")
    return seconds
