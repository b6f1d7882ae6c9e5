"""One world from its beginning to its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from simulation.scenario import Scenario
from simulation.schedules import RandomSchedule
from simulation.violations import Violation
from simulation.world import Label, World

LONGEST = 10_000
"""No world needs so many steps: one that does never ends."""


@dataclass
class Outcome:
    """How a run went."""

    labels: list[Label] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    error: Exception | None = None


def run(scenario: Scenario, recorded: Sequence[Label] = (), *, record: bool = True, go_on: bool = True) -> Outcome:
    """Run a world: first the recorded steps as far as they are possible, then by chance until everything is over.

    Args:
        scenario: the world.
        recorded: the steps.
        record: whether the outcome has the steps that were taken.
        go_on: False to stop behind the recorded steps: what is found must be found by then.
    """
    world = World(scenario)
    outcome = Outcome()
    labels = outcome.labels
    try:
        for label in _steps(world, recorded, go_on):
            if record:
                labels.append(label)
            if not world.perform(label) and record:
                labels.pop()
            if world.steps > LONGEST:
                raise Violation(f"not over after {LONGEST} steps")
        if go_on:
            _check_over(world)
    except Exception as error:
        outcome.error = error
    outcome.counts = world.counts
    outcome.counts["steps"] += world.steps
    for process in world.processes:
        process.forget()
    return outcome


def _steps(world: World, recorded: Sequence[Label], go_on: bool) -> Iterator[Label]:
    yield from recorded
    if not go_on:
        return
    schedule, soft_limit = RandomSchedule(world.scenario.seed, world), world.scenario.soft_limit
    while True:
        if world.steps > soft_limit and not world.calm:
            yield ("calm",)
        elif (label := schedule.next()) is not None:
            yield label
        else:
            return


def _check_over(world: World) -> None:
    if world.active:
        where = [
            f"process {p.number}: {[f'{t.id} {t.life.state.name}' for t in p.running]}, pending {p.coordinator.pending_ids}"
            for p in world.active
            if hasattr(p, "job") and p.job.coordinator is not None
        ]
        raise Violation(f"deadlock: nothing can happen any more; {'; '.join(where)}")
    if not any(process.status == "FINISHED" for process in world.processes):
        raise Violation(f"no run has finished: {[process.status for process in world.processes]}")
