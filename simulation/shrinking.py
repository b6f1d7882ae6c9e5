"""Shortens a run that breaks an invariant to the fewest steps that break the same one.

Steps are labels, and an impossible label is left out, so any part of a run is a run.
"""

from __future__ import annotations

import re
import time

from simulation.running import Outcome, run
from simulation.scenario import Scenario

LONGEST_SHOWN = 400
FOUND_AT_END = ("Violation: not ended", "Violation: deadlock", "Violation: no run has finished")
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
    best = _fewest(scenario, outcome, True, until - seconds / 2)
    return best if kind_of(outcome.error).startswith(FOUND_AT_END) else _fewest(scenario, best, False, until)


def _fewest(scenario: Scenario, best: Outcome, to_end: bool, until: float) -> Outcome:
    """Leave out smaller and smaller parts, from the end to the beginning."""
    labels, wanted = best.labels, kind_of(best.error)
    size = len(labels)
    while size:
        before = len(labels)
        for end in range(before, 0, -size):
            if time.monotonic() >= until:
                return best
            less = [*labels[: max(end - size, 0)], *labels[end:]]
            found = run(scenario, [*less, ("calm",)] if to_end else less, to_end=to_end)
            if kind_of(found.error) == wanted:
                labels, best = less, found
        if size > 1 or len(labels) == before:
            size //= 2
    return best


def show(scenario: Scenario, outcome: Outcome) -> str:
    """The seed, the pipeline, the settings and the steps, as text."""
    lines = [f"seed {scenario.seed}: {type(outcome.error).__name__}: {outcome.error}", ""]
    for number, variant in enumerate(scenario.variants):
        lines.append(f"variant {number}:")
        for stage, spec in enumerate(variant.stages):
            reads = ", ".join(f"s{i.source}{' static' * i.static}{' keyed' * i.keyed}" for i in spec.inputs)
            records = f" x {spec.records} records" if spec.is_source else ""
            lines.append(f"  s{stage} {spec.kind} p{spec.instances}{records}{' <- ' * bool(reads)}{reads}{' +sink' * spec.sink}")
    lines += [f"{scenario.config}, {scenario.restart}, idle={scenario.idle}", "", f"{len(outcome.labels)} steps:"]
    if len(outcome.labels) > LONGEST_SHOWN:
        lines.append(f"  (only the last {LONGEST_SHOWN} are shown; the seed repeats all of them)")
    lines += [f"  {label!r}," for label in outcome.labels[-LONGEST_SHOWN:]]
    return "\n".join(lines)
