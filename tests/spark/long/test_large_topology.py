"""Three inputs, a self-join and rows of the year 9999: what the sinks commit is what Spark computes over the same files."""

from __future__ import annotations

import datetime as dt
from typing import Any

from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, stage, unbounded_source
from tests.spark.test_topologies import FLIGHTS, hourly, put_hours


def test_three_inputs_a_self_join_and_rows_of_the_year_9999(lab: Any) -> None:
    """Three streaming inputs in one stage; an input used twice; a row in the far future, behind filters and inner joins."""
    put_hours(lab, "a", 4, "a")
    put_hours(lab, "b", 3, "b")
    put_hours(lab, "c", 2, "c")
    lab.put("names", "k string, name string", [("a", "Anna")])
    far = dt.datetime(9999, 12, 31, 23, 59, tzinfo=dt.UTC)

    @unbounded_source(watermark=("ts", "1 minute"))
    def a(context):
        return lab.stream("a", FLIGHTS)

    @bounded_source(watermark=("ts", "2 minutes"))
    def b(context):
        return lab.stream("b", FLIGHTS)

    @bounded_source(watermark=("ts", "1 minute"))
    def c(context):
        return lab.stream("c", FLIGHTS)

    @bounded_source
    def names(context):
        return lab.table("names", "k string, name string")

    @stage(sink=lab.sink("three"))
    def three(a, b, c):
        return hourly(a.unionByName(b).unionByName(c))

    def neighbours(frame: Any) -> Any:
        one, other = frame.alias("one"), frame.alias("other")
        near = F.expr("one.k = other.k AND other.ts > one.ts AND other.ts <= one.ts + INTERVAL 60 SECONDS")
        return one.join(other, near).select("one.k", "one.ts", F.col("other.v").alias("next"))

    @stage(sink=lab.sink("pairs"))
    def pairs(a):
        return neighbours(a)

    def dues(frame: Any, names: Any) -> Any:
        due = F.when(F.col("v") == 120, F.lit(far)).otherwise(F.col("ts"))
        return frame.withColumn("due", due).join(F.broadcast(names), "k").where("v >= 60")

    def due_windows(frame: Any) -> Any:
        found = frame.where("due > TIMESTAMP '2000-01-01 00:00:00'").groupBy(F.window("due", "10 minutes"), "name").count()
        return found.select(F.col("window.start").alias("start"), "name", "count")

    @stage(inputs={"names": StageInput(mode="static")}, event_time="due")
    def due(a, names):
        return dues(a, names)

    @stage(sink=lab.sink("due_windows"))
    def far_windows(due):
        return due_windows(due)

    job = lab.start(Pipeline("p", [a, b, c, names, three, pairs, due, far_windows], chaining=False))
    table_a, table_names = lab.table("a", FLIGHTS), lab.table("names", "k string, name string")
    expected = lab.rows(due_windows(dues(table_a, table_names)))
    now = [row for row in expected if row[0] < lab.at(1800)]
    assert len(now) == 3
    job.wait_until(lambda: len(lab.committed("due_windows")) >= len(now))
    assert lab.committed("due_windows") == now

    # b and c have ended: the windows of all three are emitted up to the watermark of a, without a drain.
    of_three = hourly(table_a.unionByName(lab.table("b", FLIGHTS)).unionByName(lab.table("c", FLIGHTS)))
    due_of_three = [row for row in lab.rows(of_three) if row[0] < lab.at(1800)]
    job.wait_until(lambda: len(lab.committed("three")) >= len(due_of_three))
    assert lab.committed("three") == due_of_three

    job.drain()
    job.finished()
    lab.check(of_three, "three")
    lab.check(neighbours(table_a), "pairs")
    lab.check(expected, "due_windows")
    assert lab.committed("due_windows")[-1][0].year == 9999
