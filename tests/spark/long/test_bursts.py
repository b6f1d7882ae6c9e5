"""Bursts: a run reads what is there and suspends; the next run goes on. One pipeline has every kind of source."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, SplitSource, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.job.events import CheckpointDone, StageFinished

ROWS = "k string, ts timestamp, v long"


def windows_of(frame: Any) -> Any:
    found = frame.groupBy(F.window("ts", "10 minutes"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return found.select(F.col("window.start").alias("start"), "k", "v", "n")


class Parts(SplitSource):
    """Tables that are added from burst to burst."""

    schema = ROWS
    bounded = False
    discovery_interval = 0.2

    def __init__(self, lab: Any, names: list[str], **options: Any) -> None:
        super().__init__(name="parts", **options)
        self.lab, self.names = lab, names

    def discover(self, context: Any) -> Iterable[str]:
        return list(self.names)

    def read(self, context: Any, split: str) -> Any:
        return self.lab.table(split, ROWS)


def every_kind_of_source(lab: Any, names: list[str]) -> Pipeline:
    @bounded_source(watermark=("ts", "1 minute"))
    def history(context):
        return lab.stream("history", ROWS)

    @unbounded_source(watermark=("ts", "1 minute"))
    def live(context):
        return lab.stream("live", ROWS)

    @stage(sink=lab.sink("fused"), inputs=dict.fromkeys(("history", "live"), StageInput(fuse=True)))
    def fused(history, live):
        return windows_of(history.unionByName(live))

    @unbounded_source(watermark=("ts", "1 minute"), instances=["x", "y"])
    def feed(context):
        return lab.stream(f"feed-{context.instance}", ROWS)

    @stage(sink=lab.sink("behind"), instances=["0", "1"], inputs={"feed": StageInput(key="k")})
    def behind(feed):
        return windows_of(feed)

    return Pipeline("p", [history, live, fused, feed, behind, Parts(lab, names, instances=["1", "2"], sink=lab.sink("parts"))])


def put(lab: Any, name: str, first: int, minutes: int = 30) -> None:
    for start in range(first, first + minutes, 10):
        lab.put(name, ROWS, [(key, lab.at(60 * minute), minute) for minute in range(start, start + 10) for key in "abcd"])


def test_each_burst_reads_what_is_there_and_a_drain_emits_the_rest(lab: Any) -> None:
    names: list[str] = []
    pipeline = every_kind_of_source(lab, names)
    put(lab, "history", 0)
    for burst in range(2):
        first = 1000 + 30 * burst
        for name in ("live", "feed-x", "feed-y"):
            put(lab, name, first)
        for number in range(burst + 1):
            names.append(f"part-{burst}-{number}")
            put(lab, names[-1], first, 10)

        job = lab.start(pipeline, until="caught_up", interval=None)
        assert job.finished().ended_by == "suspend", job.story()
        assert {done.stage for done in job.of(StageFinished)} == {"history"}

        due = F.col("start") + F.expr("INTERVAL 10 MINUTES") <= F.lit(lab.at(60 * (first + 29 - 1)))
        fed = lab.table("feed-x", ROWS).unionByName(lab.table("feed-y", ROWS))
        lab.check(windows_of(lab.table("history", ROWS).unionByName(lab.table("live", ROWS))).where(due), "fused")
        lab.check(windows_of(fed).where(due), "behind")
        lab.check([row for name in names for row in lab.rows(lab.table(name, ROWS))], "parts")

    savepoints = list((lab.folder / "store" / "p" / "savepoints").glob("*caught-up*"))
    assert len(savepoints) == 1, "a burst deletes the savepoint of the one before"

    # A burst whose process is canceled in the middle: the next one goes on from its checkpoint.
    put(lab, "live", 1060, 10)
    job = lab.start(pipeline, until="caught_up", interval=0.2)
    job.wait_for(CheckpointDone)
    job.cancel()
    job.result()
    assert lab.start(pipeline, until="caught_up").finished().ended_by == "suspend"
    job = lab.start(pipeline)
    job.drain()
    assert job.finished().ended_by == "drain"
    lab.check(windows_of(lab.table("history", ROWS).unionByName(lab.table("live", ROWS))), "fused")
    lab.check(windows_of(fed), "behind")
    lab.check([row for name in names for row in lab.rows(lab.table(name, ROWS))], "parts")


def test_a_batch_that_was_planned_before_the_first_event_time_is_followed_by_one_for_it(lab: Any) -> None:
    """While the first batch of the stage behind runs, its source sends event time, has read what was there, and is suspended."""

    @bounded_source(watermark=("ts", "1 minute"))
    def history(context):
        return lab.stream("history", ROWS)

    @unbounded_source(watermark=("ts", "1 minute"))
    def live(context):
        return lab.stream("live", ROWS)

    @stage(sink=lab.sink("both"))
    def both(history, live):
        return history.unionByName(live)

    @stage(sink=lab.sink("behind"))
    def behind(both):
        slow = F.udf(lambda v: time.sleep(0.05) or v, "long")
        return windows_of(both.withColumn("v", slow("v")))

    put(lab, "history", 0, 10)
    put(lab, "live", 1000, 10)
    job = lab.start(Pipeline("p", [history, live, both, behind]), until="caught_up", interval=None)
    assert job.finished().ended_by == "suspend", job.story()
    due = F.col("start") + F.expr("INTERVAL 10 MINUTES") <= F.lit(lab.at(60 * (1000 + 9 - 1)))
    lab.check(windows_of(lab.table("history", ROWS).unionByName(lab.table("live", ROWS))).where(due), "behind")
