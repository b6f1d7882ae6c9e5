"""When a source counts as silent: its query has not got an answer from it, or its first rows, for some time.

A source that answers that it has no new rows is quiet, and not silent. Values and a rule with the time as an argument; it must
not know Spark's objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SILENT_SECONDS = 20.0
"""Seconds without an answer after which a source counts as silent."""
LOCAL_FIRST_BATCH_SECONDS = 60.0
"""The same for a first batch that Spark's driver reads itself: it reaches what it reads, so the batch is only slow."""
REPEAT_SECONDS = 600.0
"""Seconds after which a source that is still silent is reported again."""

Doing = Literal["starting", "asking", "reading", "other"]
"""What a query does: it creates its sources; asks them what there is to read; reads its first rows; or anything else, for which
its sources have answered."""


@dataclass(frozen=True)
class SourceLook:
    """What a query does at a moment.

    Attributes:
        answers: Differs from the one before if the sources have answered in between.
        doing: The kind of what it does.
        words: Spark's own words for it.
    """

    answers: str
    doing: Doing
    words: str


@dataclass(frozen=True)
class Silence:
    """A source is silent.

    Attributes:
        seconds: The time since its last answer, or since its query began.
        doing: What its query does.
        words: Spark's own words for it.
        local: Whether Spark's driver reads the rows itself, and no executors on other machines.
    """

    seconds: float
    doing: Doing
    words: str
    local: bool = False


class SourceAnswers:
    """Watches the sources of one query.

    Args:
        now: Monotonic seconds.
        local: Whether Spark's driver reads the rows itself, and no executors on other machines.
    """

    def __init__(self, now: float, *, local: bool = False) -> None:
        self.silence: Silence | None = None
        self._local = local
        self._answers: str | None = None
        self._since = now
        self._reported_at: float | None = None

    def look(self, look: SourceLook | None, now: float) -> bool:
        """Take a look at the query. Returns whether there is something to report: a silence that began or lasts, or its end.

        Args:
            look: What the query does; None if it does not read now.
            now: Monotonic seconds.
        """
        answered = look is None or look.doing == "other" or (self._answers is not None and look.answers != self._answers)
        self._answers = look.answers if look is not None else None
        if answered:
            self._since = now
        seconds = now - self._since
        patience = LOCAL_FIRST_BATCH_SECONDS if self._local and look is not None and look.doing == "reading" else SILENT_SECONDS
        if look is None or answered or seconds < patience:
            ended, self.silence, self._reported_at = self.silence is not None, None, None
            return ended
        self.silence = Silence(seconds, look.doing, look.words, self._local)
        if self._reported_at is not None and now - self._reported_at < REPEAT_SECONDS:
            return False
        self._reported_at = now
        return True


def silence_in_short(doing: Doing) -> str:
    """A silence in two or three words, as the state of a source.

    Args:
        doing: What the query of the source does.
    """
    return "no rows yet" if doing == "reading" else "no answer"


def silence_text(sources: Sequence[str], silence: Silence) -> str:
    """A silence in words, with what to check.

    Args:
        sources: The sources that the query reads.
        silence: The silence.
    """
    names = ", ".join(map(repr, sources))
    subject = f"Source {names}" if len(sources) == 1 else f"One of the sources {names}"
    if silence.doing == "reading":
        reach = "" if silence.local else "If there are few rows, check that the machines of Spark's executors reach the source. "
        return (
            f"{subject} has given no rows yet: its first batch has been running for {silence.seconds:.0f} s ({silence.words}). "
            f"{reach}If there are many rows, limit those of a micro-batch: none of them is committed while it runs."
        )
    return (
        f"{subject} has not answered for {silence.seconds:.0f} s; Spark says: {silence.words}. No rows are read meanwhile, and "
        "checkpoints complete without them. Check its address, port, credentials and network from Spark's driver, and that what "
        "it names (topic, table, path) exists. Spark goes on asking."
    )
