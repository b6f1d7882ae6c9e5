"""The rows of both inputs, and the micro-batches in which they arrive. No row arrives later than the inputs' lateness allows."""

from __future__ import annotations

import datetime as dt
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from pathlib import Path

LATENESS_MINUTES = 10
START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
SCHEMA = pa.schema([("k", pa.int64()), ("ts", pa.timestamp("us", "UTC")), ("v", pa.int64())])
SIDES = ("a", "b")
PATTERNS = ("both", "one empty", "alternating", "one after the other", "any")
"""What arrives in a micro-batch: rows of both inputs; all rows of one input in the first one; rows of one input, then of the
other one; all of one input, in several ones, before the other's first; anything."""

Row = tuple[int | None, dt.datetime | None, int | None]


@dataclass(frozen=True)
class Arrival:
    """What one micro-batch may read: the new rows of each input."""

    rows: Mapping[str, Sequence[Row]]


def random_rows(chance: random.Random, count: int) -> list[Row]:
    """Rows in the order of their arrival. Their times go back by less than the lateness."""
    minutes = [(chance.randrange(60), chance.uniform(0, LATENESS_MINUTES - 0.5)) for _ in range(count)]
    minutes.sort(key=sum)
    keys: list[int | None] = [0, 1, 2, 3, None] if chance.random() < 0.3 else [0, 1, 2]
    values: list[int | None] = [None, *range(6)] if chance.random() < 0.3 else list(range(6))
    times: list[dt.datetime | None] = [START + dt.timedelta(minutes=minute) for minute, _ in minutes]
    if chance.random() < 0.1:
        times = [None if chance.random() < 0.15 else time for time in times]
    return [(chance.choice(keys), time, chance.choice(values)) for time in times]


def random_arrivals(chance: random.Random) -> tuple[str, list[Arrival]]:
    """A pattern's name, and its micro-batches."""
    rows = {side: random_rows(chance, chance.randrange(4, 28)) for side in SIDES}
    pattern = chance.choice(PATTERNS)
    batches = chance.randrange(2, 6)
    parts: list[dict[str, Sequence[Row]]] = []
    if pattern in ("both", "any"):
        cuts = {side: _cuts(chance, rows[side], batches, may_be_empty=pattern == "any") for side in SIDES}
        parts = [{side: cuts[side][number] for side in SIDES} for number in range(batches)]
    else:
        first, second = chance.sample(SIDES, 2)
        pieces = {side: _cuts(chance, rows[side], max(2, batches // 2), may_be_empty=False) for side in SIDES}
        if pattern == "alternating":
            parts = [
                {side: piece}
                for pair in zip(pieces[first], pieces[second], strict=True)
                for side, piece in zip((first, second), pair, strict=True)
            ]
        elif pattern == "one after the other":
            parts = [{side: piece} for side in (first, second) for piece in pieces[side]]
        else:
            parts = [{first: rows[first]}, *({second: piece} for piece in pieces[second])]
    return pattern, [Arrival({side: part.get(side, ()) for side in SIDES}) for part in parts if any(part.values())]


def _cuts(chance: random.Random, rows: Sequence[Row], count: int, *, may_be_empty: bool) -> list[Sequence[Row]]:
    places = range(len(rows) + 1) if may_be_empty else range(1, len(rows))
    count_of_cuts = min(count - 1, len(places))
    cuts = sorted(chance.choices(places, k=count - 1) if may_be_empty else chance.sample(places, count_of_cuts))
    ends = [0, *cuts, len(rows)]
    pieces: list[Sequence[Row]] = [rows[begin:end] for begin, end in pairwise(ends)]
    return pieces + [()] * (count - len(pieces))


def write_rows(rows: Sequence[Row], file: Path, number: int = 0) -> Path:
    """Write rows as one Parquet file, which appears whole.

    Args:
        rows: The rows.
        file: The file's path.
        number: Its number among the files of its folder. Spark reads files in the order of their modification times, and in any
            order if these are equal, as those of files written at once may be.
    """
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    table = pa.table([pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)
    scratch = file.with_name(f".{file.name}.next")
    pq.write_table(table, scratch)
    os.utime(scratch, (number, number))
    return scratch.rename(file)
