"""Rows per second of the four variants, and the throughput lost to checkpoints every five seconds."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from bench import computation
from bench.computation import Rows
from bench.environment import BenchFailed, Environment
from bench.measures import Measure, at_least, below
from bench.processes import cpu_seconds
from bench.variants import VARIANTS, Timed, chained

PART = "Throughput"
COST_PART = "Cost of checkpoints"
INTERVAL = 5.0


def input_rows(environment: Environment) -> Rows:
    """The rows that all parts read; fewer rows are stored in fewer files, so that batches do not become too small."""
    files = min(computation.MAX_FILES, max(4, environment.rows // 20_000))
    return computation.generate(environment.spark, environment.cache, environment.rows, files)


def warm_up(environment: Environment) -> None:
    """Run every variant once on few rows: Java compiles, Python workers start."""
    few = computation.generate(environment.spark, environment.cache, min(environment.rows, 200_000), 4)
    for _, variant in VARIANTS.values():
        variant(environment, few)


def measure(environment: Environment) -> Iterator[Measure]:
    """Measure the four variants in turns, so that other work on the machine affects all of them."""
    rows = input_rows(environment)
    environment.say("  warming up")
    warm_up(environment)
    seconds: dict[str, list[float]] = defaultdict(list)
    processor: dict[str, list[float]] = defaultdict(list)
    expected: list[tuple[object, ...]] | None = None
    for repeat in range(environment.repeats):
        for letter, (name, variant) in VARIANTS.items():
            before = cpu_seconds(os.getpid())
            timed = variant(environment, rows)
            seconds[letter].append(timed.seconds)
            processor[letter].append(cpu_seconds(os.getpid()) - before)
            times = f"{timed.seconds:.1f} s, {processor[letter][-1]:.1f} s of processor time"
            environment.say(f"  {repeat + 1}/{environment.repeats} ({letter}) {name}: {times}")
            result = computation.result(environment.spark, timed.output)
            expected = result if expected is None else expected
            compare(f"({letter}) {name}", result, expected)
    took = {letter: median(values) for letter, values in seconds.items()}
    for letter, (name, _) in VARIANTS.items():
        yield Measure(
            PART, f"({letter}) {name}", rows.count / took[letter], "rows/s", note=_runs(seconds[letter], processor[letter])
        )
    yield at_least(PART, "(c) / (a)", _ratio(seconds, "a", "c"), "", 0.9)
    yield at_least(PART, "(d) / (b)", _ratio(seconds, "b", "d"), "", 1.0)
    for own, reference in (("c", "a"), ("d", "b")):
        what = f"processor time: ({reference}) / ({own})"
        yield Measure(PART, what, _ratio(processor, reference, own), "", note="hardly depends on other work on the machine")
    yield Measure(PART, "rows of the result, the same for all four", len(expected or ()), "rows")


def measure_checkpoint_cost(environment: Environment) -> Iterator[Measure]:
    """Compare (c) with periodic checkpoints and (c) with only the final checkpoint."""
    rows = input_rows(environment)
    without: list[Timed] = []
    with_them: list[Timed] = []
    warm_up(environment)
    for _ in range(environment.repeats):
        without.append(chained(environment, rows))
        with_them.append(chained(environment, rows, INTERVAL))
        environment.say(f"  without {without[-1].seconds:.1f} s, with {with_them[-1].seconds:.1f} s")
    ratios = [a.seconds / b.seconds for a, b in zip(without, with_them, strict=True)]
    cost = 100 * (1 - median(ratios))
    taken = median([len(timed.job.checkpoints) for timed in with_them if timed.job])
    yield below(
        COST_PART, f"throughput lost to checkpoints every {INTERVAL:.0f} s", cost, "%", 10, f"{taken:.0f} checkpoints per run"
    )


def compare(name: str, found: list[tuple[object, ...]], expected: list[tuple[object, ...]]) -> None:
    """Compare two results row by row. Raises BenchFailed if they differ."""
    if found != expected:
        missing, extra = set(expected) - set(found), set(found) - set(expected)
        raise BenchFailed(
            f"{name}: expected {len(expected)} rows, found {len(found)}; missing {sorted(missing, key=str)[:2]}, "
            f"unexpected {sorted(extra, key=str)[:2]}"
        )


def _ratio(seconds: dict[str, list[float]], reference: str, own: str) -> float:
    """The median of the ratios of each round: the two runs of a round ran under the same load."""
    return median([a / b for a, b in zip(seconds[reference], seconds[own], strict=True)])


def _runs(seconds: list[float], processor: list[float]) -> str:
    each = [f"{s:.1f} s ({p:.1f} s of processor time)" for s, p in zip(seconds, processor, strict=True)]
    return "runs: " + ", ".join(each)
