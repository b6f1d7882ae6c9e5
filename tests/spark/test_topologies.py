"""Pipelines of different shapes: what their sinks commit is what Spark computes over the same files as a batch."""

from __future__ import annotations

from typing import Any

from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, stage

FLIGHTS = "k string, ts timestamp, v long"


def hourly(frame: Any) -> Any:
    windows = frame.groupBy(F.window("ts", "10 minutes"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return windows.select(F.col("window.start").alias("start"), "k", "v", "n")


def put_hours(lab: Any, name: str, files: int, key: str = "a", begin: int = 0) -> None:
    for number in range(begin, begin + files):
        lab.put(name, FLIGHTS, [(key, lab.at(number * 600 + second), second) for second in range(0, 600, 60)])


def test_chained_and_unchained_stages_compute_the_same_with_a_static_input(lab: Any) -> None:
    put_hours(lab, "in", 4)
    lab.put("names", "k string, name string", [("a", "Anna"), ("b", "Bob")])

    @bounded_source(watermark=("ts", "1 minute"))
    def flights(context):
        return lab.stream("in", FLIGHTS)

    @bounded_source
    def names(context):
        return lab.table("names", "k string, name string")

    @stage
    def kept(flights):
        return flights.where("v > 0")

    @stage(inputs={"names": StageInput(mode="static")})
    def named(kept, names):
        return kept.join(F.broadcast(names), "k", "left").withColumn("k", F.col("name")).drop("name")

    def counts(to):
        @stage(sink=lab.sink(to), name="counts")
        def made(named):
            return hourly(named)

        return made

    chained = lab.start(Pipeline("chained", [flights, names, kept, named, counts("chained")]))
    chained.finished()
    unchained = lab.start(Pipeline("unchained", [flights, names, kept, named, counts("unchained")], chaining=False))
    unchained.finished()

    expected = hourly(lab.table("in", FLIGHTS).where("v > 0").withColumn("k", F.lit("Anna")))
    lab.check(expected, "chained")
    lab.check(expected, "unchained")
    assert chained.chains == (("flights", "kept"), ("names",), ("named", "counts"))
    assert unchained.chains == (("flights",), ("names",), ("kept",), ("named",), ("counts",))
