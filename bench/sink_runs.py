"""A sink without a job: batches that Spark writes as segments, and commits of many files."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench.environment import Environment
from dagster_checkpoints.sinks import SinkContext, TwoPhaseCommitSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

UNUSED: Any = SimpleNamespace(columns=[])


def batch_of_sales(environment: Environment, count: int, number: int) -> DataFrame:
    """The rows of a batch.

    Args:
        environment: the benchmark's environment.
        count: rows of each batch.
        number: the batch's number, from 0.
    """
    ids = environment.spark.range(number * count, (number + 1) * count, 1, 2)
    return ids.selectExpr("id", "concat('shop-', id % 1000) AS shop", "id * 0.25D AS amount", "timestamp_seconds(id) AS ts")


def warm_up(environment: Environment, count: int) -> None:
    """Start Spark, and let Java compile what the batches need: neither belongs to a sink."""
    for number in range(3):
        batch_of_sales(environment, count, number).write.parquet(str(environment.fresh("warm-up") / "segment"))
        batch_of_sales(environment, count, number).toArrow()


def run_batches(
    environment: Environment, sink: TwoPhaseCommitSink, folder: Path, count: int, batches: int
) -> tuple[float, float]:
    """The seconds in which Spark writes the segments, and those of the sink; a checkpoint after each batch."""
    open_sink(sink)
    spark = writing = 0.0
    for number in range(batches):
        segment = folder / f"segment-{number}"
        began = time.perf_counter()
        batch_of_sales(environment, count, number).write.parquet(str(segment))
        written = time.perf_counter()
        sink.write(UNUSED, [str(file) for file in sorted(segment.glob("*.parquet"))], number)
        take_checkpoint(sink, number + 1)
        spark += written - began
        writing += time.perf_counter() - written
    sink.close()
    return spark, writing


def commit_seconds(sink: TwoPhaseCommitSink, folder: Path, files: int) -> float:
    """The seconds of one commit with this number of files, in a table that holds one file."""
    open_sink(sink)
    segment = folder / "segment.parquet"
    pq.write_table(pa.table({"id": pa.array([1], pa.int64())}), segment)
    sink.write(UNUSED, [str(segment)], 0)
    take_checkpoint(sink, 1)
    sink.write(UNUSED, [str(segment)] * files, 1)
    transaction = sink.pre_commit(2)
    assert transaction is not None
    began = time.perf_counter()
    sink.commit(transaction)
    took = time.perf_counter() - began
    sink.close()
    return took


def open_sink(sink: TwoPhaseCommitSink) -> None:
    sink.open(SinkContext("bench", "rows", "0", 0, 1, 1, "a1", history="h1", epoch=1))
    sink.start_new()


def take_checkpoint(sink: TwoPhaseCommitSink, checkpoint_id: int) -> None:
    transaction = sink.pre_commit(checkpoint_id)
    assert transaction is not None
    sink.commit(transaction)
