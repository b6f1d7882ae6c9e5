"""The measured computation: its rows, its three stages, and its result.

Each stage is a plain function on DataFrames, shared by the hand-written queries and by the pipeline. All arithmetic is on
integers, so every variant must give exactly the same rows.
"""

from __future__ import annotations

import datetime as dt
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "ts timestamp, line string"
EVENT_TIME, LATENESS, WINDOW = "ts", "2 minutes", "10 minutes"
FILES_PER_BATCH = 2
MAX_FILES = 32
START = dt.datetime(2026, 1, 1)
HOURS = 10
# The last row is a day later: without it, plain Spark would not emit the windows before it.
CLOSING = dt.datetime(2026, 1, 2)


@dataclass(frozen=True)
class Rows:
    """Generated input: Parquet files, which the source reads in order of time."""

    folder: Path
    count: int
    files: int

    def stream(self, spark: SparkSession) -> DataFrame:
        return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", FILES_PER_BATCH).parquet(str(self.folder))


def generate(spark: SparkSession, cache: Path, count: int, files: int = MAX_FILES) -> Rows:
    """Generate `count` rows, or read them from the cache. Each file holds a slice of time, out of order within a minute."""
    folder = cache / f"rows-{count}-{files}"
    rows = Rows(folder, count, files)
    if folder.exists():
        return rows
    scratch = folder.with_suffix(".part")
    shutil.rmtree(scratch, ignore_errors=True)
    row = F.col("id")
    jitter = F.pmod(F.hash(row), F.lit(60))
    seconds = F.floor(row * HOURS * 3600 / count) + jitter + int(START.replace(tzinfo=dt.UTC).timestamp())
    closing = int(CLOSING.replace(tzinfo=dt.UTC).timestamp())
    status = F.when(F.pmod(F.hash(row, F.lit(3)), F.lit(20)) == 0, F.lit("BAD")).otherwise(F.lit("OK"))
    (
        spark.range(0, count, 1, files)
        .select(
            F.timestamp_seconds(F.when(row == count - 1, F.lit(closing)).otherwise(seconds)).alias("ts"),
            F.concat_ws(
                ",",
                F.format_string("sensor-%03d", F.pmod(F.hash(row, F.lit(1)), F.lit(100))),
                F.pmod(F.hash(row, F.lit(2)), F.lit(1000)).cast("string"),
                F.when(row == count - 1, F.lit("OK")).otherwise(status),
            ).alias("line"),
        )
        .write.parquet(str(scratch))
    )
    for number, file in enumerate(sorted(scratch.glob("part-*.parquet"))):
        os.utime(file, (1_750_000_000 + number, 1_750_000_000 + number))  # the file source reads in this order
    scratch.rename(folder)
    return rows


def parsed(lines: DataFrame) -> DataFrame:
    """Stage 1: parse, filter, derive columns."""
    parts = F.split("line", ",")
    return lines.where(parts[2] != "BAD").select(
        "ts", parts[0].alias("sensor"), parts[1].cast("long").alias("reading"), F.length("line").alias("size")
    )


def enriched(readings: DataFrame) -> DataFrame:
    """Stage 2: derive more columns, without state."""
    band = F.when(F.col("reading") < 250, "low").when(F.col("reading") < 750, "normal").otherwise("high")
    return readings.select(
        "ts",
        "sensor",
        "size",
        (F.col("reading") * 9 + 320 * 5).alias("fahrenheit"),
        band.alias("band"),
        F.pmod(F.col("reading") * 31 + F.minute("ts"), F.lit(97)).alias("weight"),
    )


def windowed(readings: DataFrame) -> DataFrame:
    """Stage 3: aggregate in event time. The input carries its watermark."""
    return (
        readings.groupBy(F.window(EVENT_TIME, WINDOW), "sensor", "band")
        .agg(
            F.count("*").alias("n"),
            F.sum("fahrenheit").alias("fahrenheit"),
            F.max("weight").alias("weight"),
            F.sum("size").alias("size"),
        )
        .select(F.col("window.start").alias("start"), "sensor", "band", "n", "fahrenheit", "weight", "size")
    )


def result(spark: SparkSession, folder: Path) -> list[tuple[object, ...]]:
    """The rows committed to a folder, sorted, without the window of the closing row."""
    committed = spark.read.parquet(str(folder)).select("start", "sensor", "band", "n", "fahrenheit", "weight", "size")
    return sorted(tuple(row) for row in committed.where(F.col("start") < F.lit(CLOSING)).collect())
