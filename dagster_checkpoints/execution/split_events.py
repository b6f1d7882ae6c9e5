"""What the job, its tasks and the discovery of splits tell each other about the splits of a source; values only."""

from __future__ import annotations

import msgspec

from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state.metadata import EnumeratorState

# To a task


class AssignSplit(msgspec.Struct, frozen=True):
    """The task reads this split from now on.

    Attributes:
        split: the split, as text.
    """

    split: str


class NoMoreSplits(msgspec.Struct, frozen=True):
    """No split is left for the task: its data ends with the splits that it has."""


SplitMessage = AssignSplit | NoMoreSplits

# To the job


class SplitRequest(msgspec.Struct, frozen=True):
    """A task has read splits to their end, or asks for one.

    Attributes:
        task: the task.
        finished: the splits that it has read to their end since its last report.
        asks: whether it asks for a split. It asks again only after an answer.
    """

    task: TaskId
    finished: tuple[str, ...] = ()
    asks: bool = False


class SplitsDiscovered(msgspec.Struct, frozen=True):
    """A part of the answer to `DiscoverSplits`.

    Attributes:
        stage: the source.
        splits: splits that exist, in the order in which they are to be read; those that are known already are ignored.
        last: whether the discovery has come to its end.
    """

    stage: str
    splits: tuple[str, ...] = ()
    last: bool = False

    @property
    def task(self) -> TaskId:
        """A task of the source: the report counts if the tasks of its attempt are deployed."""
        return TaskId(self.stage, 0)


class EnumeratorStart(msgspec.Struct, frozen=True):
    """The enumerator of one source, as an attempt begins with it.

    Attributes:
        stage: the source.
        tasks: its tasks that have not finished.
        bounded: whether the splits are discovered once. Otherwise they are discovered again and again.
        interval: seconds between two discoveries of an unbounded source.
        state: the enumerator in the restored checkpoint.
        held: the splits that the restored tasks read on. Other assigned splits are assigned again.
    """

    stage: str
    tasks: tuple[TaskId, ...]
    bounded: bool
    interval: float
    state: EnumeratorState = EnumeratorState()
    held: frozenset[str] = frozenset()
