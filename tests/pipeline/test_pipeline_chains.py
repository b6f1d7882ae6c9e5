"""Which stages share a query, and the execution graph that follows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.pipeline import (
    Chain,
    EdgePattern,
    ExecutionGraph,
    Pipeline,
    Stage,
    StageContext,
    StageInput,
    StageKind,
    TaskId,
    Vertex,
    VertexEdge,
    build_chains,
    channel_reasons,
    execution_graph,
    fused_sources,
    links,
)
from dagster_checkpoints.pipeline.errors import (
    ChainLayoutError,
    InvalidExecutionGraphError,
    UnknownStageError,
)

STATIC, ALL, BY_KEY = StageInput(mode="static"), StageInput(edge="all_to_all"), StageInput(key="origin")
POINTWISE, ALL_TO_ALL = EdgePattern.POINTWISE, EdgePattern.ALL_TO_ALL


class Plain(Stage):
    def transform(self, context: StageContext, **inputs: Any) -> Any:
        return None


class Batches(Plain):
    def process_batch(self, batch: Any, batch_id: int) -> Any:
        return batch


class Flushes(Plain):
    def finish(self) -> Any:
        return None


class TakesAll:
    supported_output_modes = frozenset({"append", "update", "complete"})


SORTS = {"=": STATIC, "*": ALL, "#": BY_KEY, "^": StageInput(fuse=False)}


def described(row: str, **options: Any) -> Pipeline:
    """A pipeline in a row: "a/3 b(a) c!(b,=t) d~(*c)$".

    /n instances, ! overrides process_batch, ~ overrides finish, % update mode, + limited micro-batches, ? no watermark, $ a sink;
    inputs: = static, * all to all, # by key, ^ not fused. A last stage always gets a sink.
    """
    words = row.split()
    read = {name.lstrip("=*#^") for word in words for name in arguments(word)}
    return Pipeline("p", [made(word, read) for word in words], **options)


def arguments(word: str) -> list[str]:
    return word[word.index("(") + 1 : word.index(")")].split(",") if "(" in word else []


def made(word: str, read: set[str]) -> Stage:
    inputs = {name.lstrip("=*#^"): SORTS.get(name[0], StageInput()) for name in arguments(word)}
    head = word.split("(")[0].rstrip("$")
    head, _, count = head.partition("/")
    name = head.rstrip("!~%?+")
    cls = Batches if "!" in head else Flushes if "~" in head else Plain
    return cls(
        name,
        inputs=inputs,
        instances=[str(number) for number in range(int(count or 1))],
        kind=StageKind.DERIVED if inputs else StageKind.BOUNDED_SOURCE,
        sink=TakesAll() if word.endswith("$") or name not in read else None,
        output_mode="update" if "%" in head else "append",
        max_rows_per_trigger=1_000 if "+" in head else None,
        watermark=None if inputs or "?" in head else ("ts", "1 minute"),
    )


def shown(chains: tuple[Chain, ...]) -> str:
    return " | ".join(" ".join(chain.stages) for chain in chains)


@pytest.mark.parametrize(
    ("row", "chains"),
    [
        ("a", "a"),
        ("a b(a)", "a b"),
        ("a b(a) c(b) d(c)", "a b c d"),
        ("a/3 b/3(a) c/3(b)", "a b c"),
        ("d(c) c(b) b(a) a", "a b c d"),
        # not exactly one streaming input
        ("a b(a) c(a,b) d(c)", "a | b | c d"),
        ("a b(^a) c(b)", "a | b c"),
        ("a t b(a,=t) c(b)", "a | t | b c"),
        ("t b(=t) c(b)", "t | b c"),
        # a limit of the rows that a micro-batch takes from channels
        ("a b+(a) c(b)", "a | b c"),
        ("a b+(a) c+(b)", "a | b | c"),
        ("a b c+(a,b)", "a | b | c"),
        # not POINTWISE, or other instances
        ("a/2 b/2(*a) c/2(b)", "a | b c"),
        ("a/2 b/2(#a)", "a | b"),
        ("a b(*a)", "a | b"),
        ("a/3 b(a) c(b) d/2(c)", "a | b c | d"),
        # another consumer, or a sink
        ("a b(a) c(a)", "a | b | c"),
        ("a b(a) c(b) d(b) e(d)", "a b | c | d e"),
        ("a b(a) t(a) c(b,=t)", "a | b | t | c"),
        ("a b(a) c(b,=a)", "a | b | c"),
        ("a b(a)$ c(b)", "a b | c"),
        ("a$ b(a) c(b)", "a | b c"),
        # a stage with process_batch or finish ends its chain
        ("a b!(a) c(b)", "a b | c"),
        ("a b~(a) c(b) d(c)", "a b | c d"),
        ("a! b(a)", "a | b"),
        ("a b(a) c!(b)", "a b c"),
        # fused sources: all inputs of a stage of one instance are streams of sources of one instance, which it alone reads
        ("a b c(a,b)", "a b c"),
        ("a b c(b,a) d(c) e(d)", "a b c d e"),
        ("b x a c(a,b) d(x,c)", "b x a c d"),
        ("a b c(a,b) d e f(d,e) g(c,f)", "a b d e c f g"),
        ("a b c(a,b) d e f(d,e) g!(c,=f)", "a b c | d e f | g"),
        ("a b c!%(a,b)$", "a b c"),
        ("a b c(a,b)$ d(c)", "a b c | d"),
        ("a b c(^a,b) d(c)", "a | b | c d"),
        ("a b c(*a,b)", "a | b | c"),
        ("a b t c(a,b,=t)", "a | b | t | c"),
        # ... or pass on the rows of such sources
        ("a b d(b) c(a,d)", "a b d c"),
        ("a d(a) b e(b) f(e) c(d,f) g(c)", "a b d e f c g"),
        ("a b d(a,b) x c(d,x)", "a b x d c"),
        ("a b d(^a,b) x c(d,x)", "a | b | d | x | c"),
        ("a b d(^b) c(a,d)", "a | b | d | c"),
        ("a b d+(b) c(a,d)", "a | b | d | c"),
        ("a b d(b)$ c(a,d)", "a | b d | c"),
        ("a b d(*b) c(a,d)", "a | b | d | c"),
        ("a b? d(b) c(a,d)", "a | b d | c"),
        ("a? b? d(b) c(a,d)", "a b d c"),
        ("a? b? d(a,b) x c(d,x)", "a b d | x | c"),
        ("a b d!(b) c(a,d)", "a | b d | c"),
        ("a b d(b) e(b) c(a,d,e)", "a | b | d | e | c"),
        ("a b d(b) c%(a,d)", "a b d c"),
        ("a b c(a,b) d(b)", "a | b | c | d"),
        ("a$ b c(a,b)", "a | b | c"),
        ("a! b c(a,b)", "a | b | c"),
        ("a b~ c(a,b)", "a | b | c"),
        ("a/2 b/2 c/2(a,b)", "a | b | c"),
        ("a/2 b c(a,b)", "a | b | c"),
        ("a b? c(a,b)", "a | b | c"),
        # a query has one output mode
        ("a b(a) c%(b)", "a b | c"),
    ],
)
def test_which_stages_share_a_query(row: str, chains: str) -> None:
    assert shown(build_chains(described(row))) == chains


@pytest.mark.parametrize(
    ("row", "reasons"),
    [
        ("a b c(a,b)", {}),
        ("a b? c(a,b)", {"c": "'a' declares a watermark, and 'b' does not"}),
        ("a b c(a,^b)", {"c": "'c' has fuse=False for its input 'b'"}),
        ("a b(^a) c(b)", {}),
        ("a b c+(a,b)", {"c": "'c' has max_rows_per_trigger=1000, which limits what it takes from channels"}),
        ("a/2 b/2 c/2(a,b)", {"c": "'c' has 2 instances; expected one"}),
        ("a/2 b c(a,b)", {"c": "'c' has the instances ['0'], and 'a' has ['0', '1']"}),
        ("a b c(a,*b)", {"c": "'c' reads 'b' over ALL_TO_ALL; expected a stream over POINTWISE"}),
        ("a b t c(a,b,=t)", {"c": "'c' reads 't' as a static input; expected a stream over POINTWISE"}),
        ("a t c(a,=t)", {}),
        ("a b$ c(a,b)", {"c": "'b' has a sink"}),
        ("a b d(b)$ c(a,b)", {"c": "'b' is read by 'd', 'c'; expected 'c' alone"}),
        ("a b d(b)$ c(a,d) e f(c,e)", {"c": "'d' has a sink", "f": "'d' has a sink"}),
        ("a b! c(a,b)", {"c": "'b' overrides process_batch"}),
    ],
)
def test_why_a_stage_reads_sources_through_channels(row: str, reasons: dict[str, str]) -> None:
    assert dict(channel_reasons(described(row))) == reasons
    assert not dict(channel_reasons(described(row, chaining=False))).items() - {
        (name, "the pipeline has chaining=False") for name in ("c", "f")
    }


def test_one_instance_of_another_name_is_not_the_same_instance() -> None:
    source = Plain("a", kind=StageKind.BOUNDED_SOURCE, instances=["EWR"])
    pipeline = Pipeline("p", [source, Plain("b", inputs={"a": StageInput()}, sink=1)])
    assert build_chains(pipeline) == (Chain("a", ("a",), ("EWR",)), Chain("b", ("b",), ("0",)))


def test_chaining_can_be_switched_off() -> None:
    assert shown(build_chains(described("a b(a) c(b)", chaining=False))) == "a | b | c"
    assert shown(build_chains(described("a b c(a,b)", chaining=False))) == "a | b | c"


def test_fused_sources_are_one_vertex_without_edges_inside_it() -> None:
    pipeline = described("a b c(a,b) d(c)$ e(d)")
    graph = execution_graph(pipeline, build_chains(pipeline))
    assert graph.vertices == (Vertex("a", ("a", "b", "c", "d"), 1, fused=2), Vertex("e", ("e",), 1))
    assert graph.edges == (VertexEdge(0, 1, POINTWISE),)


def test_a_stage_whose_sources_cannot_share_its_query_reads_them_through_channels() -> None:
    assert shown(build_chains(described("a b c(a,b) d(c)"), frozenset({"c"}))) == "a | b | c d"


@pytest.mark.parametrize(
    ("row", "stages"),
    [
        ("a b c(a,b)$ d(b)", "a b c"),  # another stage reads a source
        ("a b x c(a,b,x)", "a b c"),  # one more source
        ("a b(a) c(a,b)", "a b c"),
        ("a b c(b)$ d(a)", "a b c"),
    ],
)
def test_a_recorded_layout_with_fused_sources_that_no_longer_fits_is_refused(row: str, stages: str) -> None:
    pipeline = described(row)
    chains = [Chain("a", tuple(stages.split()), ("0",))]
    chains += [Chain(s.name, (s.name,), ("0",)) for s in pipeline.stages if s.name not in stages.split()]
    with pytest.raises(ChainLayoutError, match=r"Was the pipeline changed"):
        execution_graph(pipeline, chains)


@pytest.mark.parametrize(
    ("breaks", "chains"),
    [((), "a b c d"), (("c",), "a b | c d"), (("b", "d"), "a | b c | d"), (("a",), "a b c d")],
)
def test_the_runtime_can_ask_for_breaks(breaks: tuple[str, ...], chains: str) -> None:
    assert shown(build_chains(described("a b(a) c(b) d(c)"), frozenset(breaks))) == chains


def test_a_break_at_a_stage_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnknownStageError, match="'bb'"):
        build_chains(described("a b(a)"), frozenset({"bb"}))


def test_a_chain_is_called_after_its_first_stage_and_has_its_instances() -> None:
    assert build_chains(described("a/2 b/2(a) c(b)")) == (
        Chain("a", ("a", "b"), ("0", "1")),
        Chain("c", ("c",), ("0",)),
    )


def test_the_execution_graph_has_an_edge_per_stage_edge_between_chains() -> None:
    pipeline = described("a/3 t b(a,=t) c(b) d(c) e(c)")
    assert execution_graph(pipeline, build_chains(pipeline)) == ExecutionGraph(
        (
            Vertex("a", ("a",), 3),
            Vertex("t", ("t",), 1),
            Vertex("b", ("b", "c"), 1),
            Vertex("d", ("d",), 1),
            Vertex("e", ("e",), 1),
        ),
        (
            VertexEdge(0, 2, POINTWISE),
            VertexEdge(1, 2, ALL_TO_ALL),
            VertexEdge(2, 3, POINTWISE),
            VertexEdge(2, 4, POINTWISE),
        ),
    )


def test_a_recorded_layout_serves_in_any_order_and_without_chaining() -> None:
    pipeline = described("a b(a) c(b) d(c)", chaining=False)
    recorded = [Chain("c", ("c", "d"), ("0",)), Chain("a", ("a", "b"), ("0",))]
    graph = execution_graph(pipeline, recorded)
    assert [vertex.stages for vertex in graph.vertices] == [("a", "b"), ("c", "d")]
    assert graph.edges == (VertexEdge(0, 1, POINTWISE),)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ([("a", "b")], "Stages 't', 'c' are in no chain"),
        ([("a", "b"), ("b",), ("c",), ("t",)], "Stage 'b' is in two chains"),
        ([("a", "b", "c"), ("t",)], "'c' reads 't'"),
        ([("b", "a"), ("c",), ("t",)], "'a' reads no stage"),
        ([("a", "t"), ("b",), ("c",)], "'t' reads no stage"),
        ([(), ("a",), ("b",), ("c",), ("t",)], "not called after its first stage"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout: list[tuple[str, ...]], says: str) -> None:
    pipeline = described("a b(a) t c(b,=t)")
    with pytest.raises(ChainLayoutError, match=says):
        execution_graph(pipeline, [Chain("".join(stages[:1]), stages, ("0",)) for stages in layout])


def test_a_layout_with_other_instances_is_refused() -> None:
    with pytest.raises(ChainLayoutError, match=r"\['0', '1'\], but Stage 'a'"):
        execution_graph(described("a"), [Chain("a", ("a",), ("0", "1"))])


def test_a_layout_with_an_unknown_stage_is_refused() -> None:
    with pytest.raises(UnknownStageError, match="no stage 'x'"):
        execution_graph(described("a"), [Chain("x", ("x",), ("0",))])


def test_finding_vertices_and_tasks_of_an_execution_graph() -> None:
    graph = ExecutionGraph(tuple(Vertex(name, (name,), 2) for name in "abc"), ())
    assert [graph.index_of(name) for name in "abc"] == [0, 1, 2]
    assert [str(task) for task in graph.tasks()] == ["a[0]", "a[1]", "b[0]", "b[1]", "c[0]", "c[1]"]
    with pytest.raises(UnknownStageError, match="no vertex 'd'"):
        graph.index_of("d")


def test_a_task_is_a_value() -> None:
    task = TaskId("departures", 0)
    assert (str(task), task.vertex, task.index) == ("departures[0]", "departures", 0)
    assert {task: 1}[TaskId("departures", 0)] == 1


@pytest.mark.parametrize(
    ("vertices", "edges", "says"),
    [
        ([("a", 1), ("a", 1)], [], "Two vertices"),
        ([("a", 0)], [], "parallelism 0"),
        ([("a", 1), ("b", 1)], [(1, 0)], "topological"),
        ([("a", 1)], [(0, 0)], "0 -> 0"),
        ([("a", 1), ("b", 1)], [(0, 2)], "among 2 vertices"),
        ([("a", 1), ("b", 1)], [(-1, 1)], "-1 -> 1"),
    ],
)
def test_what_is_no_execution_graph_is_refused(vertices: list[tuple[str, int]], edges: list[tuple[int, int]], says: str) -> None:
    with pytest.raises(InvalidExecutionGraphError, match=says):
        ExecutionGraph(
            tuple(Vertex(name, (name,), count) for name, count in vertices),
            tuple(VertexEdge(source, target, POINTWISE) for source, target in edges),
        )


def test_a_graph_of_a_million_instances_holds_nothing_per_instance() -> None:
    graph = ExecutionGraph(
        tuple(Vertex(f"v{number}", (f"v{number}",), 1_000) for number in range(1_000)),
        tuple(VertexEdge(number, number + 1, ALL_TO_ALL) for number in range(999)),
    )
    tasks = graph.tasks()
    assert iter(tasks) is tasks, "tasks are created one at a time"
    assert next(tasks) == TaskId("v0", 0)


@st.composite
def rows(draw: st.DrawFn) -> str:
    """Random pipelines in the language of `described`."""
    words: list[str] = []
    for number in range(draw(st.integers(1, 10))):
        mark = draw(st.sampled_from(["", "", "", "!", "~"]))
        count = draw(st.sampled_from([1, 1, 2]))
        reads = draw(st.sets(st.integers(0, number - 1), max_size=2)) if number else set()
        sorts = draw(st.lists(st.sampled_from(["", "", "", "*", "="]), min_size=2, max_size=2))
        inputs = ",".join(sort + f"s{each}" for sort, each in zip(sorts, sorted(reads), strict=False))
        words.append(f"s{number}{mark}/{count}" + (f"({inputs})" if inputs else "") + draw(st.sampled_from(["", "", "$"])))
    return " ".join(words)


@given(rows())
def test_every_layout_covers_the_pipeline_and_leads_forward(row: str) -> None:
    pipeline = described(row)
    chains = build_chains(pipeline)
    covered = [name for chain in chains for name in chain.stages]
    assert sorted(covered) == sorted(stage.name for stage in pipeline.stages)
    for chain in chains:
        begins = max(len(fused_sources(chain.stages, lambda name: not pipeline.upstream(name))), 1)
        read = links(chain.stages, {name: pipeline.upstream(name) for name in chain.stages[begins:]})
        for one, other in read:
            assert set(pipeline.upstream(other)) == {upstream for upstream, reader in read if reader == other}
            assert pipeline.downstream(one) == (other,)
            assert pipeline.stage(one).sink is None
    graph = execution_graph(pipeline, chains)
    inside = sum(len(chain.stages) - 1 for chain in chains)
    assert len(graph.edges) == len(pipeline.edges) - inside
    assert [vertex.name for vertex in graph.vertices] == [chain.name for chain in chains]
