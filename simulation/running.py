"""Runs one world from its beginning to its end."""

from __future__ import annotations

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
