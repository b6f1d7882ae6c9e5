"""The number of random pipelines per second that the simulator runs from their beginning to their end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO

from bench.environment import BenchFailed, Environment
from bench.measures import Measure, at_least
from simulation.search import search

PART = "Simulator"
SECONDS = 20.0
FIRST_SEED = 12345
PIPELINES = 200.0  # per second


def measure(environment: Environment) -> Iterator[Measure]:
    rate = pipelines_per_second(SECONDS)
    yield at_least(PART, "Random pipelines, one core", rate, "/s", PIPELINES, f"{SECONDS:.0f} s from seed {FIRST_SEED}")


def pipelines_per_second(seconds: float) -> float:
    """The rate of one worker. Raises BenchFailed if a pipeline breaks an invariant."""
    with redirect_stdout(StringIO()) as printed:
        counts, failed_seeds = search(FIRST_SEED, 1, seconds)
    if failed_seeds:
        raise BenchFailed(f"The simulator has found something:\n{printed.getvalue()}")
    return counts["pipelines"] / seconds
