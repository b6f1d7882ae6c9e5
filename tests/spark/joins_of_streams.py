"""Joins of two streams, the micro-batches in which their rows arrive, and the comparison with the batch result."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.stream_programs.arrivals import START, Arrival, Row
from bench.stream_programs.program import Filter, Input, Join, Program, Select, Union, Windows, operators
from bench.stream_programs.queries import batch_rows
from bench.stream_programs.random_programs import Case

A, B = Input("a"), Input("b")
BOTH = Union(Select(A, "k", "2 * v"), Select(B, "k", "2 * v + 1"))
"""One stream of the rows of both inputs, as an earlier stage of the same query returns it."""
OF_A, OF_B = Filter(BOTH, "v % 2 = 0"), Filter(BOTH, "v % 2 = 1")
COALESCED = Join(A, B, "full", "times")
"""Its event time is computed: the time of one input, or of the other one."""
LATE = ("key and times", "key and range", "times", "windows")


def hourly(of: Program) -> Windows:
    return Windows(of, "10 minutes", by_key=False, session=False, kept=True)


JOINS: dict[str, Program] = {
    **{f"inner, {on}": Join(A, B, "inner", on) for on in ("key", *LATE)},
    **{f"{how}, {on}": Join(A, B, how, on) for how in ("left", "right", "full", "left_semi") for on in LATE},
    "inner, a further condition": Join(A, B, "inner", "key and range", "v <= rv"),
    "windows of counts": Join(hourly(A), hourly(B), "inner", "times"),
    "windows of counts, left": Join(hourly(A), hourly(B), "left", "times"),
    "self-join": Join(A, Filter(A, "v > 2"), "inner", "key and later"),
    "three ways": Join(Join(A, B, "inner", "key and times"), A, "inner", "key and times"),
    "semi join of a union": Join(Union(A, B), B, "left_semi", "key and later"),
    **{f"chained, {how}": Join(OF_A, OF_B, how, "key and times") for how in ("inner", "left", "full", "left_semi")},
}


def _inputs(program: Program) -> list[str]:
    return sorted(of.name for of in operators(program) if isinstance(of, Input))


def _is_by_key(of: Program) -> bool:
    return of.on.startswith("key") if isinstance(of, Join) else not isinstance(of, Windows) or of.by_key


ONCE = {name: join for name, join in JOINS.items() if _inputs(join) == ["a", "b"]}
"""The joins that read each input once, so that sources can be fused."""
BY_KEY = {name: join for name, join in JOINS.items() if {*_inputs(join)} == {"a", "b"} and all(map(_is_by_key, operators(join)))}
"""The joins of both inputs whose state belongs to the key, so that several instances may each have a part of the keys."""


def rows(first: int, count: int, step: int = 1) -> list[Row]:
    return [(n % 3, START + dt.timedelta(minutes=n), n % 7) for n in range(first, first + count * step, step)]


ARRIVALS: dict[str, list[Arrival]] = {
    "both sides in one batch": [Arrival({"a": rows(0, 12), "b": rows(0, 12)}), Arrival({"a": rows(12, 8), "b": rows(12, 6, 2)})],
    "one side empty": [Arrival({"a": rows(0, 20), "b": []}), Arrival({"a": [], "b": rows(0, 12, 2)})],
    "alternating": [
        Arrival({"a": [], "b": rows(0, 6, 2)}),
        Arrival({"a": rows(0, 10), "b": []}),
        Arrival({"a": [], "b": rows(12, 6, 2)}),
        Arrival({"a": rows(10, 10), "b": []}),
    ],
}


def case_of(program: Program, arrivals: Sequence[Arrival], layout: str, **settings: Any) -> Case:
    fields: dict[str, Any] = {
        "event_time": True, "channels": 1, "partitions": 1, "restarts": frozenset(), "ends_early": False, "rocksdb": False,
        "compiled": False, **settings,
    }  # fmt: skip
    return Case(0, program, "", arrivals, layout, **fields)


def check(spark: Any, case: Case, folder: Path, found: Sequence[Any]) -> None:
    expected = batch_rows(spark, case, folder)
    assert expected
    assert sorted(found, key=repr) == expected
