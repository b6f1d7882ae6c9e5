"""How a task ends: finish, wait for a final checkpoint, commit, close.

    RUNNING ── EndOfData ──> FINISHING ── finished ──> WAITING_FOR_FINAL_CHECKPOINT ── completed ──> FINISHED
       └── a suspend's snapshot: paused ── its savepoint completed ──────────────────────────────────────┘

A suspend's snapshot may also be taken while the operators finish: what they emit after it belongs to the next attempt, and the
task reports the end of its data only if the savepoint fails. Snapshots come in the order of their checkpoints; a snapshot of a
checkpoint that was reported as aborted before is not waited for, and pauses nothing.

One machine per task, driven by the task's own thread. Must not know: how operators finish, commit or close.

Source: FLIP-147, "Final Checkpoint and Stopping Job With Savepoint"; FLIP-34; the order of snapshots and aborts:
Flink's SubtaskCheckpointCoordinatorImpl (lastCheckpointId, abortedCheckpointIds).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NoReturn

import msgspec

from dagster_checkpoints.coordination.errors import UnexpectedEvent
from dagster_checkpoints.coordination.id_ranges import IdRanges


class LifecycleState(Enum):
    """How far a task is on its way to its end."""

    RUNNING = "running"
    FINISHING = "finishing"
    """MAX_WATERMARK, end_input and finish are being done."""
    WAITING_FOR_FINAL_CHECKPOINT = "waiting for the final checkpoint"
    """The task emits nothing more and keeps its resources: they are needed for the final commit."""
    FINISHED = "finished"


_RUNNING, _FINISHING, _WAITING, _FINISHED = LifecycleState
"""Names of the members that are read at every event: a look-up in an enumeration takes ten times as long."""


class EndOfDataReceived(msgspec.Struct, frozen=True):
    """No more records on any input, or the source is exhausted or was stopped.

    Attributes:
        drain: False after a suspend: the upstream task has ended with the savepoint, which is therefore complete. This task
            ends when the coordinator sends it the same notice.
    """

    drain: bool = True


class OperatorsFinished(msgspec.Struct, frozen=True):
    """MAX_WATERMARK, end_input and finish are done."""


class SnapshotTaken(msgspec.Struct, frozen=True):
    """The task has taken its snapshot for this checkpoint.

    Attributes:
        stops_job: whether it is the savepoint of a stop: the task ends with exactly this one.
        savepoint: whether it is a savepoint; the job continues after it unless `stops_job`.
    """

    checkpoint_id: int
    stops_job: bool = False
    savepoint: bool = False


class CheckpointCompletedNotice(msgspec.Struct, frozen=True):
    """The coordinator reports that this checkpoint has completed: the task commits, and ends if the checkpoint lets it."""

    checkpoint_id: int


class SavepointCompletedNotice(msgspec.Struct, frozen=True):
    """The coordinator reports that this savepoint of a job that continues has completed: there is nothing to commit, and
    the task waits for it no longer."""

    checkpoint_id: int


class CheckpointAbortedNotice(msgspec.Struct, frozen=True):
    """The coordinator reports that this checkpoint will never complete."""

    checkpoint_id: int


CheckpointNotice = CheckpointCompletedNotice | SavepointCompletedNotice | CheckpointAbortedNotice
"""The outcome of a checkpoint, as the coordinator sends it to tasks."""


class RestoredAfterFinish(msgspec.Struct, frozen=True):
    """The task was restored from a snapshot that it had taken after finish(): it must not finish again."""


class DrainAnnounced(msgspec.Struct, frozen=True):
    """The job is being stopped with a savepoint after a drain: a task that would not wait for a checkpoint waits for that
    savepoint, too. Sent before the end of data that the stop causes."""


LifecycleEvent = EndOfDataReceived | OperatorsFinished | SnapshotTaken | CheckpointNotice | RestoredAfterFinish | DrainAnnounced


class FinishOperators(msgspec.Struct, frozen=True):
    """Emit MAX_WATERMARK, call end_input of every input and finish; then send OperatorsFinished."""


class PauseOperators(msgspec.Struct, frozen=True):
    """Process nothing more, from before the next record on: the snapshot of a suspend's savepoint was taken."""


