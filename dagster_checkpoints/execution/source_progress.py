"""When the sources of a query have caught up: Spark has asked them since the query began, and found nothing after its last batch.

    begins ── a batch that was planned before runs unasked ──> asked ── rows ──> a batch ──> asked ── none ──> caught up

Two facts prove it, and nothing else does. Either Spark has found no rows and no work after the newest batch; or the newest batch
has no rows of the source, and Spark planned it in this run of the query, after asking. Only the second one comes from a query
that always wants another batch, such as one with timers of processing time. That no batch runs proves nothing: rows may wait.

It must not know: Spark's objects and logs, what depends on the answer.

Source: Spark's `MicroBatchExecution.constructNextBatch` (`noNewData`, the offset log).
"""

from __future__ import annotations

from collections.abc import Callable


class SourceProgress:
    """The progress of one query's sources; a fact may be told late, and on any thread."""

    def __init__(self) -> None:
        self._asks_from = 0
        """The first batch that the running query plans itself."""
        self._nothing_after: int | None = None
        """The batch after which Spark has found nothing; None if it has not since the query began."""

    def begins(self, planned: int) -> None:
        """The query begins.

        Args:
            planned: number of the newest batch in its offset log, which is run without asking the sources; -1 for none.
        """
        self._asks_from, self._nothing_after = planned + 1, None

    def found_nothing(self, committed: int) -> None:
        """Spark has asked the sources, and wants no batch.

        Args:
            committed: number of the newest batch that was committed before this was seen; -1 for none.
        """
        self._nothing_after = committed

    def caught_up(self, newest: int, has_rows: Callable[[int], bool]) -> bool:
        """Whether the sources have caught up.

        Args:
            newest: number of the newest planned batch; -1 for none.
            has_rows: whether a planned batch has rows of them.
        """
        return self._nothing_after == newest or (newest >= self._asks_from and not has_rows(newest))
