"""Restores with other instances: every row counts once, and state is where its rows arrive."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, stage, unbounded_source
from dagster_checkpoints.spark.job.events import InstanceFinished, JobStarted
from dagster_checkpoints.spark.job.pipeline_checks import check_plans
from dagster_checkpoints.spark.query.plan_fingerprint import stateful_nodes
from dagster_checkpoints.spark.query.plans import QueryPlan
from dagster_checkpoints.spark.query.routed_keys import name_in_joins, operators_not_by, operators_without
from dagster_checkpoints.spark.snapshots import rewritten_state
from dagster_checkpoints.spark.snapshots.restored_state import Restored
from dagster_checkpoints.state.errors import InstancesChanged
from dagster_checkpoints.state.restore import validate_restore
from dagster_checkpoints.storage.verification import verify_savepoint

ROWS = "k string, ts timestamp, v long"
BUYS = "k string, bought timestamp, price long"


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


def bought_soon(clicks: Any, buys: Any) -> Any:
    """The key of the join's state holds the column by which rows are routed, but not in front."""
    soon = F.expr("c.v % 2 = b.price % 2 AND c.k = b.k AND b.bought BETWEEN c.ts AND c.ts + INTERVAL 30 MINUTES")
    return clicks.alias("c").join(buys.alias("b"), soon, "left").select("c.k", "c.v", "b.price")


