"""The regions of an execution graph: vertices that are connected by edges, in any direction and over any number of others.

No record passes between two regions, so a failure in one is no reason to restart the other. All instances of a vertex are in one
region, also if no edge connects them: they share operator state, and the splits of a source. Must not know why a region restarts.

Source: Flink, "Task Failure Recovery", Restart Pipelined Region; there an instance without edges is a region of its own.
"""

from __future__ import annotations

from dagster_checkpoints.pipeline.chains import ExecutionGraph


def connected_regions(graph: ExecutionGraph) -> dict[str, frozenset[str]]:
    """By vertex, the names of all vertices of its region.

    Args:
        graph: the execution graph; edges of static inputs connect as well.
    """
    region_of = [{position} for position in range(len(graph.vertices))]
    for edge in graph.edges:
        source, target = region_of[edge.source], region_of[edge.target]
        if source is not target:
            source |= target
            for position in target:
                region_of[position] = source
    names: dict[int, frozenset[str]] = {}
    for region in region_of:
        if id(region) not in names:
            names[id(region)] = frozenset(graph.vertices[position].name for position in region)
    return {vertex.name: names[id(region)] for vertex, region in zip(graph.vertices, region_of, strict=True)}
