"""How soon a running pipeline answers a suspend, a drain, and the end of one source, and where that time goes.

Two sources of files (a few rows a second, or none) meet in a window: in one query with them, or through channels; and one source
in one query with the window. Requests and answers go through a local storage, as from another process.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal

from pyspark.sql import functions as F

from bench.control import run_under_control, wait_until
from bench.environment import BenchFailed, Environment
from bench.measures import Measure, below, percentile
from dagster_checkpoints.control import PipelineControl
from dagster_checkpoints.pipeline import Pipeline, Stage, StageContext, StageInput, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.job.events import JobStarted, SavepointDone
from dagster_checkpoints.spark.job.job_execution import JobExecution
from dagster_checkpoints.storage import CheckpointStorage, open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PART = "Stops"
REPETITIONS = 10
SCHEMA = "ts timestamp, k string, v bigint"
ROWS_PER_FILE = 3
FEED_SECONDS = 0.4
SETTLE_SECONDS = 2.0
GOAL_MEDIAN, GOAL_P99 = 0.5, 1.0

Layout = Literal["fused", "chained", "through channels"]
Kind = Literal["suspend", "drain", "end_source"]
LAYOUTS: tuple[Layout, ...] = ("fused", "chained", "through channels")
KINDS: tuple[Kind, ...] = ("suspend", "drain", "end_source")


@dataclass(frozen=True)
class Stop:
    """One request, by the clock of its requester; seconds from the request.

    Attributes:
        answered: When the requester had the answer.
        begun: When the savepoint was triggered; after a drain's end of data. None for the end of a source.
        saved: When the savepoint was complete; None for the end of a source.
        ended: When the run had ended; None for the end of a source.
    """

    answered: float
    begun: float | None = None
    saved: float | None = None
    ended: float | None = None


def measure(environment: Environment) -> Iterator[Measure]:
    stop(environment, "fused", "drain", fed=True)  # the first one warms up
    for layout in LAYOUTS:
        for fed in (True, False):
            for kind in KINDS:
                stops = [stop(environment, layout, kind, fed=fed) for _ in range(REPETITIONS)]
                yield from _measures(f"{kind}, {layout}, {'a few rows a second' if fed else 'idle'}", stops)
                environment.say(f"  {kind}, {layout}, fed={fed}: {sorted(round(each.answered, 2) for each in stops)}")


def _measures(what: str, stops: Sequence[Stop]) -> Iterator[Measure]:
    answered = sorted(each.answered for each in stops)
    note = _phases(stops)
    yield below(PART, f"{what}: request to answer, median", median(answered), "s", GOAL_MEDIAN, note)
    yield below(PART, f"{what}: request to answer, p99", percentile(answered, 99), "s", GOAL_P99, f"of {len(stops)}")


def _phases(stops: Sequence[Stop]) -> str:
    """The medians of the phases: to the savepoint's trigger, to its completion, to the answer, and to the end of the run."""
    moments = [[each.begun, each.saved, each.answered, each.ended] for each in stops]
    known = [[0.0, *(moment for moment in row if moment is not None)] for row in moments if None not in row]
    if not known:
        return ""
    names = ("to the savepoint's trigger", "savepoint", "commits and answer", "end of the run")
    spans = [median(row[i + 1] - row[i] for row in known) for i in range(len(names))]
    return "medians: " + ", ".join(f"{name} {span:.2f} s" for name, span in zip(names, spans, strict=True))


def stop(environment: Environment, layout: Layout, kind: Kind, *, fed: bool) -> Stop:
    """Run the pipeline, let it settle, and send one request."""
    folder = environment.fresh(f"stop-{kind}")
    measured = pipeline(folder, layout)
    sources = [stage.name for stage in measured.stages if stage.kind.is_source]
    for number in range(3):
        for source in sources:
            write_rows(folder, source, number)
    over = threading.Event()
    asked_at = answered_at = 0.0

    def feed() -> None:
        number = 3
        while fed and not over.wait(FEED_SECONDS):
            for source in sources:
                write_rows(folder, source, number)
            number += 1

    feeding = threading.Thread(target=feed)

    def control(job: JobExecution) -> None:
        nonlocal asked_at, answered_at
        wait_until(lambda: all(job.rows().get(source) for source in sources))
        feeding.start()
        time.sleep(SETTLE_SECONDS)
        requester = PipelineControl(CheckpointStorage(open_store(str(folder / "store")), measured.name), asked_by="bench")
        asked_at = time.monotonic()
        if kind == "end_source":
            requester.end_source(sources[0]).wait(120.0)
        else:
            requester.stop(drain=kind == "drain").wait(120.0)
        answered_at = time.monotonic()
        over.set()
        if kind == "end_source":
            requester.stop(drain=False).wait(120.0)

    try:
        run = run_under_control(environment, measured, folder, control)
    finally:
        over.set()
    chains = next(event.chains for _, event in run.events if isinstance(event, JobStarted))
    if len(chains) != (len(measured.stages) if layout == "through channels" else 1):
        raise BenchFailed(f"expected the stages {layout}, found the queries {chains}")
    answered = answered_at - asked_at
    if kind == "end_source":
        return Stop(answered)
    saved_at, savepoint = next((at, event) for at, event in run.events if isinstance(event, SavepointDone))
    saved = saved_at - asked_at
    return Stop(answered, saved - savepoint.checkpoint.duration, saved, run.started_at + run.seconds - asked_at)


def write_rows(folder: Path, source: str, number: int) -> None:
    """Write a source's next file, whose rows are two seconds later than those of the file before."""
    moment = dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=2 * number)
    rows = [json.dumps({"ts": moment.isoformat(), "k": f"k{key}", "v": number}) for key in range(ROWS_PER_FILE)]
    file = folder / f"{source}-{number}"
    file.write_text("\n".join(rows) + "\n")
    file.rename(folder / source / f"{number:06d}.json")


def pipeline(folder: Path, layout: Layout) -> Pipeline:
    """One or two sources, and a window over the rows of all."""
    names = ("left",) if layout == "chained" else ("left", "right")
    stages: list[Stage] = [_source(folder / name) for name in names]
    inputs = {name: StageInput(fuse=layout != "through channels") for name in names}
    return Pipeline("stops", [*stages, Counts("counts", inputs=inputs, sink=ParquetSink(folder / "result"))])


def _source(folder: Path) -> Stage:
    folder.mkdir()

    def read(context: StageContext) -> DataFrame:
        return context.spark.readStream.schema(SCHEMA).json(str(folder))

    return unbounded_source(name=folder.name, watermark=("ts", "10 seconds"))(read)


class Counts(Stage):
    """Counts and sums the rows of all inputs by window and key."""

    def transform(self, context: StageContext, **inputs: DataFrame) -> DataFrame:
        both = functools.reduce(lambda one, other: one.unionByName(other), inputs.values())
        counted = both.groupBy(F.window("ts", "10 seconds"), "k").agg(F.count("*").alias("n"), F.sum("v").alias("v"))
        return counted.select(F.col("window.start").alias("start"), "k", "n", "v")
