from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    ParquetSink,
    Pipeline,
    StageContext,
    bounded_source,
    build_pipeline_defs,
    stage,
)

SALES = "ts timestamp, shop string, amount double"


@bounded_source(watermark=("ts", "1 hour"))
def history(context: StageContext) -> DataFrame:
    files = context.spark.readStream.schema(SALES).option("maxFilesPerTrigger", "10").option("maxFileAge", "36500d")
    return files.json("sales/history")


@stage(sink=ParquetSink("first_table"))
def daily_sales(history: DataFrame) -> DataFrame:
    days = history.groupBy(F.window("ts", "1 day"), "shop").agg(F.sum("amount").alias("amount"))
    return days.select(F.col("window.start").alias("day"), "shop", "amount")


first = Pipeline("first", [history, daily_sales])
defs = build_pipeline_defs(first, coordinator=CheckpointCoordinatorResource(storage="first_checkpoints", interval=5))

if __name__ == "__main__":
    defs.resolve_job_def("first_job").execute_in_process()
