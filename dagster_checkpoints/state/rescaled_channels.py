"""What the input channels of a stage begin with after numbers of instances have changed: elements in flight, and event time.

Records in flight go to the instances that have to process them now: with a key to the owners of its key groups, without one to
any one instance, those of a static input to every instance. They come over a channel that there is now, of the same sender if it
runs. A channel thus carries several old ones, as one: with all their records, and with the least of their watermarks, as in a
task that reads them. So no record becomes late that was not. Must not know: storage, Spark, where records are kept.

Source: PROTOCOL 8.3 and 8.5; Flink's TaskStateAssignment, RecordFilter and DemultiplexingRecordDeserializer; PROTOCOL section 4.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

import msgspec

from dagster_checkpoints.pipeline import Chain, ChannelGroup, ChannelId, TaskId, channel_groups
from dagster_checkpoints.state.fitted_checkpoint import FittedCheckpoint
from dagster_checkpoints.state.instance_matches import InstanceMatch, InstanceMatches
from dagster_checkpoints.state.key_groups import key_groups_of
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    ChannelElement,
    ChannelSnapshot,
    EndOfData,
    Segment,
    StageMetadata,
    TaskSnapshot,
    WatermarkAt,
)

if TYPE_CHECKING:
    from dagster_checkpoints.pipeline import Pipeline


@dataclass(frozen=True)
class OldChannel:
    """A channel of the checkpoint.

    Attributes:
        sender: index of the instance that sent.
        reader: index of the instance that read.
        saved: what the snapshot of the latter holds of the channel.
    """

    sender: int
    reader: int
    saved: ChannelSnapshot

    @property
    def carries_records(self) -> bool:
        """Whether records are in flight."""
        return any(isinstance(element, Segment) for element in self.saved.in_flight)

    @property
    def watermark(self) -> float | None:
        """The watermark in front of the elements in flight, epoch ms; None before the first, infinite behind the end."""
        return math.inf if self.saved.ended in ("drain", "partition") else self.saved.watermark

    @cached_property
    def last_watermark(self) -> float | None:
        """The watermark behind the elements in flight."""
        found = self.watermark
        for element in self.saved.in_flight:
            found = _advanced(found, element)
        return found


def old_channels(chain: ChainMetadata) -> dict[str, list[OldChannel]]:
    """By the uid of the stage that sends, the channels of a recorded chain, ordered by sender and reader."""
    found: dict[str, list[OldChannel]] = {}
    for task in chain.tasks.values():
        for saved in task.channels:
            name = ChannelId.parse(saved.channel)
            found.setdefault(name.producer, []).append(OldChannel(name.producer_index, name.consumer_index, saved))
    return {uid: sorted(channels, key=lambda c: (c.sender, c.reader)) for uid, channels in found.items()}


@dataclass(frozen=True, slots=True)
class MergedEventTime:
    """The event time of old channels together.

    Attributes:
        watermark: the least in front of their elements in flight, epoch ms, of those that have not ended; None if one of these
            has none, or all have ended.
        last_watermark: the least behind these elements, infinite behind the end; None if one has none.
        idle: whether all that have not ended are idle; False if all have.
        behind: whether all that have not ended are left out of the minimum, and not all of them are idle.
    """

    watermark: float | None = None
    last_watermark: float | None = math.inf
    idle: bool = False
    behind: bool = False

    @classmethod
    def of(cls, channels: Sequence[OldChannel]) -> MergedEventTime:
        last = least_time(channel.last_watermark for channel in channels)
        going_on = [channel for channel in channels if channel.saved.ended == "none"]
        if not going_on:
            return cls(None, last)
        idle = all(channel.saved.idle for channel in going_on)
        left_out = all(channel.saved.idle or channel.saved.behind for channel in going_on)
        return cls(least_time(c.watermark for c in going_on), last, idle, left_out and not idle)


def one_after_the_other(
    channels: Sequence[tuple[float | None, Iterable[ChannelElement]]], watermark: float | None, limit: float | None
) -> Iterator[ChannelElement]:
    """The records of several channels as those of one, whose watermark is the least of theirs; without the marks of their ends.

    Args:
        channels: by channel, its watermark in front of its elements, epoch ms, and the elements.
        watermark: the watermark of the one channel so far; None before the first.
        limit: the latest watermark that the one channel may have; None for none at all.
    """
    times = [before for before, _ in channels]
    for number, element in _numbered(channels):
        if isinstance(element, Segment):
            yield element
            continue
        if element is not None:
            times[number] = _advanced(times[number], element)
        reached = milliseconds(least_time((limit, *times)))
        if reached is not None and (watermark is None or reached > watermark):
            watermark = reached
            yield WatermarkAt(reached)


def _numbered(channels: Sequence[tuple[float | None, Iterable[ChannelElement]]]) -> Iterator[tuple[int, ChannelElement | None]]:
    """The elements with the numbers of their channels; before them None, where the watermark may advance at once."""
    yield 0, None
    for number, (_, elements) in enumerate(channels):
        for element in elements:
            yield number, element


def _advanced(watermark: float | None, mark: ChannelElement) -> float | None:
    """The watermark of a channel behind a mark; infinite behind the end of the data."""
    if isinstance(mark, WatermarkAt):
        return mark.ms if watermark is None else max(watermark, mark.ms)
    return math.inf if isinstance(mark, EndOfData) and mark.drain else watermark


def least_time(watermarks: Iterable[float | None]) -> float | None:
    """The earliest of several watermarks, of which at least one is given; None if one of them is None."""
    known = list(watermarks)
    return None if None in known else min(ms for ms in known if ms is not None)


def least_watermark(watermarks: Iterable[int | None]) -> int | None:
    """The watermark that every instance of a rescaled job begins with: the earliest of the old instances of its stage.

    Args:
        watermarks: by old instance that had not ended, its watermark, epoch ms; None before the first.

    Returns:
        None if an old instance had none, or there was no such instance: any row may still come.
    """
    known = list(watermarks)
    return None if None in known else min((ms for ms in known if ms is not None), default=None)


def milliseconds(watermark: float | None) -> int | None:
    return None if watermark is None or watermark == math.inf else int(watermark)


Place = tuple[int, int]
"""A channel of an edge: the index of the instance that sends, and of the one that reads."""


class SegmentShare(Segment, frozen=True):
    """The rows of a segment whose key groups an instance owns; in memory only. `rows` counts all rows of the segment.

    Attributes:
        key: the column by which the rows are divided.
        reader: index of the instance.
        readers: number of the stage's instances.
        key_groups: number of all key groups.
    """

    key: str
    reader: int
    readers: int
    key_groups: int

    @property
    def groups(self) -> range:
        """The key groups of the instance."""
        return key_groups_of(self.reader, self.readers, self.key_groups)


def table_reader(tasks: Mapping[int, TaskSnapshot]) -> int | None:
    """The old instance whose static inputs a new instance begins with: each of them has all rows, or was to get them.

    Args:
        tasks: the tasks of the recorded chain by index.

    Returns:
        None if all have ended.
    """
    reading = [index for index, task in tasks.items() if task.end_of_data == "none"]
    return min((index for index, task in tasks.items() if task.static), default=min(reading, default=None))


class RescaledEdge:
    """The channels of one edge, in the checkpoint and now.

    Args:
        groups: the present channels, by instance that sends.
        old: the channels of the checkpoint, see `old_channels`.
        senders: the instances of the stage that sends.
        readers: the instances of the stage that reads.
        key_groups: number of key groups of the stage that reads.
        table_reader: the old instance whose static inputs a new instance begins with, see `table_reader`.
    """

    def __init__(
        self,
        groups: Sequence[ChannelGroup],
        old: Sequence[OldChannel],
        senders: InstanceMatch,
        readers: InstanceMatch,
        key_groups: int,
        table_reader: int | None,
    ) -> None:
        self._static = groups[0].static
        self._key = groups[0].key
        self._vertex = groups[0].producer.vertex
        self._names = {(g.producer.index, task.index): str(name) for g in groups for task, name in g.channels.items()}
        self._senders_to: defaultdict[int, list[int]] = defaultdict(list)
        self._readers_of: defaultdict[int, list[int]] = defaultdict(list)
        for sender, reader in self._names:
            self._senders_to[reader].append(sender)
            self._readers_of[sender].append(reader)
        self._senders = senders
        self._readers = readers
        self._key_groups = key_groups
        self._table_reader = table_reader
        self._old: dict[tuple[int | None, int | None], OldChannel] = {(c.sender, c.reader): c for c in old}
        self._carried: defaultdict[Place, list[tuple[OldChannel, int | None]]] = defaultdict(list)
        """By present channel, the old ones whose records it carries: those of one reader's key groups, or all (None)."""
        sent_by: defaultdict[int | None, list[OldChannel]] = defaultdict(list)
        for channel in old:
            sent_by[None if senders.any_sender else channel.sender].append(channel)
            for place, keys_of in self._places(channel) if channel.carries_records else ():
                self._carried[place].append((channel, keys_of))
        self._known = {sender: MergedEventTime.of(channels) for sender, channels in sent_by.items()}
        """By old instance that sent; under None, of all where a present instance may send what any of them would have sent."""

    def into_ended(self, reader: int) -> Iterator[ChannelSnapshot]:
        """What an instance that waits behind the end of its data knows of its channels: all have ended, and it reads no more."""
        origin = self._readers.origins[reader]
        for sender in self._senders_to[reader]:
            name, same = self._names[sender, reader], self._old.get((self._senders.origins[sender], origin))
            if same is None:
                yield ChannelSnapshot(name, 0, ended="drain")
            else:
                yield msgspec.structs.replace(same.saved, channel=name, position=0, in_flight=())

    def into(self, reader: int, positions: Mapping[str, int], begins: Mapping[TaskId, int | None]) -> Iterator[ChannelSnapshot]:
        """What a present instance begins with on its channels; nothing for a channel of which nothing is known.

        Args:
            reader: the instance that reads.
            positions: by name of a channel, the position from which the query of the instance reads it; 0 for others.
            begins: by task that runs, the watermark with which it begins, epoch ms; None before the first.
        """
        for sender in self._senders_to[reader]:
            name = self._names[sender, reader]
            position = positions.get(name, 0)
            if self._static:
                known = self._table(name, position, (sender, reader))
            else:
                known = self._stream(name, position, (sender, reader), begins.get(TaskId(self._vertex, sender), math.inf))
            if known is not None:
                yield known

    # Records

    def _places(self, channel: OldChannel) -> Iterator[tuple[Place, int | None]]:
        """The present channels that carry the records of an old one, each with the reader whose key groups it gets, or None."""
        if not self._readers.shares_rows:
            for new, origin in enumerate(self._readers.origins):
                if channel.reader == (self._table_reader if self._static and origin is None else origin):
                    yield self._place(channel, new), None
        elif self._static:
            if channel.reader == self._table_reader:
                yield from ((self._place(channel, new), None) for new in range(self._readers.now))
        elif self._key is None:
            yield self._any_place(channel), None
        else:
            held = key_groups_of(channel.reader, self._readers.before, self._key_groups)
            for new in range(self._readers.now):
                own = key_groups_of(new, self._readers.now, self._key_groups)
                if held.start < own.stop and own.start < held.stop:
                    whole = own.start <= held.start and held.stop <= own.stop
                    yield self._place(channel, new), None if whole else new

    def _place(self, channel: OldChannel, reader: int) -> Place:
        """The present channel on which a reader gets records of an old one: of the same sender, or of any if that is gone."""
        senders, same = self._senders_to[reader], self._senders.present(channel.sender)
        return (same if same is not None and same in senders else senders[channel.sender % len(senders)], reader)

    def _any_place(self, channel: OldChannel) -> Place:
        """The present channel for records that any reader may process."""
        same = self._senders.present(channel.sender)
        sender = channel.sender % self._senders.now if same is None else same
        readers = self._readers_of[sender]
        return (sender, channel.reader if channel.reader in readers else readers[channel.reader % len(readers)])

    def _elements(self, channel: OldChannel, reader: int | None) -> Iterator[ChannelElement]:
        """The elements of an old channel, with the rows of one reader's key groups, or all (None)."""
        for element in channel.saved.in_flight:
            if isinstance(element, Segment) and reader is not None and self._key is not None:
                yield SegmentShare(element.files, element.rows, self._key, reader, self._readers.now, self._key_groups)
            else:
                yield element

    # Channels

    def _table(self, name: str, position: int, place: Place) -> ChannelSnapshot | None:
        """A channel of a static input. Behind records in flight its end comes again: the sender, or the restore, sends it."""
        carried = [element for channel, _ in self._carried[place] for element in channel.saved.in_flight]
        records = tuple(element for element in carried if isinstance(element, Segment))
        sender, reader = self._senders.origins[place[0]], self._readers.origins[place[1]]
        reader = self._table_reader if reader is None else reader
        if self._senders.shares_rows:
            known = [channel for (_, of), channel in self._old.items() if of == reader]
        else:
            known = [channel for at, channel in self._old.items() if at == (sender, reader)]
        ended = not records and bool(known) and all(channel.watermark == math.inf for channel in known)
        if not (records or ended or position):
            return None
        return ChannelSnapshot(name, position, ended="drain" if ended else "none", in_flight=records)

    def _stream(self, name: str, position: int, place: Place, begin: float | None) -> ChannelSnapshot | None:
        """A channel of a stream, at the least watermark of what it goes on from. Its end is always sent again."""
        origin, carried = self._senders.origins[place[0]], self._carried[place]
        known = self._known.get(None if self._senders.any_sender else origin, MergedEventTime())
        watermark = least_time((known.watermark, *(channel.watermark for channel, _ in carried)))
        limit = least_time((known.last_watermark, begin))
        parts = [(channel.watermark, self._elements(channel, keys_of)) for channel, keys_of in carried]
        elements = tuple(one_after_the_other(parts, watermark, limit))
        # In front of elements a channel counts as active: its sender says again that it is idle.
        idle = known.idle and not elements
        if watermark is None and not (elements or position or idle or known.behind):
            return None
        return ChannelSnapshot(name, position, milliseconds(watermark), idle, in_flight=elements, behind=known.behind)


