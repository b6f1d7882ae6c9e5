"""From the death of a process to the first new checkpoint of its successor.

The pipeline is run by children of this process (`python -m bench.recovery`), so that one of them can be killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from bench import computation
from bench.computation import EVENT_TIME, LATENESS, Rows
from bench.measures import Measure
from bench.setting import BenchFailed, Setting
from dagster_checkpoints.pipeline import Pipeline, StageContext, stage, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.events import CheckpointDone, JobEvent, JobStarted
from dagster_checkpoints.spark.job import JobExecution

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PART = "Recovery"
LEASE_SECONDS = 5.0
INTERVAL = 1.0
ROWS = 20_000
DEADLINE_SECONDS = 120.0


def measure(setting: Setting) -> Iterator[Measure]:
    computation.generate(setting.spark, setting.cache, ROWS, 4)
    folder = setting.fresh("recovery")
    first = _child(setting, folder)
    try:
        _await(first, "checkpoint")
        _await(first, "checkpoint")
        first.kill()
        killed = time.time()
        first.wait()
        second = _child(setting, folder)
        try:
            alive = _await(second, "alive") - killed
            started = _await(second, "started") - killed
            done = _await(second, "checkpoint") - killed
        finally:
            second.kill()
            second.wait()
    finally:
        first.kill()
        first.wait()
    note = f"lease_seconds={LEASE_SECONDS:.0f}, checkpoints every {INTERVAL:.0f} s, chained; the successor starts at once"
    yield Measure(PART, "kill to the successor's first new checkpoint", done, "s", note=note)
    yield Measure(PART, "  of it: its process is there, packages imported", alive, "s")
    yield Measure(PART, "  of it: lease run out, Spark started, state restored", started - alive, "s")
    yield Measure(PART, "  of it: first checkpoint", done - started, "s")


def _child(setting: Setting, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.recovery", str(setting.cache), str(folder)]
    with open(folder / "stderr.log", "a") as log:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)


def _await(child: subprocess.Popen[str], word: str) -> float:
    """The time at which the child says a word. Raises BenchFailed if it ends, or takes far too long."""
    output: IO[str] | None = child.stdout
    assert output is not None
    until = time.monotonic() + DEADLINE_SECONDS
    for line in output:
        said = json.loads(line)
        if said["what"] == word:
            return float(said["at"])
        if time.monotonic() > until:
            break
    raise BenchFailed(f"the child never said {word!r}; its stderr is in the run's folder")


# The child


def _say(what: str) -> None:
    print(json.dumps({"what": what, "at": time.time()}), flush=True)


def _tell(event: JobEvent, job: JobExecution) -> None:
    if isinstance(event, JobStarted):
        _say("started")
    elif isinstance(event, CheckpointDone):
        _say("checkpoint")


def endless(rows: Rows, output: Path) -> Pipeline:
    """The computation over a source that waits for more when it has read everything."""

    @unbounded_source(watermark=(EVENT_TIME, LATENESS))
    def readings(context: StageContext) -> DataFrame:
        return computation.parsed(rows.stream(context.spark))

    @stage(sink=ParquetSink(output))
    def windows(readings: DataFrame) -> DataFrame:
        return computation.windowed(computation.enriched(readings))

    return Pipeline("endless", [readings, windows])


def main(cache: Path, folder: Path) -> None:
    """Run until killed."""
    _say("alive")
    setting = Setting(ROWS, 1, cache, folder)
    rows = Rows(cache / f"rows-{ROWS}-4", ROWS, 4)
    setting.run_job(endless(rows, folder / "result"), folder, INTERVAL, lease_seconds=LEASE_SECONDS, on_event=_tell)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
