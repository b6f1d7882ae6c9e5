"""Random worlds for a given time, in several processes, and their statistics.

A world that breaks an invariant is shrunk, printed as a list of steps, and ends the search of all workers.
"""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from itertools import count, islice

from simulation.running import run
from simulation.scenario import random_scenario
from simulation.shrinking import show, shrink

SHOWN = (
    "checkpoints", "savepoints", "stops", "crashes", "pauses", "task failures", "take-overs", "take-overs at once", "restores",
    "rescalings", "restarts", "finished tasks", "finishes", "records", "steps",
)  # fmt: skip
"""The counts that are printed."""
PROGRESS_SECONDS = 60.0
"""Interval of the progress lines, seconds."""
WORLDS_AT_ONCE = 20
"""Number of worlds that a worker runs before it returns their counts."""


def trace(seed: int, seconds: float = 60.0) -> str | None:
    """The fewest steps that lead to a seed's violation, as text; None if the seed breaks no invariant."""
    scenario = random_scenario(seed)
    outcome = run(scenario)
    return None if outcome.error is None else show(scenario, shrink(scenario, outcome, seconds))


class Search:
    """A search in several worker processes. A violation in one stops the others, and is printed at once.

    Args:
        first: the first seed.
        workers: number of worker processes.
        seconds: time after which no new worlds are begun.

    Attributes:
        worlds: number of worlds that were run.
        counts: the sum of their counts.
        failed_seeds: the seeds that broke an invariant.
    """

    def __init__(self, first: int, workers: int, seconds: float) -> None:
        self.first = first
        self.workers = workers
        self.seconds = seconds
        self.worlds = 0
        self.counts = Counter[str]()
        self.failed_seeds: list[int] = []
        self._began = time.monotonic()

    def run(self) -> int:
        """Search, and print the statistics. Returns the exit code: 0 if no invariant was broken."""
        with ProcessPoolExecutor(self.workers, initializer=_prepare) as pool, suppress(KeyboardInterrupt):
            self._run_workers(pool)
        seconds = self._seconds
        rate = self.worlds / max(seconds, 0.001)
        print(f"{self.worlds:>12,} pipelines in {seconds:.0f} s, {rate:.0f} per second, from seed {self.first}")
        for name in SHOWN:
            print(f"{self.counts[name]:>12,} {name}")
        for seed in self.failed_seeds:
            print(f"found by seed {seed}")
        return 1 if self.failed_seeds else 0

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _run_workers(self, pool: ProcessPoolExecutor) -> None:
        work = (pool.submit(_simulate, range(seed, seed + WORLDS_AT_ONCE)) for seed in count(self.first, WORLDS_AT_ONCE))
        running: set[Future[tuple[int, Counter[str], int | None]]] = set(islice(work, self.workers))
        progress_at = PROGRESS_SECONDS
        while running:
            done, running = wait(running, max(progress_at - self._seconds, 0.0), FIRST_COMPLETED)
            for future in done:
                worlds, counts, found = future.result()
                self.worlds += worlds
                self.counts.update(counts)
                if found is not None:
                    self._report(found)
                elif not self.failed_seeds and self._seconds < self.seconds:
                    running.add(next(work))
            if self._seconds >= progress_at:
                progress_at += PROGRESS_SECONDS
                counted = [f"{self.counts[name]:,} {name}" for name in ("checkpoints", "crashes", "take-overs", "finishes")]
                line = f"{self._seconds:5.0f} s: {self.worlds:,} pipelines, {', '.join(counted)}"
                print(line, file=sys.stderr, flush=True)

    def _report(self, seed: int) -> None:
        self.failed_seeds.append(seed)
        print(f"seed {seed} breaks an invariant; shortening its steps", file=sys.stderr, flush=True)
        print(trace(seed) or f"seed {seed} broke an invariant, but not when repeated", flush=True)


def _prepare() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # garbage arises only at the end of a world, and is collected there


def _simulate(seeds: range) -> tuple[int, Counter[str], int | None]:
    """Run these worlds until one breaks an invariant.

    Returns:
        The number of worlds run, their counts, and the seed that broke an invariant, if any.
    """
    counts = Counter[str]()
    for worlds, seed in enumerate(seeds, 1):
        outcome = run(random_scenario(seed), record=False)
        gc.collect(0)  # a world is one big reference cycle, in the youngest generation
        counts.update(outcome.counts)
        if outcome.error is not None:
            return worlds, counts, seed
    return len(seeds), counts, None
