"""The checkpoint plan: Flink's table of graphs, and random graphs against the definition, spelled out."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.coordination.errors import UnknownTask
from dagster_checkpoints.coordination.plan import CheckpointPlan, NotAllRunning, TaskState, TaskStateTable, compute_plan
from dagster_checkpoints.pipeline import (
    EdgePattern,
    ExecutionGraph,
    TaskId,
    Vertex,
    VertexEdge,
    pointwise_producers,
)

States = Callable[[str], TaskStateTable]


def tasks(text: str) -> set[TaskId]:
    """Reads ``V0{2} V1{0,1}``."""
    return {TaskId(name, int(index)) for name, indices in re.findall(r"(\w+)\{([\d,]+)\}", text) for index in indices.split(",")}


@pytest.mark.parametrize(
    ("row", "trigger"),
    [
        # All running: the sources.
        ("V0 p3", "V0{0,1,2}"),
        ("V0 p3 -ALL-> V1 p4", "V0{0,1,2}"),
        ("V0 p3 -PW-> V1 p3", "V0{0,1,2}"),
        ("V0 p2 -ALL-> V2 p2; V1 p1 -ALL-> V2", "V0{0,1} V1{0}"),
        # Some finished.
        ("V0 p3 fin{0,1} -ALL-> V1 p4", "V0{2}"),
        ("V0 p4 fin{0,1} -PW-> V1 p4", "V0{2,3} V1{0,1}"),
        ("V0 p3 fin{0,1,2} -ALL-> V1 p4", "V1{0,1,2,3}"),
        ("V0 p3 fin{0,1,2} -PW-> V1 p3", "V1{0,1,2}"),
        ("V0 p3 fin{0,1,2} -ALL-> V1 p4 fin{0,3}", "V1{1,2}"),
        ("V0 p4 fin{0,1} -PW-> V1 p4 fin{0}", "V0{2,3} V1{1}"),
        # POINTWISE with different parallelism: 3->5 reads [0][0][1][1][2], 5->3 reads [0][1,2][3,4].
        ("V0 p3 fin{0} -PW-> V1 p5", "V0{1,2} V1{0,1}"),
        ("V0 p3 fin{1} -PW-> V1 p5", "V0{0,2} V1{2,3}"),
        ("V0 p3 fin{2} -PW-> V1 p5", "V0{0,1} V1{4}"),
        ("V0 p5 fin{0} -PW-> V1 p3", "V0{1,2,3,4} V1{0}"),
        ("V0 p5 fin{1} -PW-> V1 p3", "V0{0,2,3,4}"),
        ("V0 p5 fin{1,2} -PW-> V1 p3", "V0{0,3,4} V1{1}"),
        ("V0 p5 fin{2,3,4} -PW-> V1 p3", "V0{0,1} V1{2}"),
        # Several inputs: every one must have finished.
        ("V0 p2 fin{0,1} -ALL-> V2 p3; V1 p2 -ALL-> V2", "V1{0,1}"),
        ("V0 p2 fin{0,1} -ALL-> V2 p3; V1 p2 fin{0} -ALL-> V2", "V1{1}"),
        ("V0 p2 fin{0,1} -ALL-> V2 p3; V1 p2 fin{0,1} -ALL-> V2", "V2{0,1,2}"),
        ("V0 p3 fin{0,1} -PW-> V2 p3; V1 p3 fin{1,2} -PW-> V2", "V0{2} V1{0} V2{1}"),
        ("V0 p3 fin{0,1} -PW-> V2 p3; V1 p2 fin{0,1} -ALL-> V2", "V0{2} V2{0,1}"),
        # Two edges between one pair: the stricter decides.
        ("V0 p3 fin{0} -PW-> V1 p3; V0 -ALL-> V1", "V0{1,2}"),
        # Depth: a running predecessor hides everything behind it.
        ("V0 p1 fin{0} -ALL-> V1 p2 fin{0} -ALL-> V2 p2", "V1{1}"),
        ("V0 p1 fin{0} -ALL-> V1 p2 fin{0,1} -ALL-> V2 p2", "V2{0,1}"),
        ("V0 p2 fin{0} -PW-> V1 p2 fin{0} -PW-> V2 p2", "V0{1} V2{0}"),
        # A task may report FINISHED before its predecessor does.
        ("V0 p1 -ALL-> V1 p1 fin{0} -ALL-> V2 p1", "V0{0} V2{0}"),
        # Everything has finished.
        ("V0 p2 fin{0,1} -ALL-> V1 p1 fin{0}", ""),
    ],
)
def test_roots(states_of: States, row: str, trigger: str) -> None:
    plan = compute_plan(states_of(row))
    assert isinstance(plan, CheckpointPlan)
    assert plan.trigger == tasks(trigger)


@pytest.mark.parametrize(
    ("row", "finished", "wait", "fully"),
    [
        ("V0 p2 -ALL-> V1 p1", "", "V0{0,1} V1{0}", set()),
        ("V0 p3 fin{0,1} -ALL-> V1 p1", "V0{0,1}", "V0{2} V1{0}", set()),
        ("V0 p2 fin{0,1} -ALL-> V1 p2 fin{1}", "V0{0,1} V1{1}", "V1{0}", {"v0"}),
    ],
)
def test_collections(states_of: States, row: str, finished: str, wait: str, fully: set[str]) -> None:
    plan = compute_plan(states_of(row))
    assert isinstance(plan, CheckpointPlan)
    assert plan.finished == tasks(finished)
    assert plan.wait == tasks(wait) == plan.commit
    assert plan.fully_finished == fully


@pytest.mark.parametrize("state", [s for s in TaskState if s not in (TaskState.RUNNING, TaskState.FINISHED)])
def test_a_task_to_wait_for_that_does_not_run(states_of: States, state: TaskState) -> None:
    plan = compute_plan(states_of(f"V0 p2 fin{{0}} -ALL-> V1 p3 {state.name.lower()}{{2}}"))
    assert plan == NotAllRunning(TaskId("V1", 2), state)
    assert f"V1[2] is {state.name}" in plan.message


def test_after_tasks_finish_switched_off(states_of: States) -> None:
    plan = compute_plan(states_of("V0 p2 fin{1} -ALL-> V1 p1"), after_tasks_finish=False)
    assert plan == NotAllRunning(TaskId("V0", 1), TaskState.FINISHED)
    why = "checkpoints after tasks finish are switched off (checkpoints_after_tasks_finish)"
    assert plan.message == f"task V0[1] is FINISHED and {why}"
    assert isinstance(compute_plan(states_of("V0 p2 -ALL-> V1 p1"), after_tasks_finish=False), CheckpointPlan)


def test_a_plan_does_not_follow_later_states(states_of: States) -> None:
    states = states_of("V0 p2 -ALL-> V1 p1")
    plan = compute_plan(states)
    states.set(TaskId("V0", 0), TaskState.FINISHED)
    assert isinstance(plan, CheckpointPlan)
    assert plan.finished == set()
    assert plan.trigger == tasks("V0{0,1}")


def test_a_set_of_tasks_is_a_set(states_of: States) -> None:
    plan = compute_plan(states_of("V0 p9 fin{0} -ALL-> V1 p3"))
    assert isinstance(plan, CheckpointPlan)
    assert plan.trigger & {TaskId("V0", 1), TaskId("V1", 1)} == {TaskId("V0", 1)}
    assert plan.wait - plan.trigger == tasks("V1{0,1,2}")
    strangers: list[object] = [TaskId("V0", 9), TaskId("V0", -1), TaskId("V7", 0), ("V0", 1, 2), "V0", None]
    assert not any(stranger in plan.wait for stranger in strangers)
    assert repr(plan.finished) == "TaskSet(V0[0])"
    shown = ", ".join(f"V0[{index}]" for index in range(1, 9))
    assert repr(plan.wait) == f"TaskSet({shown}, … 11 tasks)"


def test_the_flags_belong_to_every_stage_of_a_chain() -> None:
    graph = ExecutionGraph((Vertex("a", ("a", "b", "c"), 1), Vertex("d", ("d",), 1)), ())
    states = TaskStateTable(graph, [TaskId("a", 0)])
    states.set(TaskId("d", 0), TaskState.RUNNING)
    plan = compute_plan(states)
    assert isinstance(plan, CheckpointPlan)
    assert plan.fully_finished == {"a", "b", "c"}
    assert plan.roots == ("d",)


def test_the_fused_sources_that_have_not_ended_are_the_roots_of_their_task() -> None:
    graph = ExecutionGraph((Vertex("a", ("a", "b", "c", "d"), 1, fused=2), Vertex("e", ("e",), 1)), ())
    states = TaskStateTable(graph)
    for task in graph.tasks():
        states.set(task, TaskState.RUNNING)
    plan = compute_plan(states)
    assert isinstance(plan, CheckpointPlan)
    assert plan.roots == ("a", "b", "e")
    assert plan.roots_without({"a"}) == ("b", "e")
    assert plan.roots_without({"a", "b"}) == ("c", "e")


@pytest.mark.parametrize("task", [TaskId("V9", 0), TaskId("V0", 2), TaskId("V0", -1)])
def test_an_unknown_task_is_refused(states_of: States, task: TaskId) -> None:
    with pytest.raises(UnknownTask) as found:
        states_of("V0 p2; V1 p3").set(task, TaskState.RUNNING)
    assert str(found.value) == (
        f"Task {task} is not in the execution graph, which has V0[0..1], V1[0..2]. Send events only for tasks of the graph that "
        "the coordinator was made with."
    )
    plan = compute_plan(states_of("V0 p2"))
    assert isinstance(plan, CheckpointPlan)
    assert task not in plan.wait


def test_of_a_large_graph_an_error_names_a_part(states_of: States) -> None:
    with pytest.raises(UnknownTask) as caught:
        states_of("; ".join(f"V{index:02} p1" for index in range(21))).get(TaskId("V9", 0))
    assert "V19[0..0]" in str(caught.value) and "V20" not in str(caught.value)


@pytest.mark.parametrize(
    ("events", "running", "finished"),
    [
        ("", 0, 0),
        ("running", 1, 0),
        ("running running", 1, 0),
        ("running finished", 0, 1),
        # Reported twice, and started again.
        ("finished finished", 0, 1),
        ("finished initializing", 0, 0),
        ("finished running", 1, 0),
        ("running failed", 0, 0),
    ],
)
def test_states_are_counted(states_of: States, events: str, running: int, finished: int) -> None:
    states = TaskStateTable(states_of("V0 p1; V1 p1").graph)
    for word in events.split():
        states.set(TaskId("V0", 0), TaskState[word.upper()])
    assert (states.running, states.finished, states.unfinished) == (running, finished, 2 - finished)


@st.composite
def random_states(draw: st.DrawFn) -> TaskStateTable:
    vertices = [Vertex(f"V{i}", (f"v{i}",), draw(st.integers(1, 6))) for i in range(draw(st.integers(1, 6)))]
    edges = [
        VertexEdge(source, target, draw(st.sampled_from(EdgePattern)))
        for target in range(len(vertices))
        for source in range(target)
        if draw(st.booleans())
    ]
    states = TaskStateTable(ExecutionGraph(tuple(vertices), tuple(edges)))
    share = draw(st.sampled_from([1, 3, 10]))
    for vertex in vertices:
        for index in range(vertex.parallelism):
            finished = draw(st.integers(0, share)) > 0
            states.set(TaskId(vertex.name, index), TaskState.FINISHED if finished else TaskState.RUNNING)
    return states


@given(random_states())
def test_the_plan_is_the_definition(states: TaskStateTable) -> None:
    graph = states.graph
    everything = [TaskId(v.name, i) for v in graph.vertices for i in range(v.parallelism)]
    running = {task for task in everything if states.get(task) is TaskState.RUNNING}

    def predecessors(task: TaskId) -> set[TaskId]:
        found = set()
        target = graph.index_of(task.vertex)
        for edge in graph.edges:
            if edge.target == target:
                source = graph.vertices[edge.source]
                s, t = source.parallelism, graph.vertices[target].parallelism
                pointwise = edge.pattern is EdgePattern.POINTWISE
                found |= {TaskId(source.name, i) for i in (pointwise_producers(s, t, task.index) if pointwise else range(s))}
        return found

    plan = compute_plan(states)
    assert isinstance(plan, CheckpointPlan)
    assert plan.trigger == {task for task in running if not predecessors(task) & running}
    assert plan.wait == running
    assert plan.finished == set(everything) - running
    assert set(plan.roots) == {task.vertex.lower() for task in plan.trigger}
    assert len(plan.wait) == len(list(plan.wait)) == states.running
    # Every running task gets a barrier: there is a path to it from a root.
    assert bool(plan.trigger) == bool(running)


def test_a_million_instances_cost_no_object_each() -> None:
    stages, instances = 1000, 1000
    graph = ExecutionGraph(
        tuple(Vertex(f"V{i}", (f"v{i}",), instances) for i in range(stages)),
        tuple(VertexEdge(i, i + 1, EdgePattern.ALL_TO_ALL) for i in range(stages - 1)),
    )
    states = TaskStateTable(graph)
    for row in states.rows:
        row[:] = bytes([TaskState.RUNNING.value]) * instances
    states.running = stages * instances
    plan = compute_plan(states)
    assert isinstance(plan, CheckpointPlan)
    assert len(plan.wait) == 1_000_000
    assert plan.trigger == {TaskId("V0", i) for i in range(instances)}
