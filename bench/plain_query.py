"""Plain PySpark beside a start of this project: `python -m bench.plain_query FOLDER SETTINGS [available]`.

It starts or restarts the hand-written query in a new driver, and runs until its standard input ends; with `available`, until it
has read what is there. It imports nothing of this project.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench import computation
from bench.computation import EVENT_TIME, LATENESS, Rows


def main(folder: Path, settings: dict[str, str], available: bool) -> None:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    readings = computation.parsed(Rows(folder / "input", 0, 0).stream(spark)).withWatermark(EVENT_TIME, LATENESS)
    writer = computation.windowed(computation.enriched(readings)).writeStream.format("parquet").outputMode("append")
    writer = writer.trigger(availableNow=True) if available else writer
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).start(str(folder / "result"))
    if available:
        query.awaitTermination()
    else:
        sys.stdin.read()
        query.stop()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:] == ["available"])
