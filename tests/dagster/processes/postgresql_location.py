"""A code location for the test of PostgreSQL as Dagster's storage: a bounded and an unbounded pipeline, with sensors and a check.

Everything is below the directory LIVE_ROOT. Observations are frequent, so that a run soon writes to Dagster's storage.
"""

import os
from pathlib import Path

import dagster as dg

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    ParquetSink,
    Pipeline,
    bounded_source,
    build_pipeline_defs,
    build_recovery_sensor,
    pipeline_assets,
    unbounded_source,
)
from dagster_checkpoints import stage as pipeline_stage
from dagster_checkpoints.sensors import Backoff, bounded_stages_finished, marker_object

ROOT = Path(os.environ["LIVE_ROOT"])


@bounded_source
def numbers(context):
    return context.spark.range(5)


@pipeline_stage(sink=ParquetSink(ROOT / "doubled"))
def doubled(numbers):
    return numbers.selectExpr("id * 2 AS id")


@bounded_source(sink=ParquetSink(ROOT / "backfill"))
def backfill(context):
    return context.spark.range(5)


@unbounded_source
def live(context):
    return context.spark.readStream.schema("id long").json(str(ROOT / "input"))


@pipeline_stage(sink=ParquetSink(ROOT / "squares"))
def squares(live):
    return live.selectExpr("id * id AS id")


stored_bounded = Pipeline("stored_bounded", [numbers, doubled])
stored_live = Pipeline("stored_live", [backfill, live, squares])


@pipeline_assets(pipeline=stored_live)
def stored_live_assets(context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource):
    yield from checkpoint_coordinator.run(stored_live, context=context)


coordinator = CheckpointCoordinatorResource(
    storage=(ROOT.parent / "checkpoints").as_uri(),
    interval=1.0,
    observe_every=1.0,
    materialize_every=1.0,
    lease_seconds=10.0,
    status_seconds=1.0,
    work_directory=str(ROOT / "work"),
    spark_config={"spark.master": "local[2]", "spark.sql.shuffle.partitions": "2"},
)
stored_live_job = dg.define_asset_job(
    "numbers", dg.AssetSelection.assets(stored_live_assets), executor_def=dg.in_process_executor
)
recovery = build_recovery_sensor(
    pipeline=stored_live,
    assets=stored_live_assets,
    jobs=[stored_live_job],
    backoff=Backoff(first=0.0, longest=0.0),
    dead_after=20.0,
)
defs = dg.Definitions.merge(
    build_pipeline_defs(stored_bounded, coordinator=coordinator, recovery_attempts=0, health=False),
    build_pipeline_defs(
        stored_live,
        assets=stored_live_assets,
        drain_when=bounded_stages_finished() & marker_object("drain-now"),
        recovery_attempts=0,
    ),
    dg.Definitions(
        sensors=[recovery],
        jobs=[
            stored_live_job,
            dg.define_asset_job("take_savepoint", dg.AssetSelection.assets(["savepoints", "stored_live"])),
            dg.define_asset_job(
                "look", dg.AssetSelection.checks(dg.AssetCheckKey(dg.AssetKey(["checkpoints", "stored_live"]), "healthy"))
            ),
        ],
    ),
)
