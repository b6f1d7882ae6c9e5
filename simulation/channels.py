"""What a simulated task acknowledges with, and the channels between tasks. Values and queues only."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from dagster_checkpoints.coordination import MIN_WATERMARK_MS
from dagster_checkpoints.execution.task_events import PinnedChannel
from simulation.elements import Element
from simulation.shapes import ChannelSpec, OutputSpec
from simulation.sinks import Name, Rows, Transaction


class Channel:
    """An ordered log from one task to another, as its consumer sees it. `sent` is the producer's end, if it has one.

    Attributes:
        queue: what has arrived and was not read.
        log: what the gate has read, and the query has not consumed.
        consumed: position of the first element of `log`.
        watermark: what the marks that the query has come past say.
        ended: likewise.
    """

    __slots__ = ("consumed", "edge", "ended", "log", "name", "queue", "sent", "static", "watermark")

    def __init__(self, spec: ChannelSpec, buffered: bool) -> None:
        self.name, self.edge, self.static = spec.name, spec.edge, spec.static
        self.queue: deque[Element] = deque()
        self.sent: deque[Element] = deque() if buffered else self.queue
        self.log: deque[Element] = deque()
        self.consumed = 0
        self.watermark = MIN_WATERMARK_MS
        self.ended = "none"


class Output:
    """Where rows go to one consumer stage, and the tally of those that have gone."""

    __slots__ = ("channels", "edge", "keyed", "sent", "static", "turn")

    def __init__(self, spec: OutputSpec, channels: list[Channel]) -> None:
        self.edge, self.keyed, self.static = spec.edge, spec.keyed, spec.static
        self.channels = channels
        self.turn = self.sent = 0


class Ghost(msgspec.Struct, eq=False):
    """What only the simulator knows of a task: tallies of the rows that it has read, sent and written, ever.

    Attributes:
        counted: by stage with union list state, what its operator counts.
    """

    read: Mapping[int, int]
    sent: Mapping[int, int]
    written: int
    splits: tuple[tuple[int, int], ...]
    counted: dict[int, int]


class Snapshot(msgspec.Struct, eq=False):
    """What a task acknowledges with.

    Attributes:
        output: by channel, what an unaligned barrier has overtaken on its way out.
        event_time: the watermark that the query has run under.
        watermark: the watermark that was said last.
        tables: by edge, the rows of the static table so far.
        contents: of its state files.
        files: their names in storage, once they are there.
    """

    after_finish: bool = False
    channels: dict[str, PinnedChannel] = msgspec.field(default_factory=dict)
    output: dict[str, tuple[Element, ...]] = msgspec.field(default_factory=dict)
    valve: int | None = None
    event_time: int | None = None
    watermark: int | None = None
    stages: tuple[Any, ...] = ()
    tables: dict[int, frozenset[int]] = msgspec.field(default_factory=dict)
    splits: tuple[tuple[int, int], ...] = ()
    transactions: tuple[Transaction, ...] = ()
    with_rows: dict[Name, Rows] = msgspec.field(default_factory=dict)
    contents: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    ghost: Ghost = msgspec.field(default_factory=lambda: Ghost({}, {}, 0, (), {}))
