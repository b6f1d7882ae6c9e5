"""The code location of the benchmark of starts: one job of one pipeline, in the folder that the environment names.

The time of each of the job's events is appended to a file there, as a line of JSON.
"""

# Without `from __future__ import annotations`: Dagster reads the types of an op's parameters.

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
from pyspark.sql import DataFrame

from bench import computation
from bench.computation import EVENT_TIME, LATENESS, Rows
from bench.environment import session_settings
from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    ParquetSink,
    Pipeline,
    StageContext,
    pipeline_assets,
    stage,
    unbounded_source,
)
from dagster_checkpoints.spark.job.events import JobEvent

folder = Path(os.environ["BENCH_START_FOLDER"])


def end_with_the_benchmark() -> None:
    """End this process when its standard input ends: the benchmark itself was killed."""
    while os.read(0, 1):
        pass
    os._exit(1)


threading.Thread(target=end_with_the_benchmark, daemon=True).start()


@unbounded_source(watermark=(EVENT_TIME, LATENESS))
def readings(context: StageContext) -> DataFrame:
    return computation.parsed(Rows(folder / "input", 0, 0).stream(context.spark))


@stage(sink=ParquetSink(folder / "result"))
def windows(readings: DataFrame) -> DataFrame:
    return computation.windowed(computation.enriched(readings))


pipeline = Pipeline("endless", [readings, windows])


def report(event: JobEvent) -> None:
    with (folder / "events").open("a") as file:
        file.write(json.dumps({"what": type(event).__name__, "at": time.time(), "rows": getattr(event, "rows", None)}) + "\n")


@pipeline_assets(pipeline=pipeline)
def endless_assets(
    context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource
) -> Iterator[dg.MaterializeResult[Any]]:
    yield from checkpoint_coordinator.run(pipeline, context=context, on_event=report)


defs = dg.Definitions(
    assets=[endless_assets],
    jobs=[dg.define_asset_job("endless", selection=[endless_assets], executor_def=dg.in_process_executor)],
    resources={
        "checkpoint_coordinator": CheckpointCoordinatorResource(
            storage=str(folder / "store"),
            work_directory=str(folder / "work"),
            interval=1.0,
            initial_delay=0.0,
            spark_config=session_settings(),
        )
    },
)
