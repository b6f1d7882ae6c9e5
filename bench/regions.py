"""The throughput of stages that go on while others, which are not connected with them, fail and restart.

One source writes as many rows as it can; another stage, behind a source of its own, fails now and then. The rows written in the
periods that begin with a failure are compared with those of the periods between them, in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING

from bench.control import request, run_under_control, wait_until
from bench.environment import BenchFailed, Environment
from bench.measures import Measure, below
from dagster_checkpoints.coordination.restarts import FailoverStrategy
from dagster_checkpoints.pipeline import Pipeline, Stage, StageContext, StageInput, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.job.events import JobRestarting
from dagster_checkpoints.spark.job.job_execution import JobExecution

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PART = "Restart of a part"
SECONDS = 20.0
FAILURES = 3
ROWS_PER_BATCH = 50_000
INTERVAL = 5.0


def measure(environment: Environment) -> Iterator[Measure]:
    lost: dict[FailoverStrategy, list[float]] = {"region": [], "full": []}
    for number in range(environment.repeats):
        for failover, parts in lost.items():
            parts.append(_lost(environment, environment.fresh(f"regions-{failover}-{number}"), failover))
            environment.say(f"  {number + 1}/{environment.repeats} {failover}: {parts[-1]:.0f} %")
    note = f"rows of another part of the pipeline in the {SECONDS:.0f} s after each of {FAILURES} failures, against those between"
    yield below(PART, "lost throughput beside a region that restarts", median(lost["region"]), "%", 10, note)
    yield Measure(PART, "the same with failover_strategy=full", median(lost["full"]), "%")


def _lost(environment: Environment, folder: Path, failover: FailoverStrategy) -> float:
    """The part of the throughput that failures elsewhere cost while they are repaired, percent."""
    rows: dict[bool, list[int]] = {True: [], False: []}

    def control(job: JobExecution) -> None:
        wait_until(lambda: job.rows().get("steady", 0) > 0 and job.rows().get("failing", 0) > 0)
        request(job, "checkpoint")
        for fails in (*((False, True) * FAILURES), False):
            before = job.rows()["steady"]
            if fails:
                (folder / "fault").touch()
            time.sleep(SECONDS)
            rows[fails].append(job.rows()["steady"] - before)
        request(job, "stop")

    run = run_under_control(
        environment, pipeline(folder), folder, control, interval=INTERVAL, restarts=FAILURES, failover=failover
    )
    restarts = sum(isinstance(event, JobRestarting) for _, event in run.events)
    if restarts != FAILURES:
        raise BenchFailed(f"expected {FAILURES} restarts, found {restarts}")
    return 100 * (1 - mean(rows[True]) / mean(rows[False]))


class _Failing(Stage):
    """Raises at the next batch after a file appears, and removes the file."""

    def __init__(self, fault: Path, sink: ParquetSink) -> None:
        super().__init__("failing", inputs={"ticks": StageInput()}, sink=sink)
        self._fault = fault

    def transform(self, context: StageContext, **inputs: DataFrame) -> DataFrame:
        return inputs["ticks"]

    def process_batch(self, batch: DataFrame, batch_id: int) -> DataFrame:
        if self._fault.exists():
            self._fault.unlink()
            raise ValueError("the benchmark fails this batch")
        return batch


def pipeline(folder: Path) -> Pipeline:
    """A source that writes without a pause; and a slow one behind which a stage can be made to fail."""

    @unbounded_source(sink=ParquetSink(folder / "steady"))
    def steady(context: StageContext) -> DataFrame:
        return context.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS_PER_BATCH).load()

    @unbounded_source
    def ticks(context: StageContext) -> DataFrame:
        return context.spark.readStream.format("rate").option("rowsPerSecond", 10).load()

    return Pipeline("parts", [steady, ticks, _Failing(folder / "fault", ParquetSink(folder / "failing"))])
