"""Random worlds for a given time, in several processes, and what was seen in them.

A world that breaks an invariant is shrunk, printed as a list of steps, and ends the search of all workers.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event

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
    "take-overs at once": "of them at once, the owner being known to be gone",
    "restores": "restores",
    "rescalings": "rescalings",
    "restarts": "restarts of jobs",
    "finished tasks": "finished tasks",
    "finishes": "finished jobs",
    "records": "records",
    "steps": "steps",
}
"""What is printed of what was counted."""
PROGRESS_SECONDS = 60.0
"""How often a line is printed while it goes on."""


@dataclass
class Seen:
    """What one worker, or all of them, have been through."""

    worlds: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, other: Seen) -> None:
        self.worlds += other.worlds
        self.counts.update(other.counts)


def simulate(first_seed: int, step: int, seconds: float, tell: Callable[[Seen], None], stopped: Callable[[], bool]) -> int | None:
    """Run worlds for so long, until one breaks an invariant, or until stopped.

    Args:
        tell: what was seen since it was called the last time, about once in a second and at the end.
        stopped: asked after each world.

    Returns:
        The seed that found something.
    """
    now = time.monotonic()
    until, tell_at = now + seconds, now + 1.0
    seen, seed, found = Seen(), first_seed, None
    while now < until and not stopped():
        outcome = run(random_scenario(seed), record=False)
        gc.collect(0)  # a world is one big cycle, and all of it is new
        seen.worlds += 1
        seen.counts.update(outcome.counts)
        if outcome.error is not None:
            found = seed
            break
        seed += step
        now = time.monotonic()
        if now >= tell_at:
            tell(seen)
            seen, tell_at = Seen(), now + 1.0
    tell(seen)
    return found


def trace(seed: int, seconds: float = 60.0) -> str | None:
    """The shortest way to what a seed finds; None if it finds nothing."""
    scenario = random_scenario(seed)
    outcome = run(scenario)
    return None if outcome.error is None else show(*shrink(scenario, outcome, seconds))


class Search:
    """All workers: a process each, which tells through a pipe. What one finds stops the others, and is printed at once."""

    def __init__(self, first: int, workers: int, seconds: float) -> None:
        self.first = first
        self.workers = workers
        self.seconds = seconds
        self.seen = Seen()
        self.found: list[int] = []
        self._stop = multiprocessing.Event()
        self._began = time.monotonic()

    def go(self) -> int:
        """Search, and print what was seen. Returns the exit code: 0 if nothing was found."""
        ends: dict[Connection, BaseProcess] = {}
        for n in range(self.workers):
            here, there = multiprocessing.Pipe(duplex=False)
            work = (self.first + n, self.workers, self.seconds, there, self._stop)
            ends[here] = multiprocessing.Process(target=_work, args=work, daemon=True)
            ends[here].start()
            there.close()
        broken = 0
        try:
            broken = self._listen(ends)
        except KeyboardInterrupt:
            self._stop.set()
        print(report(self.seen, time.monotonic() - self._began, self.first))
        for seed in self.found:
            print(f"found by seed {seed}")
        if broken:
            print(f"{broken} workers have ended without a word", file=sys.stderr)
        return 1 if self.found or broken else 0

    def _listen(self, ends: dict[Connection, BaseProcess]) -> int:
        """Until all workers have ended. Returns how many have not said so."""
        tell_at, broken = self._began + PROGRESS_SECONDS, 0
        while ends:
            for end in wait(list(ends), timeout=max(tell_at - time.monotonic(), 0.0)):
                assert isinstance(end, Connection)
                try:
                    said = end.recv()
                except EOFError:
                    broken += 1
                else:
                    if isinstance(said, Seen):
                        self.seen.add(said)
                        continue
                    if said is not None:
                        self._stop.set()
                        self.found.append(said)
                        print(f"seed {said} has found something; what is the shortest way there?", file=sys.stderr, flush=True)
                        print(trace(said) or f"seed {said} broke an invariant, and does so no more", flush=True)
                ends.pop(end).join()
            if time.monotonic() >= tell_at:
                tell_at += PROGRESS_SECONDS
                print(progress(self.seen, time.monotonic() - self._began), file=sys.stderr, flush=True)
        return broken


def _work(first: int, step: int, seconds: float, told: Connection, stop: Event) -> None:
    gc.disable()  # worlds are collected when they are over: in the middle of one nothing is garbage
    with suppress(KeyboardInterrupt):
        told.send(simulate(first, step, seconds, told.send, stop.is_set))


def progress(seen: Seen, seconds: float) -> str:
    """One line, while it goes on."""
    counts = seen.counts
    parts = [f"{counts[name]:,} {name}" for name in ("checkpoints", "crashes", "take-overs", "finishes")]
    return f"{seconds:5.0f} s: {seen.worlds:,} pipelines, {', '.join(parts)}"


def report(seen: Seen, seconds: float, first: int) -> str:
    """What was seen, for people."""
    rate = seen.worlds / max(seconds, 0.001)
    lines = [f"{seen.worlds:>12,} pipelines in {seconds:.0f} s, {rate:.0f} per second, from seed {first}"]
    lines += [f"{seen.counts[name]:>12,} {title}" for name, title in SHOWN.items()]
    return "\n".join(lines)
