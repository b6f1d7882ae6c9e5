"""The regions of an execution graph: what restarts together."""

from __future__ import annotations

import random

import pytest

from dagster_checkpoints.pipeline import (
    EdgePattern,
    ExecutionGraph,
    Pipeline,
    Stage,
    StageInput,
    StageKind,
    Vertex,
    VertexEdge,
    build_chains,
    connected_regions,
    execution_graph,
)


def graph_of(vertices: str, edges: str) -> ExecutionGraph:
    """A graph from names of one letter, and edges such as `ac` from `a` to `c`."""
    at = {name: number for number, name in enumerate(vertices)}
    return ExecutionGraph(
        tuple(Vertex(name, (name,), 2) for name in vertices),
        tuple(VertexEdge(at[source], at[target], EdgePattern.POINTWISE) for source, target in edges.split()),
    )


@pytest.mark.parametrize(
    ("vertices", "edges", "regions"),
    [
        ("a", "", "a"),
        ("ab", "", "a b"),
        ("ab", "ab", "ab"),
        ("ab", "ab ab", "ab"),
        ("abcd", "ab cd", "ab cd"),
        ("abcd", "ac bd", "ac bd"),
        ("abc", "ac bc", "abc"),
        ("abc", "ab ac", "abc"),
        ("abcde", "ab cd ad", "abcd e"),
        ("abcdef", "ad bd ce cf", "abd cef"),
        ("abcd", "ab cd bc", "abcd"),
        ("abcd", "ad bc", "ad bc"),
    ],
)
def test_vertices_are_in_one_region_if_edges_connect_them_in_any_direction(vertices: str, edges: str, regions: str) -> None:
    expected = {name: frozenset(region) for region in regions.split() for name in region}
    assert connected_regions(graph_of(vertices, edges)) == expected


@pytest.mark.parametrize("seed", range(50))
def test_regions_are_the_smallest_sets_that_no_edge_leaves(seed: int) -> None:
    r = random.Random(seed)
    vertices = "abcdefghij"[: r.randint(1, 10)]
    pairs = [(a, b) for a in vertices for b in vertices if a < b]
    edges = r.sample(pairs, min(len(pairs), r.randint(0, 8)))
    regions = connected_regions(graph_of(vertices, " ".join(a + b for a, b in edges)))
    assert all(name in regions[name] and regions[other] == regions[name] for name in vertices for other in regions[name])
    assert all(regions[a] == regions[b] for a, b in edges)
    for region in set(regions.values()):  # connected: reached from any of its vertices
        reached = {min(region)}
        for _ in region:
            reached |= {b for a, b in edges if a in reached} | {a for a, b in edges if b in reached}
        assert reached == region


class _Reader(Stage):
    def transform(self, context: object, **inputs: object) -> object:
        raise AssertionError("not run")


def test_a_static_input_connects_and_a_fused_source_belongs_to_its_task() -> None:
    def source(name: str) -> Stage:
        return _Reader(name, kind=StageKind.BOUNDED_SOURCE, watermark=("ts", "1 second"))

    pipeline = Pipeline(
        "flights",
        [
            source("history"),
            source("live"),
            _Reader("departures", inputs={"history": StageInput(fuse=True), "live": StageInput(fuse=True)}, sink=_Sink()),
            source("airlines"),
            source("planes"),
            _Reader("fleet", inputs={"planes": StageInput(), "airlines": StageInput(mode="static")}, sink=_Sink()),
            source("weather"),
            _Reader("storms", inputs={"weather": StageInput()}, sink=_Sink()),
        ],
    )
    graph = execution_graph(pipeline, build_chains(pipeline))
    assert set(connected_regions(graph).values()) == {
        frozenset({"history"}),
        frozenset({"airlines", "planes", "fleet"}),
        frozenset({"weather"}),
    }
    assert next(v.stages for v in graph.vertices if v.name == "history") == ("history", "live", "departures")


class _Sink:
    supported_output_modes = frozenset({"append"})
