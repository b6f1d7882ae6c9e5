"""The simulator on a fixed number of seeds: whatever it finds is printed as a trace that can be replayed."""

from __future__ import annotations

import pytest

from simulation.running import run
from simulation.scenario import random_scenario
from simulation.shrinking import show, shrink


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_worlds_break_no_invariant(first: int) -> None:
    for seed in range(first, first + 50):
        scenario = random_scenario(seed)
        outcome = run(scenario)
        if outcome.error is not None:
            pytest.fail(show(*shrink(scenario, outcome, seconds=20)))
