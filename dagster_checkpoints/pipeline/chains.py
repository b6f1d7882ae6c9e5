"""Which stages share a Spark query, and the graph of tasks that follows.

DESIGN "Chains". The execution graph is what the coordinator plans over: arrays per vertex, not an object
per instance, so that a million instances cost nothing until one of them is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from dagster_checkpoints.pipeline.edges import EdgePattern
from dagster_checkpoints.pipeline.errors import (
    ChainLayoutError,
    InvalidExecutionGraphError,
    UnknownStageError,
)
from dagster_checkpoints.pipeline.graph import Pipeline, StageEdge
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
            with two or more *fused sources*, and each stage behind them reads some stages in front of it, and no others.
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
    last = {stage.name: stage.name for stage in pipeline.stages}
    """By stage, the last stage of its chain."""
    for stage in reversed(pipeline.stages):
        if pipeline.chaining and joining_obstacle(pipeline, stage.name, breaks) is None:
            last.update(dict.fromkeys(pipeline.upstream(stage.name), last[stage.name]))
    chains: dict[str, list[str]] = {}
    for stage in pipeline.stages:
        chains.setdefault(last[stage.name], []).append(stage.name)
    # The sources of a chain come first. Only a chain's first stage reads other chains, so the order of first stages is a
    # topological order of chains.
    ordered = [sorted(stages, key=lambda name: not pipeline.stage(name).kind.is_source) for stages in chains.values()]
    position = {stage.name: number for number, stage in enumerate(pipeline.stages)}
    ordered.sort(key=lambda stages: position[stages[0]])
    return tuple(Chain(stages[0], tuple(stages), pipeline.stage(stages[0]).instances) for stages in ordered)


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


def links(stages: Sequence[str], reads: Mapping[str, Collection[str]]) -> list[tuple[str, str]]:
    """What a chain's stages read of each other: pairs of a stage and the one that reads it, in the order of the chain.

    Args:
        stages: The chain's stages, in order.
        reads: By stage, the stages that it reads.
    """
    reader = {upstream: name for name in stages for upstream in reads.get(name, ())}
    return [(name, reader[name]) for name in stages if name in reader]


def merging_stage(stages: Sequence[str], reads: Mapping[str, Collection[str]]) -> str | None:
    """The stage of a chain at which all of its fused sources have met; None for a chain without them.

    The stages in front of it pass rows on, and keep no state. Arguments as of :func:`links`.
    """
    return next((name for name in reversed(stages) if len(reads.get(name, ())) > 1 and set(reads[name]) <= set(stages)), None)


def merging_in(pipeline: Pipeline, stages: Sequence[str]) -> str | None:
    """The stage of a chain of this pipeline at which all of its fused sources have met; None for a chain without them."""
    return merging_stage(stages, {name: pipeline.upstream(name) for name in stages})


def channel_reasons(pipeline: Pipeline) -> Iterator[tuple[str, str]]:
    """Each stage that could share the query of several sources, and reads them through channels, with the reason in words.

    Only what the graph shows: Spark may refuse the combined plan of others.
    """
    for stage in pipeline.stages:
        streams = [name for name, how in stage.inputs.items() if how.mode == "stream"]
        if len(streams) < 2 or not any(_sources_alone(pipeline, name) for name in streams):
            continue
        obstacle = joining_obstacle(pipeline, stage.name) if pipeline.chaining else "the pipeline has chaining=False"
        if obstacle is not None:
            yield stage.name, obstacle


def _sources_alone(pipeline: Pipeline, name: str) -> bool:
    """Whether a stage is a source, or reads one through stages with one input each."""
    stage = pipeline.stage(name)
    return stage.kind.is_source or (len(stage.inputs) == 1 and _sources_alone(pipeline, *stage.inputs))


def joining_obstacle(pipeline: Pipeline, name: str, breaks: Collection[str] = ()) -> str | None:
    """Why a stage cannot run in one query with the stages that it reads, as far as the graph shows; None if it can.

    A stage that reads several stages can if they are sources, or pass on the rows of sources. Each of these sources keeps an end
    of its own: it finishes, and is not read again after a restore, although the query goes on.

    Args:
        pipeline: The pipeline.
        name: The stage.
        breaks: Stages that begin a query of their own.
    """
    stage, edges = pipeline.stage(name), [edge for edge in pipeline.edges if edge.target == name]
    if not edges:
        return f"{name!r} reads no stage"
    if name in breaks:
        return f"{name!r} begins a query of its own"
    if stage.max_rows_per_trigger is not None:
        return f"{name!r} has max_rows_per_trigger={stage.max_rows_per_trigger}, which limits what it takes from channels"
    for edge in edges:
        obstacle = _input_obstacle(pipeline, edge) or (_fusing_obstacle(pipeline, edge, breaks) if len(edges) > 1 else None)
        if obstacle is not None:
            return obstacle
    if len(edges) > 1:
        return _mixed_sources(pipeline, name)
    # A query has one output mode; in "update" an upstream aggregation would emit what it must still hold back.
    return None if stage.output_mode == "append" else f"{name!r} has the output mode {stage.output_mode!r}"


def _mixed_sources(pipeline: Pipeline, name: str) -> str | None:
    """Why the sources in front of a stage cannot share a query: some have an event time, which would not wait for the others."""
    sources = [pipeline.stage(each) for each in _sources_in_front(pipeline, name)]
    without = next((source.name for source in sources if source.watermark is None), None)
    declared = next((source.name for source in sources if source.watermark is not None), None)
    return f"{declared!r} declares a watermark, and {without!r} does not" if without and declared else None


def _sources_in_front(pipeline: Pipeline, name: str) -> Iterator[str]:
    for upstream in pipeline.upstream(name):
        yield from [upstream] if pipeline.stage(upstream).kind.is_source else _sources_in_front(pipeline, upstream)


def _input_obstacle(pipeline: Pipeline, edge: StageEdge) -> str | None:
    """Why a stage cannot run in the query of one of the stages that it reads."""
    name, stage, upstream = edge.target, pipeline.stage(edge.target), pipeline.stage(edge.source)
    if edge.input.fuse is False:
        return f"{name!r} has fuse=False for its input {upstream.name!r}"
    if edge.input.mode != "stream" or edge.pattern is not EdgePattern.POINTWISE:
        connection = "as a static input" if edge.input.mode != "stream" else "over ALL_TO_ALL"
        return f"{name!r} reads {upstream.name!r} {connection}; expected a stream over POINTWISE"
    if upstream.instances != stage.instances:
        return f"{name!r} has the instances {list(stage.instances)}, and {upstream.name!r} has {list(upstream.instances)}"
    consumers = pipeline.downstream(upstream.name)
    if len(consumers) > 1:
        return f"{upstream.name!r} is read by {', '.join(map(repr, consumers))}; expected {name!r} alone"
    if upstream.sink is not None:
        return f"{upstream.name!r} has a sink"
    if upstream.split_interval is not None:
        return f"{upstream.name!r} is a split source, whose splits are evaluated one by one"
    if upstream.overrides_process_batch or upstream.overrides_finish:
        return f"{upstream.name!r} overrides {'process_batch' if upstream.overrides_process_batch else 'finish'}"
    if upstream.event_time_lateness_ms:
        # A query has one watermark, and the watermark of the upstream stage's output is earlier than that of its input.
        return f"{upstream.name!r} declares its own lateness with event_time="
    return None


def _fusing_obstacle(pipeline: Pipeline, edge: StageEdge, breaks: Collection[str]) -> str | None:
    """Why one of several inputs of a stage cannot be in its query."""
    upstream = pipeline.stage(edge.source)
    if upstream.parallelism != 1:
        return f"{edge.target!r} has {upstream.parallelism} instances; expected one"
    before = [each for each in pipeline.edges if each.target == upstream.name]
    if not before:
        return None
    obstacle = joining_obstacle(pipeline, upstream.name, breaks)
    # That has looked at several inputs, but not behind a single one.
    return _fusing_obstacle(pipeline, before[0], breaks) if obstacle is None and len(before) == 1 else obstacle


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
        for name in chain.stages:
            if name in chain_of:
                raise ChainLayoutError(f"Stage {name!r} is in two chains: {chain_of[name]!r} and {chain.name!r}.")
            chain_of[name] = chain.name
            stage = pipeline.stage(name)
            if stage.instances != chain.instances:
                raise ChainLayoutError(
                    f"Chain {chain.name!r} has instances {list(chain.instances)}, but {stage.where} has "
                    f"{list(stage.instances)}; a restore with other instances needs its own layout."
                )
        obstacle = _layout_obstacle(pipeline, chain)
        if obstacle is not None:
            raise ChainLayoutError(
                f"The stages {' -> '.join(chain.stages)} cannot run as one query: {obstacle}. Each of them must read only stages "
                "in front of it, instance by instance, and no other stage may read these. Was the pipeline changed since this "
                "layout was made?"
            )
    absent = [stage.name for stage in pipeline.stages if stage.name not in chain_of]
    if absent:
        raise ChainLayoutError(f"Stages {', '.join(map(repr, absent))} are in no chain.")
    return chain_of


def _layout_obstacle(pipeline: Pipeline, chain: Chain) -> str | None:
    """Why the stages of a chain cannot run as one query; None if they can."""
    begins = max(len(fused_in(pipeline, chain.stages)), 1)
    reads = {name: pipeline.upstream(name) for name in chain.stages[begins:]}
    for number, name in enumerate(chain.stages[begins:], begins):
        other = next((upstream for upstream in reads[name] if upstream not in chain.stages[:number]), None)
        if other is not None:
            return f"{name!r} reads {other!r}"
        obstacle = joining_obstacle(pipeline, name)
        if obstacle is not None:
            return obstacle
    unread = set(chain.stages[:-1]) - {name for name, _ in links(chain.stages, reads)}
    return f"no stage of them reads {', '.join(map(repr, sorted(unread)))}" if unread else None
