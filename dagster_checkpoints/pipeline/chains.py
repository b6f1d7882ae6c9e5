"""Which stages share a Spark query, and the graph of tasks that follows.

DESIGN "Chains". The execution graph is what the coordinator plans over: arrays per vertex, not an object
per instance, so that a million instances cost nothing until one of them is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import NamedTuple

from dagster_checkpoints.pipeline.edges import EdgePattern
from dagster_checkpoints.pipeline.errors import (
    ChainLayoutError,
    InvalidExecutionGraphError,
    UnknownStageError,
)
from dagster_checkpoints.pipeline.graph import Pipeline
from dagster_checkpoints.pipeline.names import suggestion


class TaskId(NamedTuple):
    """One instance of a chain.

    `index` is the number of the instance within this vertex, from 0; it is not a position in any other list.
    """

    vertex: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used with tasks

    def __str__(self) -> str:
        return f"{self.vertex}[{self.index}]"


@dataclass(frozen=True)
class Chain:
    """Stages that run as one query.

    Args:
        name: Name of its first stage.
        stages: Names of its stages, from the first to the last; each but the first reads exactly the one before it. Or it begins
            with two or more *fused sources*, which the stage behind them reads, all of them and nothing else.
        instances: Names of the instances, the same for every stage.
    """

    name: str
    stages: tuple[str, ...]
    instances: tuple[str, ...]


@dataclass(frozen=True)
class Vertex:
    """A chain in the execution graph.

    Args:
        name: Name of the chain.
        stages: Names of its stages, in order.
        parallelism: Number of its instances.
        fused: Number of fused sources with which it begins.
    """

    name: str
    stages: tuple[str, ...]
    parallelism: int
    fused: int = 0


@dataclass(frozen=True)
class VertexEdge:
    """One chain reads another.

    Args:
        source: Number of the upstream vertex in `ExecutionGraph.vertices`.
        target: Number of the downstream vertex; greater than `source`.
        pattern: Which instances the edge joins.
    """

    source: int
    target: int
    pattern: EdgePattern


@dataclass(frozen=True)
class ExecutionGraph:
    """The graph of chains over which checkpoints are planned; cost O(vertices + edges), whatever the
    parallelism.

    Args:
        vertices: The chains, in topological order.
        edges: One edge per edge between stages of different chains; several may join the same two vertices.

    Raises:
        InvalidExecutionGraphError: Two vertices have one name, a parallelism is below 1, or an edge does not lead from an
            earlier vertex to a later one.
    """

    vertices: tuple[Vertex, ...]
    edges: tuple[VertexEdge, ...]
    _index: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index: dict[str, int] = {}
        for number, vertex in enumerate(self.vertices):
            if vertex.name in index:
                raise InvalidExecutionGraphError(f"Two vertices of the execution graph are called {vertex.name!r}.")
            if vertex.parallelism < 1:
                raise InvalidExecutionGraphError(
                    f"Vertex {vertex.name!r} has parallelism {vertex.parallelism}; expected at least 1."
                )
            index[vertex.name] = number
        for edge in self.edges:
            if not 0 <= edge.source < edge.target < len(self.vertices):
                raise InvalidExecutionGraphError(
                    f"Edge {edge.source} -> {edge.target} among {len(self.vertices)} vertices: an edge "
                    f"leads from an earlier vertex to a later one. Put the vertices into topological order."
                )
        object.__setattr__(self, "_index", index)

    def index_of(self, name: str) -> int:
        """The number of the vertex called `name`.

        Raises:
            UnknownStageError: The graph has no vertex of this name.
        """
        try:
            return self._index[name]
        except KeyError:
            raise UnknownStageError(
                f"The execution graph has no vertex {name!r}. {suggestion(name, self._index)} (A vertex is "
                f"called after the first stage of its chain.)"
            ) from None

    def tasks(self) -> Iterator[TaskId]:
        """Every task, vertex by vertex; each is created when the iterator reaches it."""
        for vertex in self.vertices:
            for index in range(vertex.parallelism):
                yield TaskId(vertex.name, index)


def build_chains(pipeline: Pipeline, breaks: frozenset[str] = frozenset()) -> tuple[Chain, ...]:
    """Put the stages of a pipeline into chains.

    Args:
        pipeline: The pipeline whose stages are put into chains.
        breaks: Names of stages that must begin a chain, because Spark refuses the combined plan.

    Returns:
        The chains in topological order; every stage is in exactly one.

    Raises:
        UnknownStageError: `breaks` names a stage that the pipeline does not have.
    """
    for name in breaks:
        pipeline.stage(name)
    chains: dict[str, list[str]] = {}
    may_join = [stage.name for stage in pipeline.stages if pipeline.chaining and stage.name not in breaks]
    head: dict[str, str] = {}
    for name in may_join:
        allowed = all(how.fuse for how in pipeline.stage(name).inputs.values())
        if allowed and fusing_obstacle(pipeline, name) is None:
            first = next(stage.name for stage in pipeline.stages if stage.name in pipeline.upstream(name))
            head.update(dict.fromkeys((*pipeline.upstream(name), name), first))
    for stage in pipeline.stages:
        if stage.name not in head:
            joins = stage.name in may_join and may_join_upstream(pipeline, stage.name)
            head[stage.name] = head[pipeline.upstream(stage.name)[0]] if joins else stage.name
        chains.setdefault(head[stage.name], []).append(stage.name)
    # Only a chain's first stage reads other chains, so the order of first stages is a topological order of
    # chains.
    return tuple(Chain(name, tuple(stages), pipeline.stage(name).instances) for name, stages in chains.items())


def fused_sources(stages: Sequence[str], is_source: Callable[[str], bool]) -> tuple[str, ...]:
    """The fused sources with which a chain begins; empty for a chain that begins with one source, or behind channels.

    Args:
        stages: The chain's stages, in order.
        is_source: Whether the stage of this name is a source.
    """
    sources = tuple(takewhile(is_source, stages))
    return sources if 2 <= len(sources) < len(stages) else ()


def fused_in(pipeline: Pipeline, stages: Sequence[str]) -> tuple[str, ...]:
    """The fused sources with which a chain of this pipeline begins."""
    return fused_sources(stages, lambda name: pipeline.stage(name).kind.is_source)


def links(stages: Sequence[str], fused: Sequence[str]) -> list[tuple[str, str]]:
    """What a chain's stages read of each other: pairs of a stage and the one that reads it.

    Args:
        stages: The chain's stages, in order.
        fused: Its fused sources.
    """
    behind = stages[len(fused) :]
    return [*((source, behind[0]) for source in fused), *pairwise(behind)]


def fusing_obstacle(pipeline: Pipeline, name: str) -> str | None:
    """Why the sources that a stage reads cannot run in its query, as far as the graph shows; None if they can.

    Each of them keeps an end of its own: it finishes, and is not read again after a restore, although the query goes on.
    """
    stage, edges = pipeline.stage(name), [edge for edge in pipeline.edges if edge.target == name]
    if len(edges) < 2:
        return f"{name!r} reads {len(edges)} stages; expected two sources or more"
    if stage.max_rows_per_trigger is not None:
        return f"{name!r} has max_rows_per_trigger={stage.max_rows_per_trigger}, which limits what it takes from channels"
    if stage.parallelism != 1:
        return f"{name!r} has {stage.parallelism} instances; expected one"
    for edge in edges:
        source = pipeline.stage(edge.source)
        if not source.kind.is_source:
            return f"{name!r} reads {source.name!r}, which is not a source"
        if edge.input.mode != "stream" or edge.pattern is not EdgePattern.POINTWISE:
            connection = "as a static input" if edge.input.mode != "stream" else "over ALL_TO_ALL"
            return f"{name!r} reads {source.name!r} {connection}; expected a stream over POINTWISE"
        if source.watermark is None:
            # What a fused source has emitted is known from its watermark node alone.
            return f"{name!r} reads {source.name!r}, which declares no watermark"
        if source.instances != stage.instances:
            return f"{name!r} has the instances {list(stage.instances)}, and {source.name!r} has {list(source.instances)}"
        obstacle = _output_obstacle(pipeline, source.name, name)
        if obstacle is not None:
            return obstacle
    return None


def _output_obstacle(pipeline: Pipeline, upstream: str, name: str) -> str | None:
    """Why the output of a stage cannot stay inside the query of the stage `name`, which reads it."""
    stage, consumers = pipeline.stage(upstream), pipeline.downstream(upstream)
    if len(consumers) > 1:
        return f"{upstream!r} is read by {', '.join(map(repr, consumers))}; expected {name!r} alone"
    if stage.sink is not None:
        return f"{upstream!r} has a sink"
    if stage.split_interval is not None:
        return f"{upstream!r} is a split source, whose splits are evaluated one by one"
    if stage.overrides_process_batch or stage.overrides_finish:
        return f"{upstream!r} overrides {'process_batch' if stage.overrides_process_batch else 'finish'}"
    return None


def may_join_upstream(pipeline: Pipeline, name: str) -> bool:
    """Whether a stage may run in the query of the one stage it reads, as far as the graph shows."""
    return chain_obstacle(pipeline, name) is None


def chain_obstacle(pipeline: Pipeline, name: str) -> str | None:
    """Why a stage cannot run in the query of the stage it reads, as far as the graph shows; None if it can."""
    stage, edges = pipeline.stage(name), [edge for edge in pipeline.edges if edge.target == name]
    if len(edges) != 1:
        return f"{name!r} reads {len(edges)} stages; expected one"
    if edges[0].input.mode != "stream" or edges[0].pattern is not EdgePattern.POINTWISE:
        connection = "as a static input" if edges[0].input.mode != "stream" else "over ALL_TO_ALL"
        return f"{name!r} reads {edges[0].source!r} {connection}; expected a stream over POINTWISE"
    if stage.max_rows_per_trigger is not None:
        return f"{name!r} has max_rows_per_trigger={stage.max_rows_per_trigger}, which limits what it takes from channels"
    upstream = pipeline.stage(edges[0].source)
    if upstream.instances != stage.instances:
        return f"{name!r} has the instances {list(stage.instances)}, and {upstream.name!r} has {list(upstream.instances)}"
    obstacle = _output_obstacle(pipeline, upstream.name, name)
    if obstacle is not None:
        return obstacle
    if upstream.event_time_lateness_ms:
        # A query has one watermark, and the watermark of the upstream stage's output is earlier than that of its input.
        return f"{upstream.name!r} declares its own lateness with event_time="
    # A query has one output mode; in "update" an upstream aggregation would emit what it must still hold
    # back.
    return None if stage.output_mode == "append" else f"{name!r} has the output mode {stage.output_mode!r}"


def execution_graph(pipeline: Pipeline, chains: Sequence[Chain]) -> ExecutionGraph:
    """The graph of chains over which checkpoints are planned.

    Args:
        pipeline: The pipeline whose edges become the graph's edges.
        chains: The result of :func:`build_chains`, or the chains that a checkpoint recorded; in any order.

    Returns:
        A vertex per chain, ordered by the position of its first stage in the pipeline; an edge per stage edge
        between chains.

    Raises:
        ChainLayoutError: A stage is in no chain or in two, or a chain joins stages that cannot be one query.
    """
    chain_of = _checked_layout(pipeline, chains)
    position = {stage.name: number for number, stage in enumerate(pipeline.stages)}
    ordered = sorted(chains, key=lambda chain: position[chain.stages[0]])
    number_of = {chain.name: number for number, chain in enumerate(ordered)}
    return ExecutionGraph(
        tuple(Vertex(c.name, c.stages, len(c.instances), len(fused_in(pipeline, c.stages))) for c in ordered),
        tuple(
            VertexEdge(number_of[chain_of[edge.source]], number_of[chain_of[edge.target]], edge.pattern)
            for edge in pipeline.edges
            if chain_of[edge.source] != chain_of[edge.target]
        ),
    )


def _checked_layout(pipeline: Pipeline, chains: Sequence[Chain]) -> dict[str, str]:
    """The chain of each stage; checks that the pipeline can run in this layout."""
    chain_of: dict[str, str] = {}
    for chain in chains:
        if not chain.stages or chain.name != chain.stages[0]:
            raise ChainLayoutError(f"Chain {chain.name!r} is not called after its first stage: {chain.stages}.")
        fused = fused_in(pipeline, chain.stages)
        for number, name in enumerate(chain.stages):
            if name in chain_of:
                raise ChainLayoutError(f"Stage {name!r} is in two chains: {chain_of[name]!r} and {chain.name!r}.")
            chain_of[name] = chain.name
            stage = pipeline.stage(name)
            if stage.instances != chain.instances:
                raise ChainLayoutError(
                    f"Chain {chain.name!r} has instances {list(chain.instances)}, but {stage.where} has "
                    f"{list(stage.instances)}; a restore with other instances needs its own layout."
                )
            if number == len(fused) > 0:
                _check_fused(pipeline, chain, fused, name)
            elif number > len(fused) and (
                pipeline.upstream(name) != (chain.stages[number - 1],) or not may_join_upstream(pipeline, name)
            ):
                raise ChainLayoutError(
                    f"{stage.where} cannot follow {chain.stages[number - 1]!r} in chain {chain.name!r}: it "
                    f"must read exactly that stage, instance by instance, no other stage may read that "
                    f"stage's output, and that stage may not declare its own lateness (event_time=). Was the "
                    f"pipeline changed since this layout was made?"
                )
    absent = [stage.name for stage in pipeline.stages if stage.name not in chain_of]
    if absent:
        raise ChainLayoutError(f"Stages {', '.join(map(repr, absent))} are in no chain.")
    return chain_of


def _check_fused(pipeline: Pipeline, chain: Chain, fused: Sequence[str], reader: str) -> None:
    obstacle = fusing_obstacle(pipeline, reader)
    if obstacle is None and set(pipeline.upstream(reader)) != set(fused):
        obstacle = f"{reader!r} reads {', '.join(map(repr, pipeline.upstream(reader)))}"
    if obstacle is not None:
        raise ChainLayoutError(
            f"Chain {chain.name!r} runs the sources {', '.join(map(repr, fused))} in the query of {reader!r}, but {obstacle}. "
            "Was the pipeline changed since this layout was made?"
        )
