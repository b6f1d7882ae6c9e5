"""When observations of a running pipeline are written to Dagster's event log, so that an endless pipeline does not fill it.

Each subject (a stage, the checkpoints, a kind of failure) has its own due times: often in its first minutes, when a person
watches, then at a steady rate, and rarely while it does not change. A pure state machine: time is an argument. It must not know
the content of observations, nor where they are written.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

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
