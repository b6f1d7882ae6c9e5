"""The snapshots of simulated tasks, and the channels between tasks. Values and queues only."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dagster_checkpoints.coordination import MIN_WATERMARK_MS
from dagster_checkpoints.execution.task_events import PinnedChannel
from simulation.elements import Element
from simulation.shapes import ChannelSpec
from simulation.sinks import Transaction


class Channel:
    """An ordered log from one task to another, as its consumer sees it.

    Attributes:
        queue: the elements that have arrived and that the gate has not read.
        sent: the elements that are still at the producer; `queue` itself where the producer buffers none.
        log: the elements that the gate has read and the query has not consumed.
        consumed: position of the first element of `log`.
        watermark: the highest watermark that the query has passed, in milliseconds.
        ended: "none", or how the data ended at the mark that the query has passed: "drain" or "suspend".
    """

    __slots__ = ("consumed", "edge", "ended", "keyed", "log", "name", "queue", "sent", "static", "watermark")

    def __init__(self, spec: ChannelSpec, buffered: bool) -> None:
        self.name, self.edge, self.static, self.keyed = spec.name, spec.edge, spec.static, spec.keyed
        self.queue: deque[Element] = deque()
        self.sent: deque[Element] = deque() if buffered else self.queue
        self.log: deque[Element] = deque()
        self.consumed = 0
        self.watermark = MIN_WATERMARK_MS
        self.ended = "none"


class Output:
    """The channels of one task to one consumer stage, and the tally of the rows sent."""

    __slots__ = ("channels", "edge", "keyed", "sent", "static", "turn")

    def __init__(self, channels: Sequence[Channel]) -> None:
        self.channels, first = channels, channels[0]
        self.edge, self.keyed, self.static = first.edge, first.keyed, first.static
        self.turn = self.sent = 0


class Ghost(msgspec.Struct, eq=False):
    """State that only the simulator keeps of a task, for its checks: tallies of all rows that it has ever read, sent and written.

    Attributes:
        counted: by stage with union list state, the number of rows that its operator has counted.
    """

    read: Mapping[int, int]
    sent: Mapping[int, int]
    written: int
    splits: tuple[tuple[int, int], ...]
    counted: dict[int, int]


class Snapshot(msgspec.Struct, eq=False):
    """The state that a task acknowledges a checkpoint with.

    Attributes:
        output: by channel, the elements that an unaligned barrier has overtaken on the output.
        event_time: the watermark that the query has run under.
        watermark: the watermark that was sent last.
        tables: by edge, the rows of the static table so far.
        contents: the contents of its state files.
        files: their names in storage, once uploaded.
    """

    after_finish: bool = False
    channels: dict[str, PinnedChannel] = msgspec.field(default_factory=dict)
    output: dict[str, tuple[Element, ...]] = msgspec.field(default_factory=dict)
    valve: int | None = None
    event_time: int = MIN_WATERMARK_MS
    watermark: int | None = None
    stages: tuple[Any, ...] = ()
    tables: dict[int, frozenset[int]] = msgspec.field(default_factory=dict)
    transactions: tuple[Transaction, ...] = ()
    contents: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    ghost: Ghost = msgspec.field(default_factory=lambda: Ghost({}, {}, 0, (), {}))
