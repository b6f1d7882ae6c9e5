"""Reads an execution graph from one line of text."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from dagster_checkpoints.coordination.plan import TaskState, TaskStateTable
from dagster_checkpoints.pipeline import EdgePattern, ExecutionGraph, TaskId, Vertex, VertexEdge

_EDGE = {"ALL": EdgePattern.ALL_TO_ALL, "PW": EdgePattern.POINTWISE}
_VERTEX = re.compile(r"^(\w+)(?: p(\d+))?(?: fin\{([\d,]*)\})?(?: (\w+)\{([\d,]*)\})?$")


def parse_graph(row: str) -> TaskStateTable:
    """Reads ``V0 p3 fin{0,1} -ALL-> V1 p4; V0 -PW-> V2 p3 failed{2}``.

    A vertex is described where it is first named; the names in order are a topological order. Tasks that are
    not mentioned are RUNNING.
    """
    vertices: dict[str, Vertex] = {}
    special: list[tuple[TaskId, TaskState]] = []
    edges: list[tuple[str, str, EdgePattern]] = []

    def vertex_of(text: str) -> str:
        match = _VERTEX.match(text.strip())
        assert match, f"not a vertex: {text!r}"
        name, parallelism, finished, state, those = match.groups()
        if name not in vertices:
            vertices[name] = Vertex(name, (name.lower(),), int(parallelism))
            listed = ((TaskState.FINISHED, finished), (state and TaskState[state.upper()], those))
            special.extend(
                (TaskId(name, int(index)), which) for which, indices in listed if indices for index in indices.split(",")
            )
        return name

    for statement in row.split(";"):
        parts = re.split(r"-(ALL|PW)->", statement)
        names = [vertex_of(part) for part in parts[::2]]
        edges.extend(
            (source, target, _EDGE[pattern]) for source, target, pattern in zip(names, names[1:], parts[1::2], strict=False)
        )
    order = sorted(vertices)
    graph = ExecutionGraph(
        tuple(vertices[name] for name in order),
        tuple(VertexEdge(order.index(source), order.index(target), p) for source, target, p in edges),
    )
    states = TaskStateTable(graph)
    for vertex in vertices.values():
        for index in range(vertex.parallelism):
            states.set(TaskId(vertex.name, index), TaskState.RUNNING)
    for task, which in special:
        states.set(task, which)
    return states


@pytest.fixture(scope="session")
def states_of() -> Callable[[str], TaskStateTable]:
    return parse_graph


@pytest.fixture(scope="session")
def graph_of() -> Callable[[str], ExecutionGraph]:
    return lambda row: parse_graph(row).graph