class ResumeOperators(msgspec.Struct, frozen=True):
    """Process again: the savepoint of the suspend has failed."""


class EmitEndOfData(msgspec.Struct, frozen=True):
    """Send EndOfData to every output; after a drain also report to the coordinator that the data of this task has ended."""

    drain: bool


class CommitUpTo(msgspec.Struct, frozen=True):
    """Commit what was pre-committed for this checkpoint and earlier ones, call notify_checkpoint_complete.

    Attributes:
        checkpoint_id: None where a task does not wait for a checkpoint: commit everything.
    """

    checkpoint_id: int | None


class CloseOperators(msgspec.Struct, frozen=True):
    """Call close: release resources, emit nothing."""


class EmitEndOfPartition(msgspec.Struct, frozen=True):
    """Send EndOfPartition to every output."""


class TaskFinished(msgspec.Struct, frozen=True):
    """Report to the coordinator that the task is FINISHED."""


LifecycleAction = (
    FinishOperators
    | PauseOperators
    | ResumeOperators
    | EmitEndOfData
    | CommitUpTo
    | CloseOperators
    | EmitEndOfPartition
    | TaskFinished
)


class TaskLifecycle:
    """The life cycle of one task.

    Args:
        checkpointing: False when there are no checkpoints to wait for, because those after tasks finish are switched off: the
            task then commits and ends without waiting. No run on Spark reaches that yet.
    """

    def __init__(self, checkpointing: bool = True) -> None:
        self._checkpointing = checkpointing
        self._state = _RUNNING
        self._last_snapshot = 0
        """The newest checkpoint for which a snapshot was taken; checkpoint ids start at 1."""
        self._aborted_ids = IdRanges()
        """Checkpoints that the coordinator has reported as aborted; those older than the newest snapshot have no effect."""
        self._awaited: set[int] = set()
        """Snapshots whose outcome the task waits for although it cannot end with them: of checkpoints before finish, and of
        savepoints."""
        self._after_finish: set[int] = set()
        """Snapshots taken after finish, of checkpoints that commit: the completion of one of them lets the task end."""
        self._final_completed = False
        self._stop: int | None = None
        """The stop's savepoint that the task has taken: it ends with exactly this one."""
        self._paused = False
        self._data_ended = False
        """The data ended while the task was paused."""

    @property
    def state(self) -> LifecycleState:
        return self._state

    @property
    def paused(self) -> bool:
        """Whether nothing may be processed, because a suspend's savepoint is pending."""
        return self._paused

    @property
    def operators_finished(self) -> bool:
        """Whether a snapshot taken now is taken after finish; goes into the acknowledgement's statistics."""
        return self._state in (_WAITING, _FINISHED)

    def handle(self, event: LifecycleEvent) -> list[LifecycleAction]:
        """Take one event, return what the task has to do, in this order.

        Raises:
            UnexpectedEvent: the event cannot come in this state, or is no event of a life cycle.
        """
        try:
            take = _TAKES[type(event)]
        except KeyError:
            self._refuse(event)
        return take(self, event)

    def _operators_done(self, event: OperatorsFinished) -> list[LifecycleAction]:
        if self._state is not _FINISHING:
            self._refuse(event)
        return self._wait()

    def _restored(self, event: RestoredAfterFinish) -> list[LifecycleAction]:
        if self._state is not _RUNNING or self._last_snapshot:
            self._refuse(event)
        return self._wait()

    def _savepoint_completed(self, event: SavepointCompletedNotice) -> list[LifecycleAction]:
        self._awaited.discard(event.checkpoint_id)
        return self._end_if_done()

    def _drain_announced(self, event: DrainAnnounced) -> list[LifecycleAction]:
        self._checkpointing = True
        return []

    def _end_of_data(self, event: EndOfDataReceived) -> list[LifecycleAction]:
        if self._paused:
            # The task reacts to the end of its data when it processes again, if it does.
            if event.drain:
                self._data_ended = True
            return []
        if self._state is not _RUNNING:
            # After a restore the inputs report their end a second time.
            return []
        if not event.drain:
            self._refuse(event)
        self._state = _FINISHING
        return [FinishOperators()]

    def _wait(self) -> list[LifecycleAction]:
        self._state = _WAITING
        # After a suspend's snapshot the next attempt reports the end of the data; if the savepoint fails, this one does.
        return [] if self._paused else self._report_end_of_data()

    def _report_end_of_data(self) -> list[LifecycleAction]:
        actions: list[LifecycleAction] = [EmitEndOfData(True)]
        if self._checkpointing:
            return actions
        return [*actions, CommitUpTo(None), *self._end()]

    def _snapshot_taken(self, event: SnapshotTaken) -> list[LifecycleAction]:
        if self._state is _FINISHED or event.checkpoint_id <= self._last_snapshot:
            self._refuse(event)
        self._last_snapshot = event.checkpoint_id
        if event.checkpoint_id in self._aborted_ids:
            return []
        if event.stops_job:
            self._stop = event.checkpoint_id
            if self.operators_finished or self._paused:
                return []
            self._paused = True
            return [PauseOperators()]
        lets_end = self.operators_finished and not event.savepoint
        (self._after_finish if lets_end else self._awaited).add(event.checkpoint_id)
        return []

    def _completed(self, event: CheckpointCompletedNotice) -> list[LifecycleAction]:
        checkpoint_id = event.checkpoint_id
        if self._state is _FINISHED:
            return []
        if checkpoint_id == self._stop:
            ended: list[LifecycleAction] = [EmitEndOfData(False)] if self._paused else []
            return [CommitUpTo(checkpoint_id), *ended, *self._end()]
        self._awaited.discard(checkpoint_id)
        # A later checkpoint holds what an earlier one held, so any id from the first one on lets the task end.
        if any(taken <= checkpoint_id for taken in self._after_finish):
            self._final_completed = True
        return [CommitUpTo(checkpoint_id), *self._end_if_done()]

    def _aborted(self, event: CheckpointAbortedNotice) -> list[LifecycleAction]:
        checkpoint_id = event.checkpoint_id
        self._aborted_ids.add(checkpoint_id)
        self._awaited.discard(checkpoint_id)
        self._after_finish.discard(checkpoint_id)
        resumed: list[LifecycleAction] = []
        if checkpoint_id == self._stop:
            self._stop = None
            resumed = self._resume()
        return [*resumed, *self._end_if_done()]

    def _resume(self) -> list[LifecycleAction]:
        """Process again, and do what was held back while the task was paused."""
        if not self._paused:
            return []
        self._paused = False
        held: list[LifecycleAction] = []
        if self._state is _WAITING:
            held = self._report_end_of_data()
        elif self._data_ended:
            held = self._end_of_data(EndOfDataReceived(True))
        return [ResumeOperators(), *held]

    def _end_if_done(self) -> list[LifecycleAction]:
        waiting = self._state is _WAITING and self._stop is None
        if not waiting or not self._final_completed or self._awaited:
            return []
        return self._end()

    def _end(self) -> list[LifecycleAction]:
        self._state = _FINISHED
        self._paused = False
        return [CloseOperators(), EmitEndOfPartition(), TaskFinished()]

    def _refuse(self, event: LifecycleEvent) -> NoReturn:
        raise UnexpectedEvent(
            f"A task that is {self._state.value} cannot take {event!r}: {_EXPECTED[self._state]}. "
            "The runtime delivered events in an order that is not possible."
        )


_TAKES: dict[type[object], Callable[[TaskLifecycle, Any], list[LifecycleAction]]] = {
    EndOfDataReceived: TaskLifecycle._end_of_data,
    OperatorsFinished: TaskLifecycle._operators_done,
    RestoredAfterFinish: TaskLifecycle._restored,
    SnapshotTaken: TaskLifecycle._snapshot_taken,
    CheckpointCompletedNotice: TaskLifecycle._completed,
    SavepointCompletedNotice: TaskLifecycle._savepoint_completed,
    CheckpointAbortedNotice: TaskLifecycle._aborted,
    DrainAnnounced: TaskLifecycle._drain_announced,
}
_EXPECTED = {
    LifecycleState.RUNNING: "EndOfDataReceived is expected first",
    LifecycleState.FINISHING: "OperatorsFinished is expected next",
    LifecycleState.WAITING_FOR_FINAL_CHECKPOINT: "only snapshots and the outcomes of checkpoints are expected now",
    LifecycleState.FINISHED: "no event is expected any more",
}
