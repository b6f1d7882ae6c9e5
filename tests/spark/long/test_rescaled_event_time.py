"""Other instances of a stage whose reader, without state, was further in event time than the rows that it gets now."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, unbounded_source
from dagster_checkpoints.spark.job.events import JobStarted
from dagster_checkpoints.state import InstancesChanged

ROWS = "k string, ts timestamp, v long"
FEEDS = "abc"
HOUR = 60


class Plain(Stage):
    def transform(self, context: Any, **rows: Any) -> Any:
        return next(iter(rows.values()))


class SlowInOneInstance(Plain):
    """Instance `a` waits before each micro-batch as long as a file is there."""

    def __init__(self, file: Path, **options: Any) -> None:
        super().__init__(**options)
        self.file = file

    def open(self, context: Any) -> None:
        self.waits = context.instance == "a"

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        while self.waits and self.file.exists():
            time.sleep(0.02)
        return batch


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
            SlowInOneInstance(
                lab.folder / "slow",
                name="passed",
                inputs={"merged": StageInput()},
                instances=list(FEEDS),
                sink=lab.sink("passed"),
            ),
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


def test_no_row_is_late_behind_an_instance_that_was_ahead(lab: Any) -> None:
    """`passed[a]` gets rows that are six hours behind what it has sent, and sends them when the others are three hours on."""
    by_key = StageInput(key="k")
    stopped(lab, by_key)
    (lab.folder / "slow").touch()
    again = lab.start(pipeline(lab, "x", by_key), interval=3600.0)
    assert again.wait_for(JobStarted).restored_checkpoint
    for begin in range(HOUR, 4 * HOUR, HOUR // 2):
        for feed in "bc":
            put(lab, feed, begin, begin + HOUR // 2)
    again.wait_until(lambda: again.execution.rows().get("merged", 0) >= 15 * HOUR + 1)
    time.sleep(8)  # were the window of the second hour complete without the rows of `passed[a]`, it would be emitted now
    (lab.folder / "slow").unlink()
    again.wait_until(lambda: again.execution.rows().get("passed", 0) >= 15 * HOUR + 1)
    again.drain()
    again.finished()
    rows = lab.table("a", ROWS).unionByName(lab.table("b", ROWS)).unionByName(lab.table("c", ROWS))
    lab.check(rows, "passed")
    lab.check(in_hours(rows), "hours")


def test_state_behind_a_stage_that_gets_the_rows_of_other_instances_is_refused(lab: Any) -> None:
    one_to_one = StageInput()
    stopped(lab, one_to_one)
    with pytest.raises(InstancesChanged, match="the instances of 'hours', which read 'passed' POINTWISE"):
        lab.start(pipeline(lab, "x", one_to_one)).result()
