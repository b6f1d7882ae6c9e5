"""When something about a running pipeline is written into Dagster's event log, so that an endless pipeline does not fill it.

Each subject (a stage, the checkpoints, a kind of failure) has due times of its own: often in its first minutes, when a person
watches, then at a steady rate, and seldom while nothing changes. A pure state machine: time is an argument. It must not know
what is written, nor where.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

EARLY_EVERY = 30.0
"""Seconds between two observations of a subject in its first minutes."""
EARLY_FOR = 300.0
"""How many seconds a subject's first minutes last."""
UNCHANGED_FACTOR = 12
"""How many times less often a subject that does not change is observed."""


@dataclass
class _Subject:
    """What is known of a subject: when it was observed first and last, what was seen then, and how often since it was not due."""

    first: float
    last: float
    seen: Hashable
    passed_over: int = 0


class ObservationSchedule:
    """Decides which observations of a run are made.

    Args:
        every: Seconds between two observations of a subject after its first minutes. In its first minutes it is the smaller
            one of this and :data:`EARLY_EVERY`.

    Examples:
        >>> schedule = ObservationSchedule(300.0)
        >>> [now for now in range(0, 1200, 10) if schedule.due("sales", now, now) is not None]
        [0, 30, 60, 90, 120, 150, 180, 210, 240, 270, 570, 870, 1170]
    """

    def __init__(self, every: float) -> None:
        self._every = every
        self._subjects: dict[str, _Subject] = {}

    def due(self, subject: str, seen: Hashable, now: float) -> int | None:
        """Whether an observation of a subject is to be made now; it is then taken as made.

        Args:
            subject: What is observed.
            seen: What the observation would show, as far as a difference matters.
            now: Monotonic seconds.

        Returns:
            None if it is not due. Otherwise how many times it was not due since the last one.
        """
        known = self._subjects.get(subject)
        if known is None:
            self._subjects[subject] = _Subject(now, now, seen)
            return 0
        if now - known.last < self._pause(known, seen, now):
            known.passed_over += 1
            return None
        passed_over, known.passed_over = known.passed_over, 0
        known.last, known.seen = now, seen
        return passed_over

    def made(self, subject: str, seen: Hashable, now: float) -> int:
        """An observation is made now, due or not, because something happened that must not be missed.

        Returns:
            How many times it was not due since the last one.
        """
        known = self._subjects.setdefault(subject, _Subject(now, now, seen))
        passed_over, known.passed_over = known.passed_over, 0
        known.last, known.seen = now, seen
        return passed_over

    def may_be_due(self, subject: str, now: float) -> bool:
        """Whether :meth:`due` would say so if the subject has changed; changes nothing."""
        known = self._subjects.get(subject)
        return known is None or now - known.last >= self._changed_pause(known, now)

    def _pause(self, known: _Subject, seen: Hashable, now: float) -> float:
        return self._changed_pause(known, now) if seen != known.seen else self._every * UNCHANGED_FACTOR

    def _changed_pause(self, known: _Subject, now: float) -> float:
        return min(self._every, EARLY_EVERY) if now - known.first < EARLY_FOR else self._every
