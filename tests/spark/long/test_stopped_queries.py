"""A query that was stopped from outside: it never counts as one that has read all its input."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS
from dagster_checkpoints.pipeline import Pipeline, bounded_source, stage
from dagster_checkpoints.spark.errors import QueryStoppedError
from dagster_checkpoints.spark.job.events import JobRestarting
from dagster_checkpoints.spark.query.query import QueryStopped, TaskQuery

ROWS = "k string, ts timestamp, v long"
PER_FILE = 30


def put_files(lab: Any, count: int) -> None:
    for number in range(count):
        first = number * PER_FILE
        lab.put("history", ROWS, [("ab"[v % 2], lab.at(v * 60), v) for v in range(first, first + PER_FILE)])


def hours(frame: Any) -> Any:
    found = frame.groupBy(F.window("ts", "1 hour"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return found.select(F.col("window.start").alias("start"), "k", "v", "n")


def stop_query_of(lab: Any, stage: str) -> bool:
    """Stop the query of a stage from outside, as any code in the process can. Returns whether it ran."""
    for query in lab.spark.streams.active:
        if f"/tasks/{stage}.0/" in query._jsq.streamingQuery().resolvedCheckpointRoot():
            query.stop()
            return True
    return False


def test_a_stopped_query_restarts_the_job_which_then_has_every_row(lab: Any) -> None:
    put_files(lab, 20)

    @bounded_source(watermark=("ts", "1 minute"))
    def history(context):
        return lab.stream("history", ROWS)

    @stage(sink=lab.sink("rows"))
    def rows(history):
        return history

    @stage(sink=lab.sink("hours"))
    def hourly(rows):
        return hours(rows)

    pipeline = Pipeline("p", [history, rows, hourly], chaining=False)
    job = lab.start(pipeline, interval=0.5, restart=FixedDelayRestart(2, 0.1))
    job.wait_until(lambda: job.execution.rows().get("history", 0) > 0)
    assert stop_query_of(lab, "history")
    restarting = job.wait_for(JobRestarting)
    assert "Stage 'history' (instance '0')" in restarting.cause
    assert "was stopped from outside" in restarting.cause
    job.finished()
    lab.check(lab.table("history", ROWS), "rows")
    lab.check(hours(lab.table("history", ROWS)), "hours")


def test_a_stopped_query_fails_a_job_that_may_not_restart(lab: Any) -> None:
    put_files(lab, 20)

    @bounded_source(sink=lab.sink())
    def history(context):
        return lab.stream("history", ROWS)

    job = lab.start(Pipeline("p", [history]))
    job.wait_until(lambda: job.execution.rows().get("history", 0) > 0)
    assert stop_query_of(lab, "history")
    result = job.result()
    assert result.status == "FAILED", job.story()
    assert isinstance(result.error.__cause__ or result.error, QueryStoppedError), result.error
    assert "Stage 'history' (instance '0')" in str(result.error)


class Reading:
    """One task's query over the files, without a task: counts the rows of committed batches."""

    def __init__(self, lab: Any, name: str) -> None:
        self.lab = lab
        self.rows: dict[int, int] = {}
        self.seen = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.query = TaskQuery(lab.folder / name, "pool", self._on_batch, lambda give_up: None)

    def _on_batch(self, batch: Any, batch_id: int) -> Callable[[], None]:
        self.rows[batch_id] = batch.count()
        self.seen.set()
        assert self.go_on.wait(60)
        return lambda: None

    def start(self, **trigger: Any) -> None:
        self.seen.clear()
        frame = self.lab.stream("history", ROWS).withWatermark("ts", "1 minute")
        self.query.start(hours(frame), "append", trigger)

    def stop_from_outside(self) -> None:
        self.query._query.stop()  # type: ignore[union-attr]

    def ended(self) -> BaseException | None:
        deadline = time.monotonic() + 60
        while self.query.active:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self.query.failure()


def test_only_a_query_that_found_nothing_more_to_read_has_read_everything(lab: Any) -> None:
    """A query that was stopped at any moment has failed, or its log holds every row."""
    put_files(lab, 4)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    reading = Reading(lab, "whole")
    began = time.monotonic()
    reading.start(availableNow=True)
    assert reading.ended() is None
    needed, whole = time.monotonic() - began, reading.query.log.last_committed()
    complete = 0
    for number in range(8):
        reading = Reading(lab, f"stopped-{number}")
        reading.start(availableNow=True)
        time.sleep(moments.uniform(0.0, 1.2 * needed))
        reading.stop_from_outside()
        failure = reading.ended()
        if failure is None:
            complete += 1
            assert reading.query.log.last_committed() == whole
            continue
        assert reading.query._query is not None
        if reading.query._query.exception() is None:
            # The query was between two batches, or its batch was cancelled: then the batch's error is a consequence.
            assert isinstance(failure, QueryStopped)
            # A callback that outlives its query sets the error later.
            assert failure.__cause__ in (None, reading.query.error)
        else:
            # Spark may treat the cancelled job as a failure of the query; an interruption of its thread is a stop.
            assert reading.query.error is not None
            assert failure is reading.query.error or isinstance(failure, QueryStopped)
            assert reading.query.error in (failure, failure.__cause__)
    print(f"{complete} had read everything")


def test_a_query_without_an_end_has_none(lab: Any) -> None:
    put_files(lab, 1)
    reading = Reading(lab, "unbounded")
    reading.start()
    assert reading.seen.wait(60)
    reading.stop_from_outside()
    assert isinstance(reading.ended(), QueryStopped)


def test_a_planned_batch_that_was_stopped_has_not_run(lab: Any) -> None:
    put_files(lab, 1)
    reading = Reading(lab, "planned")
    reading.start(availableNow=True)
    assert reading.ended() is None
    newest = reading.query.log.last_committed()
    reading.query.log.plan_batch(newest + 1, MAX_WATERMARK_MS)
    reading.go_on.clear()
    reading.start(once=True)
    assert reading.seen.wait(60)
    stopping = threading.Thread(target=reading.stop_from_outside)
    stopping.start()
    while reading.query.active:
        time.sleep(0.01)
    reading.go_on.set()
    stopping.join(60)
    committed = reading.query.log.is_committed(newest + 1)
    failure = reading.ended()
    assert (failure is None) == committed
    if not committed:
        assert isinstance(failure, QueryStopped)
        with pytest.raises(QueryStopped):
            reading.query.stop()
        reading.start(once=True)
        assert reading.ended() is None
    assert reading.rows[newest + 1] > 0
    assert reading.query.log.is_committed(newest + 1)
