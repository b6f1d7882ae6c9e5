"""From the launch of a driver's process to its first completed checkpoint, compared with plain PySpark.

Both restart, and find one new file of input: this project as a Dagster job that continues from a savepoint, until a checkpoint
holds the new rows; plain PySpark as a hand-written query that continues from its own checkpoint, until the new batch is
committed. The archive of Java classes is made before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench import computation
from bench.computation import Rows
from bench.control import wait_until
from bench.environment import BenchFailed, Environment, session_settings
from bench.measures import Measure, below
from bench.processes import cpu_seconds
from dagster_checkpoints.control import PipelineControl
from dagster_checkpoints.storage import CheckpointStorage, open_store

PART = "Start"
FILES, ROWS = 32, 20_000
DEADLINE_SECONDS = 300.0
POLL_SECONDS = 0.02
LIMIT = 1.5
MILESTONES = {
    "PipelineAcquired": "Python, Dagster and the definitions are loaded, the run owns the pipeline",
    "SparkStarted": "Spark has started",
    "JobStarted": "the state is restored, the plans are built",
    "QueryStarted": "the query has started",
    "FirstBatch": "the first batch was processed",
    "CheckpointDone": "a checkpoint holds its rows",
}
"""The job's events in their order, and what is done when each is reported."""


@dataclass
class Starts:
    """The measured starts of one kind: seconds to the goal, and processor time until then.

    Attributes:
        steps: Seconds from the launch to each milestone, by milestone.
    """

    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    steps: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def until(self, reached: Callable[[], bool], process: subprocess.Popen[bytes], began: float) -> None:
        """Wait for the goal of a start, and record it."""
        while not reached():
            if process.poll() is not None or time.time() > began + DEADLINE_SECONDS:
                raise BenchFailed(f"process {process.args!r} did not reach its goal; its output is in the run's folder")
            time.sleep(POLL_SECONDS)
        self.seconds.append(time.time() - began)
        self.processor.append(cpu_seconds(process.pid))

    def ratios(self, other: Starts) -> tuple[float, float]:
        """The medians of the ratios of pairs: of the seconds, and of the processor time."""
        seconds = median(mine / theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True))
        return seconds, median(mine / theirs for mine, theirs in zip(self.processor, other.processor, strict=True))

    def until_exit(self, process: subprocess.Popen[bytes], began: float) -> None:
        """Wait for the end of a process that ends by itself, and record it."""
        processor = 0.0
        while process.poll() is None:
            if time.time() > began + DEADLINE_SECONDS:
                raise BenchFailed(f"process {process.args!r} did not end; its output is in the run's folder")
            processor = max(processor, cpu_seconds(process.pid))
            time.sleep(POLL_SECONDS)
        self.seconds.append(time.time() - began)
        self.processor.append(processor)


def measure(environment: Environment) -> Iterator[Measure]:
    rows = computation.generate(environment.spark, environment.cache, ROWS, FILES)
    folder = environment.fresh("start")
    plain, project = Starts(), Starts()
    cache = environment.cache / "start"
    for number in range(environment.repeats + 1):
        if number == 1:  # the first is a new start, which has recorded the classes
            wait_until(lambda: any(cache.rglob("classes-*.jsa")))
            plain, project = Starts(), Starts()
        restart_query(folder / "plain", rows, number, plain)
        restart_job(folder / "project", cache, rows, number, project)
        environment.say(
            f"  {number}/{environment.repeats} plain {plain.seconds[-1]:.1f} s ({plain.processor[-1]:.1f} s of processor time), "
            f"project {project.seconds[-1]:.1f} s ({project.processor[-1]:.1f} s)"
        )
    yield Measure(PART, "plain PySpark: launch to the first commit", median(plain.seconds), "s", note=_processor(plain))
    what = "this project: launch to the first checkpoint"
    yield Measure(PART, what, median(project.seconds), "s", note=_processor(project))
    at = 0.0
    for milestone, text in MILESTONES.items():
        before, at = at, median(project.steps[milestone])
        yield Measure(PART, f"  of it: {text}", at - before, "s")
    ratio, processor = project.ratios(plain)
    yield below(PART, "this project / plain PySpark", ratio, "", LIMIT, f"processor time {processor:.2f}")


