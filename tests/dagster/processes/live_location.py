"""A code location for tests that run Dagster in separate processes: a bounded and an unbounded source, two sinks.

Everything is below the directory LIVE_ROOT; the live source ends when the file `drain` exists and ten rows were read.
"""

import os
from pathlib import Path

import dagster as dg

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    ParquetSink,
    Pipeline,
    bounded_source,
    pipeline_assets,
    unbounded_source,
)
from dagster_checkpoints import stage as pipeline_stage

ROOT = Path(os.environ["LIVE_ROOT"])


@bounded_source(sink=ParquetSink(ROOT / "backfill"))
def backfill(context):
    return context.spark.range(5)


@unbounded_source
def live(context):
    return context.spark.readStream.schema("id long").json(str(ROOT / "input"))


@pipeline_stage(sink=ParquetSink(ROOT / "squares"))
def squares(live):
    return live.selectExpr("id * id AS id")


pipeline = Pipeline("live_numbers", [backfill, live, squares])


@pipeline_assets(pipeline=pipeline)
def live_assets(context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource):
    yield from checkpoint_coordinator.run(
        pipeline,
        context=context,
        drain_when=lambda rows: (ROOT / "drain").exists() and rows.get("squares", 0) >= 10,
    )


everything = dg.AssetSelection.assets(live_assets)
unfinished = dg.AssetSelection.assets("live", "squares")

defs = dg.Definitions(
    assets=[live_assets],
    jobs=[
        dg.define_asset_job(f"{what}_{how}", selection=selection, executor_def=executor)
        for what, selection in {"everything": everything, "unfinished": unfinished}.items()
        for how, executor in {
            "in_process": dg.in_process_executor,
            "multiprocess": dg.multiprocess_executor,
        }.items()
    ]
    + [
        dg.define_asset_job(
            "retried", selection=everything, executor_def=dg.multiprocess_executor, op_retry_policy=dg.RetryPolicy(max_retries=1)
        )
    ],
    resources={
        "checkpoint_coordinator": CheckpointCoordinatorResource(
            interval=0.5,
            lease_seconds=5.0,
            work_directory=str(ROOT / "work"),
            spark_config={"spark.master": "local[2]", "spark.sql.shuffle.partitions": "2"},
        )
    },
)
