"""A pipeline that the test of forks runs under two names, each with its own sinks; as a program it is the second one.

    python fork_runner.py <folder> <savepoint>

The run starts from the savepoint, with barriers that block nothing, and goes on until its process is killed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.restarts import NoRestart
from dagster_checkpoints.pipeline import Pipeline, stage, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.job.job_execution import JobExecution
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.session.spark_session import build_session
from dagster_checkpoints.storage import CheckpointStorage, open_store

ROWS = "k string, ts timestamp, v long"


def in_hours(frame: DataFrame) -> DataFrame:
    counted = frame.groupBy(F.window("ts", "1 hour"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return counted.select(F.col("window.start").alias("start"), "k", "v", "n")


def pipeline(name: str, folder: Path, place: str) -> Pipeline:
    """live -> rows -> hours, both with a sink below `place`. Each reads one channel: "at_least_once" repeats no row either."""

    @unbounded_source(watermark=("ts", "1 minute"))
    def live(context):
        return context.spark.readStream.schema(ROWS).option("maxFilesPerTrigger", 1).parquet(str(folder / "input" / "live"))

    @stage(sink=ParquetSink(folder / place / "rows"))
    def rows(live):
        return live

    @stage(sink=ParquetSink(folder / place / "hours"))
    def hours(rows):
        return in_hours(rows)

    return Pipeline(name, [live, rows, hours], chaining=False)


def main(folder: Path, savepoint: str) -> int:
    spark = build_session({"spark.master": "local[2]", "spark.sql.shuffle.partitions": 2, "spark.ui.enabled": "false"})
    options = JobOptions(
        CheckpointConfig(interval=0.5, mode="at_least_once"),
        NoRestart(),
        folder / "work",
        restore_from=savepoint,
        request_poll_seconds=0.2,
        lease_seconds=6.0,
    )
    storage = CheckpointStorage(open_store(str(folder / "store")), "green")
    job = JobExecution(
        pipeline("green", folder, "green"),
        storage=storage,
        options=options,
        session=lambda: spark,
        on_event=lambda event: print(event, flush=True),
        run_id="green-run",
    )

    print(job.run(), flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
