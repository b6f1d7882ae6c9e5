"""A code location for the test that runs all of Dagster: a live feed in bursts, from one call. Everything is below LIVE_ROOT."""

import os
from pathlib import Path

from dagster_checkpoints import CheckpointCoordinatorResource, ParquetSink, Pipeline, build_pipeline_defs, unbounded_source
from dagster_checkpoints import stage as pipeline_stage

ROOT = Path(os.environ["LIVE_ROOT"])


@unbounded_source
def live(context):
    return context.spark.readStream.schema("id long").json(str(ROOT / "input"))


@pipeline_stage(sink=ParquetSink(ROOT / "squares"))
def squares(live):
    return live.selectExpr("id * id AS id")


defs = build_pipeline_defs(
    Pipeline("daemon_bursts", [live, squares]),
    coordinator=CheckpointCoordinatorResource(
        work_directory=str(ROOT / "work"),
        lease_seconds=10.0,
        spark_config={"spark.master": "local[2]", "spark.sql.shuffle.partitions": "2"},
    ),
    burst_schedule="* * * * *",
    minimum_interval_seconds=1,
    automation=True,
)
