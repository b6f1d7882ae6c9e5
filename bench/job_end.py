"""The time and the number of checkpoints from the last record to the final commit, by the depth of the pipeline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bench import computation
from bench.computation import Rows
from bench.environment import Environment
from bench.measures import Measure, below, equal
from dagster_checkpoints.pipeline import Pipeline, Stage, StageContext, StageInput, StageKind
from dagster_checkpoints.sinks import ParquetSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PART = "The end"
DEPTHS = (1, 3, 6)
ROWS = 20_000


class Readings(Stage):
    """The source; it records the time of its last record."""

    kind = StageKind.BOUNDED_SOURCE
    last_record_at = 0.0  # a class attribute: each instance of the job is a copy

    def __init__(self, rows: Rows, sink: ParquetSink | None) -> None:
        super().__init__("readings", sink=sink)
        self.rows = rows

    def transform(self, context: StageContext) -> DataFrame:
        return computation.parsed(self.rows.stream(context.spark))

    def process_batch(self, batch: DataFrame, batch_id: int) -> DataFrame:
        Readings.last_record_at = time.monotonic()
        return batch


def measure(environment: Environment) -> Iterator[Measure]:
    rows = computation.generate(environment.spark, environment.cache, ROWS, 4)
    for depth in DEPTHS:
        folder = environment.fresh(f"depth-{depth}")
        run = environment.run_job(line_of_stages(rows, folder / "result", depth), folder)
        end = run.started_at + run.seconds
        what = f"depth {depth}: last record to final commit"
        after_last, note = (
            end - Readings.last_record_at,
            f"the whole run: {run.seconds:.1f} s; the batch of the last record is in it",
        )
        yield below(PART, what, after_last, "s", 1, note) if depth == 1 else Measure(PART, what, after_last, "s", note=note)
        yield equal(PART, f"depth {depth}: checkpoints that the end needs", len(run.checkpoints), "", 1)


def line_of_stages(rows: Rows, output: Path, depth: int) -> Pipeline:
    """A line of `depth` stages, each in a separate task, the last one with the sink."""
    sink = ParquetSink(output)
    stages: list[Stage] = [Readings(rows, sink if depth == 1 else None)]
    for number in range(1, depth):
        inputs = {stages[-1].name: StageInput()}
        stages.append(Stage(f"step{number}", inputs=inputs, sink=sink if number == depth - 1 else None))
    return Pipeline(f"depth{depth}", stages, chaining=False)
