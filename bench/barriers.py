"""Barriers under a slow stage: the time of aligned and unaligned checkpoints, and the throughput of each mode."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench import computation, throughput, variants
from bench.environment import Environment, JobRun
from bench.measures import Measure, at_least, below
from dagster_checkpoints.pipeline import Pipeline, Stage, StageContext, bounded_source
from dagster_checkpoints.sinks import ParquetSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PART = "Barriers"
FILES = 60
"""Number of micro-batches of the fast source."""
SECONDS_PER_FILE = 0.4
"""Seconds that the slow stage needs for the rows of one of them."""
INTERVAL = 1.0
MODES: dict[str, dict[str, Any]] = {
    "aligned": {},
    "unaligned": {"unaligned": True},
    "aligned with timeout": {"unaligned": True, "aligned_checkpoint_timeout": INTERVAL},
    "at least once": {"mode": "at_least_once"},
}


class SlowStage(Stage):
    """Sleeps for each row."""

    def __init__(self, seconds_per_row: float, times: Path, **options: Any) -> None:
        super().__init__(**options)
        self.seconds_per_row = seconds_per_row
        self.times = times

    def transform(self, context: StageContext, fast: DataFrame) -> DataFrame:
        return fast

    def process_batch(self, batch: DataFrame, batch_id: int) -> DataFrame:
        began = time.monotonic()
        time.sleep(batch.count() * self.seconds_per_row)
        with self.times.open("a") as file:
            file.write(f"{began} {time.monotonic()}\n")
        return batch


@dataclass(frozen=True)
class SlowRun:
    """The checkpoints of one run under a slow stage.

    Attributes:
        durations: Seconds from trigger to completion, of each.
        batches: Seconds of the slow stage's micro-batches, with Spark's work between them.
    """

    durations: list[float]
    batches: list[float]


def measure(environment: Environment) -> Iterator[Measure]:
    yield from _under_a_slow_stage(environment)
    yield from _throughput(environment)


def _under_a_slow_stage(environment: Environment) -> Iterator[Measure]:
    rows = computation.generate(environment.spark, environment.cache, FILES * 500, FILES)
    runs = {name: slow_run(environment, rows, settings) for name, settings in MODES.items()}
    for name, run in runs.items():
        note = f"{len(run.durations)} checkpoints; the longest {max(run.durations):.1f} s"
        yield Measure(PART, f"checkpoint under a slow stage, {name}", median(run.durations), "s", note=note)
    unaligned = runs["unaligned"]
    yield below(
        PART, "unaligned: longest checkpoint / longest micro-batch", max(unaligned.durations) / max(unaligned.batches), "", 2
    )


def slow_run(environment: Environment, rows: computation.Rows, settings: Mapping[str, Any]) -> SlowRun:
    """Run a fast source in front of a slow stage, with a checkpoint every second."""
    folder = environment.fresh("slow")

    @bounded_source
    def fast(context: StageContext) -> DataFrame:
        files = context.spark.readStream.schema(computation.SCHEMA).option("maxFilesPerTrigger", 1)
        return files.parquet(str(rows.folder))

    slow = SlowStage(
        SECONDS_PER_FILE * rows.files / rows.count, folder / "times", name="slow", sink=ParquetSink(folder / "result")
    )
    pipeline = Pipeline("slow", [fast, slow], chaining=False)
    job = environment.run_job(pipeline, folder, INTERVAL, checkpoints=settings)
    batches = batch_seconds([float(moment) for moment in (folder / "times").read_text().split()])
    durations = [done.duration for done in job.checkpoints]
    environment.say(f"  {settings}: {len(durations)} checkpoints, the longest {max(durations):.1f} s")
    return SlowRun(durations, batches)


def batch_seconds(moments: list[float]) -> list[float]:
    """The seconds from the end of each micro-batch to the end of the next; `moments`: begin and end of each."""
    ends = [moments[0], *moments[1::2]]
    return [after - before for before, after in pairwise(ends)]


def _throughput(environment: Environment) -> Iterator[Measure]:
    """Compare the modes in turns, so that other work on the machine affects all of them."""
    rows = throughput.input_rows(environment)
    runs: dict[str, list[JobRun]] = defaultdict(list)
    for number in range(environment.repeats + 1):
        for name, settings in MODES.items():
            job = variants.unchained(environment, rows, throughput.INTERVAL, settings).job
            assert job is not None
            environment.say(f"  {number}/{environment.repeats} {name}: {job.seconds:.1f} s, {len(job.checkpoints)} checkpoints")
            if number:  # the first round only warms up
                runs[name].append(job)
    completed = {name: sum(len(job.checkpoints) for job in jobs) for name, jobs in runs.items()}
    for name in list(MODES)[1:]:
        ratio = median([a.seconds / b.seconds for a, b in zip(runs["aligned"], runs[name], strict=True)])
        note = f"{completed[name]} checkpoints against {completed['aligned']}"
        yield at_least(PART, f"throughput, {name} / aligned", ratio, "", 0.95, note)