class RescaledChannels:
    """The present channels of a pipeline, and what is known of them.

    Args:
        checkpoint: the checkpoint, with the pipeline that is to run.
        matches: which instances are which ones of the checkpoint.
        key_groups: returns the number of key groups of a recorded stage.
    """

    def __init__(
        self, checkpoint: FittedCheckpoint, matches: InstanceMatches, key_groups: Callable[[StageMetadata], int]
    ) -> None:
        self._checkpoint = checkpoint
        self._matches = matches
        self._key_groups = key_groups

    @cached_property
    def groups(self) -> list[ChannelGroup]:
        """The channels that there are now."""
        now = self._checkpoint.instances
        whole = [chain.stages for chain in self._checkpoint.metadata.chains if len({now.get(name) for name in chain.stages}) == 1]
        chained = {name: stages for stages in whole for name in stages}
        layout = dict.fromkeys(chained.get(name, (name,)) for name in now)
        chains = [Chain(stages[0], stages, tuple(now[stages[0]])) for stages in layout]
        return list(channel_groups(cast("Pipeline", self._checkpoint.pipeline), chains))

    def given_to(self, parts: Sequence[tuple[ChainMetadata, Mapping[int, int] | None]]) -> tuple[ChainMetadata, ...]:
        """The chains of the checkpoint with what their tasks know of their present channels.

        Args:
            parts: by recorded chain, the chain with its present tasks, and by task the old one whose query it continues; None
                instead of the latter for a chain that keeps its channels.
        """
        begins = {TaskId(chain.name, index): task.watermark for chain, _ in parts for index, task in chain.tasks.items()}
        result = []
        for before, (chain, of) in zip(self._checkpoint.metadata.chains, parts, strict=True):
            if of is None:
                result.append(chain)
                continue
            positions = {index: {c.channel: c.position for c in task.channels} for index, task in before.tasks.items()}
            edges, tasks = self._edges_into(before), {}
            for index, task in chain.tasks.items():
                own = positions[of[index]] if index in of else {}
                ended = task.end_of_data == "drain"
                known = (edge.into_ended(index) if ended else edge.into(index, own, begins) for edge in edges)
                channels = tuple(itertools.chain.from_iterable(known))
                tasks[index] = msgspec.structs.replace(task, channels=channels, output_positions={})
            result.append(msgspec.structs.replace(chain, tasks=tasks))
        return tuple(result)

    def behind(self, chain: ChainMetadata, running: Collection[TaskId]) -> Iterator[tuple[int, int | None]]:
        """The tasks of a chain whose event time is in front of that of their present channels, and the earliest of these.

        Channels that are idle or left out, and those of ended tasks, do not decide about event time.

        Args:
            chain: the chain, as :meth:`given_to` returns it.
            running: the tasks of all chains that have not ended.
        """
        for index, task in chain.tasks.items():
            reader, valve = TaskId(chain.name, index), task.valve_watermark
            known = {channel.channel: channel for channel in task.channels}
            streams = [g for g in self.groups if reader in g.channels and g.producer in running and not g.static]
            found = [known.get(name, ChannelSnapshot(name, 0)) for name in (str(g.channels[reader]) for g in streams)]
            deciding = [channel.watermark for channel in found if not (channel.idle or channel.behind)]
            least = least_watermark(deciding) if deciding else valve
            if reader in running and valve is not None and (least is None or least < valve):
                yield index, least

    def _edges_into(self, chain: ChainMetadata) -> list[RescaledEdge]:
        """The edges over which a recorded chain gets its rows now."""
        into: dict[str, list[ChannelGroup]] = {}
        for group in self.groups:
            if chain.name in {task.vertex for task in group.channels}:
                into.setdefault(group.edge.source, []).append(group)
        old, tables = old_channels(chain), table_reader(chain.tasks)
        key_groups = self._key_groups(self._checkpoint.recorded[chain.name])
        readers = self._matches.of(chain.name)
        return [
            RescaledEdge(groups, old.get(self._checkpoint.uids[name], ()), self._matches.of(name), readers, key_groups, tables)
            for name, groups in into.items()
        ]
