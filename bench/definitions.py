"""What loading definitions costs a process of Dagster: its own modules against these and an example's definitions, in pairs.

A code server, the daemon's sensors and each command of `dg` load them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench.environment import BenchFailed, Environment
from bench.measures import Measure, below

PART = "Definitions"
REPOSITORY = Path(__file__).resolve().parent.parent
DAGSTER = "import dagster, dagster._cli.api, dagster._core.storage.runs"
"""What a process that loads definitions has loaded before, without any of ours."""
EXAMPLES = {
    "the component, and the pipeline of examples/shop": "import dagster_checkpoints.plugin.component, shop.defs.sales.pipeline",
    "this repository's code location": "import definitions; definitions.defs.get_repository_def()",
}


def measure(environment: Environment) -> Iterator[Measure]:
    """The seconds that definitions add, as medians of pairs of processes; the first pair fills the caches of files."""
    for name, code in EXAMPLES.items():
        pairs = [(_run(DAGSTER), _run(f"{DAGSTER}; {code}")) for _ in range(environment.repeats + 1)][1:]
        wall, processor = (median(mine[index] - dagsters[index] for dagsters, mine in pairs) for index in (0, 1))
        alone = median(dagsters[0] for dagsters, _ in pairs)
        yield below(PART, name, wall, "s", 1.0, f"Dagster alone {alone:.2f} s; {processor:.2f} s of processor time are added")


def _run(code: str) -> tuple[float, float]:
    """Wall-clock and processor seconds of a process."""
    paths = [str(REPOSITORY), str(REPOSITORY / "examples/shop/src")]
    before, began = os.times(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True
    )
    seconds, after = time.perf_counter() - began, os.times()
    if done.returncode:
        raise BenchFailed(f"definitions cannot be loaded by {code!r}: {done.stderr[-2000:]}")
    user, system = after.children_user - before.children_user, after.children_system - before.children_system
    return seconds, user + system
