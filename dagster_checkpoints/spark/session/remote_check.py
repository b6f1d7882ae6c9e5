"""The check, before a job starts, that Spark can use a work directory on a file system that only its Hadoop client reaches.

An executor that cannot reach it (no jar, no credentials, no network) would fail every batch; one job shows that at start. Must
not know jobs of the pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_checkpoints.spark.files.path_patterns import literal
from dagster_checkpoints.spark.files.work_path import WorkPath, url
from dagster_checkpoints.spark.session.work_directory import WorkDirectoryError, WorkDirectoryNotSharedError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROWS_EACH = 10
_TASKS_PER_CORE = 2  # so that each executor that is free takes part


def check_remote_directory(spark: SparkSession, folder: WorkPath) -> None:
    """Write rows with all executors, read them again, and let the driver write and read a file.

    Args:
        spark: The session.
        folder: A new folder in the work directory.

    Raises:
        WorkDirectoryError: The driver or an executor cannot write or read there; the text has the cause.
        WorkDirectoryNotSharedError: Rows that executors have written are not there.
    """
    tasks = max(2, _TASKS_PER_CORE * spark.sparkContext.defaultParallelism)
    rows = tasks * _ROWS_EACH
    place = url(folder / "rows")
    try:
        (folder / "driver").write_text("written", "utf-8")
        read = (folder / "driver").read_text("utf-8")
        spark.range(0, rows, 1, tasks).write.parquet(place)
        found = spark.read.parquet(literal(place)).count()
    except Exception as error:
        raise WorkDirectoryError(
            f"expected the driver and all executors of {spark.sparkContext.master} to write to the work directory "
            f"{folder.parent} and to read from it, found {type(error).__name__}: {error}. Check that its server runs, that "
            "the session has the file system's jar and settings (spark.hadoop.*), and the permissions of Spark's user. Nothing "
            "was started"
        ) from error
    if (read, found) != ("written", rows):
        raise WorkDirectoryNotSharedError(
            f"expected {rows} rows that {tasks} tasks have written to {place}, found {found}. Nothing was started"
        )
