"""Other instances of a stage that another one reads instance by instance, and a stage with state behind it."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, unbounded_source
from dagster_checkpoints.state.errors import InstancesChanged

ROWS = "k string, ts timestamp, v long"
FEEDS = "abc"
HOUR = 60


class Plain(Stage):
    def transform(self, context: Any, **rows: Any) -> Any:
        return next(iter(rows.values()))


class Hours(Stage):
    def transform(self, context: Any, passed: Any) -> Any:
        return in_hours(passed)


def in_hours(rows: Any) -> Any:
    counted = rows.groupBy(F.window("ts", "1 hour"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return counted.select(F.col("window.start").alias("start"), "k", "v", "n")


def pipeline(lab: Any, merged: str, how: StageInput) -> Pipeline:
    @unbounded_source(watermark=("ts", "1 minute"), instances=list(FEEDS))
    def live(context):
        return lab.stream(context.instance, ROWS)

    return Pipeline(
        "behind",
        [
            live,
            Plain(name="merged", inputs={"live": StageInput()}, instances=list(merged)),
            Plain(name="passed", inputs={"merged": StageInput()}, instances=list(FEEDS), sink=lab.sink("passed")),
            Hours(name="hours", inputs={"passed": how}, instances=list(FEEDS), sink=lab.sink("hours")),
        ],
        chaining=False,
    )


def put(lab: Any, feed: str, begin: int, end: int) -> None:
    """A row a minute."""
    lab.put(feed, ROWS, [("abcd"[m % 4], lab.at(60 * m), m) for m in range(begin, end)])


def stopped(lab: Any, how: StageInput) -> None:
    """The feed `a` is six hours ahead of the others when the job stops with a checkpoint."""
    job = lab.start(pipeline(lab, FEEDS, how), interval=3600.0)
    for feed, hours in zip(FEEDS, (7, 1, 1), strict=True):
        put(lab, feed, 0, hours * HOUR)
    job.wait_until(lambda: job.execution.rows().get("passed", 0) >= 9 * HOUR)
    put(lab, "a", 7 * HOUR, 7 * HOUR + 1)
    job.wait_until(lambda: job.execution.rows().get("passed", 0) >= 9 * HOUR + 1)
    job.ask("checkpoint")
    job.wait_until(lambda: bool(job.checkpoints()))
    job.cancel()
    job.result()


def test_state_behind_a_stage_that_gets_the_rows_of_other_instances_is_refused(lab: Any) -> None:
    one_to_one = StageInput()
    stopped(lab, one_to_one)
    with pytest.raises(InstancesChanged, match="the instances of 'hours', which read 'passed' POINTWISE"):
        lab.start(pipeline(lab, "x", one_to_one)).result()
