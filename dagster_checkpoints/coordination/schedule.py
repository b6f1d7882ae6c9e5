"""When the coordinator asks itself for a checkpoint: by the interval, and at the end of the data.

Must not know: what a checkpoint is, whether one can be triggered.
"""

from __future__ import annotations

from enum import Enum

from dagster_checkpoints.coordination.config import CheckpointConfig

_LONGEST_BACK_OFF = 1.0


class _Final(Enum):
    NOT_YET = "some task has not reached its end of data"
    WANTED = "every task has reached its end of data"
    TRIGGERED = "the final checkpoint is pending"
    DONE = "a checkpoint that serves every task has completed"


class CheckpointSchedule:
    """Due times of one attempt of the job.

    The periodic due time starts when all tasks run. When every task has reached its end of data the periodic
    ones end and exactly one final checkpoint is wanted, at once; if it fails, another after a short back-off.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._next_periodic: float | None = None
        self._final = _Final.NOT_YET
        self._final_at = 0.0
        self._final_id: int | None = None
        self._draining = False
        self._for_served = False
        """The final checkpoint is put off because a task is just finishing."""

    @property
    def ends_periodic(self) -> bool:
        """Whether periodic checkpoints have no purpose any more: the final one replaces them."""
        return self._draining or self._final is not _Final.NOT_YET

    def drain(self) -> None:
        """Every source ends now: periodic checkpoints stop, so that all tasks end with the final one."""
        self._draining = True

    def next_due(self, *, periodic_queued: bool) -> float | None:
        """When something is due; a periodic checkpoint that waits in the queue is not due again."""
        if self._final is _Final.WANTED:
            return self._final_at
        if self.ends_periodic or periodic_queued:
            return None
        return self._next_periodic

    def observe(self, *, running: bool, at_end: bool, served: int, unserved: int, now: float) -> None:
        """Take note of the tasks that are left.

        Args:
            running: whether all of them run.
            at_end: whether all of them run and have reached their end of data.
            served: how many a completed checkpoint has let go, so that they are about to be FINISHED.
            unserved: how many still wait for one.
            now: seconds.
        """
        if self._config.interval is None:
            return
        if running and self._next_periodic is None:
            delay = self._config.initial_delay
            self._next_periodic = now + (self._config.interval if delay is None else delay)
        if at_end and self._final is _Final.NOT_YET and self._config.tasks_wait_for_final_checkpoint:
            self._final = _Final.WANTED
            # A task that is just finishing would abort the checkpoint: give it a moment to be gone.
            self._final_at = now + self._back_off if served else now
            self._for_served = served > 0
        if self._final is _Final.WANTED and self._for_served and not served:
            self._for_served = False
            self._final_at = now
        if self._final is _Final.WANTED and at_end and not unserved:
            self._final = _Final.DONE

    @property
    def _back_off(self) -> float:
        return min(self._config.interval or _LONGEST_BACK_OFF, _LONGEST_BACK_OFF)

    def take_periodic(self, now: float) -> bool:
        """Whether a periodic checkpoint is due now; the next one is then due an interval later."""
        interval = self._config.interval
        if interval is None or self._next_periodic is None or now < self._next_periodic:
            return False
        missed = int((now - self._next_periodic) // interval)
        self._next_periodic += (missed + 1) * interval
        return True

    def postpone_periodic(self, until: float) -> None:
        """The minimum pause has not passed: the next periodic checkpoint is due when it has."""
        if self._next_periodic is not None:
            self._next_periodic = until

    @property
    def final_wanted(self) -> bool:
        return self._final is _Final.WANTED

    def final_due(self, now: float) -> bool:
        return self._final is _Final.WANTED and now >= self._final_at

    def final_triggered(self, checkpoint_id: int) -> None:
        """A checkpoint was triggered after every task's end of data."""
        if self._final is not _Final.DONE:
            self._final = _Final.TRIGGERED
            self._final_id = checkpoint_id

    def final_failed(self, checkpoint_id: int | None, now: float) -> None:
        """A checkpoint failed (None: it could not be triggered); if it was the final one, another is
        wanted."""
        is_final = self._final is _Final.TRIGGERED and checkpoint_id == self._final_id
        if is_final or (self._final is _Final.WANTED and checkpoint_id is None):
            self._final = _Final.WANTED
            self._final_at = now + self._back_off

    def completed(self, checkpoint_id: int) -> None:
        """A checkpoint completed. One triggered after every task's end of data serves every task."""
        if self._final is _Final.TRIGGERED and self._final_id is not None and checkpoint_id >= self._final_id:
            self._final = _Final.DONE
