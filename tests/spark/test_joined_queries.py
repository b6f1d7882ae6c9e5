"""Queries that were separate in a checkpoint, and go on as one after a restore: exact rows, and nothing new is read again."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, stage, unbounded_source
from dagster_checkpoints.spark.job.events import CheckpointDone, JobStarted

ROWS = "k string, ts timestamp, v long"


class Stages:
    """live -> plain -> fresh (drops duplicates) -> tens (windows) -> halves (windows over these), and readers of some of them."""

    def __init__(self, lab: Any, *, behind_channels: bool) -> None:
        self.lab = lab
        self.behind_channels = behind_channels
        self.minutes = range(0)

    def pipeline(self, *more: Any, chaining: bool = True) -> Pipeline:
        lab = self.lab

        @unbounded_source(watermark=("ts", "5 minutes"), sink=lab.sink("raw") if self.behind_channels else None)
        def live(context):
            return lab.stream("live", ROWS)

        @stage
        def plain(live):
            return live.where("v >= 0").withColumn("key", F.upper("k"))

        @stage
        def fresh(plain):
            return plain.dropDuplicatesWithinWatermark(["v"])

        @stage
        def tens(fresh):
            counted = fresh.groupBy(F.window("ts", "10 minutes"), "key").agg(F.count("*").alias("n"), F.sum("v").alias("v"))
            return counted.select(F.window_time("window").alias("ts"), "key", "n", "v")

        @stage(sink=lab.sink("halves"))
        def halves(tens):
            summed = tens.groupBy(F.window("ts", "30 minutes"), "key").agg(F.sum("n").alias("n"), F.sum("v").alias("v"))
            return summed.select(F.col("window.start").alias("start"), "key", "n", "v")

        return Pipeline("joined", [live, plain, fresh, tens, halves, *more], chaining=chaining)

    def put(self, minutes: range) -> None:
        """Add files of five minutes each, whose values overlap with those that were put before."""
        for first in minutes[::5]:
            span = range(first, min(first + 5, minutes.stop))
            self.lab.put("live", ROWS, [("ab"[m % 2], self.lab.at(60 * m), m) for m in span])

    def expected(self, minutes: int) -> list[tuple[Any, ...]]:
        zero = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
        found = []
        for half in range(0, minutes, 30):
            for parity, key in enumerate("AB"):
                values = [m for m in range(half, min(half + 30, minutes)) if m % 2 == parity]
                if values:
                    found.append((zero + dt.timedelta(minutes=half), key, len(values), sum(values)))
        return sorted(found)


@pytest.mark.parametrize("behind_channels", [False, True], ids=["source", "behind channels"])
def test_separate_queries_are_joined_with_their_state(lab: Any, behind_channels: bool) -> None:
    flow = Stages(lab, behind_channels=behind_channels)
    flow.put(range(85))
    first = lab.start(flow.pipeline(chaining=False), interval=0.5)
    assert len(first.chains) == 5
    first.wait_for(CheckpointDone, lambda done: done.stages["halves"].rows == 4)
    first.done("stop", drain=False)
    assert first.result().status == "FINISHED"
    flow.put(range(80, 130))
    second = lab.start(flow.pipeline(), interval=0.5)
    started = second.wait_for(JobStarted)
    assert started.restored_checkpoint is not None
    rest = ("plain", "fresh", "tens", "halves")
    assert set(started.chains) == ({("live",), rest} if behind_channels else {("live", *rest)})
    second.wait_until(lambda: lab.count("halves") == 8)
    second.drain()
    second.finished()
    assert sorted(lab.committed("halves")) == flow.expected(130)
