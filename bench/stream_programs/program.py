"""A program over the inputs `a` and `b`: a tree of operators, and the DataFrame that it makes of two DataFrames.

Every operator returns the columns `k` (long), `ts` (timestamp, the event time) and `v` (long), so that all operators fit
together. Every operator is a function of its input's rows as a multiset: so a batch computation has the same result. Must not
know how a program is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import Column

COLUMNS = "k bigint, ts timestamp, v bigint"

_FLOATING = "CASE WHEN k = 0 AND v % 2 = 0 THEN -0.0D WHEN k = 2 THEN double('NaN') ELSE CAST(k AS DOUBLE) END"
"""`k` as a floating-point number: 0 is zero of either sign, 2 is NaN."""

CONDITIONS: Mapping[str, str] = {
    "key": "k = rk",
    "times": "ts = rts",
    "key and times": "k = rk AND ts = rts",
    "key and range": "k = rk AND rts BETWEEN ts - INTERVAL 5 MINUTES AND ts + INTERVAL 10 MINUTES",
    "key and later": "k = rk AND rts > ts AND rts <= ts + INTERVAL 15 MINUTES",
    "range": "rts BETWEEN ts - INTERVAL 5 MINUTES AND ts + INTERVAL 5 MINUTES",
    "windows": "w = rw",
    "key and windows": "k = rk AND w = rw",
    "key or null, and times": "k <=> rk AND ts = rts",
    "key or null, and range": "k <=> rk AND rts BETWEEN ts - INTERVAL 5 MINUTES AND ts + INTERVAL 10 MINUTES",
    "keys of two types, and times": "k = CAST(rk AS INT) AND ts = rts",
    "key as text, and times": "CAST(k AS STRING) = CAST(rk AS STRING) AND ts = rts",
    "key as structure, and range": (
        "named_struct('a', k, 'b', k % 2) = named_struct('a', rk, 'b', rk % 2) "
        "AND rts BETWEEN ts - INTERVAL 5 MINUTES AND ts + INTERVAL 10 MINUTES"
    ),
    "key as floating point, and times": (
        f"{_FLOATING} = CASE WHEN rk = 2 THEN double('NaN') ELSE CAST(rk AS DOUBLE) END AND ts = rts"
    ),
    "computed keys, and later": "k + 1 = rk * 2 AND rts > ts AND rts <= ts + INTERVAL 15 MINUTES",
    "key, and later without an end": "k = rk AND rts >= ts",
    "shifted times": "ts - INTERVAL 3 MINUTES = rts",
}
"""By name, the condition of a join of `k, ts, v` with `rk, rts, rv`; `w` and `rw` are windows of ten minutes."""

KEYS: Mapping[str, str] = {
    "number": "k",
    "text": "CAST(k AS STRING)",
    "structure": "named_struct('a', k, 'b', k % 2)",
    "decimal": "CAST(k AS DECIMAL(20, 2))",
    "floating point": _FLOATING,
    "array": "array(k, k)",
    "binary": "CAST(CAST(k AS STRING) AS BINARY)",
    "date": "date_add(DATE '2026-01-01', CAST(k AS INT))",
    "timestamp": "timestamp_seconds(k)",
}
"""By type, an expression of `k` that has as many different values as `k`, and one for its nulls."""

VALUES: Mapping[str, str] = {
    "sum": "sum(v)",
    "extremes": "max(v) * 10 - min(v)",
    "average": "CAST(avg(v) * 1000 AS BIGINT)",
    "set": "aggregate(array_sort(collect_set(v)), 0L, (sum, each) -> sum * 7 + each)",
    "count of some": "count(CASE WHEN v > 2 THEN 1 END)",
}
"""By name, an aggregation of `v` that does not depend on the order of the rows."""


@dataclass(frozen=True)
class Input:
    """All rows of an input."""

    name: str


@dataclass(frozen=True)
class Filter:
    """The rows for which a condition holds."""

    of: Program
    condition: str


@dataclass(frozen=True)
class Select:
    """Another `k` and `v` for each row."""

    of: Program
    k: str
    v: str


@dataclass(frozen=True)
class Union:
    """The rows of both."""

    left: Program
    right: Program


@dataclass(frozen=True)
class Join:
    """A join of two streams.

    Attributes:
        how: The type of the join.
        on: The name of its condition.
        also: A further condition, or an empty text.
    """

    left: Program
    right: Program
    how: str
    on: str
    also: str = ""


@dataclass(frozen=True)
class Windows:
    """A row for each window of event time, and for each key if it is grouped by keys: the sum of `v` and the number of rows.

    Attributes:
        size: The size of a window; a session's gap.
        by_key: Whether `k` is a key.
        session: Whether the windows are sessions.
        kept: Whether the aggregation is in the result; otherwise only the windows that have rows.
        slide: The time between the beginnings of two windows; an empty text for the size.
        key: The type of the key.
        value: The name of the aggregation.
    """

    of: Program
    size: str
    by_key: bool
    session: bool
    kept: bool
    slide: str = ""
    key: str = "number"
    value: str = "sum"


@dataclass(frozen=True)
class Distinct:
    """The different rows, or the different pairs of key and time; `key` is the key's type."""

    of: Program
    whole: bool
    key: str = "number"


@dataclass(frozen=True)
class Explode:
    """One to three rows for each row."""

    of: Program


@dataclass(frozen=True)
class Lookup:
    """A join with a table of three keys; `how` is the type of the join."""

    of: Program
    how: str


