"""FileSink against Spark's own writers: rows per second in each format, and the time of a commit by number of files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import pyarrow.dataset as ds

from bench.environment import BenchFailed, Environment
from bench.measures import Measure, at_least, below
from bench.sink_runs import batch_of_sales, commit_seconds, run_batches
from dagster_checkpoints.sinks import FileSink

PART = "File sink"
BATCHES = 5
FORMATS: tuple[Any, ...] = ("parquet", "orc", "csv", "json")
COMMITS = (1, 100, 10_000)
COMMIT_LIMIT = 5.0
LINEAR = 200.0  # 100 times the files may take twice as long per file


def measure(environment: Environment) -> Iterator[Measure]:
    """Spark writes segments, which the sink commits, against Spark writing the same DataFrames in the sink's format."""
    count = min(environment.rows, 2_000_000) // BATCHES
    note = f"{BATCHES} batches of {count:,} rows, a checkpoint after each"
    for format in FORMATS:
        rounds = [_round(environment, format, count) for _ in range(environment.repeats)]
        if format == "parquet":
            ratio = median(segments / (segments + sink) for segments, sink, _ in rounds)
            yield at_least(PART, "rows/s, Spark and the sink / Spark alone, parquet", ratio, "", 0.95, note)
        else:
            ratio = median(direct / (segments + sink) for segments, sink, direct in rounds)
            note = "Spark alone writes this format; with the sink it writes Parquet, of which the sink makes this format"
            yield at_least(PART, f"rows/s, Spark and the sink / Spark alone, {format}", ratio, "", 0.8, note)
        yield Measure(PART, f"rows/s of the sink alone, {format}", BATCHES * count / median(b for _, b, _ in rounds), "rows/s")
    seconds = [median(_commit(environment, files) for _ in range(environment.repeats)) for files in COMMITS]
    for files, took in zip(COMMITS, seconds, strict=True):
        what = f"commit of {files:,} files"
        yield below(PART, what, took, "s", COMMIT_LIMIT) if files == COMMITS[-1] else Measure(PART, what, took, "s")
    yield below(PART, "time with 100 times the files / time", seconds[-1] / seconds[-2], "", LINEAR)


def _round(environment: Environment, format: Any, count: int) -> tuple[float, float, float]:
    """The seconds in which Spark writes segments, those of the sink, and those in which Spark writes the format directly."""
    folder = environment.fresh("files")
    segments, writing = run_batches(environment, FileSink(folder / "sink", format), folder, count, BATCHES)
    began = time.perf_counter()
    for number in range(BATCHES):
        rows = batch_of_sales(environment, count, number).write.mode("append").option("header", True)
        rows.format(format).save(str(folder / "direct"))
    direct = time.perf_counter() - began
    for name in ("sink", "direct"):
        found = ds.dataset(folder / name, format=format).count_rows()
        if found != BATCHES * count:
            raise BenchFailed(f"{format} files of {name}: expected {BATCHES * count:,} rows, found {found:,}")
    return segments, writing, direct


def _commit(environment: Environment, files: int) -> float:
    folder = environment.fresh("file-commit")
    return commit_seconds(FileSink(folder / "sink"), folder, files)
