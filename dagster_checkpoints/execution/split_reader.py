"""The splits of one task of a split source: which it reads, when it asks for another, and when its data ends.

    asks ── AssignSplit ──> reads ── SplitRead ──> reports it and asks ── … ── NoMoreSplits ──> ended

A snapshot holds the splits that the task was assigned and has not read to their end; after a restore it begins with them. The
driver knows how far a split was read. It must not know: which splits there are, other tasks.

Source: Flink's SourceReaderBase, FLIP-27.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dagster_checkpoints.execution.split_events import SplitRequest
from dagster_checkpoints.execution.task_events import ReadSplit, Report
from dagster_checkpoints.pipeline import TaskId

SplitAction = ReadSplit | Report


class SplitReader:
    """The splits of one task; see the module's docstring.

    Args:
        task: the task's id.
        held: the splits with which a restored task begins.
    """

    def __init__(self, task: TaskId, held: Sequence[str] = ()) -> None:
        self._task = task
        self._held = deque(held)
        self._reading = False
        self._asked = False
        self._last = False

    @property
    def held(self) -> tuple[str, ...]:
        """The splits that were assigned and are not read to their end: the task's part of a checkpoint."""
        return tuple(self._held)

    @property
    def exhausted(self) -> bool:
        """Whether all splits are read, and no other follows."""
        return self._last and not self._held

    def begin(self) -> list[SplitAction]:
        """The task begins."""
        return self._next(())

    def assigned(self, split: str) -> list[SplitAction]:
        """The task was assigned a split."""
        self._asked = False
        self._held.append(split)
        return self._next(())

    def read(self, split: str) -> list[SplitAction]:
        """A split was read to its end, and its rows are emitted."""
        self._reading = False
        self._held.remove(split)
        return self._next((split,))

    def end(self) -> None:
        """No other split follows: none is left, or the source is to end."""
        self._last = True

    def _next(self, finished: tuple[str, ...]) -> list[SplitAction]:
        asks = not (self._held or self._asked or self._last)
        self._asked = self._asked or asks
        actions: list[SplitAction] = [Report(SplitRequest(self._task, finished, asks))] if finished or asks else []
        if self._held and not self._reading:
            self._reading = True
            actions.append(ReadSplit(self._held[0]))
        return actions