def _processor(starts: Starts) -> str:
    return f"processor time {median(starts.processor):.1f} s"


def restart_query(folder: Path, rows: Rows, number: int, starts: Starts) -> None:
    """Start plain PySpark's query, and stop it after its first commit."""
    feed(rows, folder / "input", number)
    commits = folder / "checkpoint" / "commits"
    before = _newest(commits)
    command = [sys.executable, "-m", "bench.plain_query", str(folder), json.dumps(session_settings())]
    with driver(command, folder, {}) as (process, began):
        starts.until(lambda: _newest(commits) > before, process, began)


def restart_job(folder: Path, cache: Path, rows: Rows, number: int, starts: Starts) -> None:
    """Launch the Dagster job, and suspend it after the checkpoint."""
    with launched_job(folder, cache, rows, number, starts) as process:
        suspend(folder, process)


@contextmanager
def launched_job(folder: Path, cache: Path, rows: Rows, number: int, starts: Starts) -> Iterator[subprocess.Popen[bytes]]:
    """Launch the Dagster job with one more file of input, and wait for the checkpoint that holds its rows.

    Args:
        folder: The folder of the job.
        cache: The cache directory of the job's process, which keeps the archive of Java classes.
        rows: The rows of input.
        number: The number of starts before.
        starts: Gets the times of this start.
    """
    feed(rows, folder / "input", number)
    events = folder / "events"
    events.unlink(missing_ok=True)
    command, variables = job_command(folder, cache)
    with driver(command, folder, variables) as (process, began):
        starts.until(lambda: "CheckpointDone" in _reached(events), process, began)
        for milestone, at in _reached(events).items():
            starts.steps[milestone].append(at - began)
        yield process


def job_command(folder: Path, cache: Path, config: dict[str, str] | None = None) -> tuple[list[str], dict[str, str]]:
    """The command that runs the Dagster job of a folder, and its environment variables.

    Args:
        folder: The folder of the job.
        cache: The cache directory of the job's process, which keeps the archive of Java classes.
        config: The run configuration of the pipeline's op.
    """
    (folder / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    (folder / "run.yaml").write_text(json.dumps({"ops": {"endless_assets": {"config": config or {}}}}))
    location = Path(__file__).with_name("start_location.py")
    command = [sys.executable, "-m", "dagster", "job", "execute", "-f", str(location), "-j", "endless"]
    variables = {"BENCH_START_FOLDER": str(folder), "DAGSTER_HOME": str(folder), "XDG_CACHE_HOME": str(cache)}
    return [*command, "-c", str(folder / "run.yaml")], variables


def suspend(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Suspend the job of a folder, and wait until its process has ended."""
    storage = CheckpointStorage(open_store(str(folder / "store")), "endless")
    PipelineControl(storage, asked_by="bench").stop(drain=False).wait(DEADLINE_SECONDS)
    process.wait(DEADLINE_SECONDS)


def feed(rows: Rows, gate: Path, number: int) -> None:
    """Link one more file of rows into the folder that the source reads."""
    gate.mkdir(parents=True, exist_ok=True)
    file = sorted(rows.folder.glob("part-*.parquet"))[number]
    os.link(file, gate / file.name)


@contextmanager
def driver(command: list[str], folder: Path, variables: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """A driver's process and the time of its launch. It is told to end by the end of its standard input, or killed."""
    with (folder / "output.log").open("ab") as log:
        began = time.time()
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env={**os.environ, **variables}, start_new_session=True
        )
    try:
        yield process, began
        assert process.stdin is not None
        process.stdin.close()
        process.wait(DEADLINE_SECONDS)
    finally:
        process.kill()
        process.wait()


def _newest(commits: Path) -> int:
    return max((int(entry.name) for entry in commits.glob("[0-9]*")), default=-1)


def _reached(events: Path) -> dict[str, float]:
    """The time of each milestone that the job has reached: of the first such event behind the milestone before it."""
    lines = iter(events.read_text().splitlines() if events.exists() else ())
    reached = {}
    for milestone in MILESTONES:
        for event in map(json.loads, lines):
            if event["what"] == milestone and event["rows"] != 0:
                reached[milestone] = event["at"]
                break
    return reached
