"""When commits of running stages are written to Dagster's event log, so that an endless pipeline does not fill it.

The first commit of a stage is reported at once, every other one when the last report is old enough; until then it is held. A pure
state machine: time is an argument. It must not know the content of commits, nor where they are written.
"""

from __future__ import annotations


class CommitSchedule:
    """Decides which commits of a run are reported, and when.

    Args:
        every: Least seconds between two reports of a stage; 0: each commit; None: no commit of a running stage.

    Examples:
        >>> schedule = CommitSchedule(60.0)
        >>> [now for now in range(0, 200, 10) if schedule.committed("sales", now)]
        [0, 60, 120, 180]
    """

    def __init__(self, every: float | None) -> None:
        self._every = every
        self._reported: dict[str, float] = {}
        self._held: set[str] = set()
        self._ending: set[str] = set()
        """The stages whose last commit is held, which is not reported before the end of the stage or the run."""

    def committed(self, stage: str, now: float) -> bool:
        """Whether a commit is reported now, with all that were held; it counts as reported. Otherwise it is held.

        Args:
            stage: Name of the stage.
            now: Monotonic seconds.
        """
        self._ending.discard(stage)
        self._held.add(stage)
        if not self._is_due(stage, now):
            return False
        self._report(stage, now)
        return True

    def hurried(self, stage: str, now: float) -> bool:
        """Whether held commits are reported now, although they are not due, because a report of their reader follows; these count
        as reported.

        Args:
            stage: Name of the stage.
            now: Monotonic seconds.
        """
        if stage not in self._held:
            return False
        self._report(stage, now)
        return True

    def last_committed(self, stage: str) -> None:
        """Hold the last commit of a stage: the end of the stage follows, or that of the run, and is reported with it."""
        self._held.discard(stage)
        self._ending.add(stage)

    def due(self, now: float) -> list[str]:
        """The stages whose held commits are reported now; these count as reported.

        Args:
            now: Monotonic seconds.
        """
        due = [stage for stage in sorted(self._held) if self._is_due(stage, now)]
        for stage in due:
            self._report(stage, now)
        return due

    def may_be_due(self, now: float) -> bool:
        """Whether a held commit would be reported now."""
        return any(self._is_due(stage, now) for stage in self._held)

    def stage_ended(self, stage: str) -> None:
        """The stage has ended: what was held is reported with its end."""
        self._held.discard(stage)
        self._ending.discard(stage)

    def run_ended(self) -> list[str]:
        """The run has ended: the stages whose held commits are reported, whatever the time; none if `every` is None."""
        held = sorted(self._held | self._ending) if self._every is not None else []
        self._held.clear()
        self._ending.clear()
        return held

    def _report(self, stage: str, now: float) -> None:
        self._held.discard(stage)
        self._reported[stage] = now

    def _is_due(self, stage: str, now: float) -> bool:
        last = self._reported.get(stage)
        return self._every is not None and (last is None or now - last >= self._every)
