"""The channels of one attempt: their producers and consumers, and the elements that a restored channel begins with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dagster_checkpoints.execution.elements import EndOfData, EndOfPartition
from dagster_checkpoints.pipeline import (
    Chain,
    EdgePattern,
    Pipeline,
    StageEdge,
    TaskId,
    pointwise_consumers,
    pointwise_producers,
)
from dagster_checkpoints.spark.channels.channel_log import Channel, ChannelId, Records, SegmentFiles
from dagster_checkpoints.spark.channels.outputs import OutputEdge
from dagster_checkpoints.spark.channels.segments import Split
from dagster_checkpoints.state import (
    Segment,
    StateFile,
    TaskSnapshot,
    default_max_parallelism,
)


class Wiring:
    """Creates the channels between chains.

    Args:
        pipeline: The pipeline.
        chains: The chains of the attempt.
        folder: The attempt's work directory.
        snapshots: The snapshots of the restored tasks: a channel starts at its consumer's position.
        finished: The tasks that do not run again: their output channels have ended.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        chains: Sequence[Chain],
        folder: Path,
        snapshots: Mapping[TaskId, TaskSnapshot],
        finished: frozenset[TaskId],
    ) -> None:
        self._pipeline = pipeline
        self._chain_of = {stage: chain for chain in chains for stage in chain.stages}
        self._folder = folder / "channels"
        self._finished = finished
        self._positions = {c.channel: c.position for snapshot in snapshots.values() for c in snapshot.channels}
        self._channels: dict[ChannelId, Channel] = {}
        self._into: dict[tuple[str, int, str], list[Channel]] = defaultdict(list)
        for edge in pipeline.edges:
            if self._chain_of[edge.source] is not self._chain_of[edge.target]:
                self._connect(edge)

    def into(self, consumer: str, index: int, input_name: str) -> list[Channel]:
        """The channels of one input of an instance of a chain's first stage."""
        return self._into[consumer, index, input_name]

    def outputs(self, producer: str, index: int) -> list[OutputEdge]:
        """The output edges of an instance of a chain's last stage."""
        edges = []
        for edge in self._pipeline.edges:
            if edge.source != producer or self._chain_of[producer] is self._chain_of[edge.target]:
                continue
            consumers = self._consumers(edge, index)
            ids = [ChannelId(producer, index, edge.target, consumer) for consumer in consumers]
            channels = tuple(self._channels[i] for i in ids if i in self._channels)
            if not channels:
                continue
            static = edge.input.mode == "static"
            split = None
            if not static and len(channels) > 1:
                split = Split(len(channels), edge.input.key, default_max_parallelism(len(channels)))
            edges.append(OutputEdge(edge.target, channels, split, static))
        return edges

    def restore_in_flight(
        self,
        task: TaskId,
        snapshot: TaskSnapshot | None,
        folder: Path,
        fetch: Callable[[Sequence[StateFile], Path], Path],
    ) -> None:
        """Append the in-flight elements to the task's input channels, and the end to channels whose producer has finished."""
        in_flight = {c.channel: c for c in snapshot.channels} if snapshot else {}
        consumer = self._chain_of[task.vertex].stages[0]
        for channel in [c for c in self._channels.values() if (c.id.consumer, c.id.consumer_index) == (consumer, task.index)]:
            saved = in_flight.get(str(channel.id))
            elements = saved.in_flight if saved else ()
            files = [f for e in elements if isinstance(e, Segment) for f in e.files]
            root = fetch(files, folder) if files else folder
            for element in elements:
                channel.append(Records(restored_segment(element, root)) if isinstance(element, Segment) else element)
            producer = TaskId(self._chain_of[channel.id.producer].name, channel.id.producer_index)
            if producer in self._finished:
                channel.append(EndOfData(drain=True))
                channel.append(EndOfPartition())

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _connect(self, edge: StageEdge) -> None:
        source, target = self._pipeline.stage(edge.source), self._pipeline.stage(edge.target)
        for consumer in range(target.parallelism):
            if TaskId(self._chain_of[target.name].name, consumer) in self._finished:
                continue
            for producer in self._producers(edge, source.parallelism, target.parallelism, consumer):
                identity = ChannelId(source.name, producer, target.name, consumer)
                base = self._positions.get(str(identity), 0)
                channel = Channel(identity, self._folder / identity.file_name, base)
                self._channels[identity] = channel
                self._into[target.name, consumer, source.name].append(channel)

    @staticmethod
    def _producers(edge: StageEdge, producers: int, consumers: int, consumer: int) -> range:
        if edge.pattern is EdgePattern.ALL_TO_ALL:
            return range(producers)
        return pointwise_producers(producers, consumers, consumer)

    def _consumers(self, edge: StageEdge, producer: int) -> range:
        source, target = self._pipeline.stage(edge.source), self._pipeline.stage(edge.target)
        if edge.pattern is EdgePattern.ALL_TO_ALL:
            return range(target.parallelism)
        return pointwise_consumers(source.parallelism, target.parallelism, producer)


def restored_segment(segment: Segment, root: Path) -> SegmentFiles:
    """A segment of a checkpoint whose files were fetched below `root`."""
    files = tuple(root / file.path for file in segment.files)
    restored = SegmentFiles(files, segment.rows, sum(file.size for file in segment.files))
    restored.hold()
    return restored
