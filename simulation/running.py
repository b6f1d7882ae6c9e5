"""Runs one world from its beginning to its end, and shortens a run that breaks an invariant to the fewest steps that break it.

Steps are labels, and an impossible label is left out, so any part of a run is a run.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from simulation.scenario import Scenario
from simulation.schedules import RandomSchedule
from simulation.violations import Violation
from simulation.world import Label, World

LONGEST = 10_000
"""Maximum number of steps: a world that exceeds it is taken as endless."""
LONGEST_SHOWN = 400
FOUND_AT_END = ("Violation: not ended", "Violation: deadlock", "Violation: no run has finished")
"""Violations that are found only at the end of a run."""


@dataclass
class Outcome:
    """The result of a run."""

    labels: list[Label]
    counts: Counter[str]
    error: Exception | None = None


def run(scenario: Scenario, recorded: Sequence[Label] = (), *, record: bool = True, to_end: bool = True) -> Outcome:
    """Run a world: first the recorded steps as far as they are possible, then random ones until the job has ended.

    Args:
        scenario: the world.
        recorded: the recorded steps; none by default.
        record: whether to record the steps in the outcome.
        to_end: False to stop after the recorded steps.
    """
    world = World(scenario)
    labels: list[Label] = []
    outcome = Outcome(labels, world.counts)
    try:
        for label in chain(recorded, iter(RandomSchedule(world).next, None) if to_end else ()):
            if record:
                labels.append(label)
            if not world.perform(label) and record:
                labels.pop()
            if world.steps > LONGEST:
                raise Violation(f"not ended after {LONGEST} steps")
        if to_end:
            _check_ended(world)
    except Exception as error:
        outcome.error = error
    outcome.counts["steps"] += world.steps
    for process in world.processes:
        process.forget()
    return outcome


def _check_ended(world: World) -> None:
    if world.active:
        where = [
            f"process {p.number}: {[f'{t.id} {t.life.state.name}' for t in p.running]}, pending {p.coordinator.pending_ids}"
            for p in world.active
            if hasattr(p, "job") and p.job.coordinator is not None
        ]
        raise Violation(f"deadlock: no step is possible; {'; '.join(where)}")
    if not any(process.status == "FINISHED" for process in world.processes):
        raise Violation(f"no run has finished: {[process.status for process in world.processes]}")


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
