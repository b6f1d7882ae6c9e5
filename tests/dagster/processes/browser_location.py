"""A code location that a test looks at in Dagster's own user interface. Everything is below LIVE_ROOT."""

import os
from pathlib import Path

from pyspark.sql import functions as F

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    ParquetSink,
    Pipeline,
    bounded_source,
    build_pipeline_defs,
    stage,
    unbounded_source,
)

ROOT = Path(os.environ["LIVE_ROOT"])


FIRST_MINUTE = 29_000_000  # since 1970: 19 February 2025, 21:20 UTC


def with_time(ids):
    """One row a minute."""
    return ids.select("id", F.timestamp_seconds((F.col("id") + FIRST_MINUTE) * 60).alias("ts"))


@bounded_source(watermark=("ts", "1 minute"))
def history(context):
    """Sales of last year: they end."""
    return with_time(context.spark.range(5))


@unbounded_source(watermark=("ts", "1 minute"))
def live(context):
    """Sales of today: they do not end."""
    return with_time(context.spark.readStream.schema("id long").json(str(ROOT / "input")))


@stage(sink=ParquetSink(ROOT / "sales"))
def sales(history, live):
    """All sales."""
    return history.unionByName(live)


@stage(sink=ParquetSink(ROOT / "minutes"))
def minutes(sales):
    """The number of sales in each minute."""
    return sales.groupBy(F.window("ts", "1 minute")).agg(F.count("*").alias("sales"), F.first("id").alias("id"))


pipeline = Pipeline("shop", [history, live, sales, minutes])

defs = build_pipeline_defs(
    pipeline,
    coordinator=CheckpointCoordinatorResource(
        interval=2.0,
        observe_every=2.0,
        materialize_every=2.0,
        lease_seconds=10.0,
        status_seconds=1.0,
        work_directory=str(ROOT / "work"),
        spark_config={"spark.master": "local[2]", "spark.sql.shuffle.partitions": "2"},
    ),
    minimum_interval_seconds=1,
)
