"""The splits of a source: discovered and handed out by enumerators in the job, and read by the readers in its tasks.

A split::

    discovered ── a task asks ──> assigned to that task ── the task has read it to its end ──> finished, never read again

There is one enumerator per stage, in the job. Its part of a checkpoint is taken in the step in which the checkpoint is triggered,
before the triggers are sent. A task gets messages in their order: a split that was assigned before is in the task's snapshot, or
was read to its end in front of it; a split that is assigned after belongs to the next checkpoint, and is still discovered in this
one. `state.recording.recorded_enumerators` puts both parts together.

A bounded source has a fixed set of splits: those of its first complete discovery. Its instances finish one by one, when no split
is left for them. An unbounded source discovers again after its interval; in a burst (`execution.burst`) it discovers once. If all
its instances were asked to end before the attempt, it reads what is there, as a bounded one: so it reads again what they had read
behind the restored checkpoint. It must not know: how splits are discovered or read.

A reader, of which each task has one::

    asks ── AssignSplit ──> reads ── SplitRead ──> reports it and asks ── … ── NoMoreSplits ──> ended

A snapshot holds the splits that the task was assigned and has not read to their end; after a restore it begins with them. The
driver knows how far a split was read.

Source: PROTOCOL section 7; FLIP-27; Flink's SourceCoordinator, which takes its snapshot before the barriers are sent and holds
back assignments until then, and SourceReaderBase.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence, Set

import msgspec

from dagster_checkpoints.coordination.errors import UnexpectedEvent
from dagster_checkpoints.execution.split_events import (
    AssignSplit,
    EnumeratorStart,
    NoMoreSplits,
    SplitMessage,
    SplitRequest,
    SplitsDiscovered,
)
from dagster_checkpoints.execution.task_events import ReadSplit, Report
from dagster_checkpoints.pipeline import Pipeline, StageKind, TaskId
from dagster_checkpoints.state.metadata import EnumeratorState

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


SplitMessages = list[tuple[TaskId, SplitMessage]]


class SplitCounts(msgspec.Struct, frozen=True):
    """The progress of a source in splits.

    Attributes:
        discovered: number of splits discovered so far, the others included.
        assigned: number of splits that instances read.
        finished: number of splits read to their end.
        complete: whether no other split is discovered any more.
        read_all: whether the source is unbounded, and all splits of the discoveries of this attempt so far have been read.
    """

    discovered: int = 0
    assigned: int = 0
    finished: int = 0
    complete: bool = False
    read_all: bool = False


class SplitEnumerator:
    """The enumerator of one source.

    Args:
        start: the source, and the state with which the attempt begins.
        ended: its tasks that were asked to end: they get no split, unless those are all of its tasks.
        burst: whether the splits of an unbounded source are discovered once.
    """

    def __init__(self, start: EnumeratorStart, ended: Set[TaskId] = frozenset(), *, burst: bool = False) -> None:
        state = start.state
        self._start = start
        self._assigned = dict.fromkeys(split for split in state.assigned if split in start.held)
        self._pending = deque([*(split for split in state.assigned if split not in start.held), *state.discovered])
        self._finished = dict.fromkeys(state.finished)
        self._known = {*state.discovered, *state.assigned, *state.finished}
        self._waiting: dict[TaskId, None] = {}
        reads_what_is_there = bool(start.tasks) and ended >= frozenset(start.tasks)
        self._bounded = start.bounded or reads_what_is_there
        """Whether one complete discovery finds all splits that are read."""
        self._complete = state.complete and self._bounded
        """Whether that discovery was made; one that was, and does not end the source any more, finds the first splits."""
        self._ended: set[TaskId] = set() if reads_what_is_there else set(ended)
        """The tasks that get no split any more."""
        self._burst = burst
        self._discovered = False
        """Whether a discovery has come to its end."""
        self._due: float | None = None if self._complete else float("-inf")
        """When the next discovery begins, seconds; None while one runs, and if none follows."""

    @property
    def counts(self) -> SplitCounts:
        """The progress of the source."""
        return SplitCounts(len(self._known), len(self._assigned), len(self._finished), self._complete, self.has_read_all)

    @property
    def has_read_all(self) -> bool:
        """Whether the source is unbounded, and all splits of the discoveries so far have been read."""
        return self._discovered and not (self._bounded or self._pending or self._assigned)

    @property
    def next_discovery(self) -> float | None:
        """When the next discovery begins, seconds; None if that is not known, or none follows."""
        return None if self._ended.issuperset(self._start.tasks) else self._due

    def discover(self) -> None:
        """A discovery begins."""
        self._due = None

    def discovered(self, event: SplitsDiscovered, now: float) -> SplitMessages:
        """Splits were discovered."""
        new = [split for split in dict.fromkeys(event.splits) if split not in self._known]
        self._known.update(new)
        self._pending += new
        if event.last:
            self._complete, self._discovered = self._bounded, True
            self._due = None if self._complete or self._burst else now + self._start.interval
        return self._deal_out()

    def asked(self, event: SplitRequest) -> SplitMessages:
        """A task has finished splits, or asks for one."""
        for split in event.finished:
            if split not in self._assigned:
                raise UnexpectedEvent(f"{event.task} has finished the split {split!r}, which it was not assigned.")
            del self._assigned[split]
            self._finished[split] = None
        if event.asks:
            self._waiting[event.task] = None
        return self._deal_out()

    def end(self, tasks: Iterable[TaskId]) -> None:
        """These tasks are to end: they read the splits that they have, and get no other."""
        for task in tasks:
            self._ended.add(task)
            self._waiting.pop(task, None)

    def _deal_out(self) -> SplitMessages:
        messages: SplitMessages = []
        for task in list(self._waiting):
            if task not in self._ended and self._pending:
                split = self._pending.popleft()
                self._assigned[split] = None
                messages.append((task, AssignSplit(split)))
            elif task in self._ended or self._complete:
                self._ended.add(task)
                messages.append((task, NoMoreSplits()))
            else:
                break
            del self._waiting[task]
        return messages

    def state(self) -> EnumeratorState:
        """The enumerator's part of a checkpoint that is triggered now."""
        return EnumeratorState(tuple(self._pending), tuple(self._assigned), tuple(self._finished), self._complete)


