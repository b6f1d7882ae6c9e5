"""The records that flow between simulated tasks, and their arithmetic. Marks are those of `execution.elements`.

A record is `(uid, ts, key)`: `uid` identifies the source record and the edges that it has passed, so that every effect in the
world has its own id; `ts` is event time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from dagster_checkpoints.execution.elements import Mark
from dagster_checkpoints.state import key_groups

Row = tuple[int, int, int]
"""(uid, ts, key)."""
Element = Row | Mark

KEYS = 5
KEY_GROUPS = 128
WINDOW = 4
"""Length of a window in event time."""
FLUSHED_TS = 10**6
"""Event time of the rows that a stage emits only at its end: later than any window."""
EDGES = 32
"""Upper limit of the number of edges of a pipeline, exclusive."""

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


def total(tallies: Iterable[Mapping[int, int]]) -> Counter[int]:
    """By key, the sum of all values."""
    found = Counter[int]()
    for each in tallies:
        found.update(each)
    return found


def describe(tally: int) -> str:
    return f"{tally // ONE} rows (sum {tally % ONE})"


def source_row(source: int, split: int, position: int) -> Row:
    """The record at a position of a split: sources can be read again."""
    seed = mix(source, split, position)
    return (seed, 2 * position + seed % 4, (seed // 4) % KEYS)


def source_watermark(position: int) -> int:
    """No record of a split at this position or behind it is earlier."""
    return 2 * position


def key_group(key: int) -> int:
    return key * 53 % KEY_GROUPS


def owner_of(key: int, parallelism: int) -> int:
    return key_groups.owner_of(key_group(key), parallelism, KEY_GROUPS)
