"""Restart strategies, as rows: the times of failures, and the decision on each."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from dagster_checkpoints.coordination.errors import InvalidCheckpointConfig
from dagster_checkpoints.coordination.restarts import (
    ExponentialDelayRestart,
    FailureRateRestart,
    FixedDelayRestart,
    GiveUp,
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


NO_NUMBERS = [-1, float("nan"), float("inf"), True, "5"]


@pytest.mark.parametrize(
    ("strategy", "name", "refused", "taken"),
    [
        (FixedDelayRestart, "attempts", [*NO_NUMBERS, 1.5, None], [0, 1]),
        (FixedDelayRestart, "delay", NO_NUMBERS, [0, 0.5]),
        (ExponentialDelayRestart, "initial", [*NO_NUMBERS, 0], [0.1, 60]),
        (ExponentialDelayRestart, "maximum", [*NO_NUMBERS, 0, 0.9], [1, 1e9]),
        (ExponentialDelayRestart, "multiplier", [*NO_NUMBERS, 0.5], [1, 1.1]),
        (ExponentialDelayRestart, "reset_after", [*NO_NUMBERS, 0], [0.1]),
        (ExponentialDelayRestart, "attempts", [*NO_NUMBERS, 1.5], [0, 1, None]),
        (FailureRateRestart, "max_failures", [*NO_NUMBERS, 1.5, None], [0, 1, 59]),
        (FailureRateRestart, "interval", [*NO_NUMBERS, 0, 1], [1.1]),
        (FailureRateRestart, "delay", NO_NUMBERS, [0, 59]),
    ],
)
def test_a_setting_that_counts_nothing_is_refused_by_name(
    strategy: Callable[..., RestartStrategy], name: str, refused: list[object], taken: list[object]
) -> None:
    """Each setting with the defaults of the others."""
    for value in refused:
        text = re.escape(f"{strategy.__name__}({name}={value!r}): expected ")  # type: ignore[attr-defined]
        with pytest.raises(InvalidCheckpointConfig, match=f"^{text}"):
            strategy(**{name: value})
    for value in taken:
        strategy(**{name: value})


def test_a_first_delay_above_the_longest_is_refused() -> None:
    with pytest.raises(InvalidCheckpointConfig, match=r"\(maximum=60\): expected seconds, at least initial=61"):
        ExponentialDelayRestart(initial=61, maximum=60)


@pytest.mark.parametrize(("failures", "interval", "delay"), [(2, 60, 30), (3, 60, 20), (1, 60, 60), (1, 60, 61)])
def test_a_rate_that_no_failures_reach_is_refused(failures: int, interval: float, delay: float) -> None:
    """With such a delay the limit is not reached within the interval: the job would restart without end."""
    with pytest.raises(InvalidCheckpointConfig, match=r"more than max_failures \* delay = 6\d seconds: else the limit is never"):
        FailureRateRestart(failures, interval, delay)
    shorter = interval / failures - 0.1
    reached = FailureRateRestart(failures, interval, shorter)
    assert isinstance([reached.on_failure(number * shorter) for number in range(failures + 1)][-1], GiveUp)
