"""The file that ``dg scaffold defs`` writes: a pipeline that runs as it is, to be changed."""

from __future__ import annotations

_FILE = '''"""A pipeline with a backfill and a live feed under one checkpoint: replace its sources, stages and sink by yours."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dagster_checkpoints import ParquetSink, Pipeline, StageContext, bounded_source, stage, unbounded_source

# Example data: January is the backfill, February the live feed. New files in `live` are read while the pipeline runs.
DATA = Path("data", "PIPELINE").absolute()
SALES = "ts timestamp, shop string, amount double"
for folder, month in (("history", 1), ("live", 2)):
    if not (DATA / folder).exists():
        (DATA / folder).mkdir(parents=True)
        hours = [datetime(2026, month, 1, tzinfo=UTC) + timedelta(hours=hour) for hour in range(240)]
        rows = pa.table({"ts": hours, "shop": ["north", "south"] * 120, "amount": [1.0] * 240})
        pq.write_table(rows, DATA / folder / f"{month}.parquet")

FILES = {"maxFilesPerTrigger": "10", "maxFileAge": "36500d"}


@bounded_source(watermark=("ts", "1 hour"))  # event time and allowed lateness; ends when everything has been read
def history(context: StageContext) -> DataFrame:
    return context.spark.readStream.schema(SALES).options(**FILES).parquet(str(DATA / "history"))


@unbounded_source(watermark=("ts", "1 hour"))  # runs until it is stopped
def live(context: StageContext) -> DataFrame:
    return context.spark.readStream.schema(SALES).options(**FILES).parquet(str(DATA / "live"))


@stage  # the names of the parameters are the stages upstream
def both(history: DataFrame, live: DataFrame) -> DataFrame:
    return history.unionByName(live)


@stage(sink=ParquetSink(DATA / "daily_sales"))
def daily_sales(both: DataFrame) -> DataFrame:
    days = both.groupBy(F.window("ts", "1 day"), "shop").agg(F.sum("amount").alias("amount"))
    return days.select(F.col("window.start").alias("day"), "shop", "amount")


pipeline = Pipeline("PIPELINE", [history, live, both, daily_sales])
'''


def pipeline_file(name: str) -> str:
    """The Python file, for a pipeline of this name."""
    return _FILE.replace("PIPELINE", name)
