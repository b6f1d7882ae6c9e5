"""From a run that found something to the shortest one that finds the same.

Steps are labels, and a label that is impossible is left out, so that any part of a run is a run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from simulation.running import Outcome, run
from simulation.scenario import Scenario
from simulation.world import Label

LONGEST_SHOWN = 400
ENDLESS = ("Violation: not over", "Violation: deadlock")
"""What is found at the end of a run only."""


def kind_of(error: Exception | None) -> str:
    """What was found, without the numbers in it."""
    text = f"{type(error).__name__}: {error}" if error is not None else ""
    return re.sub(r"\d+(\.\d+)?|\[.*?\]|\{.*?\}", "#", text)[:60]


def shrink(scenario: Scenario, outcome: Outcome, seconds: float = 30.0) -> Outcome:
    """The fewest steps that still find the same kind of thing.

    First the beginning that matters, behind which nothing goes wrong and chance brings the world to its end; then what
    chance has done there.
    """
    until = time.monotonic() + seconds
    wanted = kind_of(outcome.error)

    def again(labels: Sequence[Label], go_on: bool) -> Outcome | None:
        found = run(scenario, [*labels, ("calm",)] if go_on else labels, go_on=go_on)
        return found if kind_of(found.error) == wanted else None

    beginning = _fewest(outcome.labels, lambda labels: again(labels, True) is not None, until - seconds / 2)
    best = again(beginning, True) or outcome
    if wanted.startswith(ENDLESS):
        return best
    return again(_fewest(best.labels, lambda labels: again(labels, False) is not None, until), False) or best


def _fewest(labels: Sequence[Label], found: Callable[[Sequence[Label]], bool], until: float) -> Sequence[Label]:
    """Leave out ever smaller parts, from the end to the beginning."""
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
    """What somebody needs to understand and repeat it."""
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
