"""The results of the benchmark's parts, and their output: a table for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path


@dataclass(frozen=True)
class Measure:
    """One line of the table.

    Attributes:
        part: The benchmark's part that measured the value.
        what: Name of the measured quantity.
        value: The measured value, in `unit`.
        target: The target, as text; empty for a value without a target.
        holds: Whether the value reaches the target; None without a target.
        note: How the value was measured, if that is not obvious.
    """

    part: str
    what: str
    value: float
    unit: str
    target: str = ""
    holds: bool | None = None
    note: str = ""


def at_least(part: str, what: str, value: float, unit: str, limit: float, note: str = "") -> Measure:
    return Measure(part, what, value, unit, f">= {shown(limit)} {unit}".strip(), value >= limit, note)


def below(part: str, what: str, value: float, unit: str, limit: float, note: str = "") -> Measure:
    return Measure(part, what, value, unit, f"< {shown(limit)} {unit}".strip(), value < limit, note)


def equal(part: str, what: str, value: float, unit: str, wanted: float, note: str = "") -> Measure:
    return Measure(part, what, value, unit, f"= {shown(wanted)} {unit}".strip(), value == wanted, note)


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest of the sorted values that is not below this percentage of them."""
    return values[min(len(values) - 1, -(-len(values) * percent // 100) - 1)]


def shown(value: float) -> str:
    """A number with three significant digits, or whole with separators."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.4f}"


def table(measures: Sequence[Measure]) -> str:
    """The whole table as text."""
    rows = [(m.what, shown(m.value), m.unit, m.target, _verdict(m)) for m in measures]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(5)]
    lines = []
    for part, group in groupby(zip(measures, rows, strict=True), key=lambda pair: pair[0].part):
        lines += ["", part]
        for measure, (what, value, unit, target, verdict) in group:
            cells = (
                f"  {what:<{widths[0]}}  {value:>{widths[1]}} {unit:<{widths[2]}}  {target:<{widths[3]}}  {verdict:<{widths[4]}}"
            )
            lines.append(cells.rstrip())
            if measure.note:
                lines.append(f"      {measure.note}")
    missed = [m for m in measures if m.holds is False]
    targets = sum(1 for m in measures if m.holds is not None)
    lines += ["", f"{targets - len(missed)} of {targets} targets hold."]
    return "\n".join(lines)


def write_json(measures: Iterable[Measure], file: Path) -> None:
    file.write_text(json.dumps([asdict(m) for m in measures], indent=2) + "\n", encoding="utf-8")


def _verdict(measure: Measure) -> str:
    return {None: "", True: "holds", False: "MISSED"}[measure.holds]