class SplitEnumerators:
    """The enumerators of all split sources of a job, in the present attempt.

    Args:
        burst: whether the splits of unbounded sources are discovered once in each attempt.
    """

    def __init__(self, *, burst: bool = False) -> None:
        self._burst = burst
        self._of: dict[str, SplitEnumerator] = {}
        self._taken: dict[int, dict[str, EnumeratorState]] = {}
        """By pending checkpoint, the state of each enumerator."""

    def begin(self, starts: Iterable[EnumeratorStart], ended: Set[TaskId], restarting: Set[str] | None = None) -> None:
        """An attempt begins.

        Args:
            starts: the enumerators with their restored states.
            ended: the tasks that were asked to end.
            restarting: the vertices whose tasks restart; the enumerators of others go on. None for all.
        """
        self._of = {
            start.stage: SplitEnumerator(start, ended, burst=self._burst)
            if restarting is None or start.stage in restarting
            else self._of[start.stage]
            for start in starts
        }

    @property
    def counts(self) -> Mapping[str, SplitCounts]:
        """By source, its progress in splits."""
        return {stage: each.counts for stage, each in self._of.items()}

    @property
    def have_read_all(self) -> list[str]:
        """The unbounded sources all of whose splits have been read."""
        return [stage for stage, each in self._of.items() if each.has_read_all]

    def next_discovery(self, deployed: Container[str]) -> float | None:
        """When the next discovery begins, seconds, of the sources that are deployed; None if that is not known."""
        due = [each.next_discovery for stage, each in self._of.items() if stage in deployed]
        return min((at for at in due if at is not None), default=None)

    def discover(self, now: float, deployed: Container[str]) -> list[str]:
        """Begin the discoveries that are due, of the sources that are deployed. Returns their sources."""
        due = [
            stage
            for stage, each in self._of.items()
            if stage in deployed and each.next_discovery is not None and each.next_discovery <= now
        ]
        for stage in due:
            self._of[stage].discover()
        return due

    def take(self, event: SplitRequest | SplitsDiscovered, now: float) -> SplitMessages:
        """Take the report of a task or of a discovery."""
        if isinstance(event, SplitsDiscovered):
            return self._of[event.stage].discovered(event, now)
        return self._of[event.task.vertex].asked(event)

    def end(self, tasks: Iterable[TaskId]) -> None:
        """These tasks are to end."""
        for task in tasks:
            if task.vertex in self._of:
                self._of[task.vertex].end((task,))

    def triggered(self, checkpoint_id: int) -> None:
        """A checkpoint is triggered: its triggers are sent next."""
        if self._of:
            self._taken[checkpoint_id] = {stage: each.state() for stage, each in self._of.items()}

    def failed(self, checkpoint_id: int) -> None:
        """A checkpoint has failed."""
        self._taken.pop(checkpoint_id, None)

    def written(self, checkpoint_id: int) -> Mapping[str, EnumeratorState]:
        """All tasks have acknowledged the checkpoint. Returns the enumerators' states at its trigger."""
        return self._taken.pop(checkpoint_id, {})


def enumerator_starts(
    pipeline: Pipeline,
    finished: Set[TaskId],
    known: Mapping[str, EnumeratorState],
    held: Mapping[TaskId, Iterable[str]],
) -> tuple[EnumeratorStart, ...]:
    """The enumerators with which an attempt begins.

    Args:
        pipeline: the pipeline that runs.
        finished: the tasks that had finished in the restored checkpoint.
        known: by source, its enumerator in the restored checkpoint.
        held: by restored task, the splits with which it begins.
    """
    starts = []
    for stage in pipeline.stages:
        if stage.split_interval is None:
            continue
        tasks = tuple(TaskId(stage.name, index) for index in range(stage.parallelism))
        starts.append(
            EnumeratorStart(
                stage.name,
                tuple(task for task in tasks if task not in finished),
                bounded=stage.kind is StageKind.BOUNDED_SOURCE,
                interval=stage.split_interval,
                state=known.get(stage.name, EnumeratorState()),
                held=frozenset(split for task in tasks for split in held.get(task, ())),
            )
        )
    return tuple(starts)
