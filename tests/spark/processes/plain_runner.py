"""Plain queries, in a process that is killed: Spark alone, with its own default settings.

    python plain_runner.py <folder> <names of programs>

The folder holds the input; each query has a checkpoint directory and an output of its own. When all have committed two batches,
the file `going` is written; the process runs until it is killed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession

from dagster_checkpoints.spark.session.java import configure_java
from tests.spark.plain_programs import PROGRAMS, ROWS


def main(folder: Path, names: list[str]) -> None:
    configure_java()
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False)
    builder = builder.config("spark.sql.session.timeZone", "UTC").config("spark.sql.shuffle.partitions", 3)
    if "timers" in names:  # Spark demands it
        provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        builder = builder.config("spark.sql.streaming.stateStore.providerClass", provider)
    spark = builder.getOrCreate()

    def read(name: str) -> object:
        reader = spark.readStream.schema(ROWS).option("maxFilesPerTrigger", 1).option("maxFileAge", "36500d")
        return reader.parquet(str(folder / "input" / name))

    for name in names:
        writer = PROGRAMS[name].plain(read).writeStream.format("parquet")
        writer.option("checkpointLocation", str(folder / name / "checkpoint")).start(str(folder / name / "plain"))
    while not all((folder / name / "checkpoint/commits/1").exists() for name in names):
        time.sleep(0.01)
    (folder / "going").touch()
    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
