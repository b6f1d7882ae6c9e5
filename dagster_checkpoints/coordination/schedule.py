"""When the coordinator asks itself for a checkpoint: by the interval, and at the end of the data.

Must not know: what a checkpoint is, whether one can be triggered.
"""

from __future__ import annotations

from dagster_checkpoints.coordination.config import CheckpointConfig

_LONGEST_BACK_OFF = 1.0


class CheckpointSchedule:
    """Due times of one attempt of the job.

    The periodic due time starts when all tasks run. When every task has reached its end of data the periodic
    ones end and exactly one final checkpoint is wanted, at once; if it fails, another after a short back-off.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._next_periodic: float | None = None
        self._backlog = False
        self._periodic_over = False
        self._final_wanted = False
        self._final_at = 0.0
        self._finals: set[int] = set()
        """Pending checkpoints that were triggered after every task's end of data: any of them lets all go."""

    @property
    def periodic_over(self) -> bool:
        """Whether periodic checkpoints have no purpose any more: the final one replaces them."""
        return self._periodic_over

    def drain(self) -> None:
        """Every source ends now: periodic checkpoints stop, so that all tasks end with the final one."""
        self._periodic_over = True

    def resume(self, now: float) -> None:
        """Checkpoints were suspended and go on: the next periodic one is due an interval later."""
        if self._next_periodic is not None and self._config.interval is not None:
            self._next_periodic = now + self._config.interval

    def observe(self, *, running: bool, at_end: bool, leaving: bool, backlog: bool, now: float) -> None:
        """Take note of the tasks that are left.

        Args:
            running: whether all of them run.
            at_end: whether all of them run and have reached their end of data.
            leaving: whether a completed checkpoint has let some of them go, so that they are about to be FINISHED.
            backlog: whether some of them work off a backlog.
            now: seconds.
        """
        if self._config.interval is None:
            return
        if running and self._next_periodic is None:
            delay = self._config.initial_delay
            self._next_periodic = now + (self._config.interval if delay is None else delay)
        if backlog != self._backlog:
            self._backlog_changed(backlog, self._config.interval, now)
        all_wait = at_end and self._config.tasks_wait_for_final_checkpoint
        self._periodic_over |= all_wait
        self._final_wanted = all_wait and not leaving and not self._finals

    def next_due(self, *, periodic_queued: bool, final_queued: bool) -> float | None:
        """When something is due, seconds; what waits in the queue already is not due again."""
        if self._final_wanted:
            return None if final_queued else self._final_at
        return None if self._periodic_over or periodic_queued or not self._interval else self._next_periodic

    # Periodic checkpoints

    @property
    def _interval(self) -> float | None:
        """The one that applies now; None or 0 for no periodic checkpoints."""
        longer = self._config.interval_during_backlog
        return longer if self._backlog and longer is not None else self._config.interval

    def _backlog_changed(self, backlog: bool, interval: float, now: float) -> None:
        """What is due soon stays due; after a backlog nothing is due later than without one."""
        if not backlog and self._next_periodic is not None:
            suspended = not self._interval and self._next_periodic < now
            self._next_periodic = now + interval if suspended else min(self._next_periodic, now + interval)
        self._backlog = backlog

    def take_periodic(self, now: float) -> bool:
        """Whether a periodic checkpoint is due now; the next one is then due an interval later."""
        interval = self._interval
        if not interval or self._next_periodic is None or now < self._next_periodic:
            return False
        missed = int((now - self._next_periodic) // interval)
        self._next_periodic += (missed + 1) * interval
        return True

    def postpone_periodic(self, until: float) -> None:
        """The minimum pause has not passed: the next periodic checkpoint is due when it has."""
        if self._next_periodic is not None:
            self._next_periodic = until

    # The final checkpoint

    @property
    def final_wanted(self) -> bool:
        """Whether every task waits for a checkpoint and none that would let them go is pending."""
        return self._final_wanted

    def final_due(self, now: float) -> bool:
        return self._final_wanted and now >= self._final_at

    def final_triggered(self, checkpoint_id: int) -> None:
        """A checkpoint was triggered after every task's end of data."""
        self._finals.add(checkpoint_id)
        self._final_wanted = False

    def final_not_triggered(self, now: float) -> None:
        """It could not be: another attempt after the back-off."""
        self._final_at = now + min(self._config.interval or _LONGEST_BACK_OFF, _LONGEST_BACK_OFF)

    def ended(self, checkpoint_id: int, *, failed: bool, now: float) -> None:
        """A checkpoint has completed or failed; if it was a final one that failed, another is wanted."""
        if checkpoint_id in self._finals:
            self._finals.discard(checkpoint_id)
            if failed:
                self.final_not_triggered(now)
