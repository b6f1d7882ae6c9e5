"""Queries of plain Spark, on which the tests of this folder show the facts that the plugin relies on.

One test for each fact, under every version of Spark that the plugin runs on (`make test-spark VERSION=4.1`):

- a batch under MAX_WATERMARK, the watermark source, the order of a union: `test_facts_watermarks.py`;
- a pruned checkpoint, changed state partitions, purged batches: `test_facts_checkpoints.py`;
- `foreachBatch`, timestamps, sources that act on commit: `test_facts_batches.py`.

Others are in `tests/spark/`: Data Source V2 by py4j in `test_channel_sources.py`, the packaged Java in
`processes/test_packaged_java.py`, a standalone cluster from the pip package in `processes/test_cluster.py`.
"""

from __future__ import annotations

import datetime as dt
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "k string, ts timestamp, v long"
Batch = tuple[int, list[tuple[Any, ...]]]


class Scene:
    """Input files of rows `(k, ts, v)`, and queries over them.

    Args:
        spark: The session.
        folder: The directory of the input and of the checkpoints.
    """

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self._numbers = itertools.count()

    @staticmethod
    def at(seconds: float) -> dt.datetime:
        """The time that is this number of seconds after the beginning of 2026, UTC."""
        return dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=seconds)

    def put(self, name: str, *rows: tuple[str | None, float, int | None]) -> Path:
        """Add a file to an input folder. Returns the file; files are read in the order in which they were put."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        columns = {
            "k": pa.array([k for k, _, _ in rows], pa.string()),
            "ts": pa.array([self.at(seconds) for _, seconds, _ in rows], pa.timestamp("us", "UTC")),
            "v": pa.array([v for _, _, v in rows], pa.int64()),
        }
        number = next(self._numbers)
        scratch = folder / f".{number}.next"
        pq.write_table(pa.table(columns), scratch)
        os.utime(scratch, (number, number))  # Spark reads files by their modification time
        return scratch.rename(folder / f"{number:06d}.parquet")

    def stream(self, name: str = "in", **options: Any) -> DataFrame:
        """The rows of an input folder, one file in each micro-batch."""
        reader = self.spark.readStream.schema(SCHEMA).options(**{"maxFilesPerTrigger": 1, **options})
        return reader.parquet(str(self.folder / name))

    @contextmanager
    def setting(self, key: str, value: str) -> Iterator[None]:
        """A setting of the session, inside the block."""
        before = self.spark.conf.get(key)
        self.spark.conf.set(key, value)
        try:
            yield
        finally:
            self.spark.conf.set(key, str(before))

    def run(self, frame: DataFrame, checkpoint: Path, *, mode: str = "append", once: bool = False) -> list[Batch]:
        """Run a query until it has read all of its input; with `once`, for the batch that is planned. Returns its batches."""
        batches: list[Batch] = []

        def keep(batch: DataFrame, number: int) -> None:
            batches.append((number, sorted(tuple(row) for row in batch.collect())))

        writer = frame.writeStream.outputMode(mode).option("checkpointLocation", str(checkpoint)).foreachBatch(keep)
        writer = writer.trigger(once=True) if once else writer.trigger(availableNow=True)
        writer.start().awaitTermination()
        return batches


@pytest.fixture
def scene(spark: SparkSession, tmp_path: Path) -> Iterator[Scene]:
    """Queries with one state partition, which keeps them quick."""
    made = Scene(spark, tmp_path)
    with made.setting("spark.sql.shuffle.partitions", "1"):
        yield made
