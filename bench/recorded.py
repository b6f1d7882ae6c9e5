"""Measures that are kept in the repository: `python -m bench --record` adds a run, and docs/numbers.md shows what is kept.

Each part of the benchmark is kept as it was measured last, with the day, the commit, the machine and the versions.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

from bench.measures import Measure, shown

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "bench" / "measured.json"
PAGE = ROOT / "docs" / "numbers.md"
HEADING = "## Measured\n"
"""Of the section that is made from the file; it reaches to the next heading of this level."""
_INTRODUCTION = "`python -m bench --record` has measured this and written it here. A goal that is missed is shown.\n"


@dataclass(frozen=True)
class Run:
    """Measures of one run of the benchmark.

    Attributes:
        day: As `2026-11-28`.
        commit: The commit that was measured, shortened.
        machine: Processors and memory.
        software: Names and versions.
        rows: Number of generated input rows.
        repeats: Rounds of each measurement.
    """

    day: str
    commit: str
    machine: str
    software: str
    rows: int
    repeats: int
    measures: tuple[Measure, ...]


def of_this_machine(measures: Iterable[Measure], rows: int, repeats: int) -> Run:
    asked = ("git", "rev-parse", "--short=8", "HEAD")
    commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = f"{platform.system()} on {platform.machine()}, {os.cpu_count()} processors, {memory:.0f} GiB"
    software = f"Python {platform.python_version()}, Spark {version('pyspark')}, Dagster {version('dagster')}"
    return Run(dt.datetime.now(dt.UTC).date().isoformat(), commit, machine, software, rows, repeats, tuple(measures))


def read(file: Path = FILE) -> list[Run]:
    runs = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return [Run(**{**run, "measures": tuple(Measure(**measure) for measure in run["measures"])}) for run in runs]


def added(runs: Sequence[Run], run: Run) -> list[Run]:
    """The runs without what the new one has measured again, and the new one; runs of one day, commit and machine are one."""
    again = {measure.part for measure in run.measures}
    result = [replace(old, measures=tuple(m for m in old.measures if m.part not in again)) for old in runs]
    same = next((old for old in result if replace(old, measures=()) == replace(run, measures=())), None)
    if same is not None:
        result.remove(same)
        run = replace(run, measures=same.measures + run.measures)
    return [*(old for old in result if old.measures), run]


def record(run: Run) -> None:
    """Keep a run, and replace the page's section."""
    runs = added(read(), run)
    FILE.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n", encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(HEADING)
    after = rest[rest.index("\n## ") :]
    PAGE.write_text(f"{before}{HEADING}\n{section(runs)}{after}", encoding="utf-8")


def section(runs: Sequence[Run]) -> str:
    """The page's section below its heading, in Markdown."""
    return "\n".join((_INTRODUCTION, *map(_run, runs)))


def _run(run: Run) -> str:
    lines = [
        f"{run.day}, commit {run.commit}: {run.machine}; {run.software}; {run.rows:,} generated rows, {run.repeats} rounds.",
        "",
        "| what | number | goal |",
        "|---|---|---|",
    ]
    for part, measures in groupby(run.measures, key=lambda measure: measure.part):
        lines.append(f"| **{part}** | | |")
        lines += [f"| {m.what.replace('|', '/')} | {shown(m.value)} {m.unit}".rstrip() + f" | {_goal(m)} |" for m in measures]
    return "\n".join(lines) + "\n"


def _goal(measure: Measure) -> str:
    return {None: "", True: measure.target, False: f"{measure.target}, **missed**"}[measure.holds]
