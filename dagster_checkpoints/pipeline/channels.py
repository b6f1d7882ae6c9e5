"""The channels between the tasks of a pipeline, and the regions of tasks that they connect.

A channel leads from one instance of a stage to one instance of a stage that reads it. Stages of one chain share a query, so no
channel is between them. Must not know: what a channel carries, and where its elements are kept.

No record passes between two regions, so a failure in one is no reason to restart the other. All instances of a vertex are in one
region, also if no edge connects them: they share operator state, and the splits of a source.

Source: Flink, "Task Failure Recovery", Restart Pipelined Region; there an instance without edges is a region of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dagster_checkpoints.pipeline.chains import Chain, ExecutionGraph, TaskId
from dagster_checkpoints.pipeline.edges import EdgePattern, pointwise_consumers
from dagster_checkpoints.pipeline.graph import Pipeline, StageEdge


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


@dataclass(frozen=True, slots=True)
class ChannelId:
    """The channel from instance `producer_index` of stage `producer` to instance `consumer_index` of stage `consumer`.

    Its text, made of the stages' uids, is the channel's name in checkpoints and in the offsets of queries.

    Attributes:
        producer_uid, consumer_uid: the uids of the two stages; empty where they are the names.
    """

    producer: str
    producer_index: int
    consumer: str
    consumer_index: int
    producer_uid: str = ""
    consumer_uid: str = ""

    @classmethod
    def parse(cls, name: str) -> ChannelId:
        """The channel of a name, in which the stages are their uids."""
        sender, reader = name.split("->")
        producer, _, sent_by = sender.removesuffix("]").partition("[")
        consumer, _, read_by = reader.removesuffix("]").partition("[")
        return cls(producer, int(sent_by), consumer, int(read_by))

    def __str__(self) -> str:
        producer, consumer = self.producer_uid or self.producer, self.consumer_uid or self.consumer
        return f"{producer}[{self.producer_index}]->{consumer}[{self.consumer_index}]"


@dataclass(frozen=True, slots=True)
class ChannelGroup:
    """The channels over which one task sends its rows to one stage.

    Attributes:
        edge: the edge between the two stages.
        producer: the task that sends.
        channels: by task that reads, the channel; in the order of the instances.
    """

    edge: StageEdge
    producer: TaskId
    channels: Mapping[TaskId, ChannelId]

    @property
    def static(self) -> bool:
        """Whether each reader takes all rows, as a table."""
        return self.edge.input.mode == "static"

    @property
    def key(self) -> str | None:
        """The column that decides which channel gets a row; None if no column does."""
        return self.edge.input.key


def channel_groups(pipeline: Pipeline, chains: Sequence[Chain]) -> Iterator[ChannelGroup]:
    """All channels between the chains: by edge in the pipeline's order, then by instance of the producer.

    A task that reads an edge thus has its channels in the order of the producer's instances.

    Args:
        pipeline: the pipeline whose edges become channels.
        chains: the chains that run it, in any order; each stage is in one.
    """
    uid_of = {stage.name: stage.uid for stage in pipeline.stages}
    chain_of = {stage: chain for chain in chains for stage in chain.stages}
    for edge in pipeline.edges:
        source, target = chain_of[edge.source], chain_of[edge.target]
        if source is target:
            continue
        uids = tuple("" if uid_of[name] == name else uid_of[name] for name in (edge.source, edge.target))
        producers, consumers = len(source.instances), len(target.instances)
        for producer in range(producers):
            everyone = edge.pattern is EdgePattern.ALL_TO_ALL
            reads = range(consumers) if everyone else pointwise_consumers(producers, consumers, producer)
            ids = {TaskId(target.name, i): ChannelId(edge.source, producer, edge.target, i, *uids) for i in reads}
            yield ChannelGroup(edge, TaskId(source.name, producer), ids)
