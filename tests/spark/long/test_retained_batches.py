"""The least number of micro-batches whose files Spark keeps: a snapshot at batch b needs batch b - 1 as well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, stage, unbounded_source
from dagster_checkpoints.spark.job.events import CheckpointNotDone, JobStarted
from dagster_checkpoints.spark.session.spark_session import LEAST_RETAINED_BATCHES, RETAINED_BATCHES, SparkSettingError

ROWS = "k string, ts timestamp, v long"
FILES = 12


@pytest.fixture
def least_retained(lab: Any) -> Iterator[None]:
    lab.spark.conf.set(RETAINED_BATCHES, LEAST_RETAINED_BATCHES)
    lab.spark.conf.set("spark.sql.streaming.stateStore.maintenanceInterval", "1s")
    yield
    lab.spark.conf.unset(RETAINED_BATCHES)
    lab.spark.conf.set("spark.sql.streaming.stateStore.maintenanceInterval", "30s")


def in_hours(frame: Any) -> Any:
    counted = frame.groupBy(F.window("ts", "1 hour"), "k").agg(F.sum("v").alias("v"))
    return counted.select(F.col("window.start").alias("start"), "k", "v")


@pytest.mark.usefixtures("least_retained")
def test_checkpoints_are_whole_and_resumed_while_spark_retains_the_least_number_of_batches(lab: Any) -> None:
    """The query is a batch ahead at each barrier: that batch waits for the lock, and Spark has already planned it."""

    @unbounded_source(watermark=("ts", "1 minute"))
    def live(context):
        return lab.stream("live", ROWS)

    @stage(sink=lab.sink("hours"))
    def hours(live):
        return in_hours(live)

    pipeline = Pipeline("retained", [live, hours], chaining=False)  # so that the rows of `live` are counted

    def more(first: int) -> None:
        for number in range(first, first + FILES):
            lab.put("live", ROWS, [("ab"[m % 2], lab.at(60 * m), m) for m in range(number * 10, number * 10 + 10)])

    more(0)
    job = lab.start(pipeline, interval=0.2)
    job.wait_until(lambda: len(job.checkpoints()) >= 5)
    assert not job.of(CheckpointNotDone), job.story()
    job.cancel()
    job.result()
    more(FILES)
    job = lab.start(pipeline, interval=0.2)
    assert job.wait_for(JobStarted).restored_checkpoint is not None
    job.wait_until(lambda: len(job.checkpoints()) >= 2)
    job.wait_until(lambda: job.execution.rows().get("live") == 2 * FILES * 10)
    job.execution.drain()
    job.finished()
    assert not job.of(CheckpointNotDone), job.story()
    rows = lab.table("live", ROWS)
    lab.check(in_hours(rows), "hours")

    lab.spark.conf.set(RETAINED_BATCHES, LEAST_RETAINED_BATCHES - 1)

    @stage(sink=lab.sink("refused"))
    def copied(live):
        return live

    job = lab.start(Pipeline("refused", [live, copied]))
    error = job.result().error
    assert isinstance(error, SparkSettingError) and "minBatchesToRetain=1: expected at least 2" in str(error)
    assert not job.of(JobStarted)
