"""From a run that found something to the shortest one that finds the same: fewer steps, then a smaller scenario.

Steps are labels, and a label that is impossible is left out, so that any part of a run is a run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from simulation.running import Outcome, run
from simulation.scenario import Scenario
from simulation.world import Label, World

LONGEST_SHOWN = 400


def kind_of(error: Exception | None) -> str:
    """What was found, without the numbers in it."""
    text = f"{type(error).__name__}: {error}" if error is not None else ""
    return re.sub(r"\d+(\.\d+)?|\[.*?\]|\{.*?\}", "#", text)[:60]


def replayed(scenario: Scenario, labels: Sequence[Label]) -> Outcome:
    """Go through the steps and stop there: what is found must be found by then."""
    world = World(scenario)
    outcome = Outcome()
    try:
        for label in labels:
            if world.perform(label):
                outcome.labels.append(label)
    except Exception as error:
        outcome.labels.append(label)
        outcome.error = error
    outcome.counts = world.counts
    return outcome


def shrink(scenario: Scenario, outcome: Outcome, seconds: float = 30.0) -> tuple[Scenario, Outcome]:
    """The fewest steps that still find the same kind of thing.

    First the beginning that matters, behind which nothing goes wrong and chance brings the world to its end; then what
    chance has done there.
    """
    until = time.monotonic() + seconds
    wanted = kind_of(outcome.error)

    def to_the_end(labels: Sequence[Label]) -> Outcome | None:
        found = run(scenario, [*labels, ("calm",)])
        return found if kind_of(found.error) == wanted else None

    def as_it_is(labels: Sequence[Label]) -> Outcome | None:
        found = replayed(scenario, labels)
        return found if kind_of(found.error) == wanted else None

    beginning = _fewest(outcome.labels, to_the_end, time.monotonic() + seconds / 2)
    best = to_the_end(beginning) or outcome
    if wanted.startswith(ENDLESS):
        return scenario, best
    fewest = _fewest(best.labels, as_it_is, until)
    return scenario, as_it_is(fewest) or best


ENDLESS = ("Violation: not over", "Violation: deadlock", "Violation: the last run")


def _fewest(labels: Sequence[Label], found: Callable[[Sequence[Label]], Outcome | None], until: float) -> Sequence[Label]:
    """Leave out ever smaller parts, from the end to the beginning."""
    if found(labels) is None:
        return labels
    size = max(len(labels) // 2, 1)
    while True:
        shorter = False
        start = len(labels)
        while start > 0 and time.monotonic() < until:
            start = max(start - size, 0)
            less = [*labels[:start], *labels[start + size :]]
            if found(less) is not None:
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
            reads = ", ".join(
                f"s{i.source}{' static' if i.static else ' keyed' if i.keyed else ' all' if i.all_to_all else ''}"
                for i in spec.inputs
            )
            records = f" x {spec.records} records" if spec.is_source else ""
            lines.append(
                f"  s{stage} {spec.kind} p{spec.instances}{records}{' <- ' + reads if reads else ''}{' +sink' * spec.sink}"
            )
    lines += [f"{scenario.settings}", "", f"{len(outcome.labels)} steps:"]
    if len(outcome.labels) > LONGEST_SHOWN:
        lines.append(f"  (only the last {LONGEST_SHOWN} are shown; the seed repeats all of them)")
    lines += [f"  {label!r}," for label in outcome.labels[-LONGEST_SHOWN:]]
    return "\n".join(lines)
