"""A code location for the test of the recovery sensor with real runs: one unbounded source, a sink, and the sensor.

Everything is below the directory LIVE_ROOT; the live source ends when the file `drain` exists and ten rows were read.
"""

import os
from pathlib import Path

import dagster as dg

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    ParquetSink,
    Pipeline,
    build_recovery_sensor,
    pipeline_assets,
    unbounded_source,
)
from dagster_checkpoints import stage as pipeline_stage
from dagster_checkpoints.sensors import Backoff

ROOT = Path(os.environ["LIVE_ROOT"])


@unbounded_source
def live(context):
    return context.spark.readStream.schema("id long").json(str(ROOT / "input"))


@pipeline_stage(sink=ParquetSink(ROOT / "squares"))
def squares(live):
    return live.selectExpr("id * id AS id")


pipeline = Pipeline("recovered", [live, squares])


@pipeline_assets(pipeline=pipeline, pool="feeds")
def live_assets(context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource):
    yield from checkpoint_coordinator.run(
        pipeline,
        context=context,
        drain_when=lambda rows: (ROOT / "drain").exists() and rows.get("squares", 0) >= 10,
    )


jobs = [
    dg.define_asset_job(name, selection=dg.AssetSelection.assets(live_assets), executor_def=executor)
    for name, executor in {"numbers": dg.in_process_executor, "numbers_multiprocess": dg.multiprocess_executor}.items()
]
recovery = build_recovery_sensor(pipeline=pipeline, assets=live_assets, jobs=jobs, backoff=Backoff(first=0.0, longest=0.0))
coordinator = CheckpointCoordinatorResource(
    interval=1.0,
    lease_seconds=6.0,
    savepoint_on_termination=True,
    termination_timeout=120.0,
    work_directory=str(ROOT / "work"),
    spark_config={"spark.master": "local[2]", "spark.sql.shuffle.partitions": "2"},
)

defs = dg.Definitions(assets=[live_assets], jobs=jobs, sensors=[recovery], resources={"checkpoint_coordinator": coordinator})
