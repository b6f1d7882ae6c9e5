"""A code location for the test that runs all of Dagster: webserver, daemon and code server, with the whole plugin.

Everything is below the directory LIVE_ROOT.
"""

import os
from pathlib import Path

import dagster as dg
import pyarrow.dataset as ds

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    ParquetSink,
    Pipeline,
    bounded_source,
    build_drain_sensor,
    build_reroot_sensor,
    pipeline_assets,
    savepoint_asset,
    savepoint_check,
    unbounded_source,
)
from dagster_checkpoints import stage as pipeline_stage
from dagster_checkpoints.sensors import bounded_stages_finished, live_lag_zero, marker_object

ROOT = Path(os.environ["LIVE_ROOT"])
RUNNING = dg.DefaultSensorStatus.RUNNING


@bounded_source(sink=ParquetSink(ROOT / "backfill"))
def backfill(context):
    return context.spark.range(5)


@unbounded_source
def live(context):
    return context.spark.readStream.schema("id long").json(str(ROOT / "input"))


@pipeline_stage(sink=ParquetSink(ROOT / "squares"))
def squares(live):
    return live.selectExpr("id * id AS id")


pipeline = Pipeline("daemon_numbers", [backfill, live, squares])


@pipeline_assets(pipeline=pipeline)
def numbers_assets(context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource):
    yield from checkpoint_coordinator.run(pipeline, context=context)


@dg.asset(deps=["squares"], automation_condition=dg.AutomationCondition.eager())
def report():
    """Reads what is committed; the daemon runs it after each materialization of the live stage."""
    return dg.MaterializeResult(metadata={"rows": ds.dataset(ROOT / "squares", format="parquet").count_rows()})


savepoints = savepoint_asset(pipeline=pipeline, assets=numbers_assets)

defs = dg.Definitions(
    assets=[numbers_assets, savepoints, report],
    asset_checks=[savepoint_check(pipeline=pipeline, savepoints=savepoints)],
    jobs=[
        dg.define_asset_job("numbers", selection=dg.AssetSelection.assets(numbers_assets)),
        dg.define_asset_job("take_savepoint", selection=dg.AssetSelection.assets(savepoints)),
    ],
    sensors=[
        dg.AutomationConditionSensorDefinition("automation", target=[report], default_status=RUNNING, minimum_interval_seconds=1),
        build_drain_sensor(
            pipeline=pipeline,
            when=bounded_stages_finished() & live_lag_zero() & marker_object("drain-now"),
            minimum_interval_seconds=1,
            default_status=RUNNING,
        ),
        build_reroot_sensor(pipeline=pipeline, assets=numbers_assets, minimum_interval_seconds=1, default_status=RUNNING),
    ],
    resources={
        "checkpoint_coordinator": CheckpointCoordinatorResource(
            interval=2.0,
            materialize_every=1.0,
            lease_seconds=10.0,
            status_seconds=1.0,
            savepoint_on_termination=True,
            termination_timeout=120.0,
            work_directory=str(ROOT / "work"),
            spark_config={"spark.master": "local[2]", "spark.sql.shuffle.partitions": "2"},
        )
    },
    executor=dg.in_process_executor,
)
