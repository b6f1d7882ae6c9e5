"""DeltaSink against Spark alone and against its library: rows per second, and the time of a commit by number of files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

from deltalake import DeltaTable, write_deltalake

from bench.environment import BenchFailed, Environment
from bench.measures import Measure, at_least, below
from bench.sink_runs import batch_of_sales, commit_seconds, run_batches, warm_up
from dagster_checkpoints.sinks import DeltaSink

PART = "Delta sink"
BATCHES = 5
COMMITS = (1, 100, 10_000)
COMMIT_LIMIT = 5.0
LINEAR = 200.0  # 100 times the files may take twice as long per file


def measure(environment: Environment) -> Iterator[Measure]:
    """Spark writes segments, which the sink commits, against Spark alone and against the library with the same DataFrames."""
    count = min(environment.rows, 2_000_000) // BATCHES
    spark: list[float] = []
    sink: list[float] = []
    library: list[float] = []
    warm_up(environment, count)
    for _ in range(environment.repeats):
        folder = environment.fresh("delta")
        in_spark, in_sink = run_batches(environment, DeltaSink(folder / "sink"), folder, count, BATCHES)
        spark.append(in_spark)
        sink.append(in_sink)
        began = time.perf_counter()
        for number in range(BATCHES):
            write_deltalake(folder / "library", batch_of_sales(environment, count, number).toArrow(), mode="append")
        library.append(time.perf_counter() - began)
        for table in ("library", "sink"):
            if (found := DeltaTable(folder / table).count()) != BATCHES * count:
                raise BenchFailed(f"Delta table {table}: expected {BATCHES * count:,} rows, found {found:,}")
    note = f"{BATCHES} batches of {count:,} rows, a checkpoint after each"
    alone = median(a / (a + b) for a, b in zip(spark, sink, strict=True))
    yield at_least(PART, "rows/s, Spark and the sink / Spark alone", alone, "", 0.95, note)
    direct = median(c / (a + b) for a, b, c in zip(spark, sink, library, strict=True))
    note = "the library writes Parquet without Java; the sink takes the files that Spark has written in any case"
    yield Measure(PART, "rows/s, Spark and the sink / write_deltalake", direct, "", note=note)
    yield Measure(PART, "rows/s of the sink alone", BATCHES * count / median(sink), "rows/s")
    seconds = [median(_commit(environment, files) for _ in range(environment.repeats)) for files in COMMITS]
    for files, took in zip(COMMITS, seconds, strict=True):
        what = f"commit of {files:,} files"
        yield below(PART, what, took, "s", COMMIT_LIMIT) if files == COMMITS[-1] else Measure(PART, what, took, "s")
    yield below(PART, "time with 100 times the files / time", seconds[-1] / seconds[-2], "", LINEAR)


def _commit(environment: Environment, files: int) -> float:
    folder = environment.fresh("delta-commit")
    return commit_seconds(DeltaSink(folder / "sink"), folder, files)
