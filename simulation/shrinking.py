"""Shortens a run that breaks an invariant to the fewest steps that break the same one.

Steps are labels, and an impossible label is left out, so any part of a run is a run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from simulation.running import Outcome, run
from simulation.scenario import Scenario
from simulation.world import Label

LONGEST_SHOWN = 400
ENDLESS = ("Violation: not ended", "Violation: deadlock")
"""Violations that are found only at the end of a run."""


def kind_of(error: Exception | None) -> str:
    """The kind of violation: its text without numbers."""
    text = f"{type(error).__name__}: {error}" if error is not None else ""
    return re.sub(r"\d+(\.\d+)?|\[.*?\]|\{.*?\}", "#", text)[:60]


def shrink(scenario: Scenario, outcome: Outcome, seconds: float = 30.0) -> Outcome:
    """Find the fewest steps that break the same invariant.

    First shortens the beginning, which random steps without faults complete; then these random steps too.
    """
    until = time.monotonic() + seconds
    wanted = kind_of(outcome.error)

    def repeated(labels: Sequence[Label], to_end: bool) -> Outcome | None:
        found = run(scenario, [*labels, ("calm",)] if to_end else labels, to_end=to_end)
        return found if kind_of(found.error) == wanted else None

    beginning = _fewest(outcome.labels, lambda labels: repeated(labels, True) is not None, until - seconds / 2)
    best = repeated(beginning, True) or outcome
    if wanted.startswith(ENDLESS):
        return best
    return repeated(_fewest(best.labels, lambda labels: repeated(labels, False) is not None, until), False) or best


def _fewest(labels: Sequence[Label], found: Callable[[Sequence[Label]], bool], until: float) -> Sequence[Label]:
    """Leave out smaller and smaller parts, from the end to the beginning."""
    if not found(labels):
        return labels
    size = max(len(labels) // 2, 1)
    while True:
        shorter = False
        start = len(labels)
        while start > 0 and time.monotonic() < until:
            start = max(start - size, 0)
            less = [*labels[:start], *labels[start + size :]]
            if found(less):
                labels, shorter = less, True
        if time.monotonic() >= until or (size == 1 and not shorter):
            return labels
        size = max(size // 2, 1)


def show(scenario: Scenario, outcome: Outcome) -> str:
    """The seed, the pipeline, the settings and the steps, as text."""
    lines = [f"seed {scenario.seed}: {type(outcome.error).__name__}: {outcome.error}", ""]
    for number, variant in enumerate(scenario.variants):
        lines.append(f"variant {number}:")
        for stage, spec in enumerate(variant):
            reads = ", ".join(f"s{i.source}{' static' * i.static}{' keyed' * i.keyed}" for i in spec.inputs)
            records = f" x {spec.records} records" if spec.is_source else ""
            lines.append(f"  s{stage} {spec.kind} p{spec.instances}{records}{' <- ' * bool(reads)}{reads}{' +sink' * spec.sink}")
    lines += [f"{scenario.settings}", "", f"{len(outcome.labels)} steps:"]
    if len(outcome.labels) > LONGEST_SHOWN:
        lines.append(f"  (only the last {LONGEST_SHOWN} are shown; the seed repeats all of them)")
    lines += [f"  {label!r}," for label in outcome.labels[-LONGEST_SHOWN:]]
    return "\n".join(lines)
