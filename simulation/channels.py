"""What a simulated task acknowledges with, and the channels between tasks. Values and queues only."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from dagster_checkpoints.coordination import MIN_WATERMARK_MS
from dagster_checkpoints.execution.task_events import PinnedChannel
from simulation.elements import Element
from simulation.shapes import OutputSpec
from simulation.sinks import Rows, Transaction


class Channel:
    """An ordered log from one task to another, as its consumer sees it. `sent` is the producer's end, if it has one.

    Attributes:
        queue: what has arrived and was not read.
        log: what the gate has read, and the query has not consumed.
        consumed: position of the first element of `log`.
        watermark: what the marks that the query has come past say.
        ended: likewise.
    """

    __slots__ = ("consumed", "edge", "ended", "log", "name", "number", "queue", "sent", "static", "watermark")

    def __init__(self, number: int, name: str, edge: int, static: bool, buffered: bool) -> None:
        self.number = number
        self.name = name
        self.edge = edge
        self.static = static
        self.queue: deque[Element] = deque()
        self.sent: deque[Element] = deque() if buffered else self.queue
        self.log: deque[Element] = deque()
        self.consumed = 0
        self.watermark = MIN_WATERMARK_MS
        self.ended = "none"


class Ghost:
    """What only the simulator knows of a task: how many rows it has read, sent and written, ever."""

    __slots__ = ("counted", "read", "sent", "splits", "written")

    def __init__(
        self,
        read: dict[int, tuple[int, int]],
        sent: dict[int, tuple[int, int]],
        written: tuple[int, int],
        splits: Any,
        counted: dict[int, int],
    ) -> None:
        self.read = read
        self.sent = sent
        self.written = written
        self.splits: tuple[tuple[int, int], ...] = splits
        self.counted = counted
        """By stage with union list state: what its operator counts."""


class Snapshot:
    """What a task acknowledges with."""

    __slots__ = (
        "after_finish", "channels", "contents", "event_time", "files", "ghost", "held_in_tables", "output", "splits", "stages",
        "tables", "transactions", "valve", "watermark", "with_rows",
    )  # fmt: skip

    def __init__(self) -> None:
        self.after_finish = False
        self.channels: dict[str, PinnedChannel] = {}
        self.output: dict[str, tuple[Element, ...]] = {}
        """By channel: what an unaligned barrier has overtaken on its way out."""
        self.valve: int | None = None
        self.event_time: int | None = None
        """The watermark that the query has run under."""
        self.watermark: int | None = None
        """The watermark that was said last."""
        self.stages: tuple[Any, ...] = ()
        self.tables: dict[int, int] = {}
        """By edge: the sum of the static table's rows so far."""
        self.held_in_tables: dict[int, frozenset[int]] = {}
        """At-least-once: by edge, the rows themselves."""
        self.splits: tuple[tuple[int, int], ...] = ()
        self.transactions: tuple[Transaction, ...] = ()
        self.with_rows: dict[str, Rows] = {}
        self.contents: tuple[str, ...] = ()
        """Of its state files."""
        self.files: tuple[str, ...] = ()
        """Their names in storage, once they are there."""
        self.ghost: Ghost


class Output:
    """Where rows go to one consumer stage."""

    __slots__ = ("channels", "count", "edge", "keyed", "static", "total", "turn")

    def __init__(self, spec: OutputSpec, channels: Sequence[Channel]) -> None:
        self.edge = spec.edge
        self.channels = list(channels)
        self.keyed = spec.keyed
        self.static = spec.static
        self.turn = 0
        self.count = 0
        self.total = 0
