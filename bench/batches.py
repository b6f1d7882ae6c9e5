"""The fixed cost of a micro-batch: seconds and processor time per batch of one row, compared with a hand-written query.

Each computation runs over few and over many files, with one file and one row in a batch; the difference leaves out start and end.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.environment import Environment
from bench.measures import Measure
from bench.processes import cpu_seconds
from dagster_checkpoints.pipeline import Pipeline, StageContext, bounded_source, stage
from dagster_checkpoints.sinks import ParquetSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PART = "Micro-batches"
FEW, MANY = 10, 60
SCHEMA = "id bigint"
Run = Callable[[Environment, Path, Path], None]


def measure(environment: Environment) -> Iterator[Measure]:
    inputs = {count: write_files(environment.fresh(f"batches-{count}"), count) for count in (FEW, MANY)}
    runs: dict[str, Run] = {
        "hand-written query": hand_written,
        "this project, one query": chained,
        "this project, two queries": unchained,
    }
    for run in runs.values():
        run(environment, inputs[FEW], environment.fresh("batches"))
    seconds: dict[str, list[float]] = defaultdict(list)
    processor: dict[str, list[float]] = defaultdict(list)
    for repeat in range(environment.repeats):
        for name, run in runs.items():
            few, many = (timed(environment, run, inputs[count]) for count in (FEW, MANY))
            seconds[name].append((many[0] - few[0]) / (MANY - FEW))
            processor[name].append((many[1] - few[1]) / (MANY - FEW))
            times = f"{1000 * seconds[name][-1]:.0f} ms, {1000 * processor[name][-1]:.0f} ms of processor time"
            environment.say(f"  {repeat + 1}/{environment.repeats} {name}: {times}")
    reference = next(iter(runs))
    for name in runs:
        note = f"processor time {1000 * median(processor[name]):.0f} ms"
        if name != reference:
            ratio = median(own / other for own, other in zip(processor[name], processor[reference], strict=True))
            note += f", {ratio:.2f} of the {reference}'s"
        yield Measure(PART, f"{name}: one micro-batch", 1000 * median(seconds[name]), "ms", note=note)


def timed(environment: Environment, run: Run, source: Path) -> tuple[float, float]:
    """Seconds and processor time of a run over all files of a folder."""
    before, began = cpu_seconds(os.getpid()), time.monotonic()
    run(environment, source, environment.fresh("batches"))
    return time.monotonic() - began, cpu_seconds(os.getpid()) - before


def write_files(folder: Path, count: int) -> Path:
    for number in range(count):
        (folder / f"{number:04d}.json").write_text(f'{{"id": {number}}}\n')
    return folder


def stream(spark: SparkSession, source: Path) -> DataFrame:
    return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(source))


def hand_written(environment: Environment, source: Path, folder: Path) -> None:
    writer = stream(environment.spark, source).selectExpr("id + 1 AS id").writeStream.format("parquet")
    writer = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)
    writer.start(str(folder / "result")).awaitTermination()


def chained(environment: Environment, source: Path, folder: Path) -> None:
    environment.run_job(pipeline(source, folder / "result", chaining=True), folder)


def unchained(environment: Environment, source: Path, folder: Path) -> None:
    environment.run_job(pipeline(source, folder / "result", chaining=False), folder)


def pipeline(source: Path, output: Path, *, chaining: bool) -> Pipeline:
    @bounded_source
    def rows(context: StageContext) -> DataFrame:
        return stream(context.spark, source)

    @stage(sink=ParquetSink(output))
    def next_rows(rows: DataFrame) -> DataFrame:
        return rows.selectExpr("id + 1 AS id")

    return Pipeline("batches", [rows, next_rows], chaining=chaining)
