"""A code location whose runs are pods: a pipeline, and its definitions with the size of the pod."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    FileSink,
    Pipeline,
    StageContext,
    build_pipeline_defs,
    stage,
    unbounded_source,
)


@unbounded_source(watermark=("timestamp", "10 seconds"))
def orders(context: StageContext) -> DataFrame:  # replace it by your source
    return context.spark.readStream.format("rate").option("rowsPerSecond", "100").load()


@stage(sink=FileSink("s3://your-bucket/orders_by_minute"))
def orders_by_minute(orders: DataFrame) -> DataFrame:
    minutes = orders.groupBy(F.window("timestamp", "1 minute")).count()
    return minutes.select(F.col("window.start").alias("minute"), "count")


pipeline = Pipeline("orders", [orders, orders_by_minute])

coordinator = CheckpointCoordinatorResource(  # storage: CHECKPOINT_STORAGE, which the image sets
    savepoint_on_termination=True,
    termination_timeout=90,  # terminationGracePeriodSeconds in dagster.yaml is above this plus 30 s
    restart_strategy="exponential_delay",
    share_java_classes=False,  # the archive would be lost with the container
    spark_config={
        "spark.master": "local[4]",  # the cores of the pod
        "spark.sql.shuffle.partitions": "4",  # the default is the number of cores of the node
        "spark.driver.memory": "4g",
    },
)

# Spark writes to /tmp: records between stages, state, shuffle files.
POD = {
    "container_config": {
        "resources": {
            "requests": {"cpu": "4", "memory": "8Gi", "ephemeral-storage": "20Gi"},
            "limits": {"cpu": "4", "memory": "8Gi"},
        },
        "volume_mounts": [{"name": "work", "mount_path": "/tmp"}],
    },
    "pod_spec_config": {"volumes": [{"name": "work", "empty_dir": {"size_limit": "20Gi"}}]},
}

defs = build_pipeline_defs(
    pipeline,
    coordinator=coordinator,
    job_tags={"dagster-k8s/config": POD},
    automation=True,  # the recovery sensor is on, without a click
)
