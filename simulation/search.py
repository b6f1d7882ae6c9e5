"""Random worlds for a given time, in several processes, and what was seen in them.

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
"""What is printed of what was counted."""
PROGRESS_SECONDS = 60.0
"""How often a line is printed during the search."""
WORLDS_AT_ONCE = 20
"""So many worlds a worker runs before it says what it has seen."""


def trace(seed: int, seconds: float = 60.0) -> str | None:
    """The shortest way to what a seed finds; None if it finds nothing."""
    scenario = random_scenario(seed)
    outcome = run(scenario)
    return None if outcome.error is None else show(scenario, shrink(scenario, outcome, seconds))


class Search:
    """All workers: a process each. What one finds stops the others, and is printed at once.

    Args:
        first: the first seed.
        workers: number of processes.
        seconds: how long new worlds are begun.

    Attributes:
        worlds: how many were run.
        counts: what was seen in them.
        found: the seeds that found something.
    """

    def __init__(self, first: int, workers: int, seconds: float) -> None:
        self.first = first
        self.workers = workers
        self.seconds = seconds
        self.worlds = 0
        self.counts = Counter[str]()
        self.found: list[int] = []
        self._began = time.monotonic()

    def go(self) -> int:
        """Search, and print what was seen. Returns the exit code: 0 if nothing was found."""
        with ProcessPoolExecutor(self.workers, initializer=_prepare) as pool, suppress(KeyboardInterrupt):
            self._go_on(pool)
        seconds = self._seconds
        rate = self.worlds / max(seconds, 0.001)
        print(f"{self.worlds:>12,} pipelines in {seconds:.0f} s, {rate:.0f} per second, from seed {self.first}")
        for name in SHOWN:
            print(f"{self.counts[name]:>12,} {name}")
        for seed in self.found:
            print(f"found by seed {seed}")
        return 1 if self.found else 0

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _go_on(self, pool: ProcessPoolExecutor) -> None:
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
                    self._tell(found)
                elif not self.found and self._seconds < self.seconds:
                    running.add(next(work))
            if self._seconds >= progress_at:
                progress_at += PROGRESS_SECONDS
                counted = [f"{self.counts[name]:,} {name}" for name in ("checkpoints", "crashes", "take-overs", "finishes")]
                line = f"{self._seconds:5.0f} s: {self.worlds:,} pipelines, {', '.join(counted)}"
                print(line, file=sys.stderr, flush=True)

    def _tell(self, seed: int) -> None:
        self.found.append(seed)
        print(f"seed {seed} has found something; what is the shortest way there?", file=sys.stderr, flush=True)
        print(trace(seed) or f"seed {seed} broke an invariant, and does so no more", flush=True)


def _prepare() -> None:
    """In each worker, before its first world."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # worlds are collected when they are over: in the middle of one nothing is garbage


def _simulate(seeds: range) -> tuple[int, Counter[str], int | None]:
    """Run these worlds until one breaks an invariant.

    Returns:
        How many were run, what was seen in them, and the seed that found something.
    """
    counts = Counter[str]()
    for worlds, seed in enumerate(seeds, 1):
        outcome = run(random_scenario(seed), record=False)
        gc.collect(0)  # a world is one big cycle, and all of it is new
        counts.update(outcome.counts)
        if outcome.error is not None:
            return worlds, counts, seed
    return len(seeds), counts, None