class Flow:
    """Feeds by name, a stage without state in Spark that keeps items, windows by key, and a join; each with its own instances."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        self.items: dict[str, list[str]] = {}
        """By instance of `named`, the items that it began with in the latest run."""

    def put(self, feed: str, begin: int, end: int) -> None:
        rows = [("abcdefgh"[m % 8], self.lab.at(60 * m + ord(feed)), m) for m in range(begin, end)]
        self.lab.put(feed, ROWS, rows)

    def put_clicks(self, begin: int, end: int) -> None:
        """A click a minute, and a purchase half a minute after each second one."""
        keys = "abcdefgh"
        self.lab.put("clicks", ROWS, [(keys[m % 8], self.lab.at(60 * m), m) for m in range(begin, end)])
        self.lab.put("buys", BUYS, [(keys[m % 8], self.lab.at(60 * m + 30), m) for m in range(begin, end) if m % 16 < 8])

    def pipeline(self, feeds: str, named: str, hours: str, pairs: str) -> Pipeline:
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

        @unbounded_source(watermark=("ts", "10 minutes"))
        def clicks(context):
            return lab.stream("clicks", ROWS)

        @unbounded_source(watermark=("bought", "10 minutes"))
        def buys(context):
            return lab.stream("buys", BUYS)

        by_key = {"clicks": StageInput(key="k"), "buys": StageInput(key="k")}

        @stage(inputs=by_key, instances=list(pairs), sink=lab.sink("pairs"))
        def pairs(clicks, buys):
            return bought_soon(clicks, buys)

        return Pipeline("rescaled", [live, keeps, hours, clicks, buys, pairs])


def test_the_column_of_the_rows_in_the_keys_of_the_state(lab: Any) -> None:
    rows = lab.stream("live", ROWS).withWatermark("ts", "1 hour")

    def joined(condition: str) -> DataFrame:
        return rows.alias("l").join(rows.withColumnRenamed("k", "other").alias("r"), F.expr(condition)).select("l.*")

    both = joined("k = other").alias("l").join(rows.alias("r"), F.expr("l.k = r.k")).select("l.*")
    exact: list[tuple[DataFrame, bool]] = [
        (rows.dropDuplicatesWithinWatermark(["k"]), True),
        (rows.dropDuplicates(["k", "v"]), False),
        (rows.groupBy(F.window("ts", "1 hour"), "k").count(), False),
        (rows.groupBy("k").count(), True),
        (rows.groupBy(F.upper("k").alias("k")).count(), False),
        (rows.select("k").distinct(), True),
        (rows.select("k", "v").distinct(), False),
        (joined("l.k = other"), True),
        (joined("l.v = r.v AND other = l.k"), False),
        (joined("l.k = upper(other)"), False),
        (joined("l.k = other").dropDuplicates(["v"]), False),
    ]
    for frame, is_exact in exact:
        streaming = ("s",) * len(stateful_nodes(frame))
        plan = QueryPlan(frame, frame.schema, streaming=True, own_watermark=True, stateful=streaming)
        assert (not operators_not_by(plan, "k")) == is_exact, frame._jdf.toString()
    expected: list[tuple[DataFrame, list[str], str | None]] = [
        (rows.groupBy(F.window("ts", "1 hour"), "k").count(), [], None),
        (rows.groupBy(F.window("ts", "1 hour"), "v").count(), ["Aggregate"], None),
        (joined("l.k = other"), [], "field0"),
        (joined("l.v = r.v AND other = l.k AND r.ts > l.ts"), [], "field1"),
        (joined("l.v = r.v"), ["Join"], None),
        (joined("l.k = upper(other)"), ["Join"], None),
        (joined("l.k = other").dropDuplicates(["v"]), ["Deduplicate"], "field0"),
        (both, [], "field0"),
        (both.alias("l").join(rows.alias("r"), F.expr("l.v = r.v AND l.k = r.k")).select("l.*"), ["Join"] * 3, None),
    ]
    for frame, others, name in expected:
        plan = QueryPlan(frame, frame.schema, streaming=True, own_watermark=True)
        assert (operators_without(plan, "k"), name_in_joins(plan, "k")) == (others, name), frame._jdf.toString()


def test_state_offsets_and_transactions_survive_other_instances(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stage gets more instances, one fewer; a feed has ended and is left out, another one is new."""
    flow = Flow(lab)
    for feed in "abc":
        flow.put(feed, 0, 200)
    flow.put_clicks(0, 96)
    first = lab.start(flow.pipeline("abc", "xy", "pq", "rs"), interval=3600.0)
    first.wait_until(lambda: first.execution.rows().get("named", 0) >= 600)
    first.wait_until(lambda: [first.execution.rows().get(source) for source in ("clicks", "buys")] == [96, 48])
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
    flow.put_clicks(96, 192)
    changed = flow.pipeline("dcb", "x", "pqrs", "tuv")
    with monkeypatch.context() as older, lab.storage("rescaled") as storage:
        older.setattr(rewritten_state, "rewrites_state", lambda version: False)
        refused = lab.start(changed).result().error
        assert isinstance(refused, InstancesChanged) and "expected Spark 4.2 or later" in str(refused), refused
        metadata = verify_savepoint(storage, checkpoint.location, changed).metadata
        plan = validate_restore(changed, metadata)
        report = check_plans(changed, lab.spark, Restored(plan, checkpoint.location))
        assert str(refused) in map(str, report.changed)
    second = lab.start(changed, interval=3600.0)
    assert second.wait_for(JobStarted).restored_checkpoint == checkpoint.checkpoint_id
    assert {name: sorted(items) for name, items in flow.items.items()} == {"x": [f"{i}{n}" for i in "xy" for n in range(3)]}
    second.wait_until(lambda: second.execution.rows().get("named", 0) >= 900)
    assert second.execution.rows()["live"] == 900, "no feed reads twice what it has read"
    second.wait_until(lambda: [second.execution.rows().get(source) for source in ("clicks", "buys")] == [192, 96])
    second.drain()
    second.finished()
    rows = functools.reduce(DataFrame.unionByName, [lab.table(feed, ROWS) for feed in "abcd"])
    lab.check(rows.select("k", "ts", "v"), "named")
    lab.check(in_hours(rows), "hours")
    lab.check(bought_soon(lab.table("clicks", ROWS), lab.table("buys", BUYS)), "pairs")
    found = lab.committed("pairs")
    assert any(click < 96 <= price for _, click, price in found if price is not None), "no pair has its rows on both sides"
    assert any(price is None for *_, price in found), "no click is without a purchase"
