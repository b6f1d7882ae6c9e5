"""A pipeline that reads two tables and a source in splits, in a process that can be killed.

    python sources_runner.py <folder> <run id> <settings>

The folder holds the database, the sinks and the store; the settings are JSON. The result is written to `<folder>/<run id>.json`.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F

from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.restarts import NoRestart
from dagster_checkpoints.pipeline import Pipeline, Stage, StageKind, bounded_source, split_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.sources import read_delta_table, read_sql_table
from dagster_checkpoints.spark.job.job_execution import JobExecution
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.session.spark_session import build_session
from dagster_checkpoints.spark.session.work_directory import parse_work_directory
from dagster_checkpoints.storage import CheckpointStorage, open_store

SPLITS = 15
DAYS = 40


class Orders(Stage):
    """Reads the orders; each row is marked with its micro-batch."""

    def transform(self, context):
        url = f"sqlite:///{context.spark.conf.get('spark.test.folder')}/shop.db"
        return read_sql_table(context.spark, url, "orders", split_by="id", splits=SPLITS).withColumn("batch", F.lit(-1))

    def process_batch(self, batch, batch_id):
        time.sleep(0.3)  # the run is killed before it has read all of them
        return batch.withColumn("batch", F.lit(batch_id))


@dataclass(frozen=True)
class Settings:
    """The settings of a run.

    Attributes:
        lake: The location of the Delta table.
        storage_options: Options of its store.
        spark: Settings of the session.
    """

    lake: str
    storage_options: dict[str, str]
    spark: dict[str, Any]


def main(folder: Path, run_id: str, settings: Settings) -> None:
    days_sink = ParquetSink(folder / "days")

    @bounded_source(sink=ParquetSink(folder / "rows"))
    def rows(context):
        return read_delta_table(context.spark, settings.lake, storage_options=settings.storage_options, files_per_trigger=1)

    @split_source(schema="n bigint, run string", discover=list(range(DAYS)), split_type=int, instances=["x", "y"], sink=days_sink)
    def days(context, split):
        time.sleep(0.3)  # the run is killed before it has read all of them
        return context.spark.range(100 * split, 100 * split + 100).select(F.col("id").alias("n"), F.lit(run_id).alias("run"))

    orders = Orders(kind=StageKind.BOUNDED_SOURCE, sink=ParquetSink(folder / "orders"))
    execution = JobExecution(
        Pipeline("splits", [orders, rows, days]),
        storage=CheckpointStorage(open_store(str(folder / "store")), "splits"),
        options=JobOptions(
            checkpoints=CheckpointConfig(interval=0.4, retained=2),
            restart=NoRestart(),
            work_directory=parse_work_directory(str(folder / "work")),
            lease_seconds=6.0,
        ),
        session=lambda: build_session({"spark.test.folder": str(folder), **settings.spark}),
        on_event=lambda event: print(event, flush=True),
        run_id=run_id,
    )
    result = execution.run()
    (folder / f"{run_id}.json").write_text(json.dumps({"status": result.status, "error": result.error and repr(result.error)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Settings(**json.loads(sys.argv[3])))
