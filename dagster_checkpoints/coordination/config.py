"""The settings of checkpointing, with Flink's meanings; seconds throughout.

No run on Spark reaches other values than the defaults of `checkpoints_after_tasks_finish`, `max_queued`, `keep_on_finish` and
`history`: docs/protocol.md says why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dagster_checkpoints.coordination.errors import InvalidCheckpointConfig
from dagster_checkpoints.pipeline.setting_values import is_count, is_number


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """How checkpoints are taken.

    Attributes:
        interval: seconds between periodic checkpoints. None for no periodic checkpoints: only the final one, when every task has
            reached its end of data, and those that are requested.
        interval_during_backlog: the interval while a source processes a backlog (FLIP-309): at least `interval`, or 0
            for no periodic checkpoints during a backlog; None for `interval`.
        backlog_rows: number of unread rows from which an unbounded source that measures them processes a backlog (FLIP-328); None
            if only bounded sources do.
        timeout: time after which a checkpoint is aborted if not every task has acknowledged it.
        min_pause: time between the completion of one checkpoint and the next periodic one.
        max_concurrent: maximum number of pending checkpoints.
        tolerable_failed_checkpoints: maximum number of consecutive failures; one more fails the job.
        retained: number of completed checkpoints that are kept.
        mode: "exactly_once" aligns barriers or captures what they overtake, "at_least_once" only counts them.
        unaligned: whether barriers overtake the records in front of them; only with exactly-once and one checkpoint at a time.
            Savepoints stay aligned, and then wait for other checkpoints instead of being exempt from `max_concurrent`.
        aligned_checkpoint_timeout: with `unaligned`, seconds from a barrier's creation during which it aligns before it
            overtakes; None or 0 for overtaking at once.
        checkpoints_after_tasks_finish: whether checkpoints are taken once a task has finished; if not, a task that has reached
            its end of data commits and ends without waiting for one.
        initial_delay: time from the moment all tasks run to the first periodic checkpoint; None for `interval`.
        max_queued: maximum number of waiting requests.
        keep_on_finish: whether the retained checkpoints are kept when the job ends FINISHED.
        history: number of ended checkpoints of which the statistics keep every detail.
    """

    interval: float | None
    timeout: float = 600.0
    min_pause: float = 0.0
    max_concurrent: int = 1
    tolerable_failed_checkpoints: int = 0
    retained: int = 1
    mode: Literal["exactly_once", "at_least_once"] = "exactly_once"
    unaligned: bool = False
    aligned_checkpoint_timeout: float | None = None
    checkpoints_after_tasks_finish: bool = True
    initial_delay: float | None = None
    max_queued: int = 1000
    keep_on_finish: bool = False
    interval_during_backlog: float | None = None
    backlog_rows: int | None = None
    history: int = 10

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            InvalidCheckpointConfig: a setting is outside its range, or does not go with another.
        """
        self._check("interval", self.interval is None or is_number(self.interval, above=0), "a positive number or None")
        self._check("timeout", is_number(self.timeout, above=0), "a positive number")
        self._check("min_pause", is_number(self.min_pause), "0 or more")
        self._check("max_concurrent", is_count(self.max_concurrent, least=1), "1 or more")
        self._check("tolerable_failed_checkpoints", is_count(self.tolerable_failed_checkpoints), "0 or more")
        self._check("retained", is_count(self.retained, least=1), "1 or more")
        for name in ("unaligned", "checkpoints_after_tasks_finish", "keep_on_finish"):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        self._check("mode", self.mode in ("exactly_once", "at_least_once"), "exactly_once or at_least_once")
        self._check("unaligned", not self.unaligned or self.mode == "exactly_once", "False with mode='at_least_once'")
        self._check("max_concurrent", not self.unaligned or self.max_concurrent == 1, "1 with unaligned=True")
        timeout = self.aligned_checkpoint_timeout
        known = timeout is None or (is_number(timeout) and self.unaligned)
        self._check("aligned_checkpoint_timeout", known, "None, or 0 or more together with unaligned=True")
        self._check("initial_delay", self.initial_delay is None or is_number(self.initial_delay), "0 or more, or None")
        periodic = self.interval is not None
        self._check("initial_delay", periodic or self.initial_delay is None, "None with interval=None: nothing waits for it")
        self._check("min_pause", periodic or not self.min_pause, "0 with interval=None: nothing waits for it")
        self._check("max_queued", is_count(self.max_queued, least=1), "1 or more")
        self._check("history", is_count(self.history), "0 or more")
        backlog = self.interval_during_backlog
        longer = backlog is None or (self.interval is not None and is_number(backlog) and not 0 < backlog < self.interval)
        self._check("interval_during_backlog", longer, "0, or at least `interval`, which must be set, or None")

        measured = self.backlog_rows is None or (is_count(self.backlog_rows, least=1) and backlog is not None)
        self._check("backlog_rows", measured, "1 or more together with interval_during_backlog, or None")

    def _check(self, name: str, valid: bool, expected: str) -> None:
        if not valid:
            raise InvalidCheckpointConfig(f"Checkpoint setting {name} is {getattr(self, name)!r}; expected {expected}.")

    def aligned(self) -> CheckpointConfig:
        """The same settings for a task at which no barrier overtakes records."""
        return replace(self, unaligned=False, aligned_checkpoint_timeout=None)

    @property
    def overtakes_at_once(self) -> bool:
        """Whether a checkpoint's barriers are unaligned from the beginning."""
        return self.unaligned and not self.aligned_checkpoint_timeout
