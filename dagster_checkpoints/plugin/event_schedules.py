"""When commits and observations of an endless pipeline are written to Dagster's event log, so that they do not fill it.

The first commit of a stage is reported at once, every other one when the last report is old enough; until then it is held.
Observations have subjects (a stage, the checkpoints, a kind of failure), each with its own due times: often in its first minutes,
when a person watches, then at a steady rate, and rarely while it does not change. Pure state machines: time is an argument. They
must not know the content of events, nor where they are written.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


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


EARLY_EVERY = 30.0
"""Seconds between two observations of a subject in its first minutes."""
EARLY_FOR = 300.0
"""Length of a subject's first minutes, in seconds."""
UNCHANGED_FACTOR = 12
"""Factor by which the pause between two observations of an unchanged subject is longer."""


@dataclass
class _Subject:
    """A subject: times of its first and last observation, the value then, and the number of observations skipped since."""

    first: float
    last: float
    seen: Hashable
    skipped: int = 0


class ObservationSchedule:
    """Decides which observations of a run are made.

    Args:
        every: Seconds between two observations of a subject after its first minutes. In its first minutes the pause is the
            smaller one of this and :data:`EARLY_EVERY`.

    Examples:
        >>> schedule = ObservationSchedule(300.0)
        >>> [now for now in range(0, 1200, 10) if schedule.due("sales", now, now) is not None]
        [0, 30, 60, 90, 120, 150, 180, 210, 240, 270, 570, 870, 1170]
    """

    def __init__(self, every: float) -> None:
        self._every = every
        self._subjects: dict[str, _Subject] = {}

    def due(self, subject: str, seen: Hashable, now: float) -> int | None:
        """Whether an observation of a subject is due; a due observation counts as made.

        Args:
            subject: Name of the subject.
            seen: Value that the observation would show; a changed value makes the observation due earlier.
            now: Monotonic seconds.

        Returns:
            None if the observation is not due. Otherwise the number of observations skipped since the last one.
        """
        observed = self._subjects.get(subject)
        if observed is None:
            self._subjects[subject] = _Subject(now, now, seen)
            return 0
        if now - observed.last < self._pause(observed, seen, now):
            observed.skipped += 1
            return None
        skipped, observed.skipped = observed.skipped, 0
        observed.last, observed.seen = now, seen
        return skipped

    def made(self, subject: str, seen: Hashable, now: float) -> int:
        """Count an observation as made now, due or not: the caller makes it because of an important event.

        Returns:
            The number of observations skipped since the last one.
        """
        observed = self._subjects.setdefault(subject, _Subject(now, now, seen))
        skipped, observed.skipped = observed.skipped, 0
        observed.last, observed.seen = now, seen
        return skipped

    def may_be_due(self, subject: str, now: float) -> bool:
        """Whether an observation of the subject would be due now if the subject has changed. Counts no observation."""
        observed = self._subjects.get(subject)
        return observed is None or now - observed.last >= self._changed_pause(observed, now)

    def _pause(self, observed: _Subject, seen: Hashable, now: float) -> float:
        return self._changed_pause(observed, now) if seen != observed.seen else self._every * UNCHANGED_FACTOR

    def _changed_pause(self, observed: _Subject, now: float) -> float:
        return min(self._every, EARLY_EVERY) if now - observed.first < EARLY_FOR else self._every
