"""When checkpoints are due without a request: by the interval, and at the end of the data.

Must not know: the pending checkpoints, whether one can be triggered.
"""

from __future__ import annotations

from dagster_checkpoints.coordination.checkpoints import CheckpointProperties
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.progress import TaskProgress
from dagster_checkpoints.coordination.requests import CheckpointRequest, RequestQueue

_LONGEST_BACK_OFF = 1.0


class CheckpointSchedule:
    """The due times of one attempt of the job.

    The first periodic checkpoint is due an interval (or `initial_delay`) after all tasks run. When every task has reached its
    end of data no periodic checkpoint is due any more, and exactly one final checkpoint is due at once; if it fails, the next
    one is due after a short back-off.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._next_periodic: float | None = None
        self.interval_since: float | None = None
        """When the present interval began to count, seconds: a periodic checkpoint is due at most an interval later. It begins
        again with the attempt, when all tasks run, and after a stop that has failed or a backlog. None before the first event."""
        self._backlog = False
        self._periodic_ended = False
        self._final_wanted = False
        self._final_at = 0.0
        self._finals: set[int] = set()
        """Pending checkpoints that were triggered after every task's end of data: any of them lets all tasks end."""

    def drain(self) -> None:
        """Every source ends now: no periodic checkpoint is due any more, and all tasks end with the final one."""
        self._periodic_ended = True

    def resume(self, now: float) -> None:
        """Checkpoints are no longer suspended: the next periodic one is due an interval later."""
        if self._config.interval is not None:
            self._next_periodic = now + self._config.interval
            self.interval_since = now

    def due(self, tasks: TaskProgress, queue: RequestQueue, now: float) -> list[CheckpointRequest]:
        """Remove from the queue what the tasks' progress has made unnecessary; return what is due now."""
        self._observe(tasks, now)
        due = []
        if not self._final_wanted:
            queue.withdraw_end_of_data()
        elif now >= self._final_at and not queue.has_end_of_data:
            due.append(CheckpointRequest(CheckpointProperties(), now, for_end_of_data=True))
        if self._periodic_ended:
            queue.withdraw_periodic()
        elif self._take_periodic(now) and not queue.has_periodic:
            due.append(CheckpointRequest(CheckpointProperties.for_periodic(), now))
        return due

    def next_due(self, queue: RequestQueue) -> float | None:
        """When the next checkpoint is due, seconds; None if none is. A checkpoint that is already queued is not due again."""
        if self._final_wanted:
            return None if queue.has_end_of_data else self._final_at
        return None if self._periodic_ended or queue.has_periodic or not self.interval else self._next_periodic

    def _observe(self, tasks: TaskProgress, now: float) -> None:
        interval = self._config.interval
        if interval is not None:
            if self.interval_since is None:
                self.interval_since = now
            if self._next_periodic is None and tasks.all_run:
                delay = self._config.initial_delay
                self._next_periodic = now + (interval if delay is None else delay)
                self.interval_since = self._next_periodic - interval
            if tasks.any_in_backlog != self._backlog:
                self._backlog_changed(tasks.any_in_backlog, interval, now)
        all_wait = self._config.checkpoints_after_tasks_finish and tasks.all_at_end_of_data
        self._periodic_ended |= all_wait
        self._final_wanted = all_wait and not tasks.any_finishing and not self._finals

    # Periodic checkpoints

    @property
    def interval(self) -> float | None:
        """The present interval, seconds; None or 0 for no periodic checkpoints."""
        longer = self._config.interval_during_backlog
        return longer if self._backlog and longer is not None else self._config.interval

    def _backlog_changed(self, backlog: bool, interval: float, now: float) -> None:
        """A due time that has been set stays; after a backlog the next checkpoint is due within one normal interval."""
        if not backlog and self._next_periodic is not None:
            suspended = not self.interval and self._next_periodic < now
            self._next_periodic = now + interval if suspended else min(self._next_periodic, now + interval)
            self.interval_since = now
        self._backlog = backlog

    def _take_periodic(self, now: float) -> bool:
        """Whether a periodic checkpoint is due now; if so, the next one is due an interval later."""
        interval = self.interval
        if not interval or self._next_periodic is None or now < self._next_periodic:
            return False
        missed = (now - self._next_periodic) // interval
        self._next_periodic += (missed + 1) * interval
        return True

    def postpone_periodic(self, until: float) -> None:
        """The minimum pause has not passed: the next periodic checkpoint is due when it has."""
        self._next_periodic = until

    # The final checkpoint

    def final_triggered(self, checkpoint_id: int) -> None:
        """A checkpoint was triggered after every task's end of data."""
        self._finals.add(checkpoint_id)
        self._final_wanted = False

    def final_failed(self, now: float) -> None:
        """A final checkpoint has failed: the next one is due after the back-off."""
        self._final_at = now + min(self._config.interval or _LONGEST_BACK_OFF, _LONGEST_BACK_OFF)

    def completed(self, checkpoint_id: int) -> None:
        """A checkpoint has completed."""
        self._finals.discard(checkpoint_id)

    def failed(self, checkpoint_id: int, now: float) -> None:
        """A checkpoint has failed; if it was a final one, another is due."""
        if checkpoint_id in self._finals:
            self._finals.discard(checkpoint_id)
            self.final_failed(now)
