"""The machines of the execution floor get the time as an argument; none of them reads a clock."""

from __future__ import annotations

import re
from pathlib import Path

import dagster_checkpoints.execution

CLOCK = re.compile(r"\.now\(|utcnow|\btime\.\w|monotonic|perf_counter")


def test_no_line_calls_a_clock() -> None:
    folder = Path(dagster_checkpoints.execution.__file__).parent
    sources = sorted(folder.rglob("*.py"))
    assert len(sources) > 1
    found = [
        f"{source.name}:{number}: {line.strip()}"
        for source in sources
        for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1)
        if CLOCK.search(line)
    ]
    assert not found


def test_a_call_of_a_clock_would_be_found() -> None:
    for line in ("dt.datetime.now(dt.UTC)", "datetime.utcnow()", "time.monotonic()", "from time import perf_counter"):
        assert CLOCK.search(line), line
