"""`python -m simulation`: random worlds for a given time, and what was seen in them. `make simulate` calls it.

A world that breaks an invariant is shrunk, printed as a list of steps, and ends the run with an error.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor

from simulation.running import run
from simulation.scenario import random_scenario
from simulation.shrinking import show, shrink

SHOWN = {
    "checkpoints": "checkpoints",
    "savepoints": "savepoints",
    "stops": "stops with savepoint",
    "crashes": "crashes of processes",
    "pauses": "pauses of processes",
    "task failures": "failures of tasks",
    "take-overs": "take-overs",
    "restores": "restores",
    "rescalings": "rescalings",
    "restarts": "restarts of jobs",
    "finished tasks": "finished tasks",
    "finishes": "finished jobs",
    "records": "records",
    "steps": "steps",
}
"""What is printed of what was counted."""


def simulate(first_seed: int, step: int, seconds: float) -> tuple[int, Counter[str], int | None]:
    """Run worlds for so long, or until one breaks an invariant.

    Returns:
        How many worlds, what was counted in them, and the seed that found something.
    """
    until = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    worlds, seed = 0, first_seed
    while time.monotonic() < until:
        outcome = run(random_scenario(seed), record=False)
        worlds += 1
        counts.update(outcome.counts)
        if outcome.error is not None:
            return worlds, counts, seed
        seed += step
    return worlds, counts, None


def trace(seed: int, seconds: float = 60.0) -> str | None:
    """The shortest way to what a seed finds; None if it finds nothing."""
    scenario = random_scenario(seed)
    outcome = run(scenario)
    return None if outcome.error is None else show(*shrink(scenario, outcome, seconds))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation", description="Try to break the protocol.")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (%(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="the first seed; random by default")
    parser.add_argument("--workers", type=int, default=1, help="processes (%(default)s)")
    parser.add_argument("--replay", type=int, default=None, metavar="SEED", help="shrink and print what this seed finds")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        found = trace(options.replay)
        print(found or f"seed {options.replay} breaks no invariant")
        return 1 if found else 0
    first = random.randrange(10**9) if options.seed is None else options.seed
    began = time.monotonic()
    worlds, counts, broken = _all(first, options.workers, options.seconds)
    print(report(worlds, counts, time.monotonic() - began, first))
    for seed in broken:
        print(trace(seed) or f"seed {seed} broke an invariant, and does so no more", flush=True)
    return 1 if broken else 0


def _all(first: int, workers: int, seconds: float) -> tuple[int, Counter[str], list[int]]:
    found: Iterable[tuple[int, Counter[str], int | None]]
    if workers == 1:
        found = [simulate(first, 1, seconds)]
    else:
        with ProcessPoolExecutor(workers) as pool:
            found = [f.result() for f in [pool.submit(simulate, first + n, workers, seconds) for n in range(workers)]]
    worlds, counts, broken = 0, Counter[str](), []
    for some, seen, seed in found:
        worlds += some
        counts.update(seen)
        broken += [seed] if seed is not None else []
    return worlds, counts, broken


def report(worlds: int, counts: Counter[str], seconds: float, first: int) -> str:
    """What was seen, for people."""
    lines = [f"{worlds:>12,} pipelines in {seconds:.0f} s, {worlds / max(seconds, 0.001):.0f} per second, from seed {first}"]
    lines += [f"{counts[name]:>12,} {title}" for name, title in SHOWN.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
