"""The records that flow between simulated tasks, and their arithmetic. Marks are `execution.elements`' own.

A record is `(uid, ts, key)`: `uid` says which source record it is and by which edges it has come, so that every effect in the
world has a name; `ts` is event time.
"""

from __future__ import annotations

from collections.abc import Collection

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
"""Event time of what a stage holds back until the end: later than any window."""
EDGES = 32
"""A pipeline has fewer edges."""

ONE = 1 << 128
"""For each row, added to the sum of their uids: so a tally of rows is one number."""

_PRIME = (1 << 61) - 1


def mix(*numbers: int) -> int:
    """One number out of several: the same wherever and whenever it is computed."""
    mixed = 17
    for number in numbers:
        mixed = (mixed * 1_000_003 + number + 1) % _PRIME
    return mixed


def tally(uids: Collection[int]) -> int:
    return len(uids) * ONE + sum(uids)


def in_words(tally: int) -> str:
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
    """The instance that owns a key."""
    return key_groups.owner_of(key_group(key), parallelism, KEY_GROUPS)
