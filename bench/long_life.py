"""A pipeline that runs for long: what grows with the number of checkpoints, and not with the data.

The pipeline of `many` with two queries takes checkpoints one after the other while rows arrive. Memory, threads, open files, and
the files that a run keeps are compared between an early moment and the end; Spark's own list of the files that a source has
read, and the committed files, grow with the data, and are not counted.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bench import many
from bench.control import request, run_under_control
from bench.environment import Environment
from bench.measures import Measure, below
from bench.processes import is_java, pss_mb, threads, tree
from dagster_checkpoints.spark.job.events import CheckpointDone
from dagster_checkpoints.spark.job.job_execution import JobExecution

PART = "Long life"
INTERVAL = 0.25
SECONDS = 300.0
"""How long the pipeline runs; `BENCH_LONG_LIFE_SECONDS` in the environment says otherwise."""
SETTLED = 0.25
"""The part of this time after which the first look is taken: Java compiles, caches fill."""
LOOKS = 16
GOAL = 1.1
NAMES = ["s00"]


@dataclass(frozen=True)
class Look:
    """What a run has at a moment.

    Attributes:
        checkpoints: Number of checkpoints so far.
        heap: The JVM's used heap after a collection, MB.
        python: Memory of this process, MB (PSS).
        threads: Threads of this process and the JVM.
        open_files: Open files of both.
        work_files, work: Files of the run's own directory, and their MB; without Spark's logs of its sources.
        store_files, store: Files of the checkpoint storage, and their MB.
    """

    checkpoints: int
    heap: float
    python: float
    threads: int
    open_files: int
    work_files: int
    work: float
    store_files: int
    store: float


def measure(environment: Environment) -> Iterator[Measure]:
    looks, durations = observe(environment, float(os.environ.get("BENCH_LONG_LIFE_SECONDS", SECONDS)))
    first, last = looks[int(len(looks) * SETTLED)], looks[-1]
    yield Measure(PART, "checkpoints", last.checkpoints, "", note=f"the first look came after {first.checkpoints}")
    for each in fields(Look)[1:]:
        before, after = getattr(first, each.name), getattr(last, each.name)
        note = f"{before:,.1f} and {after:,.1f}"
        yield below(PART, f"{each.name.replace('_', ' ')}, at the end / early", after / before, "", GOAL, note)
    part = len(durations) // 4
    early, late = (sorted(some)[part // 2] for some in (durations[part : 2 * part], durations[-part:]))
    yield below(
        PART, "a checkpoint's duration, last / second quarter", late / early, "", 1.25, f"medians {early:.3f} and {late:.3f} s"
    )


def observe(environment: Environment, seconds: float) -> tuple[list[Look], list[float]]:
    folder = environment.fresh("long-life")
    looks: list[Look] = []
    durations: list[float] = []

    def control(job: JobExecution) -> None:
        over = threading.Event()
        feeding = threading.Thread(target=many.feed, args=(folder, NAMES, over))
        feeding.start()
        try:
            for _ in range(LOOKS):
                time.sleep(seconds / LOOKS)
                looks.append(_look(environment.spark, folder, len(durations)))
                environment.say(f"  {looks[-1]}")
        finally:
            over.set()
            feeding.join()
        request(job, "stop")

    def note(event: object, job: JobExecution) -> None:
        if isinstance(event, CheckpointDone):
            durations.append(event.duration)

    many.write(folder, NAMES, 0)
    run_under_control(
        environment, many.pipeline(folder, NAMES), folder, control, note, interval=INTERVAL, keep_events=False, lease_seconds=30.0
    )
    return looks, durations


def _look(spark: Any, folder: Path, checkpoints: int) -> Look:
    gc.collect()
    jvm = spark.sparkContext._jvm
    for _ in range(2):
        jvm.java.lang.System.gc()
        time.sleep(0.5)
    runtime = jvm.java.lang.Runtime.getRuntime()
    heap = (runtime.totalMemory() - runtime.freeMemory()) / 2**20
    pids = [pid for pid in tree(os.getpid()) if pid == os.getpid() or is_java(pid)]
    work_files, work = _kept(folder / "work")
    store_files, store = _kept(folder / "store")
    opened = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    running = threads(os.getpid())
    return Look(checkpoints, heap, pss_mb(os.getpid()), running, opened, work_files, work, store_files, store)


def _kept(folder: Path) -> tuple[int, float]:
    """The number of a folder's files, and their MB."""
    count, size = 0, 0
    for directory, _, names in os.walk(folder):
        if "/sources/" in f"{directory}/":
            continue
        for name in names:
            try:
                size += (Path(directory) / name).stat().st_size
                count += 1
            except FileNotFoundError:
                pass
    return count, size / 2**20
