"""What a pipeline costs that has nothing to do, and how soon it ends when it is asked to."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.control import run_under_control, wait_until
from bench.environment import Environment
from bench.measures import Measure, below
from bench.processes import cpu_seconds
from dagster_checkpoints.control import PipelineControl
from dagster_checkpoints.pipeline import Pipeline, Stage, StageContext, StageInput, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.job.job_execution import JobExecution
from dagster_checkpoints.storage import CheckpointStorage, open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PART = "Idle"
STAGES = 10
SETTLE_SECONDS = 10.0
SECONDS = 20.0


def measure(environment: Environment) -> Iterator[Measure]:
    used: list[float] = []
    stops: dict[bool, list[float]] = {False: [], True: []}
    for number in range(environment.repeats):
        for drain, seconds in stops.items():
            used.append(_run(environment, environment.fresh(f"idle-{number}"), drain, seconds))
    note = f"processor time in {SECONDS:.0f} s, of one core; this process and the JVM"
    yield below(PART, f"a pipeline of {STAGES} stages without data", 100 * median(used), "%", 10, note)
    for drain, seconds in stops.items():
        what = f"{'drain' if drain else 'suspend'}: request to answer"
        yield below(PART, what, median(seconds), "s", 1, f"a pipeline of {STAGES} stages, without data")


def _run(environment: Environment, folder: Path, drain: bool, stops: list[float]) -> float:
    """Run the pipeline, let it rest, and stop it. Returns the processor time that it used per second of rest."""
    idle = pipeline(folder)
    used = 0.0

    def control(job: JobExecution) -> None:
        nonlocal used
        wait_until(lambda: job.rows().get("live", 0) > 0)
        time.sleep(SETTLE_SECONDS)
        before, began = cpu_seconds(os.getpid()), time.monotonic()
        time.sleep(SECONDS)
        used = (cpu_seconds(os.getpid()) - before) / (time.monotonic() - began)
        storage = CheckpointStorage(open_store(str(folder / "store")), idle.name)
        began = time.monotonic()
        PipelineControl(storage, asked_by="bench").stop(drain=drain).wait(120.0)
        stops.append(time.monotonic() - began)

    run_under_control(environment, idle, folder, control)
    return used


def pipeline(folder: Path) -> Pipeline:
    """A line of stages, each in a separate query, with one row to begin with."""
    (folder / "input").mkdir()
    (folder / "input" / "one.json").write_text('{"id": 1}\n')

    @unbounded_source
    def live(context: StageContext) -> DataFrame:
        return context.spark.readStream.schema("id bigint").option("maxFilesPerTrigger", 1).json(str(folder / "input"))

    stages: list[Stage] = [live]
    for number in range(1, STAGES):
        sink = ParquetSink(folder / "result") if number == STAGES - 1 else None
        stages.append(Stage(f"step{number}", inputs={stages[-1].name: StageInput()}, sink=sink))
    return Pipeline("idle", stages, chaining=False)
