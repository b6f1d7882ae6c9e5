"""Rows per second of the four ways, side by side, and what checkpoints every five seconds cost."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from bench import computation
from bench.computation import Rows
from bench.measures import Measure, at_least, below
from bench.processes import cpu_seconds
from bench.setting import BenchFailed, Setting
from bench.ways import WAYS, Timed, chained

PART = "Throughput"
COST_PART = "Cost of checkpoints"
INTERVAL = 5.0


def input_rows(setting: Setting) -> Rows:
    """The rows that all parts read; fewer of them lie in fewer files, so that a batch keeps some size."""
    files = min(computation.MAX_FILES, max(4, setting.rows // 20_000))
    return computation.generate(setting.spark, setting.cache, setting.rows, files)


def warm_up(setting: Setting) -> None:
    """Run every way once on few rows: Java compiles, Python workers start."""
    few = computation.generate(setting.spark, setting.cache, min(setting.rows, 200_000), 4)
    for _, way in WAYS.values():
        way(setting, few)


def measure(setting: Setting) -> Iterator[Measure]:
    """The four ways, interleaved, so that whatever else the machine does meets all of them."""
    rows = input_rows(setting)
    setting.say("  warming up")
    warm_up(setting)
    seconds: dict[str, list[float]] = defaultdict(list)
    processor: dict[str, list[float]] = defaultdict(list)
    expected: list[tuple[object, ...]] | None = None
    for repeat in range(setting.repeats):
        for letter, (name, way) in WAYS.items():
            before = cpu_seconds(os.getpid())
            timed = way(setting, rows)
            seconds[letter].append(timed.seconds)
            processor[letter].append(cpu_seconds(os.getpid()) - before)
            said = f"{timed.seconds:.1f} s, {processor[letter][-1]:.1f} s of processor time"
            setting.say(f"  {repeat + 1}/{setting.repeats} ({letter}) {name}: {said}")
            found = computation.result(setting.spark, timed.output)
            expected = found if expected is None else expected
            compare(f"({letter}) {name}", found, expected)
    took = {letter: median(values) for letter, values in seconds.items()}
    for letter, (name, _) in WAYS.items():
        yield Measure(
            PART, f"({letter}) {name}", rows.count / took[letter], "rows/s", note=_runs(seconds[letter], processor[letter])
        )
    yield at_least(PART, "(c) / (a)", _ratio(seconds, "a", "c"), "", 0.9)
    yield at_least(PART, "(d) / (b)", _ratio(seconds, "b", "d"), "", 1.0)
    for own, reference in (("c", "a"), ("d", "b")):
        what = f"processor time: ({reference}) / ({own})"
        yield Measure(PART, what, _ratio(processor, reference, own), "", note="hardly depends on what else runs")
    yield Measure(PART, "rows of the result, the same for all four", len(expected or ()), "rows")


def measure_checkpoint_cost(setting: Setting) -> Iterator[Measure]:
    """(c) with periodic checkpoints against (c) with the final one only."""
    rows = input_rows(setting)
    without: list[Timed] = []
    with_them: list[Timed] = []
    warm_up(setting)
    for _ in range(setting.repeats):
        without.append(chained(setting, rows))
        with_them.append(chained(setting, rows, INTERVAL))
        setting.say(f"  without {without[-1].seconds:.1f} s, with {with_them[-1].seconds:.1f} s")
    ratios = [a.seconds / b.seconds for a, b in zip(without, with_them, strict=True)]
    cost = 100 * (1 - median(ratios))
    taken = median([len(timed.job.checkpoints) for timed in with_them if timed.job])
    yield below(
        COST_PART, f"throughput lost to checkpoints every {INTERVAL:.0f} s", cost, "%", 10, f"{taken:.0f} checkpoints per run"
    )


def compare(name: str, found: list[tuple[object, ...]], expected: list[tuple[object, ...]]) -> None:
    """Row by row. Raises BenchFailed: a fast wrong result is none."""
    if found != expected:
        missing, extra = set(expected) - set(found), set(found) - set(expected)
        raise BenchFailed(
            f"{name}: expected {len(expected)} rows, found {len(found)}; missing {sorted(missing, key=str)[:2]}, "
            f"unexpected {sorted(extra, key=str)[:2]}"
        )


def _ratio(seconds: dict[str, list[float]], reference: str, own: str) -> float:
    """The median of the rounds' own ratios: two runs of a round met the same machine."""
    return median([a / b for a, b in zip(seconds[reference], seconds[own], strict=True)])


def _runs(seconds: list[float], processor: list[float]) -> str:
    each = [f"{s:.1f} s ({p:.1f} s of processor time)" for s, p in zip(seconds, processor, strict=True)]
    return "runs: " + ", ".join(each)
