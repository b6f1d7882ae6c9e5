"""A pipeline's graph as it is drawn: from its code, from a running pipeline, from a checkpoint, or from several of these."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from dagster_checkpoints.control import PipelineStatus
from dagster_checkpoints.pipeline import EdgePattern, Pipeline, StageKind, build_chains
from dagster_checkpoints.state import CheckpointMetadata

StageState = Literal["", "running", "partly finished", "at end of data", "finished"]
_CHANNEL = re.compile(r"(?P<source>.+)\[\d+\]->(?P<target>.+)\[\d+\]")
_KINDS = {
    StageKind.BOUNDED_SOURCE: "bounded source",
    StageKind.UNBOUNDED_SOURCE: "unbounded source",
}


@dataclass(frozen=True)
class GraphStage:
    """A stage.

    Attributes:
        kind: "bounded source", "unbounded source", "stage"; empty if only the code could say.
        instances: how many.
        state: empty if nothing runs, or ran.
        root: the next checkpoint starts here.
        sink: what its rows are committed to, in a word; empty if nothing is known of one.
    """

    name: str
    instances: int = 1
    kind: str = ""
    state: StageState = ""
    root: bool = False
    sink: str = ""


@dataclass(frozen=True)
class GraphEdge:
    """A stage reads another; `table` once that has ended."""

    source: str
    target: str
    pattern: str = ""
    table: bool = False


@dataclass(frozen=True)
class PipelineGraph:
    """What is drawn.

    Attributes:
        seen: what the state of its stages is that of: "as the code says", "running", "checkpoint 42".
        chains: stages that share a query, first to last; every stage is in one.
    """

    name: str
    seen: str
    stages: tuple[GraphStage, ...]
    edges: tuple[GraphEdge, ...]
    chains: tuple[tuple[str, ...], ...]

    def stage(self, name: str) -> GraphStage:
        return next(stage for stage in self.stages if stage.name == name)

    def reads(self, name: str) -> list[GraphEdge]:
        """The edges into a stage."""
        return [edge for edge in self.edges if edge.target == name]


def of_code(pipeline: Pipeline) -> PipelineGraph:
    """As the code says: what would start from nothing."""
    stages = tuple(
        GraphStage(
            stage.name,
            stage.parallelism,
            _KINDS.get(stage.kind, "stage"),
            root=not stage.inputs,
            sink=type(stage.sink).__name__ if stage.sink is not None else "",
        )
        for stage in pipeline.stages
    )
    edges = tuple(
        GraphEdge(
            edge.source,
            edge.target,
            "all to all" if edge.pattern is EdgePattern.ALL_TO_ALL else "pointwise",
            edge.input.mode == "static",
        )
        for edge in pipeline.edges
    )
    chains = tuple(chain.stages for chain in build_chains(pipeline))
    return PipelineGraph(pipeline.name, "as the code says", stages, edges, chains)


def of_checkpoint(metadata: CheckpointMetadata) -> PipelineGraph:
    """As a checkpoint has it. Of a chain that had finished nobody has recorded what it read."""
    states: dict[str, StageState] = {}
    for stage in metadata.stages:
        states[stage.name] = "finished" if stage.fully_finished else "partly finished" if stage.finished else "running"
    for chain in metadata.chains:
        if chain.tasks and all(task.end_of_data != "none" for task in chain.tasks.values()):
            states.update({name: "at end of data" for name in chain.stages if states.get(name) == "running"})
    edges: dict[tuple[str, str], GraphEdge] = {}
    for chain in metadata.chains:
        for source, target in pairwise(chain.stages):
            edges[source, target] = GraphEdge(source, target, "pointwise")
        for task in chain.tasks.values():
            for channel in task.channels:
                match = _CHANNEL.fullmatch(channel.channel)
                if match:
                    edges.setdefault((match["source"], match["target"]), GraphEdge(match["source"], match["target"]))
            for table in task.static:
                edges[table.input, chain.stages[0]] = GraphEdge(table.input, chain.stages[0], table=True)
    graph = PipelineGraph(
        metadata.pipeline,
        f"{metadata.kind} {metadata.checkpoint_id}",
        tuple(GraphStage(stage.name, stage.parallelism, state=states[stage.name]) for stage in metadata.stages),
        tuple(edges.values()),
        tuple(chain.stages for chain in metadata.chains),
    )
    return _with_roots(graph)


def of_status(status: PipelineStatus) -> PipelineGraph:
    """As the running pipeline says: its chains, but not who reads whom."""
    stages = []
    for stage in status.stages:
        ended = [instance.state == "FINISHED" for instance in stage.instances]
        state: StageState = "running"
        if stage.finished:
            state = "finished"
        elif any(ended):
            state = "partly finished"
        elif stage.instances and all(instance.end_of_data for instance in stage.instances):
            state = "at end of data"
        roots = {root.partition("[")[0] for root in status.roots}
        stages.append(GraphStage(stage.name, max(len(stage.instances), 1), state=state, root=stage.name in roots))
    edges = (GraphEdge(a, b, "pointwise") for chain in status.chains for a, b in pairwise(chain))
    chains = status.chains or tuple((stage.name,) for stage in stages)
    return PipelineGraph(status.pipeline, status.phase, tuple(stages), tuple(edges), chains)


def combined(structure: PipelineGraph, seen: PipelineGraph) -> PipelineGraph:
    """The stages and edges of one graph, in the states and chains of another one.

    Stages that only the second one has are added: a checkpoint of an older version of the code.
    """
    states = {stage.name: stage for stage in seen.stages}
    stages = [_seen(stage, states.get(stage.name)) for stage in structure.stages]
    known = {stage.name for stage in stages}
    stages += [stage for stage in seen.stages if stage.name not in known]
    edges = {(edge.source, edge.target): edge for edge in (*seen.edges, *structure.edges)}
    names = {stage.name for stage in stages}
    laid_out = {name for chain in seen.chains for name in chain}
    chains = [*seen.chains, *(tuple(n for n in c if n not in laid_out) for c in structure.chains)]
    graph = PipelineGraph(
        structure.name,
        seen.seen,
        tuple(stages),
        tuple(edge for edge in edges.values() if {edge.source, edge.target} <= names),
        tuple(chain for chain in chains if chain),
    )
    return graph if any(stage.root for stage in seen.stages) else _with_roots(graph)


def layers(graph: PipelineGraph) -> list[list[tuple[str, ...]]]:
    """The chains in columns: each to the right of all that it reads, and near to it."""
    chain_of = {name: chain for chain in graph.chains for name in chain}
    reads: dict[tuple[str, ...], list[tuple[str, ...]]] = {chain: [] for chain in graph.chains}
    for edge in graph.edges:
        source, target = chain_of.get(edge.source), chain_of.get(edge.target)
        if source is not None and target is not None and source != target:
            reads[target].append(source)
    depth = _depths(reads)
    columns: list[list[tuple[str, ...]]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for chain in graph.chains:
        columns[depth[chain]].append(chain)
    place: dict[tuple[str, ...], float] = {}
    for column in columns:
        column.sort(key=lambda chain: _mean([place[source] for source in reads[chain] if source in place]))
        place.update({chain: number - (len(column) - 1) / 2 for number, chain in enumerate(column)})
    return columns


def _mean(places: Sequence[float]) -> float:
    return sum(places) / len(places) if places else 0.0


def _depths(reads: Mapping[tuple[str, ...], Sequence[tuple[str, ...]]]) -> dict[tuple[str, ...], int]:
    depth = dict.fromkeys(reads, 0)
    for _ in reads:  # as many rounds as there are chains at most: the graph has no cycle
        moved = False
        for chain, sources in reads.items():
            wanted = max((depth[source] + 1 for source in sources), default=0)
            if wanted > depth[chain] and wanted < len(reads):
                depth[chain], moved = wanted, True
        if not moved:
            break
    # A source stands as close to its reader as it can.
    for chain, sources in reads.items():
        if not sources:
            readers = [depth[reader] for reader, read in reads.items() if chain in read]
            depth[chain] = max(min(readers, default=1) - 1, 0)
    return depth


def _seen(stage: GraphStage, seen: GraphStage | None) -> GraphStage:
    if seen is None:
        return replace(stage, root=False)
    return replace(stage, state=seen.state, root=seen.root, instances=seen.instances)


def _with_roots(graph: PipelineGraph) -> PipelineGraph:
    """Where a checkpoint would start: first stages of chains that have not finished, and all that they read has."""
    finished = {stage.name for stage in graph.stages if stage.state == "finished"}
    roots = {
        chain[0]
        for chain in graph.chains
        if chain[0] not in finished and all(edge.source in finished for edge in graph.reads(chain[0]))
    }
    return replace(graph, stages=tuple(replace(stage, root=stage.name in roots) for stage in graph.stages))
