import sys

import dagster as dg
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    ParquetSink,
    Pipeline,
    PipelineRunConfig,
    StageContext,
    bounded_source,
    build_pipeline_defs,
    stage,
    unbounded_source,
)

SALES = "ts timestamp, shop string, amount double"
FILES = {"maxFilesPerTrigger": "10", "maxFileAge": "36500d"}


@bounded_source(watermark=("ts", "1 hour"))
def history(context: StageContext) -> DataFrame:
    return context.spark.readStream.schema(SALES).options(**FILES).json("sales/history")


@unbounded_source(watermark=("ts", "1 hour"))
def live(context: StageContext) -> DataFrame:
    return context.spark.readStream.schema(SALES).options(**FILES).json("sales/live")


@stage
def sales(history: DataFrame, live: DataFrame) -> DataFrame:
    return history.unionByName(live)


@stage(sink=ParquetSink("daily_sales"))
def daily_sales(sales: DataFrame) -> DataFrame:
    days = sales.groupBy(F.window("ts", "1 day"), "shop").agg(F.sum("amount").alias("amount"))
    return days.select(F.col("window.start").alias("day"), "shop", "amount")


shop = Pipeline("shop", [history, live, sales, daily_sales])
defs = build_pipeline_defs(shop, coordinator=CheckpointCoordinatorResource(interval=5))


def run(until: str) -> None:
    """Runs the job in this process, until all is read ("caught_up"), or until a request stops it ("end")."""
    config = dg.RunConfig(ops={f"{shop.name}_assets": PipelineRunConfig(until=until)})
    defs.resolve_job_def(f"{shop.name}_job").execute_in_process(run_config=config)


if __name__ == "__main__":
    run(sys.argv[1])
