"""Random programs for a given time, in several processes, and their statistics.

A program whose rows differ from its batch result is run again in Spark alone: the same difference there is a fault of Spark's.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

from bench.environment import session_settings
from bench.stream_programs.jobs import job_rows
from bench.stream_programs.program import Input, Join, operators
from bench.stream_programs.queries import NotAsFused, Refused, batch_rows, query_rows
from bench.stream_programs.random_programs import Case, random_case
from dagster_checkpoints.spark.session.spark_session import build_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PROGRESS_SECONDS = 60.0
PROGRAMS_AT_ONCE = 10
"""Number of programs that a worker runs before it returns their counts."""
PROGRAMS_OF_A_PROCESS = 300
"""Number of programs after which a worker is replaced: a JVM keeps the code that Spark has generated."""

Rows = Sequence[tuple[object, ...]]


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
        kind: "equal"; "refused" if it does not run as a stream; "different", or "failed" with an error; "Spark's own" if Spark
            alone has the same difference, or fails as well.
        text: The difference, the error, or the reason of the refusal.
        rows: The number of rows of the batch result.
        difference: The missing rows, and the unexpected ones.
    """

    kind: str
    text: str = ""
    rows: int = 0
    difference: tuple[Rows, Rows] = ((), ())

    @property
    def wrong(self) -> bool:
        return self.kind in ("different", "failed")


def run_case(spark: SparkSession, case: Case) -> Outcome:
    """Run a case, and compare its rows with the batch result."""
    with tempfile.TemporaryDirectory(prefix="stream-programs-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        outcome = _compared(spark, case, _fresh(folder, case.layout), case.layout)
        if outcome.wrong:
            plain = _compared(spark, case, _fresh(folder, "plain"), "plain")
            if plain.kind == outcome.kind and plain.difference == outcome.difference:
                return Outcome("Spark's own", f"{outcome.text}\nSpark alone: {plain.text}", outcome.rows)
        return outcome


def _fresh(folder: Path, name: str) -> Path:
    path = folder / name.replace(" ", "-").replace(":", "")
    path.mkdir()
    return path


def _compared(spark: SparkSession, case: Case, folder: Path, layout: str) -> Outcome:
    try:
        found = _rows(spark, case, folder, layout)
    except Refused as refusal:
        return Outcome("refused", str(refusal))
    except Exception as error:
        return Outcome("failed", "".join(traceback.format_exception_only(error))[:4000])
    expected = batch_rows(spark, case, folder)
    wanted, got = Counter(expected), Counter(found)
    if wanted == got:
        return Outcome("equal", rows=len(expected))
    missing, unexpected = list((wanted - got).elements()), list((got - wanted).elements())
    text = f"{len(missing)} of {len(expected)} rows are missing {missing[:5]}, {len(unexpected)} are wrong {unexpected[:5]}"
    return Outcome("different", text, len(expected), (tuple(missing), tuple(unexpected)))


def _rows(spark: SparkSession, case: Case, folder: Path, layout: str) -> Rows:
    if layout.startswith("job"):
        return job_rows(spark, case, folder)
    try:
        return query_rows(spark, case, folder, layout)
    except NotAsFused:
        return query_rows(spark, case, _fresh(folder, "channels"), "channels")


def described(case: Case) -> Counter[str]:
    """What is counted of a case that was compared."""
    kinds = {type(each).__name__.lower() for each in operators(case.program) if not isinstance(each, Input)}
    joins = {f"{each.how} join" for each in operators(case.program) if isinstance(each, Join)}
    return Counter({name: 1 for name in [case.layout, f"rows arrive {case.pattern!r}", *kinds, *joins]})


def search(first: int, workers: int, seconds: float) -> tuple[Counter[str], list[int]]:
    """Search in several worker processes, and print the statistics; a difference is printed at once.

    Args:
        first: The first seed.
        workers: Number of worker processes.
        seconds: Time after which no new programs are begun.

    Returns:
        The counts, and the seeds whose rows differ.
    """
    began = time.monotonic()
    progress_at = began + PROGRESS_SECONDS
    counts, wrong = Counter[str](), list[int]()
    context = multiprocessing.get_context("spawn")
    tasks = max(1, PROGRAMS_OF_A_PROCESS // PROGRAMS_AT_ONCE)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare, max_tasks_per_child=tasks)
    with pool, suppress(KeyboardInterrupt):
        until = time.time() + seconds
        work = (pool.submit(_run, range(seed, seed + PROGRAMS_AT_ONCE), until) for seed in count(first, PROGRAMS_AT_ONCE))
        running = set(islice(work, workers))
        while running:
            done, running = wait(running, max(progress_at - time.monotonic(), 0.0), FIRST_COMPLETED)
            for future in done:
                found, reports = future.result()
                counts.update(found)
                for seed, text in reports:
                    wrong.append(seed)
                    print(text, flush=True)
                if time.monotonic() < began + seconds:
                    running.add(next(work))
            if time.monotonic() >= progress_at:
                progress_at += PROGRESS_SECONDS
                shown = ", ".join(f"{counts[name]:,} {name}" for name in ("programs", "equal", "refused", "Spark's own"))
                print(f"{time.monotonic() - began:5.0f} s: {shown}, {len(wrong)} wrong", file=sys.stderr, flush=True)
    took = time.monotonic() - began
    print(f"{counts['programs']:>8,} programs in {took:.0f} s, from seed {first}")
    for name, number in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"{number:>8,} {name}")
    print(f"wrong: {', '.join(map(str, wrong)) or 'none'}")
    return counts, wrong


def repeat(seed: int) -> bool:
    """Run one seed's case and print what came of it. Returns whether its rows are right."""
    case = random_case(seed)
    outcome = run_case(_session(), case)
    print(f"{outcome.kind}: {outcome.text}\n{case}")
    return not outcome.wrong


def _prepare() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@cache
def _session() -> SparkSession:
    return build_session(session_settings())


def _run(seeds: range, until: float) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Run these cases. Returns their counts, and the seed and the report of each wrong one."""
    counts, reports = Counter[str](), []
    for seed in seeds:
        if time.time() > until:
            break
        case = random_case(seed)
        outcome = run_case(_session(), case)
        counts.update(["programs", outcome.kind])
        if outcome.kind == "equal":
            counts.update(described(case))
            counts.update({"equal, with rows": bool(outcome.rows)})
        elif outcome.kind == "Spark's own":
            print(f"Spark's own: {outcome.text}\n{case}", file=sys.stderr, flush=True)
        elif outcome.wrong:
            reports.append((seed, f"{outcome.kind}: {outcome.text}\n{case}"))
    return counts, reports
