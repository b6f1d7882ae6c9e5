"""Memory of the process tree without the JVM while variant (d) runs: this process, and Spark's Python workers.

PSS, from /proc/<pid>/smaps_rollup: pages that forked workers share are counted once. Linux only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench import throughput
from bench.environment import Environment
from bench.measures import Measure, below
from bench.processes import is_java, pss_mb, tree
from bench.variants import unchained

PART = "Memory"
EVERY_SECONDS = 0.5
LIMIT_MB = 350


def measure(environment: Environment) -> Iterator[Measure]:
    rows = throughput.input_rows(environment)
    if not Path("/proc/self/smaps_rollup").exists():
        environment.say("  skipped: needs /proc/<pid>/smaps_rollup")
        return
    with Sampler(os.getpid()) as sampler:
        unchained(environment, rows)
    note = f"PSS, sampled every {EVERY_SECONDS} s; this process {sampler.own_mb:.0f} MB, {sampler.workers} Python workers"
    yield below(PART, "process tree without the JVM, at its peak", sampler.peak_mb, "MB", LIMIT_MB, note)


@dataclass
class Sampler:
    """Samples a process tree on a separate thread.

    Attributes:
        peak_mb: Peak memory of all processes of the tree except Java; `own_mb` is the root's share, `workers` the number of
            other processes at that moment.
    """

    root: int
    peak_mb: float = 0.0
    own_mb: float = 0.0
    workers: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Sampler:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            sizes = {pid: pss_mb(pid) for pid in tree(self.root) if not is_java(pid)}
            total = sum(sizes.values())
            if total > self.peak_mb:
                self.peak_mb, self.own_mb, self.workers = total, sizes.get(self.root, 0.0), len(sizes) - 1
            if self._stop.wait(EVERY_SECONDS):
                return
