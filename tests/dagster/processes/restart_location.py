"""A code location that is restarted, with changed code, while a run of its pipeline goes on, and a batch job beside it.

Everything is below LIVE_ROOT.
"""

import os
from pathlib import Path

import dagster as dg

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    ParquetSink,
    Pipeline,
    build_pipeline_defs,
    build_recovery_sensor,
    pipeline_assets,
    unbounded_source,
)
from dagster_checkpoints import stage as pipeline_stage

ROOT = Path(os.environ["LIVE_ROOT"])


@unbounded_source
def live(context):
    return context.spark.readStream.schema("id long").json(str(ROOT / "input"))


@pipeline_stage(sink=ParquetSink(ROOT / "results"))
def results(live):
    return live.selectExpr("id * id AS id")


pipeline = Pipeline("restarts", [live, results])


@pipeline_assets(pipeline=pipeline)
def assets(context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource):
    yield from checkpoint_coordinator.run(pipeline, context=context)


@dg.asset
def nightly(): ...


recovery = build_recovery_sensor(
    pipeline=pipeline,
    assets=assets,
    dead_after=20.0,
    minimum_interval_seconds=1,
    default_status=dg.DefaultSensorStatus.RUNNING,
)
defs = dg.Definitions.merge(
    build_pipeline_defs(
        pipeline,
        assets=assets,
        coordinator=CheckpointCoordinatorResource(
            interval=1.0,
            lease_seconds=10.0,
            status_seconds=1.0,
            work_directory=str(ROOT / "work"),
            spark_config={"spark.master": "local[2]", "spark.sql.shuffle.partitions": "2"},
        ),
        recovery_attempts=0,
        minimum_interval_seconds=1,
        automation=True,
    ),
    dg.Definitions([nightly], jobs=[dg.define_asset_job("nightly_job", selection=[nightly])], sensors=[recovery]),
)
