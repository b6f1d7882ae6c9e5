"""Sales per day and shop, from a backfill and a live feed."""

from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from shop.example_data import files_of

from dagster_checkpoints import (
    DagsterStageTranslator,
    ParquetSink,
    Pipeline,
    Stage,
    StageContext,
    bounded_source,
    stage,
    unbounded_source,
)

DATA = Path("data/sales").absolute()
SALES = "ts timestamp, shop string, amount double"
FILES = {"maxFilesPerTrigger": "10", "maxFileAge": "36500d"}


@bounded_source(watermark=("ts", "1 hour"))
def history(context: StageContext) -> DataFrame:
    """The sales of January."""
    return context.spark.readStream.schema(SALES).options(**FILES).parquet(files_of(DATA)[0])


@unbounded_source(watermark=("ts", "1 hour"))
def live(context: StageContext) -> DataFrame:
    """The sales since February, file by file."""
    return context.spark.readStream.schema(SALES).options(**FILES).parquet(files_of(DATA)[1])


@stage
def sold(history: DataFrame, live: DataFrame) -> DataFrame:
    """All sales, without those that were cancelled."""
    return history.unionByName(live).where("amount > 0")


@stage(sink=ParquetSink(DATA / "daily_sales"))
def daily_sales(sold: DataFrame) -> DataFrame:
    """The sum of each shop and day."""
    days = sold.groupBy(F.window("ts", "1 day"), "shop").agg(F.sum("amount").alias("amount"))
    return days.select(F.col("window.start").alias("day"), "shop", "amount")


sales = Pipeline("sales", [history, live, sold, daily_sales])


class Owners(DagsterStageTranslator):
    def get_owners(self, stage: Stage) -> Sequence[str]:
        return ["team:sales"] if stage.sink is not None else []
