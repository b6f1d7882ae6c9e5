"""Random worlds for a given time, in several processes, and their statistics.

A world that breaks an invariant is shrunk, printed as a list of steps, and ends the search of all workers.
"""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import suppress
from itertools import count, islice

from simulation.running import run, show, shrink
from simulation.scenario import random_scenario

SHOWN = (
    "checkpoints", "savepoints", "stops", "crashes", "pauses", "task failures", "take-overs", "take-overs at once", "restores",
    "rescalings", "rescalings in flight", "rescalings of ended instances", "divisions", "restarts", "finished tasks",
    "finishes", "records", "steps",
)  # fmt: skip
"""The counts that are printed at the end."""
PROGRESS_COUNTS = ("pipelines", "checkpoints", "crashes", "take-overs", "finishes")
PROGRESS_SECONDS = 60.0
"""Interval of the progress lines, seconds."""
WORLDS_AT_ONCE = 20
"""Number of worlds that a worker runs before it returns their counts."""


def trace(seed: int, seconds: float = 60.0) -> str | None:
    """The fewest steps that lead to a seed's violation, as text; None if the seed breaks no invariant."""
    scenario = random_scenario(seed)
    outcome = run(scenario)
    return None if outcome.error is None else show(scenario, shrink(scenario, outcome, seconds))


def search(first: int, workers: int, seconds: float) -> tuple[Counter[str], list[int]]:
    """Search in several worker processes, and print the statistics.

    A violation in one process stops the others, and is printed at once.

    Args:
        first: the first seed.
        workers: number of worker processes.
        seconds: time after which no new worlds are begun.

    Returns:
        The sum of the worlds' counts, "pipelines" among them, and the seeds that broke an invariant.
    """
    began = time.monotonic()
    progress_at = began + PROGRESS_SECONDS
    counts, failed_seeds = Counter[str](), list[int]()
    with ProcessPoolExecutor(workers, initializer=_prepare) as pool, suppress(KeyboardInterrupt):
        work = (pool.submit(_simulate, range(seed, seed + WORLDS_AT_ONCE)) for seed in count(first, WORLDS_AT_ONCE))
        running = set(islice(work, workers))
        while running:
            done, running = wait(running, max(progress_at - time.monotonic(), 0.0), FIRST_COMPLETED)
            for future in done:
                new_counts, failed_seed = future.result()
                counts.update(new_counts)
                if failed_seed is not None:
                    failed_seeds.append(failed_seed)
                    print(f"seed {failed_seed} breaks an invariant; shortening its steps", file=sys.stderr, flush=True)
                    print(trace(failed_seed) or f"seed {failed_seed} broke an invariant, but not when repeated", flush=True)
                elif not failed_seeds and time.monotonic() < began + seconds:
                    running.add(next(work))
            if time.monotonic() >= progress_at:
                progress_at += PROGRESS_SECONDS
                counted = ", ".join(f"{counts[name]:,} {name}" for name in PROGRESS_COUNTS)
                print(f"{time.monotonic() - began:5.0f} s: {counted}", file=sys.stderr, flush=True)
    took = time.monotonic() - began
    rate = counts["pipelines"] / max(took, 0.001)
    print(f"{counts['pipelines']:>12,} pipelines in {took:.0f} s, {rate:.0f} per second, from seed {first}")
    for name in SHOWN:
        print(f"{counts[name]:>12,} {name}")
    for seed in failed_seeds:
        print(f"found by seed {seed}")
    return counts, failed_seeds


def _prepare() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # garbage arises only at the end of a world, and is collected there


def _simulate(seeds: range) -> tuple[Counter[str], int | None]:
    """Run these worlds until one breaks an invariant. Returns their counts, and the seed that did, if any."""
    counts = Counter[str]()
    for seed in seeds:
        outcome = run(random_scenario(seed), record=False)
        gc.collect(0)  # a world is one big reference cycle, in the youngest generation
        counts.update(outcome.counts, pipelines=1)
        if outcome.error is not None:
            return counts, seed
    return counts, None
