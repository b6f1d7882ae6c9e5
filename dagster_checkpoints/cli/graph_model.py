"""A pipeline's graph for a drawing: made from its code, a running pipeline, a checkpoint, or several of these."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from dagster_checkpoints.control.status import PipelineStatus
from dagster_checkpoints.pipeline import EdgePattern, Pipeline, StageKind, build_chains, channel_reasons
from dagster_checkpoints.state.metadata import CheckpointMetadata
from dagster_checkpoints.state.restore import fitted
from dagster_checkpoints.state.stage_names import with_names_of

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
        kind: "bounded source", "unbounded source" or "stage"; "" without the code, which alone contains it.
        instances: number of instances.
        state: state of the stage; "" if the graph comes from the code alone.
        root: whether the next checkpoint starts at this stage.
        sink: name of the class of its sink; "" if it has none, or without the code.
        apart: why it begins a query of its own, if it could have shared one; "" without the code.
    """

    name: str
    instances: int = 1
    kind: str = ""
    state: StageState = ""
    root: bool = False
    sink: str = ""
    apart: str = ""


@dataclass(frozen=True)
class GraphEdge:
    """One stage reads another; `table`: as a static input, after that stage has ended."""

    source: str
    target: str
    pattern: str = ""
    table: bool = False


@dataclass(frozen=True)
class PipelineGraph:
    """A pipeline's graph.

    Attributes:
        seen: where the states of the stages come from: "as the code says", "running", "checkpoint 42".
        chains: stages that share a query, from first to last; every stage is in exactly one chain.
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


def graph_of_code(pipeline: Pipeline) -> PipelineGraph:
    """The graph that the code defines, as a new start would begin."""
    reasons = dict(channel_reasons(pipeline))
    stages = tuple(
        GraphStage(
            stage.name,
            stage.parallelism,
            _KINDS.get(stage.kind, "stage"),
            root=not stage.inputs,
            sink=type(stage.sink).__name__ if stage.sink is not None else "",
            apart=reasons.get(stage.name, ""),
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


def graph_of_checkpoint(
    metadata: CheckpointMetadata, pipeline: Pipeline | None = None, names: Mapping[str, str] = MappingProxyType({})
) -> PipelineGraph:
    """The graph that a checkpoint recorded.

    Args:
        metadata: the metadata as stored, which names stages by their uids.
        pipeline: the code, whose stages may have other names; the chains are those that a restore would make.
        names: without the code, the names of stages by their uids, as far as they are known.
    """
    uids = names if pipeline is None else {stage.uid: stage.name for stage in pipeline.stages}
    metadata = with_names_of(metadata, names) if pipeline is None else fitted(pipeline, metadata)
    states: dict[str, StageState] = {}
    for stage in metadata.stages:
        states[stage.name] = "finished" if stage.fully_finished else "partly finished" if stage.finished else "running"
    for chain in metadata.chains:
        if chain.tasks and all(task.end_of_data != "none" for task in chain.tasks.values()):
            states.update({name: "at end of data" for name in chain.stages if states.get(name) == "running"})
    edges = _recorded_edges(metadata, uids)
    graph = PipelineGraph(
        metadata.pipeline,
        f"{metadata.kind} {metadata.checkpoint_id}",
        tuple(GraphStage(stage.name, stage.parallelism, state=states[stage.name]) for stage in metadata.stages),
        tuple(edge for edge in edges if edge.source in states and edge.target in states),
        tuple(chain.stages for chain in metadata.chains),
    )
    return _with_roots(graph)


def _recorded_edges(metadata: CheckpointMetadata, names: Mapping[str, str]) -> list[GraphEdge]:
    """The inputs of the stages. Early releases did not record them: then those that tasks show, but none to finished tasks."""
    if all(stage.inputs is not None for stage in metadata.stages):
        return [
            GraphEdge(how.stage, stage.name, how.pattern.replace("_", " "), how.mode == "static")
            for stage in metadata.stages
            for how in stage.inputs or ()
        ]
    edges: dict[tuple[str, str], GraphEdge] = {}
    for chain in metadata.chains:
        for source, target in pairwise(chain.stages):
            edges[source, target] = GraphEdge(source, target, "pointwise")
        for task in chain.tasks.values():
            for channel in task.channels:
                match = _CHANNEL.fullmatch(channel.channel)
                if match:  # a channel keeps the name that is made of uids
                    source, target = (names.get(match[side], match[side]) for side in ("source", "target"))
                    edges.setdefault((source, target), GraphEdge(source, target))
            for table in task.static:
                edges[table.input, chain.stages[0]] = GraphEdge(table.input, chain.stages[0], table=True)
    return list(edges.values())


def graph_of_status(status: PipelineStatus, pipeline: Pipeline | None = None) -> PipelineGraph:
    """The graph of a running pipeline; a status of an earlier release has no edges between chains.

    Args:
        status: the status of the run.
        pipeline: the code, whose stages may have other names than those that run.
    """
    called = _called(status, pipeline)
    roots = {root.partition("[")[0] for root in status.roots}
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
        stages.append(GraphStage(called[stage.name], max(len(stage.instances), 1), state=state, root=stage.name in roots))
    edges = [
        GraphEdge(called.get(source, source), called[stage.name], "" if how == "table" else how, how == "table")
        for stage in status.stages
        for source, how in (stage.inputs or {}).items()
    ]
    known = (tuple(called[name] for name in chain if name in called) for chain in status.chains)  # the file may be damaged
    chains = tuple(filter(None, known))
    edges = edges or [GraphEdge(a, b, "pointwise") for chain in chains for a, b in pairwise(chain)]
    return PipelineGraph(
        status.pipeline, status.phase, tuple(stages), tuple(edges), chains or tuple((stage.name,) for stage in stages)
    )


def _called(status: PipelineStatus, pipeline: Pipeline | None) -> dict[str, str]:
    """By the name of each stage that runs, its name in the drawing: that of the stage with its uid in the code."""
    names = {stage.uid: stage.name for stage in pipeline.stages} if pipeline is not None else {}
    taken = set(names.values())
    called = {}
    for stage in status.stages:
        other = f"uid {stage.uid}" if stage.uid and stage.name in taken else stage.name
        called[stage.name] = names.get(stage.uid, other)
    return called


def combine(structure: PipelineGraph, seen: PipelineGraph) -> PipelineGraph:
    """The stages and edges of one graph with the states and chains of another one.

    Args:
        structure: the graph whose stages and edges are taken.
        seen: the graph whose states and chains are taken. Stages that only this graph has are added, with their edges: a
            checkpoint of an older version of the code has them.
    """
    states = {stage.name: stage for stage in seen.stages}
    stages = [_with_state(stage, states.get(stage.name)) for stage in structure.stages]
    structure_names = {stage.name for stage in stages}
    stages += [stage for stage in seen.stages if stage.name not in structure_names]
    # What stages of the structure read, it alone says: they may have read other stages when the checkpoint was taken.
    old = (edge for edge in seen.edges if not {edge.source, edge.target} <= structure_names)
    edges = {(edge.source, edge.target): edge for edge in (*old, *structure.edges)}
    names = {stage.name for stage in stages}
    chained = {name for chain in seen.chains for name in chain}
    chains = [*seen.chains, *(tuple(name for name in chain if name not in chained) for chain in structure.chains)]
    graph = PipelineGraph(
        structure.name,
        seen.seen,
        tuple(stages),
        tuple(edge for edge in edges.values() if {edge.source, edge.target} <= names),
        tuple(chain for chain in chains if chain),
    )
    return graph if any(stage.root for stage in seen.stages) else _with_roots(graph)


def _with_state(stage: GraphStage, seen: GraphStage | None) -> GraphStage:
    if seen is None:
        return replace(stage, root=False)
    return replace(stage, state=seen.state, root=seen.root, instances=seen.instances)


def _with_roots(graph: PipelineGraph) -> PipelineGraph:
    """Mark the roots: unfinished stages whose inputs have all finished."""
    finished = {stage.name for stage in graph.stages if stage.state == "finished"}
    roots = {
        name
        for chain in graph.chains
        for name in chain
        if name not in finished and all(edge.source in finished for edge in graph.reads(name))
    }
    return replace(graph, stages=tuple(replace(stage, root=stage.name in roots) for stage in graph.stages))
