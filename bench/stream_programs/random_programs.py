"""A case from a seed: a program, the arrival of its rows, and how it is run. The same seed makes the same case."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.stream_programs.arrivals import Arrival, Row, random_arrivals
from bench.stream_programs.program import (
    CONDITIONS,
    KEYS,
    VALUES,
    Distinct,
    Explode,
    Filter,
    Input,
    Join,
    Lookup,
    Program,
    Select,
    Union,
    Windows,
)

LAYOUTS = ("channels", "fused")
JOB_LAYOUTS = ("job: channels", "job: fused", "job: two stages", "job: two instances of each source")
JOBS_ONE_IN = 25
"""One case out of this number runs as a whole job."""

_FILTERS = (
    "v >= 2", "v % 3 <> 1", "k <> 1", "k IS NOT NULL", "v IS NOT NULL OR k = 0", "k < 2 AND v > 0",
    "ts >= TIMESTAMP '2026-01-01 00:15:00'", "ts < TIMESTAMP '2026-01-01 00:40:00' OR v = 3", "k = 1",
)  # fmt: skip
_SELECTS = (("k", "v + 1"), ("k", "v * 3 % 11"), ("k % 2", "v"), ("k", "k + v"), ("coalesce(k, 9)", "coalesce(v, 7)"))
_FURTHER = ("v <= rv", "v % 2 = rv % 2", "v = rv", "v > 1", "rv > 1", "rv IS NOT NULL")
_HOWS = ("inner", "inner", "inner", "left", "left", "right", "right", "full", "full", "left_semi", "left_semi", "left_anti")
_BOUNDED = tuple(name for name in CONDITIONS if name not in ("key", "range"))
"""The conditions under which Spark knows when a row has no more matching rows: an outer join needs that."""


@dataclass(frozen=True)
class Case:
    """A program and how it is run.

    Attributes:
        seed: The seed that makes this case.
        pattern: The name of the arrivals' pattern.
        arrivals: The micro-batches.
        layout: How the inputs reach the program.
        event_time: Whether the inputs carry event time.
        channels: The number of channels of each input.
        partitions: The number of state partitions.
        restarts: The numbers of micro-batches after which the query stops and starts again.
        ends_early: Whether the end of an input is known as soon as it has no more rows.
        rocksdb: Whether RocksDB holds the state of a query; a job's is always there.
        compiled: Whether Spark compiles whole stages of a plan.
    """

    seed: int
    program: Program
    pattern: str
    arrivals: Sequence[Arrival]
    layout: str
    event_time: bool
    channels: int
    partitions: int
    restarts: frozenset[int]
    ends_early: bool
    rocksdb: bool
    compiled: bool

    def __str__(self) -> str:
        rows = "\n".join(
            f"  micro-batch {number}: " + "; ".join(f"{side}: {_shown(rows)}" for side, rows in arrival.rows.items())
            for number, arrival in enumerate(self.arrivals)
        )
        return (
            f"seed {self.seed}: {self.layout}, rows arrive {self.pattern!r}, event time {self.event_time}, "
            f"{self.channels} channels, {self.partitions} partitions, "
            f"restarts after {sorted(self.restarts)}, ends early {self.ends_early}\n"
            f"  {self.program}\n{rows}"
        )


def _shown(rows: Sequence[Row]) -> str:
    return " ".join(f"({k} {ts and f'{ts:%H:%M}'} {v})" for k, ts, v in rows) or "nothing"


def random_case(seed: int, *, jobs: bool = True) -> Case:
    """The case of a seed.

    Args:
        seed: The seed.
        jobs: Whether the case may run as a whole job; otherwise it is always a single query.
    """
    chance = random.Random(seed)
    event_time = chance.random() > 0.1
    program = random_program(chance, event_time)
    pattern, arrivals = random_arrivals(chance)
    layout, job_layout = chance.choice(LAYOUTS), chance.choice(JOB_LAYOUTS)
    is_job = chance.randrange(JOBS_ONE_IN) == 0
    restarts = frozenset(n for n in range(len(arrivals)) if chance.random() < 0.15)
    return Case(
        seed=seed,
        program=program,
        pattern=pattern,
        arrivals=arrivals,
        layout=job_layout if jobs and is_job else layout,
        event_time=event_time,
        channels=chance.choice((1, 1, 2)),
        partitions=chance.choice((1, 1, 2)),
        restarts=restarts,
        ends_early=chance.random() < 0.4,
        rocksdb=chance.random() < 0.2,
        compiled=chance.random() < 0.2,
    )


def random_program(chance: random.Random, event_time: bool = True) -> Program:
    """A program that reads both inputs.

    Args:
        chance: Random numbers.
        event_time: Whether the inputs carry event time; without it few operators keep state that ends.
    """
    make = _Maker(chance, event_time)
    program = make.combined(make.branch(Input("a")), make.branch(Input("b")))
    program = make.branch(program, stateful=0.2)
    if chance.random() < 0.2:
        sides = [program, make.branch(Input(chance.choice("ab")), stateful=0.1)]
        chance.shuffle(sides)
        program = make.branch(make.combined(*sides), stateful=0.15)
    return program


class _Maker:
    def __init__(self, chance: random.Random, event_time: bool) -> None:
        self._chance = chance
        self._event_time = event_time

    def branch(self, program: Program, stateful: float = 0.3) -> Program:
        """The program with up to two operators behind it, and perhaps one that keeps state."""
        chance = self._chance
        for _ in range(chance.choice((0, 0, 1, 1, 2))):
            choice = chance.random()
            if choice < 0.45:
                program = Filter(program, chance.choice(_FILTERS))
            elif choice < 0.8:
                program = Select(program, *chance.choice(_SELECTS))
            elif choice < 0.87:
                program = Explode(program)
            elif choice < 0.94:
                program = Lookup(program, chance.choice(("inner", "left", "left_semi", "left_anti")))
            else:
                program = Union(Filter(program, "v % 2 = 0"), Filter(program, "v % 2 <> 0 OR v IS NULL"))
        if chance.random() >= stateful:
            return program
        key = chance.choice(("number", *KEYS)) if chance.random() < 0.5 else "number"
        if not self._event_time or chance.random() < 0.35:
            return Distinct(program, chance.random() < 0.5, key)
        session = chance.random() < 0.2
        size = "3 minutes" if session else chance.choice(("10 minutes", "10 minutes", "20 minutes"))
        slide = "5 minutes" if not session and chance.random() < 0.2 else ""
        value = chance.choice(list(VALUES)) if chance.random() < 0.5 else "sum"
        by_key, kept = chance.random() < 0.6, chance.random() < 0.8
        return Windows(program, size, by_key, session, kept, slide, key, value)

    def combined(self, left: Program, right: Program) -> Program:
        chance = self._chance
        if chance.random() < 0.25:
            return Union(left, right)
        how = chance.choice(_HOWS) if self._event_time else "inner"
        names = list(CONDITIONS) if how in ("inner", "left_semi") else _BOUNDED
        return Join(left, right, how, chance.choice(names), chance.choice(_FURTHER) if chance.random() < 0.3 else "")
