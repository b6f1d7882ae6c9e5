"""The records that flow between simulated tasks, the channels that carry them, and the snapshots of tasks.

Values and queues only. A record is `(uid, ts, key)`: `uid` identifies the source record and the edges that it has passed, so
that every effect in the world has its own id; `ts` is event time. Marks are those of `execution.elements`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from dagster_checkpoints.coordination.watermarks import MIN_WATERMARK_MS
from dagster_checkpoints.execution.elements import Mark
from dagster_checkpoints.execution.task_events import PinnedChannel
from dagster_checkpoints.sinks.ledger import Commit, Staged
from dagster_checkpoints.state import key_groups
from dagster_checkpoints.state.metadata import FusedSourceSnapshot
from simulation.shapes import ChannelSpec

Row = tuple[int, int, int]
"""(uid, ts, key)."""
Element = Row | Mark

KEYS = 5
ONE = 1 << 128
"""A tally is one number: this for each row, plus the sum of the rows' uids."""


def mix(*numbers: int) -> int:
    """A hash of several numbers, modulo a prime: the same in every process."""
    mixed = 17
    for number in numbers:
        mixed = (mixed * 1_000_003 + number + 1) % ((1 << 61) - 1)
    return mixed


def tally(uids: Collection[int]) -> int:
    return len(uids) * ONE + sum(uids)


def total(tallies: Iterable[Mapping[int, int]]) -> defaultdict[int, int]:
    """By key, the sum of all values."""
    found: defaultdict[int, int] = defaultdict(int)
    for each in tallies:
        for key, number in each.items():
            found[key] += number
    return found


def describe(tally: int) -> str:
    return f"{tally // ONE} rows (sum {tally % ONE})"


def is_refused(uid: int) -> bool:
    """Whether a stage with a quarantine refuses a row."""
    return uid % 3 == 0


def source_row(source: int, split: int, position: int) -> Row:
    """The record at a position of a split: sources can be read again."""
    seed = mix(source, split, position)
    return (seed, 2 * position + seed % 4, (seed // 4) % KEYS)


def source_watermark(position: int) -> int:
    """No record of a split at this position or behind it is earlier."""
    return 2 * position


def key_group(key: int, groups: int) -> int:
    return key * 53 % groups


def owner_of(key: int, parallelism: int, groups: int) -> int:
    return key_groups.owner_of(key_group(key, groups), parallelism, groups)


def rows_of(element: Element) -> int:
    """The rows that an element counts as where micro-batches are limited: on Spark an element is a segment of many rows."""
    return 0 if isinstance(element, Mark) else 1 + element[0] % 3


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

    __slots__ = ("consumed", "edge", "ended", "groups", "keyed", "log", "name", "queue", "refused", "sent", "static", "watermark")

    def __init__(self, spec: ChannelSpec, buffered: bool) -> None:
        self.name, self.edge, self.static, self.keyed = spec.name, spec.edge, spec.static, spec.keyed
        self.groups, self.refused = spec.groups, spec.refused
        self.queue: deque[Element] = deque()
        self.sent: deque[Element] = deque() if buffered else self.queue
        self.log: deque[Element] = deque()
        self.consumed = 0
        self.watermark = MIN_WATERMARK_MS
        self.ended = "none"


class Output:
    """The channels of one task to one consumer stage, and the tally of the rows sent."""

    __slots__ = ("channels", "edge", "groups", "keyed", "refused", "sent", "static", "turn")

    def __init__(self, channels: Sequence[Channel]) -> None:
        self.channels, first = channels, channels[0]
        self.edge, self.keyed, self.static = first.edge, first.keyed, first.static
        self.groups, self.refused = first.groups, first.refused
        self.turn = self.sent = 0


class Ghost(msgspec.Struct, eq=False):
    """State that only the simulator keeps of a task, for its checks: tallies of all rows that it has ever read, sent and written.

    Attributes:
        counted: by stage with union list state, the number of rows that its operator has counted.
        fused: by fused source, its splits with their positions; `splits` has those of a task with one source.
        retired: the splits of instances of the source that had finished and are gone: no task reads on.
    """

    read: Mapping[int, int]
    sent: Mapping[int, int]
    written: int
    splits: tuple[tuple[int, int], ...]
    counted: dict[int, int]
    fused: Mapping[int, tuple[tuple[int, int], ...]] = msgspec.field(default_factory=dict)
    retired: tuple[tuple[int, int], ...] = ()


class Snapshot(msgspec.Struct, eq=False):
    """The state that a task acknowledges a checkpoint with.

    Attributes:
        output: by channel, the elements that an unaligned barrier has overtaken on the output.
        event_time: the watermark that the query has run under.
        watermark: the watermark that was sent last.
        tables: by edge, the rows of the static table so far.
        committed: what its sink had committed last.
        contents: the contents of its state files.
        files: their names in storage, once uploaded.
        splits: the splits that a split source was assigned and has not read to their end.
    """

    after_finish: bool = False
    channels: dict[str, PinnedChannel] = msgspec.field(default_factory=dict)
    output: dict[str, tuple[Element, ...]] = msgspec.field(default_factory=dict)
    valve: int | None = None
    event_time: int = MIN_WATERMARK_MS
    watermark: int | None = None
    stages: tuple[Any, ...] = ()
    tables: dict[int, frozenset[int]] = msgspec.field(default_factory=dict)
    transactions: tuple[Staged, ...] = ()
    committed: Commit | None = None
    contents: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    fused: tuple[FusedSourceSnapshot, ...] = ()
    splits: tuple[str, ...] = ()
    ghost: Ghost = msgspec.field(default_factory=lambda: Ghost({}, {}, 0, (), {}))
