"""The time from the death of a process to the first new checkpoint of its successor.

Child processes (`python -m bench.recovery`) run the pipeline, so that one of them can be killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING

from bench import computation
from bench.computation import EVENT_TIME, LATENESS, Rows
from bench.environment import BenchFailed, Environment, session_settings
from bench.measures import Measure
from dagster_checkpoints.pipeline import Pipeline, StageContext, stage, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.job.events import CheckpointDone, JobEvent, JobStarted
from dagster_checkpoints.spark.job.job_execution import JobExecution
from dagster_checkpoints.spark.session.spark_session import build_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PART = "Recovery"
LEASE_SECONDS = 5.0
INTERVAL = 1.0
ROWS = 20_000
DEADLINE_SECONDS = 120.0
MILESTONES = {  # the successor's message, and the step that is then done
    "alive": "Python has started and imported everything",
    "acquired": "the lease of the dead process has run out",
    "spark": "Spark has started",
    "started": "state is restored, the query planned",
    "checkpoint": "the query has started, the first checkpoint is complete",
}


def measure(environment: Environment) -> Iterator[Measure]:
    computation.generate(environment.spark, environment.cache, ROWS, 4)
    folder = environment.fresh("recovery")
    first = _child(environment, folder)
    try:
        _await(first, "checkpoint")
        _await(first, "checkpoint")
        first.kill()
        killed = time.time()
        first.wait()
        second = _child(environment, folder)
        try:
            at = [_await(second, what) - killed for what in MILESTONES]
        finally:
            second.kill()
            second.wait()
    finally:
        first.kill()
        first.wait()
    note = f"lease_seconds={LEASE_SECONDS:.0f}, checkpoints every {INTERVAL:.0f} s, chained; the successor starts at once"
    yield Measure(PART, "kill to the successor's first new checkpoint", at[-1], "s", note=note)
    for text, end, begin in zip(MILESTONES.values(), at, [0.0, *at], strict=False):
        yield Measure(PART, f"  of it: {text}", end - begin, "s")


def _child(environment: Environment, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.recovery", str(environment.cache), str(folder)]
    with open(folder / "stderr.log", "a") as log:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)


def _await(child: subprocess.Popen[str], word: str) -> float:
    """The time at which the child reports a milestone. Raises BenchFailed if the child ends first, or takes far too long."""
    output: IO[str] | None = child.stdout
    assert output is not None
    until = time.monotonic() + DEADLINE_SECONDS
    for line in output:
        report = json.loads(line)
        if report["what"] == word:
            return float(report["at"])
        if time.monotonic() > until:
            break
    raise BenchFailed(f"the child never reported {word!r}; its stderr is in the run's folder")


# The child


def _report(what: str) -> None:
    print(json.dumps({"what": what, "at": time.time()}), flush=True)


class _ReportingEnvironment(Environment):
    @cached_property
    def spark(self) -> SparkSession:
        _report("acquired")  # a job requests its session after it has acquired the pipeline
        session = build_session(session_settings())
        _report("spark")
        return session


def _report_event(event: JobEvent, job: JobExecution) -> None:
    if isinstance(event, JobStarted):
        _report("started")
    elif isinstance(event, CheckpointDone):
        _report("checkpoint")


def endless(rows: Rows, output: Path) -> Pipeline:
    """The computation over a source that waits for more rows when it has read all files."""

    @unbounded_source(watermark=(EVENT_TIME, LATENESS))
    def readings(context: StageContext) -> DataFrame:
        return computation.parsed(rows.stream(context.spark))

    @stage(sink=ParquetSink(output))
    def windows(readings: DataFrame) -> DataFrame:
        return computation.windowed(computation.enriched(readings))

    return Pipeline("endless", [readings, windows])


def main(cache: Path, folder: Path) -> None:
    """Run until killed."""
    _report("alive")
    environment = _ReportingEnvironment(ROWS, 1, cache, folder)
    rows = Rows(cache / f"rows-{ROWS}-4", ROWS, 4)
    environment.run_job(endless(rows, folder / "result"), folder, INTERVAL, lease_seconds=LEASE_SECONDS, on_event=_report_event)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
