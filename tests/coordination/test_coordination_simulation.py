"""The protocol in worlds of the simulator: pipelines, crashes, savepoints, stops; every record once. A seed repeats a world."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulation.running import Outcome, run
from simulation.scenario import random_scenario


def outcome_of(seed: int, theme: str, *, periodic: bool = True) -> Outcome:
    """Run a world of this theme; it must not break an invariant."""
    scenario = random_scenario(seed, theme)
    if not periodic:
        config = replace(
            scenario.config,
            interval=None,
            initial_delay=None,
            min_pause=0.0,
            interval_during_backlog=None,
            timeout=1000.0,
            checkpoints_after_tasks_finish=True,
        )
        scenario = replace(scenario, config=config, patience=0)
    outcome = run(scenario, record=False)
    assert outcome.error is None, f"seed {seed}, theme {theme}: {outcome.error}"
    return outcome


@pytest.mark.parametrize("first", range(0, 120, 20))
@pytest.mark.parametrize("theme", ["tasks", "ends", "owners"])
def test_every_record_is_committed_exactly_once(theme: str, first: int) -> None:
    outcomes = [outcome_of(seed, theme) for seed in range(first, first + 20)]
    assert sum(outcome.counts["restarts"] + outcome.counts["crashes"] for outcome in outcomes) > 0
    assert sum(outcome.counts["records"] for outcome in outcomes) > 0


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_savepoints_and_stops_lose_and_repeat_nothing(first: int) -> None:
    outcomes = [outcome_of(seed, "stops") for seed in range(first, first + 20)]
    assert sum(outcome.counts["stops"] for outcome in outcomes) > 0
    assert sum(outcome.counts["savepoints"] for outcome in outcomes) > 0


def test_without_periodic_checkpoints_in_between_one_checkpoint_ends_everything() -> None:
    ended = [counts for seed in range(150) if not (counts := outcome_of(seed, "quiet", periodic=False).counts)["stops begun"]]
    assert len(ended) > 50
    assert {counts["checkpoints"] for counts in ended} == {1}
