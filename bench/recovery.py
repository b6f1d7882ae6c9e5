"""From the request of a suspend, or from the death of a driver's process, to the first new checkpoint of the next run.

The next run is launched as soon as the first process has ended. A sensor that launches it adds the time until its tick; a run on
another machine also waits for the lease: for that, the benchmark changes the name of the dead owner's machine in `state.json`.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from subprocess import Popen

from bench import computation
from bench.environment import Environment
from bench.measures import Measure
from bench.start import FILES, ROWS, Starts, launched_job, restart_query, suspend

PART = "Recovery"
Stop = Callable[[Path, Popen[bytes]], None]


def measure(environment: Environment) -> Iterator[Measure]:
    rows = computation.generate(environment.spark, environment.cache, ROWS, FILES)
    folder, cache = environment.fresh("recovery"), environment.cache / "start"
    numbers = itertools.count()
    plain, starts = Starts(), Starts()
    seconds: dict[str, list[float]] = defaultdict(list)
    stops: dict[str, Stop] = {
        "suspend to the first new checkpoint": suspend,
        "SIGKILL to the first new checkpoint, on the same machine": kill,
        "SIGKILL to the first new checkpoint, on another machine": kill_elsewhere,
    }
    restart_query(folder / "plain", rows, 0, Starts())
    for repeat in range(environment.repeats):
        restart_query(folder / "plain", rows, repeat + 1, plain)
        for what, stop in stops.items():
            with launched_job(folder / "job", cache, rows, next(numbers), Starts()) as process:
                began = time.time()
                stop(folder / "job", process)
                process.wait()
            with launched_job(folder / "job", cache, rows, next(numbers), starts) as process:
                seconds[what].append(time.time() - began)
                suspend(folder / "job", process)
            environment.say(f"  {repeat + 1}/{environment.repeats} {what}: {seconds[what][-1]:.1f} s")
    yield Measure(PART, "plain PySpark: launch to the first commit", median(plain.seconds), "s")
    for position, what in enumerate(stops):
        own = starts.steps["PipelineAcquired"][position :: len(stops)]
        note = f"of it {median(own):.1f} s from the launch until the run owns the pipeline; lease_seconds=30"
        yield Measure(PART, what, median(seconds[what]), "s", note=note)


def kill(folder: Path, process: Popen[bytes]) -> None:
    process.kill()


def kill_elsewhere(folder: Path, process: Popen[bytes]) -> None:
    """Kill the process, and let its owner in `state.json` be a process of another machine."""
    process.kill()
    process.wait()
    file = folder / "store" / "endless" / "state.json"
    state = json.loads(file.read_text())
    state["lease"]["owner"]["host"] += "-elsewhere"
    file.write_text(json.dumps(state))