@dataclass(frozen=True)
class Several:
    """The results of several programs, told apart by the remainder of `v`."""

    of: tuple[Program, ...]


Program = Input | Filter | Select | Union | Join | Windows | Distinct | Explode | Lookup | Several


def below(program: Program) -> tuple[Program, ...]:
    """The programs whose results an operator reads."""
    match program:
        case Input():
            return ()
        case Union(left, right) | Join(left, right):
            return left, right
        case Several(several):
            return several
        case _:
            return (program.of,)


def operators(program: Program) -> Iterator[Program]:
    """All operators of a program, from its result to its inputs."""
    yield program
    for each in below(program):
        yield from operators(each)


def frame_of(program: Program, inputs: Mapping[str, DataFrame]) -> DataFrame:
    """The DataFrame of a program.

    Args:
        program: The program.
        inputs: Its inputs by name, with the columns `k`, `ts` and `v`; streams or tables.
    """
    match program:
        case Input(name):
            return inputs[name].select("k", "ts", "v")
        case Filter(of, condition):
            return frame_of(of, inputs).where(condition)
        case Select(of, k, v):
            return frame_of(of, inputs).selectExpr(f"{k} AS k", "ts", f"{v} AS v")
        case Union(left, right):
            return frame_of(left, inputs).unionByName(frame_of(right, inputs))
        case Several(several):
            frames = [frame_of(each, inputs) for each in several]
            marked = [
                frame.select("k", "ts", (F.col("v") * len(several) + number).alias("v")) for number, frame in enumerate(frames)
            ]
            return reduce(DataFrame.unionByName, marked)
        case Join():
            return _joined(program, frame_of(program.left, inputs), frame_of(program.right, inputs))
        case Windows():
            return _windows(program, frame_of(program.of, inputs))
        case Distinct(of, whole, key):
            frame = frame_of(of, inputs).withColumn("key", F.expr(KEYS[key]))
            if whole:
                return frame.dropDuplicates(["key", "ts", "v"]).select("k", "ts", "v")
            return frame.dropDuplicates(["key", "ts"]).select("k", "ts", F.lit(1).cast("bigint").alias("v"))
        case Explode(of):
            numbers = F.sequence(F.lit(0), F.coalesce("v", F.lit(0)) % 3)
            exploded = frame_of(of, inputs).select("k", "ts", "v", F.explode(numbers).alias("number"))
            return exploded.select("k", "ts", (F.col("v") * 3 + F.col("number")).alias("v"))
        case Lookup(of, how):
            frame = frame_of(of, inputs)
            table = frame.sparkSession.range(1, 4).select(F.col("id").alias("known"), (F.col("id") * 5).alias("more"))
            found = frame.join(table, F.col("k") == F.col("known"), how)
            return (
                found
                if how in ("left_semi", "left_anti")
                else found.select("k", "ts", F.coalesce(F.col("v") + F.col("more"), "v").alias("v"))
            )


def _joined(join: Join, left: DataFrame, right: DataFrame) -> DataFrame:
    right = right.select(F.col("k").alias("rk"), F.col("ts").alias("rts"), F.col("v").alias("rv"))
    condition = f"{CONDITIONS[join.on]} AND {join.also}" if join.also else CONDITIONS[join.on]
    event_times = "ts", "rts"
    if "windows" in join.on:  # the windows are the event time: Spark allows one such column on each side
        event_times = "w", "rw"
        left = left.select("k", _plain("ts"), "v", F.window("ts", "10 minutes").alias("w"))
        right = right.select("rk", _plain("rts"), "rv", F.window("rts", "10 minutes").alias("rw"))
    joined = left.join(right, F.expr(condition), join.how)
    of_left, of_right = (F.window_time(each) if "w" in each else F.col(each) for each in event_times)
    if join.how in ("left_semi", "left_anti"):
        return joined.select("k", of_left.alias("ts"), "v")
    times = {"right": of_right, "full": F.coalesce(of_left, of_right)}.get(join.how, of_left)
    seconds = (F.coalesce(F.unix_seconds(each), F.lit(-1)) for each in ("ts", "rts"))
    return joined.select(
        F.coalesce("k", "rk").alias("k"), times.alias("ts"), _mixed(F.col("v"), F.col("rv"), *seconds).alias("v")
    )


def _plain(column: str) -> Column:
    """The same time, without a watermark."""
    return F.timestamp_micros(F.unix_micros(column)).alias(column)


def _mixed(*columns: Column) -> Column:
    """A number that tells which of the values are null, and mixes the others."""
    return reduce(lambda sum, column: sum * 31 + F.coalesce(column * 2, F.lit(-1)) % 100_003, columns, F.lit(0)) % 100_003


def _windows(windows: Windows, frame: DataFrame) -> DataFrame:
    window = F.session_window("ts", windows.size) if windows.session else F.window("ts", windows.size, windows.slide or None)
    keys = [F.expr(KEYS[windows.key]).alias("key")] if windows.by_key else []
    aggregated = F.expr(VALUES[windows.value]).alias("s"), F.count("*").alias("n"), F.min("k").alias("k")
    grouped = frame.groupBy(window.alias("w"), *keys).agg(*aggregated)
    times = F.window_time("w") if not windows.session else F.col("w.end")
    k = F.col("k") if windows.by_key else F.lit(0).cast("bigint")
    v = (F.coalesce("s", F.lit(-1)) * 7 + F.col("n")) % 100_003 if windows.kept else F.lit(1).cast("bigint")
    return grouped.select(k.alias("k"), times.alias("ts"), v.alias("v"))
