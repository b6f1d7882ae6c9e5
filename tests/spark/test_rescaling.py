"""Restores with other instances: every row counts once, and state is where its rows arrive."""

from __future__ import annotations

import functools
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, stage, unbounded_source
from dagster_checkpoints.spark.job.events import InstanceFinished, JobStarted

ROWS = "k string, ts timestamp, v long"


def take_checkpoint(job: Any) -> Any:
    """Request a checkpoint, and wait until it is complete."""
    before = len(job.checkpoints())
    job.wait_until(lambda: job.execution.coordinator is not None and bool(job.execution.coordinator.roots))
    job.ask("checkpoint")
    job.wait_until(lambda: len(job.checkpoints()) > before)
    return job.checkpoints()[-1]


def in_hours(rows: Any) -> Any:
    counted = rows.groupBy(F.window("ts", "1 hour"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return counted.select(F.col("window.start").alias("start"), "k", "v", "n")


class Flow:
    """Feeds by name, a stage without state in Spark that keeps items, and windows by key; each with its own instances."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        self.items: dict[str, list[str]] = {}
        """By instance of `named`, the items that it began with in the latest run."""

    def put(self, feed: str, begin: int, end: int) -> None:
        rows = [("abcdefgh"[m % 8], self.lab.at(60 * m + ord(feed)), m) for m in range(begin, end)]
        self.lab.put(feed, ROWS, rows)

    def pipeline(self, feeds: str, named: str, hours: str) -> Pipeline:
        lab, items, first = self.lab, self.items, not self.items
        items.clear()

        @unbounded_source(watermark=("ts", "10 minutes"), instances=list(feeds))
        def live(context):
            return lab.stream(context.instance, ROWS)

        class Named(Stage):
            def open(self, context: Any) -> None:
                state = context.state.list("items")
                if first:
                    state.update([f"{context.instance}{number}" for number in range(3)])
                items[context.instance] = list(state)

            def transform(self, context: Any, live: Any) -> Any:
                return live.where("v >= 0")

        reads = {"live": StageInput(edge="all_to_all")}
        keeps = Named(name="named", inputs=reads, instances=list(named), sink=lab.sink("named"))

        @stage(inputs={"named": StageInput(key="k")}, instances=list(hours), sink=lab.sink("hours"))
        def hours(named):
            return in_hours(named)

        return Pipeline("rescaled", [live, keeps, hours])


def test_state_offsets_and_transactions_survive_other_instances(lab: Any) -> None:
    """One stage gets more instances, one fewer; a feed has ended and is left out, another one is new."""
    flow = Flow(lab)
    for feed in "abc":
        flow.put(feed, 0, 200)
    first = lab.start(flow.pipeline("abc", "xy", "pq"), interval=3600.0)
    first.wait_until(lambda: first.execution.rows().get("named", 0) >= 600)
    first.execution.end_source("live", "a")
    first.wait_until(lambda: first.execution.coordinator is not None and bool(first.execution.coordinator.roots))
    while not first.of(InstanceFinished):
        take_checkpoint(first)
    checkpoint = take_checkpoint(first)
    first.cancel()
    assert first.result().status == "CANCELED"

    flow.put("b", 200, 300)
    flow.put("c", 200, 300)
    flow.put("d", 200, 300)
    second = lab.start(flow.pipeline("dcb", "x", "pqrs"), interval=3600.0)
    assert second.wait_for(JobStarted).restored_checkpoint == checkpoint.checkpoint_id
    assert {name: sorted(items) for name, items in flow.items.items()} == {"x": [f"{i}{n}" for i in "xy" for n in range(3)]}
    second.wait_until(lambda: second.execution.rows().get("named", 0) >= 900)
    assert second.execution.rows()["live"] == 900, "no feed reads twice what it has read"
    second.drain()
    second.finished()
    rows = functools.reduce(DataFrame.unionByName, [lab.table(feed, ROWS) for feed in "abcd"])
    lab.check(rows.select("k", "ts", "v"), "named")
    lab.check(in_hours(rows), "hours")
