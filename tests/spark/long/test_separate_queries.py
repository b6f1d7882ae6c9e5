"""Queries that were separate in a checkpoint, and share one in a new start: a restore keeps them, with exact rows."""

from __future__ import annotations

import datetime as dt
from functools import reduce
from typing import Any, Literal

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, stage, unbounded_source
from dagster_checkpoints.spark.job.events import CheckpointDone, JobStarted
from dagster_checkpoints.spark.job.job_start import read_restored
from dagster_checkpoints.spark.job.pipeline_checks import check_plans

ROWS = "k string, ts timestamp, v long"
Kind = Literal["one source", "behind channels", "fused sources"]
APART = {
    "one source": ("live plain", "plain fresh", "fresh tens", "tens halves"),
    "behind channels": ("plain fresh", "fresh tens", "tens halves"),
    "fused sources": ("fresh tens",),
}
"""The stages, by pairs, between which the first run has another query, and a new start has not."""


class Stages:
    """live -> plain -> fresh (drops duplicates) -> tens (windows) -> halves (windows over these)."""

    def __init__(self, lab: Any, kind: Kind) -> None:
        self.lab = lab
        self.kind = kind

    def pipeline(self, *, separate: bool = False) -> Pipeline:
        """The pipeline: each stage with a query of its own, or `fresh` with a reader, if it is `separate`."""
        lab = self.lab

        @unbounded_source(watermark=("ts", "5 minutes"), sink=lab.sink("raw") if self.kind == "behind channels" else None)
        def live(context):
            return lab.stream("live", ROWS)

        @unbounded_source(watermark=("ts", "5 minutes"))
        def spare(context):
            return lab.stream("spare", ROWS)

        class Plain(Stage):
            def transform(self, context, **inputs):
                rows = reduce(DataFrame.unionByName, inputs.values())
                return rows.where("v >= 0").withColumn("key", F.upper("k"))

        @stage
        def fresh(plain):
            return plain.dropDuplicatesWithinWatermark(["v"])

        @stage(sink=lab.sink("late"))
        def late(fresh):
            return fresh.select("key", "v")

        @stage
        def tens(fresh):
            counted = fresh.groupBy(F.window("ts", "10 minutes"), "key").agg(F.count("*").alias("n"), F.sum("v").alias("v"))
            return counted.select(F.window_time("window").alias("ts"), "key", "n", "v")

        @stage(sink=lab.sink("halves"))
        def halves(tens):
            summed = tens.groupBy(F.window("ts", "30 minutes"), "key").agg(F.sum("n").alias("n"), F.sum("v").alias("v"))
            return summed.select(F.col("window.start").alias("start"), "key", "n", "v")

        fused = self.kind == "fused sources"
        sources = (live, spare) if fused else (live,)
        plain = Plain("plain", inputs={source.name: StageInput(fuse=fused or None) for source in sources})
        readers = (late,) if fused and separate else ()
        chaining = fused or not separate
        return Pipeline("separate", [*sources, plain, fresh, tens, halves, *readers], chaining=chaining)

    def put(self, minutes: range) -> None:
        """Add files of half an hour each, whose values overlap with those that were put before."""
        for first in minutes[::30]:
            span = range(first, min(first + 30, minutes.stop))
            for name in ("live", "spare") if self.kind == "fused sources" else ("live",):
                self.lab.put(name, ROWS, [("ab"[m % 2], self.lab.at(60 * m), m) for m in span])

    def expected(self, minutes: int) -> list[tuple[Any, ...]]:
        zero = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
        found = []
        for half in range(0, minutes, 30):
            for parity, key in enumerate("AB"):
                values = [m for m in range(half, min(half + 30, minutes)) if m % 2 == parity]
                if values:
                    found.append((zero + dt.timedelta(minutes=half), key, len(values), sum(values)))
        return sorted(found)


def planned(lab: Any, pipeline: Pipeline) -> tuple[str, ...]:
    """What the start of a run says of the queries of the newest savepoint, as `verify` shows it."""
    with lab.storage(pipeline.name) as storage:
        restored = read_restored(pipeline, storage, storage.list_savepoints()[0].location, True)
        report = check_plans(pipeline, lab.spark, restored)
    assert report.ok, str(report)
    return report.changes


@pytest.mark.parametrize("kind", APART)
def test_separate_queries_stay_so_until_a_new_start(lab: Any, kind: Kind) -> None:
    """Of four queries in a row: two without state, in between and in front, and three operators in the others."""
    flow = Stages(lab, kind)
    flow.put(range(85))
    first = lab.start(flow.pipeline(separate=True), interval=0.5)
    first.wait_for(CheckpointDone, lambda done: done.stages["halves"].rows == 4)
    first.done("stop", drain=False)
    first.finished()
    lines = planned(lab, flow.pipeline())
    pairs = [line.partition(" keep separate queries, as in the checkpoint.")[0] for line in lines]
    assert pairs == [" and ".join(map(repr, pair.split())) for pair in APART[kind]]

    flow.put(range(80, 160))  # 80 to 84 are known
    second = lab.start(flow.pipeline(), interval=0.5, allow_non_restored_state=True)
    started = second.wait_for(JobStarted)
    assert started.restored_checkpoint is not None
    assert set(started.chains) == set(first.chains) - {("late",)}
    second.wait_until(lambda: lab.count("halves") == 10)
    second.drain()
    second.finished()
    assert [row[1:] for row in sorted(lab.committed("halves"))] == [row[1:] for row in flow.expected(160)]
    new = {name: chain.name for chain in check_plans(flow.pipeline(), lab.spark).chains for name in chain.stages}
    assert all(new[one] == new[other] for one, other in map(str.split, APART[kind]))
