"""Other instances of a stage with keyed state: the start of a run that moves the state, against a plain copy of its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.control import request, run_under_control, wait_until
from bench.environment import BenchFailed, Environment
from bench.measures import Measure, below
from bench.savepoints import VALUE_BYTES, copy_seconds, stages_with_state
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.job.events import JobStarted
from dagster_checkpoints.spark.job.job_execution import JobExecution

PART = "Rescaling"
KEYS = 1_000_000
"""Of one kilobyte each; fewer with a smaller `--rows`."""


@dataclass(frozen=True)
class Stopped:
    """A run that was started and suspended: the seconds of building its tasks, and the files of its savepoint."""

    start: float
    files: list[Path]


def measure(environment: Environment) -> Iterator[Measure]:
    keys, folder = min(environment.rows, KEYS), environment.fresh("rescaling")
    first = _run(environment, keys, folder, "ab")
    copy = copy_seconds(first.files, environment.fresh("copies"))
    same = _run(environment, keys, folder, "ab")
    other = _run(environment, keys, folder, "abcd")
    size = sum(file.stat().st_size for file in first.files) / 1e6
    yield Measure(PART, "start with the same 2 instances", same.start, "s", note=f"{size:,.0f} MB of state")
    yield Measure(PART, "start with 4 instances, which moves the state", other.start, "s")
    yield below(PART, "start with 4 instances / plain parallel copy of the files", other.start / copy, "", 2)


def _run(environment: Environment, keys: int, folder: Path, instances: Sequence[str]) -> Stopped:
    """Start the pipeline, or continue it, until it has read everything; then suspend it."""
    files: list[Path] = []

    def control(job: JobExecution) -> None:
        wait_until(lambda: job.rows().get("events", 0) >= keys)
        answer = request(job, "stop")
        files.extend(file for file in Path(answer.url.removeprefix("file://")).rglob("*") if file.is_file())

    pipeline = Pipeline("held", stages_with_state(keys, folder, tuple(instances)), chaining=False)
    run = run_under_control(environment, pipeline, folder, control)
    if sum(file.stat().st_size for file in files) < keys * VALUE_BYTES:
        raise BenchFailed(f"the savepoint holds less than the {keys:,} values that were read")
    (start,) = (event.seconds for _, event in run.events if isinstance(event, JobStarted))
    environment.say(f"  {len(instances)} instances: started in {start:.1f} s")
    return Stopped(start, files)
