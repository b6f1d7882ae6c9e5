"""The statistics of checkpoints: counts, a bounded history with every instance's part, and a summary.

Collected from the coordinator's events and actions; no rule depends on them. Must not know: the coordinator's rules, how the
statistics are displayed.

Source: Flink's CheckpointStatsTracker, CheckpointStatsHistory, CompletedCheckpointStatsSummary.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from msgspec.structs import replace

from dagster_checkpoints.coordination.checkpoint_record import (
    Acknowledgement,
    CheckpointRecord,
    CheckpointStatus,
    Distribution,
)
from dagster_checkpoints.coordination.checkpoints import AcknowledgeAnswer, CompletedCheckpoint
from dagster_checkpoints.coordination.events import (
    AcknowledgeAnswered,
    Acknowledged,
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointTriggered,
    CoordinatorAction,
    CoordinatorEvent,
)
from dagster_checkpoints.pipeline import ExecutionGraph, TaskId

_SUCCESS = AcknowledgeAnswer.SUCCESS  # read at every event, and a look-up in an enumeration is slow
_WINDOW = 10_000
"""Number of the latest values over which percentiles are taken, as in Flink."""
_UNTAKEN = 1_000
"""Number of ended checkpoints that wait for :meth:`CheckpointStatistics.take_ended`."""


class _Quantity:
    """A distribution to which values are added; they are never negative."""

    def __init__(self) -> None:
        self._count = 0
        self._minimum = self._maximum = self._sum = 0.0
        self._latest: deque[float] = deque(maxlen=_WINDOW)

    def add(self, value: float) -> None:
        self._minimum = min(self._minimum, value) if self._count else value
        self._maximum = max(self._maximum, value)
        self._count += 1
        self._sum += value
        self._latest.append(value)

    def distribution(self) -> Distribution:
        if not self._count:
            return Distribution()
        mean = self._sum / self._count
        return Distribution(self._count, self._minimum, self._maximum, mean, tuple(sorted(self._latest)))


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """Distributions over all completed checkpoints and savepoints of this coordinator; seconds and bytes."""

    duration: Distribution
    new_bytes: Distribution
    total_bytes: Distribution
    in_flight_bytes: Distribution


@dataclass(frozen=True, slots=True)
class CheckpointCounts:
    """Numbers of checkpoints and savepoints.

    Attributes:
        triggered: number that were given an id.
        in_progress: number that are pending now.
        completed: number that have completed, savepoints included.
        failed: number that have failed, including those that failed before they were given an id.
        savepoints: number of completed savepoints.
        restored: number of starts of the job from a checkpoint or savepoint.
        failed_in_a_row: number of checkpoints that have failed since one, or a savepoint, has completed, for a reason that counts
            (`FailureReason.counts`).
    """

    triggered: int = 0
    in_progress: int = 0
    completed: int = 0
    failed: int = 0
    savepoints: int = 0
    restored: int = 0
    failed_in_a_row: int = 0


class CheckpointStatistics:
    """The statistics of one coordinator.

    Args:
        graph: the execution graph of the job.
        history: number of ended checkpoints that are kept with every detail.
    """

    def __init__(self, graph: ExecutionGraph, history: int) -> None:
        self._graph = graph
        self._numbers: Counter[str] = Counter()
        self._in_progress: dict[int, tuple[CheckpointRecord, dict[TaskId, Acknowledgement]]] = {}
        self._history: deque[CheckpointRecord] = deque(maxlen=history)
        self._untaken: deque[CheckpointRecord] = deque(maxlen=_UNTAKEN)
        self._quantities = [_Quantity() for _ in range(4)]
        self.latest_completed: CheckpointRecord | None = None
        """The latest completed checkpoint, not savepoint."""
        self.latest_savepoint: CheckpointRecord | None = None
        self.latest_failed: CheckpointRecord | None = None

    @property
    def counts(self) -> CheckpointCounts:
        return CheckpointCounts(in_progress=len(self._in_progress), **self._numbers)

    @property
    def in_progress(self) -> tuple[CheckpointRecord, ...]:
        """The pending checkpoints, oldest first."""
        return tuple(record for record, _ in self._in_progress.values())

    @property
    def history(self) -> tuple[CheckpointRecord, ...]:
        """The latest ended checkpoints, the newest first."""
        return tuple(reversed(self._history))

    @property
    def summary(self) -> CheckpointSummary:
        return CheckpointSummary(*(quantity.distribution() for quantity in self._quantities))

    def record(self, checkpoint_id: int) -> CheckpointRecord | None:
        """The record of this checkpoint; None if it is not in the history any more."""
        if checkpoint_id in self._in_progress:
            return self._in_progress[checkpoint_id][0]
        return next((record for record in self._history if record.checkpoint_id == checkpoint_id), None)

    def take_ended(self) -> tuple[CheckpointRecord, ...]:
        """The checkpoints that have ended since the last call, the oldest first; of more than 1,000 the latest."""
        taken = tuple(self._untaken)
        self._untaken.clear()
        return taken

    # Input

    def observe(self, event: CoordinatorEvent, actions: Sequence[CoordinatorAction], now: float) -> None:
        """Take note of an event of the coordinator and of its actions.

        Args:
            event: the event that the coordinator has handled.
            actions: all actions that it has returned.
            now: seconds.
        """
        for action in actions:
            if type(action) is AcknowledgeAnswered:
                if action.answer is _SUCCESS and isinstance(event, Acknowledged):
                    self._in_progress[action.checkpoint_id][1][action.task] = Acknowledgement(now, event.statistics)
            elif type(action) is CheckpointTriggered:
                self._triggered(action, now)
            elif type(action) is CheckpointCompleted:
                self._completed(action.checkpoint)
            elif type(action) is CheckpointFailed:
                self._failed(action, now)

    def restored(self) -> None:
        """The job is started from a checkpoint."""
        self._numbers["restored"] += 1

    def _triggered(self, action: CheckpointTriggered, now: float) -> None:
        self._numbers["triggered"] += 1
        parts: dict[TaskId, Acknowledgement] = {}
        record = CheckpointRecord(
            graph=self._graph,
            checkpoint_id=action.checkpoint_id,
            properties=action.properties,
            request_id=action.request_id,
            triggered_at=now,
            expected=action.waiting,
            finished=action.finished,
            acknowledgements=MappingProxyType(parts),
        )
        self._in_progress[action.checkpoint_id] = (record, parts)

    def _completed(self, checkpoint: CompletedCheckpoint) -> None:
        record, _ = self._in_progress.pop(checkpoint.checkpoint_id)
        record = replace(
            record, status=CheckpointStatus.COMPLETED, ended_at=checkpoint.completed_at, location=checkpoint.location
        )
        self._numbers["completed"] += 1
        self._numbers["failed_in_a_row"] = 0
        self._numbers["savepoints"] += checkpoint.is_savepoint
        measured = record.measured
        values = (checkpoint.duration, measured.new_bytes, measured.total_bytes, measured.in_flight_bytes)
        for quantity, value in zip(self._quantities, values, strict=True):
            quantity.add(value)
        if checkpoint.is_savepoint:
            self.latest_savepoint = record
        else:
            self.latest_completed = record
        self._ended(record)

    def _failed(self, action: CheckpointFailed, now: float) -> None:
        self._numbers["failed"] += 1
        if action.checkpoint_id is None:
            return
        record, _ = self._in_progress.pop(action.checkpoint_id)
        self._numbers["failed_in_a_row"] += action.reason.counts and not record.properties.is_savepoint
        record = replace(record, status=CheckpointStatus.FAILED, ended_at=now, reason=action.reason, message=action.message)
        self.latest_failed = record
        self._ended(record)

    def _ended(self, record: CheckpointRecord) -> None:
        self._history.append(record)
        self._untaken.append(record)
