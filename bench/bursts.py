"""A burst, from the launch of its process to its end, compared with plain PySpark's `availableNow` of the same query.

Both continue from the burst before, and find one new file of input: this project as a Dagster job with `until: caught_up`, plain
PySpark as a hand-written query that continues from its own checkpoint. The archive of Java classes is made before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench import computation
from bench.control import wait_until
from bench.environment import BenchFailed, Environment, session_settings
from bench.measures import Measure, below
from bench.start import FILES, ROWS, Starts, driver, feed, job_command

PART = "Bursts"
LIMIT = 1.3


def measure(environment: Environment) -> Iterator[Measure]:
    rows = computation.generate(environment.spark, environment.cache, ROWS, FILES)
    folder, cache = environment.fresh("bursts"), environment.cache / "start"
    plain, project = Starts(), Starts()
    for number in range(environment.repeats + 2):
        if number == 2:  # the first is a new start, which has recorded the classes; the second continues a first time
            wait_until(lambda: any(cache.rglob("classes-*.jsa")))
            plain, project = Starts(), Starts()
        feed(rows, folder / "plain" / "input", number)
        command = [sys.executable, "-m", "bench.plain_query", str(folder / "plain"), json.dumps(session_settings()), "available"]
        run_to_end(command, folder / "plain", {}, plain)
        feed(rows, folder / "project" / "input", number)
        command, variables = job_command(folder / "project", cache, {"until": "caught_up"})
        run_to_end(command, folder / "project", variables, project)
        environment.say(
            f"  {number}: plain {plain.seconds[-1]:.1f} s ({plain.processor[-1]:.1f} s of processor time), "
            f"project {project.seconds[-1]:.1f} s ({project.processor[-1]:.1f} s)"
        )
    ratio, processor = project.ratios(plain)
    yield Measure(PART, "plain PySpark: a process with availableNow", median(plain.seconds), "s")
    yield Measure(PART, "this project: a run with until: caught_up", median(project.seconds), "s")
    yield below(PART, "this project / plain PySpark", ratio, "", LIMIT, f"processor time {processor:.2f}")


def run_to_end(command: list[str], folder: Path, variables: dict[str, str], starts: Starts) -> None:
    """Run a driver's process to its own end."""
    with driver(command, folder, variables) as (process, began):
        starts.until_exit(process, began)
        if process.returncode:
            raise BenchFailed(f"process {command!r} ended with exit code {process.returncode}; its output is in {folder}")
