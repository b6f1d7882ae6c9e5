"""Restart strategies, as rows: the times of failures, and the decision on each."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from dagster_checkpoints.coordination import (
    ExponentialDelayRestart,
    FailureRateRestart,
    FixedDelayRestart,
    GiveUp,
    InvalidCheckpointConfig,
    NoRestart,
    RestartAfter,
    RestartStrategy,
)

EXPONENTIAL = ExponentialDelayRestart(initial=1, maximum=5, multiplier=2, reset_after=100)


@pytest.mark.parametrize(
    ("strategy", "failures", "delays"),
    [
        (NoRestart(), [0], [None]),
        (FixedDelayRestart(attempts=2, delay=3), [0, 1000, 2000], [3, 3, None]),
        (FixedDelayRestart(attempts=0), [0], [None]),
        (EXPONENTIAL, [0, 2, 5, 10, 16], [1, 2, 4, 5, 5]),
        # 100 seconds of health, counted from the restart and not from the failure.
        (EXPONENTIAL, [0, 2, 103, 104], [1, 2, 4, 5]),
        (EXPONENTIAL, [0, 2, 104, 105.5], [1, 2, 1, 2]),
        (ExponentialDelayRestart(initial=1, maximum=9, multiplier=2, attempts=2), [0, 2, 9], [1, 2, None]),
        (ExponentialDelayRestart(initial=4, multiplier=1), [0, 5, 10], [4, 4, 4]),
        (ExponentialDelayRestart(initial=4, multiplier=1.5), [0, 5, 12], [4, 6, 9]),
        (FailureRateRestart(max_failures=2, interval=10, delay=1), [0, 5, 9], [1, 1, None]),
        (FailureRateRestart(max_failures=2, interval=10, delay=1), [100, 105, 109], [1, 1, None]),
        (FailureRateRestart(max_failures=2, interval=10, delay=1), [0, 5, 10, 15, 20], [1, 1, 1, 1, 1]),
    ],
)
def test_strategies(strategy: RestartStrategy, failures: list[float], delays: list[float | None]) -> None:
    fresh = strategy.fresh()
    answers = [fresh.on_failure(now) for now in failures]
    assert [a.delay if isinstance(a, RestartAfter) else None for a in answers] == delays
    attempts = [a.attempt for a in answers if isinstance(a, RestartAfter)]
    assert attempts == list(range(1, len(attempts) + 1))


@pytest.mark.parametrize(
    ("strategy", "failures", "words"),
    [
        (NoRestart(), 1, "strategy is none"),
        (FixedDelayRestart(attempts=2), 3, "restarted 2 times .*attempts=2"),
        (ExponentialDelayRestart(attempts=2), 3, "failed 3 times in a row .*attempts=2"),
        (FailureRateRestart(max_failures=1, interval=10), 2, "2 failures within 10 s .*max_failures=1"),
    ],
)
def test_a_strategy_that_refuses_a_restart_names_its_limit(strategy: RestartStrategy, failures: int, words: str) -> None:
    fresh = strategy.fresh()
    *_, answer = [fresh.on_failure(0) for _ in range(failures)]
    assert isinstance(answer, GiveUp)
    assert re.search(words, answer.reason)


def test_a_fresh_strategy_has_no_past() -> None:
    used = FixedDelayRestart(attempts=1)
    used.on_failure(0)
    assert isinstance(used.on_failure(0), GiveUp)
    assert isinstance(used.fresh().on_failure(0), RestartAfter)
    rate = FailureRateRestart(max_failures=1, interval=10)
    rate.on_failure(0)
    assert isinstance(rate.fresh().on_failure(1), RestartAfter)


@pytest.mark.parametrize("multiplier", [10, 10.0])
def test_the_delay_stays_at_its_maximum(multiplier: float) -> None:
    strategy = ExponentialDelayRestart(initial=1, maximum=5, multiplier=multiplier, reset_after=1e9)
    answers = [strategy.on_failure(n) for n in range(1000)]
    assert isinstance(answers[-1], RestartAfter)
    assert answers[-1].delay == 5


@pytest.mark.parametrize(
    ("strategy", "name", "refused"),
    [
        (FixedDelayRestart, "attempts", -1),
        (FixedDelayRestart, "delay", -1),
        (ExponentialDelayRestart, "initial", -1),
        (ExponentialDelayRestart, "maximum", -1),
        (ExponentialDelayRestart, "multiplier", 0.5),
        (ExponentialDelayRestart, "reset_after", -1),
        (ExponentialDelayRestart, "attempts", -1),
        (FailureRateRestart, "max_failures", -1),
        (FailureRateRestart, "interval", -1),
        (FailureRateRestart, "delay", -1),
    ],
)
def test_a_setting_outside_its_range_is_refused_by_name(
    strategy: Callable[..., RestartStrategy], name: str, refused: float
) -> None:
    with pytest.raises(InvalidCheckpointConfig, match=rf"^{name} .* is {refused}; expected"):
        strategy(**{name: refused})
    strategy(**{name: 1 if name == "multiplier" else 0})
