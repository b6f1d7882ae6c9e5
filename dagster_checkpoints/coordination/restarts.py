"""How often, and after what delay, a job whose task has failed is restarted, or the region of the task.

A strategy holds its settings and counts the failures of one job; `fresh()` returns one without failures. Must not know: what
failed, how a job restarts. Source: Flink, "Task Failure Recovery", Restart Strategies.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from dagster_checkpoints.coordination.errors import InvalidCheckpointConfig
from dagster_checkpoints.pipeline.setting_values import is_count, is_number

FailoverStrategy = Literal["region", "full"]
"""What restarts after a task's failure: its region (`pipeline.connected_regions`), or all tasks of the job."""


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """Restart after this many seconds.

    Attributes:
        attempt: which restart this is, from 1.
    """

    delay: float
    attempt: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not restart: the job is FAILED.

    Attributes:
        reason: which limit was reached.
    """

    reason: str


class RestartStrategy(Protocol):
    """Decides after each failure whether the job is restarted."""

    def on_failure(self, now: float) -> RestartAfter | GiveUp: ...

    def fresh(self) -> RestartStrategy: ...


@dataclass(slots=True)
class NoRestart:
    """The first failure fails the job."""

    def on_failure(self, now: float) -> RestartAfter | GiveUp:
        return GiveUp("the restart strategy is none")

    def fresh(self) -> NoRestart:
        return NoRestart()


@dataclass(slots=True)
class FixedDelayRestart:
    """At most `attempts` restarts in the life of the job, each after `delay` seconds."""

    attempts: int = 3
    delay: float = 1.0
    _restarts: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self, "attempts", is_count(self.attempts), "a whole number of at least 0")
        _check(self, "delay", is_number(self.delay), "seconds, 0 or more")

    def on_failure(self, now: float) -> RestartAfter | GiveUp:
        if self._restarts >= self.attempts:
            return GiveUp(f"the job has been restarted {self._restarts} times (fixed delay, attempts={self.attempts})")
        self._restarts += 1
        return RestartAfter(self.delay, self._restarts)

    def fresh(self) -> FixedDelayRestart:
        return replace(self)


@dataclass(slots=True)
class ExponentialDelayRestart:
    """Restarts without limit (or at most `attempts` consecutive times); the delay grows with each failure.

    Attributes:
        initial: the first delay, seconds.
        maximum: the longest delay, seconds.
        multiplier: factor by which the delay grows.
        reset_after: seconds without a failure after which the delay is the first one again.
        attempts: maximum number of consecutive restarts; None for no limit.
    """

    initial: float = 1.0
    maximum: float = 60.0
    multiplier: float = 1.5
    reset_after: float = 3600.0
    attempts: int | None = None
    _restarts: int = field(default=0, init=False, repr=False, compare=False)
    _in_a_row: int = field(default=0, init=False, repr=False, compare=False)
    _running_since: float | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self, "initial", is_number(self.initial, above=0), "seconds, more than 0: a delay of 0 does not grow")
        _check(self, "multiplier", is_number(self.multiplier, least=1), "a number of at least 1")
        _check(self, "maximum", is_number(self.maximum, least=self.initial), f"seconds, at least initial={self.initial}")
        _check(self, "reset_after", is_number(self.reset_after, above=0), "seconds, more than 0: else no failure follows another")
        _check(self, "attempts", self.attempts is None or is_count(self.attempts), "a whole number of at least 0, or None")

    def on_failure(self, now: float) -> RestartAfter | GiveUp:
        if self._running_since is not None and now - self._running_since >= self.reset_after:
            self._in_a_row = 0
        if self.attempts is not None and self._in_a_row >= self.attempts:
            return GiveUp(f"the job failed {self._in_a_row + 1} times in a row (exponential delay, attempts={self.attempts})")
        try:
            delay = min(self.maximum, self.initial * self.multiplier**self._in_a_row)
        except OverflowError:
            delay = self.maximum
        self._in_a_row += 1
        self._restarts += 1
        self._running_since = now + delay
        return RestartAfter(delay, self._restarts)

    def fresh(self) -> ExponentialDelayRestart:
        return replace(self)


@dataclass(slots=True)
class FailureRateRestart:
    """Gives up when more than `max_failures` failures fall within `interval` seconds; else restarts after
    `delay`."""

    max_failures: int = 1
    interval: float = 60.0
    delay: float = 1.0
    _restarts: int = field(default=0, init=False, repr=False, compare=False)
    _failures: deque[float] = field(default_factory=deque, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self, "max_failures", is_count(self.max_failures), "a whole number of at least 0")
        _check(self, "interval", is_number(self.interval, above=0), "seconds, more than 0: else no failure is counted")
        _check(self, "delay", is_number(self.delay), "seconds, 0 or more")
        reached = self.max_failures * self.delay < self.interval
        needed = f"more than max_failures * delay = {self.max_failures * self.delay} seconds: else the limit is never reached"
        _check(self, "interval", reached, needed)

    def on_failure(self, now: float) -> RestartAfter | GiveUp:
        self._failures.append(now)
        while self._failures and now - self._failures[0] >= self.interval:
            self._failures.popleft()
        if len(self._failures) > self.max_failures:
            return GiveUp(
                f"{len(self._failures)} failures within {self.interval} s (failure rate, max_failures={self.max_failures})"
            )
        self._restarts += 1
        return RestartAfter(self.delay, self._restarts)

    def fresh(self) -> FailureRateRestart:
        return replace(self)


def _check(strategy: object, name: str, valid: bool, expected: str) -> None:
    if not valid:
        raise InvalidCheckpointConfig(f"{type(strategy).__name__}({name}={getattr(strategy, name)!r}): expected {expected}.")
