"""Random graphs of stages under random histories, against their batch result.

Every stage takes and gives the same columns, so each may read each: stages with state behind others with it, unions and joins of
what has come different ways, keys that change on the way, instances, channels and fused queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dagster_checkpoints import ParquetSink, Pipeline, Stage, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.testing import SourceRows, check_pipeline
from tests.spark.planted_mistakes import NOWHERE, at, unreachable

ROWS = "k string, ts timestamp, v long"
ALLOWED = ("key is null", "has no")  # findings about plans that are sound for these rows
LATE = "10 minutes"
"""How much earlier than the newest row of its input a row of a join may be."""


def _window(rows: DataFrame, size: str, slide: str | None = None) -> DataFrame:
    grouped = rows.groupBy(F.window("ts", size, slide), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return grouped.select("k", F.window_time("window").alias("ts"), (F.col("v") + F.col("n")).alias("v"))


WITHOUT_STATE: dict[str, Callable[[DataFrame], DataFrame]] = {
    "filter": lambda rows: rows.where("v % 5 != 1"),
    "project": lambda rows: rows.selectExpr("k", "ts", "v * 2 + 1 AS v"),
    "explode": lambda rows: rows.selectExpr("k", "ts", "v", "explode(array(0L, 1L)) AS i").selectExpr(
        "k", "ts", "v * 10 + i AS v"
    ),
    "merge keys": lambda rows: rows.selectExpr("CASE WHEN k = 'c' THEN 'a' ELSE k END AS k", "ts", "v"),
    "null keys": lambda rows: rows.selectExpr("CASE WHEN v % 4 != 0 THEN k END AS k", "ts", "v"),
}
WITH_STATE: dict[str, Callable[[DataFrame], DataFrame]] = {
    "windows": lambda rows: _window(rows, "2 minutes"),
    "sliding windows": lambda rows: _window(rows, "4 minutes", "2 minutes"),
    "windows of windows": lambda rows: _window(_window(rows, "1 minute"), "3 minutes"),
    "distinct": lambda rows: rows.dropDuplicates(["k", "ts", "v"]),
    "distinct within": lambda rows: rows.dropDuplicatesWithinWatermark(["k", "ts", "v"]),
    "distinct keys": lambda rows: rows.select("k", "ts").dropDuplicates(["k", "ts"]).selectExpr("k", "ts", "1L AS v"),
}
JOINS = ("inner", "left_outer", "right_outer", "full_outer", "left_semi")


def _union(left: DataFrame, right: DataFrame) -> DataFrame:
    return left.unionByName(right)


def _join(how: str) -> Callable[[DataFrame, DataFrame], DataFrame]:
    def join(left: DataFrame, right: DataFrame) -> DataFrame:
        other = right.selectExpr("k AS k2", "ts AS ts2", "v AS v2")
        soon = F.expr("k = k2 AND ts2 >= ts - INTERVAL 1 MINUTE AND ts2 <= ts + INTERVAL 2 MINUTES")
        joined = left.join(other, soon, how)
        if how == "left_semi":
            return joined
        value = "coalesce(v, -1L) * 1000 + coalesce(v2, -7L) AS v"
        return joined.selectExpr("coalesce(k, k2) AS k", "coalesce(ts, ts2) AS ts", value)

    return join


def _named(name: str, parameters: Sequence[str], function: Callable[..., DataFrame], **options: Any) -> Stage:
    """A stage whose function has the names of its inputs as parameters."""
    arguments = ", ".join(parameters)
    made: Stage = stage(name=name, **options)(eval(f"lambda {arguments}: function({arguments})", {"function": function}))
    return made


@dataclass
class Drawn:
    """A stage of a graph, as it was drawn.

    Attributes:
        instances: Its instances.
        states: The number of stages with state on the longest way to it, itself included.
        read: Whether another stage reads it.
    """

    name: str
    text: str
    instances: tuple[str, ...]
    states: int
    make: Callable[[bool], Stage]
    read: bool = False


class RandomGraph:
    """A graph of one to three sources and one to four other stages, with rows for its sources.

    Args:
        chance: Decides everything.
    """

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._drawn: list[Drawn] = []
        for number in range(chance.randint(1, 3)):
            self._drawn.append(self._source(f"s{number}"))
        for number in range(chance.randint(1, 4)):
            self._drawn.append(self._stage(f"t{number}"))
        used = [each for each in self._drawn if each.read or each.name.startswith("t")]
        self.sinks = {each.name for each in used if not each.read or (each.name.startswith("t") and chance.random() < 0.3)}
        self.chaining = chance.random() < 0.7
        self.text = "\n".join(f"{each.text}{' > sink' if each.name in self.sinks else ''}" for each in used)
        self.rows = {each.name: self._rows() for each in used if each.name.startswith("s")}
        self.pipeline = Pipeline("random", [each.make(each.name in self.sinks) for each in used], chaining=self.chaining)

    def _source(self, name: str) -> Drawn:
        chance = self._chance
        kind = chance.choice((bounded_source, unbounded_source))
        lateness, instances = chance.choice(("1 minute", "20 seconds")), chance.choice((("0",), ("0",), ("x", "y")))

        def make(sink: bool) -> Stage:
            made: Stage = kind(name=name, watermark=("ts", lateness), instances=instances)(unreachable)
            return made

        return Drawn(name, f"{name} = {kind.__name__}{instances}, {lateness}", instances, 0, make)

    def _rows(self) -> SourceRows:
        chance = self._chance
        return SourceRows(
            ROWS, [(chance.choice("abc"), at(chance.randrange(900) / 60), number) for number in range(chance.randint(6, 18))]
        )

    def _stage(self, name: str) -> Drawn:
        chance = self._chance
        small = [each for each in self._drawn if each.states < 3]
        inputs = [chance.choice([each for each in small if not each.read] or small)]
        others = [each for each in small if each is not inputs[0]]
        kind = chance.choices(["without state", "with state", "union", "join"], (3, 4, 2, 2))[0]
        if kind in ("union", "join") and others:
            inputs.append(chance.choice(others))
        options: dict[str, Any] = {}
        function: Callable[..., DataFrame]
        keeps_state = True
        if len(inputs) == 1:
            keeps_state = kind != "without state"
            what = chance.choice(list(WITH_STATE if keeps_state else WITHOUT_STATE))
            function = (WITH_STATE if keeps_state else WITHOUT_STATE)[what]
        elif kind == "union":
            what, function, keeps_state = kind, _union, False
        else:
            what = chance.choice(JOINS)
            function, options["event_time"] = _join(what), ("ts", LATE)
        instances, read = self._layout(inputs, keeps_state)
        if (
            len(instances) > 1
            and what in ("windows", *JOINS)
            and all(each.key for each in read.values())
            and chance.random() < 0.3
        ):
            options["state_partitions"] = chance.choice((len(instances), 6, 12))
        if chance.random() < 0.15:
            options["max_rows_per_trigger"] = chance.choice((3, 10))
        for each in inputs:
            each.read = True

        def make(sink: bool) -> Stage:
            place = {"sink": ParquetSink(f"{NOWHERE}/{name}")} if sink else {}
            return _named(name, [each.name for each in inputs], function, inputs=read, instances=instances, **options, **place)

        how = ", ".join(f"{each}{'' if given == StageInput() else f' {given}'}" for each, given in read.items())
        text = f"{name} = {what} of {how}, {instances} {options or ''}"
        return Drawn(name, text, instances, max(each.states for each in inputs) + keeps_state, make)

    def _layout(self, inputs: Sequence[Drawn], keeps_state: bool) -> tuple[tuple[str, ...], dict[str, StageInput]]:
        """The instances of a stage, and how it reads its inputs: one with state has all rows of a key in one instance."""
        chance, names = self._chance, [each.name for each in inputs]
        alike = len({each.instances for each in inputs}) == 1
        layouts = ["keyed", "all to all"]
        if alike and (not keeps_state or len(inputs[0].instances) == 1):
            layouts += ["as they are"] * 3
        layout = chance.choice(layouts)
        if layout == "keyed":
            return ("p", "q", "r")[: chance.randint(1, 3)], dict.fromkeys(names, StageInput(key="k"))
        if layout == "all to all":
            return ("p",), dict.fromkeys(names, StageInput(edge="all_to_all"))
        return inputs[0].instances, {name: StageInput(fuse=chance.choice((None, None, False))) for name in names}


@pytest.mark.parametrize("number", range(2))
def test_a_random_graph_has_its_batch_result_under_random_histories(spark: SparkSession, chance: Random, number: int) -> None:
    drawn = RandomGraph(Random(chance.randrange(10**9) + number))
    print(drawn.text, f"\nchaining: {drawn.chaining}")
    seed, sinks = chance.randrange(10**9), sorted(drawn.sinks)
    checked = check_pipeline(drawn.pipeline, drawn.rows, spark=spark, histories=4, seed=seed, allow=ALLOWED, stages=sinks)
    assert checked.rows.keys() == drawn.sinks
