"""Other instances of a stage with keyed state: the start of a run that moves the state, against a verified copy of its files.

The state is moved row by row, and, of a stage with `state_partitions`, by whole partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.control import request, run_under_control, wait_until
from bench.environment import BenchFailed, Environment
from bench.measures import Measure, below
from bench.savepoints import VALUE_BYTES, copy_seconds, source_of_values, stages_with_state
from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, stage
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.job.events import JobStarted
from dagster_checkpoints.spark.job.job_execution import JobExecution

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PART = "Rescaling"
KEYS = 1_000_000
"""Of one kilobyte each; fewer with a smaller `--rows`."""
STATE_PARTITIONS = 4
Stages = Callable[[int, Path, Sequence[str]], list[Stage]]


@dataclass(frozen=True)
class Stopped:
    """A run that was started and suspended: the seconds of building its tasks, and the files of its savepoint."""

    start: float
    files: list[Path]


def measure(environment: Environment) -> Iterator[Measure]:
    yield from _measure(environment, "row by row", stages_with_state, 1)
    yield from _measure(environment, "whole partitions", stages_with_partitions, environment.repeats)


def stages_with_partitions(keys: int, folder: Path, instances: Sequence[str]) -> list[Stage]:
    """A source with large values, and a stage that keeps them all in its state, whose partitions are the stage's key groups."""
    events = source_of_values(keys, folder)

    @stage(
        inputs={"events": StageInput(key="payload")},
        instances=instances,
        state_partitions=STATE_PARTITIONS,
        sink=ParquetSink(folder / "held"),
    )
    def held(events: DataFrame) -> DataFrame:
        return events.dropDuplicates(["payload"]).where("k < 0").select("k", "payload")

    return [events, held]


@dataclass(frozen=True)
class Round:
    """Seconds of starts, one after the other: with the same 2 instances, with 4, and with 2 again; and of copies of the files."""

    same: float
    more: float
    fewer: float
    copy: float
    checked_copy: float


def _measure(environment: Environment, moved: str, stages: Stages, repeats: int) -> Iterator[Measure]:
    keys = min(environment.rows, KEYS)
    small, _ = _rounds(environment, stages, max(1, keys // 1000), repeats)
    large, size = _rounds(environment, stages, keys, repeats)
    same, more, fewer, copy, checked = (_median(large, name) for name in ("same", "more", "fewer", "copy", "checked_copy"))
    adds = {4: more - _median(small, "more"), 2: fewer - _median(small, "fewer")}
    yield Measure(PART, f"{moved}: start with the same 2 instances", same, "s", note=f"{size:,.0f} MB of state")
    yield Measure(PART, f"{moved}: start with 4 instances, which moves the state", more, "s")
    yield Measure(PART, f"{moved}: start with 2 instances again", fewer, "s")
    yield Measure(PART, f"{moved}: parallel copy of the files, with their sha256", checked, "s", note=f"without it {copy:.2f} s")
    name = f"{moved}: what the state adds to the start with 4 instances / copy with sha256"
    yield below(PART, name, adds[4] / checked, "", 2, "above the start with a thousandth of the state")
    yield below(PART, f"{moved}: the same with 2 instances again", adds[2] / checked, "", 2)


def _median(rounds: Sequence[Round], name: str) -> float:
    return median(getattr(each, name) for each in rounds)


def _rounds(environment: Environment, stages: Stages, keys: int, repeats: int) -> tuple[list[Round], float]:
    """The rounds, and the size of the state in MB."""
    folder = environment.fresh("rescaling")
    files = _run(environment, stages, keys, folder, "ab").files
    rounds = []
    for _ in range(repeats):
        same, more, fewer = (_run(environment, stages, keys, folder, instances) for instances in ("ab", "abcd", "ab"))
        copies = (copy_seconds(fewer.files, environment.fresh("copies"), checked=checked) for checked in (False, True))
        rounds.append(Round(same.start, more.start, fewer.start, *copies))
    return rounds, sum(file.stat().st_size for file in files) / 1e6


def _run(environment: Environment, stages: Stages, keys: int, folder: Path, instances: Sequence[str]) -> Stopped:
    """Start the pipeline, or continue it, until it has read everything; then suspend it."""
    files: list[Path] = []

    def control(job: JobExecution) -> None:
        wait_until(lambda: job.rows().get("events", 0) >= keys)
        answer = request(job, "stop")
        files.extend(file for file in Path(answer.url.removeprefix("file://")).rglob("*") if file.is_file())

    pipeline = Pipeline("held", stages(keys, folder, tuple(instances)), chaining=False)
    run = run_under_control(environment, pipeline, folder, control)
    if sum(file.stat().st_size for file in files) < keys * VALUE_BYTES:
        raise BenchFailed(f"the savepoint holds less than the {keys:,} values that were read")
    (start,) = (event.seconds for _, event in run.events if isinstance(event, JobStarted))
    environment.say(f"  {len(instances)} instances: started in {start:.1f} s")
    return Stopped(start, files)
