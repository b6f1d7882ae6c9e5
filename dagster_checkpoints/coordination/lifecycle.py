"""How a task ends: finish, wait for a final checkpoint, commit, close.

    RUNNING ── EndOfData ──> FINISHING ── finished ──> WAITING_FOR_FINAL_CHECKPOINT ── completed ──> FINISHED

One machine per task, driven by the task's own thread. Must not know: how operators finish, commit or close.

Source: FLIP-147, "Final Checkpoint and Stopping Job With Savepoint".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NoReturn

from dagster_checkpoints.coordination.errors import UnexpectedEvent


class LifecycleState(Enum):
    """Where a task is on its way to the end."""

    RUNNING = "running"
    FINISHING = "finishing"
    """MAX_WATERMARK, end_input and finish are being done."""
    WAITING_FOR_FINAL_CHECKPOINT = "waiting for the final checkpoint"
    """Emits nothing more, keeps its resources: they are needed for the final commit."""
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class EndOfDataReceived:
    """No more records on any input, or the source is exhausted or was stopped.

    Attributes:
        drain: False after a suspend: nothing is flushed, because the job is meant to be resumed. It comes
            only when the savepoint is complete, so the task then ends at once.
    """

    drain: bool = True


@dataclass(frozen=True, slots=True)
class OperatorsFinished:
    """MAX_WATERMARK, end_input and finish are done."""


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """The task has taken its snapshot for this checkpoint."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class CheckpointCompleted:
    """The coordinator says that this checkpoint has completed."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class CheckpointAborted:
    """The coordinator says that this checkpoint will never complete."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class RestoredAfterFinish:
    """The task was restored from a snapshot that it had taken after finish(): it must not finish again."""


LifecycleEvent = (
    EndOfDataReceived | OperatorsFinished | SnapshotTaken | CheckpointCompleted | CheckpointAborted | RestoredAfterFinish
)


@dataclass(frozen=True, slots=True)
class FinishOperators:
    """Emit MAX_WATERMARK, call end_input of every input and finish; then send OperatorsFinished."""


@dataclass(frozen=True, slots=True)
class EmitEndOfData:
    """Send EndOfData to every output; after a drain also tell the coordinator that the data has ended
    here."""

    drain: bool


@dataclass(frozen=True, slots=True)
class CommitUpTo:
    """Commit what was pre-committed for this checkpoint and earlier ones, call notify_checkpoint_complete.

    Attributes:
        checkpoint_id: None with checkpointing switched off: commit everything.
    """

    checkpoint_id: int | None


@dataclass(frozen=True, slots=True)
class CloseOperators:
    """Call close: release resources, emit nothing."""


@dataclass(frozen=True, slots=True)
class EmitEndOfPartition:
    """Send EndOfPartition to every output."""


@dataclass(frozen=True, slots=True)
class TaskFinished:
    """Tell the coordinator that the task is FINISHED."""


LifecycleAction = FinishOperators | EmitEndOfData | CommitUpTo | CloseOperators | EmitEndOfPartition | TaskFinished


class TaskLifecycle:
    """The end of a task's life.

    Args:
        checkpointing: False when there are no checkpoints to wait for (no interval, or checkpoints after
            tasks finish are switched off): the task then commits and ends without waiting.
    """

    def __init__(self, checkpointing: bool = True) -> None:
        self._checkpointing = checkpointing
        self._state = LifecycleState.RUNNING
        self._before_finish: set[int] = set()
        """Snapshots taken before finish whose outcome is open: waited for, but they let nobody go."""
        self._after_finish: set[int] = set()
        self._final_completed = False

    @property
    def state(self) -> LifecycleState:
        return self._state

    @property
    def operators_finished(self) -> bool:
        """Whether a snapshot taken now is taken after finish; goes into the acknowledgement's statistics."""
        return self._state in (LifecycleState.WAITING_FOR_FINAL_CHECKPOINT, LifecycleState.FINISHED)

    def handle(self, event: LifecycleEvent) -> list[LifecycleAction]:
        """Take one event, return what the task has to do, in this order.

        Raises:
            UnexpectedEvent: the event cannot come in this state.
        """
        match event:
            case EndOfDataReceived(drain):
                return self._end_of_data(drain)
            case OperatorsFinished():
                if self._state is not LifecycleState.FINISHING:
                    self._refuse(event)
                return self._wait()
            case RestoredAfterFinish():
                if self._state is not LifecycleState.RUNNING:
                    self._refuse(event)
                return self._wait()
            case SnapshotTaken(checkpoint_id):
                if self._state is LifecycleState.FINISHED:
                    self._refuse(event)
                taken = self._after_finish if self.operators_finished else self._before_finish
                taken.add(checkpoint_id)
                return []
            case CheckpointCompleted(checkpoint_id):
                return self._completed(checkpoint_id)
            case CheckpointAborted(checkpoint_id):
                self._before_finish.discard(checkpoint_id)
                self._after_finish.discard(checkpoint_id)
                return self._end_if_done()

    def _end_of_data(self, drain: bool) -> list[LifecycleAction]:
        if self._state is not LifecycleState.RUNNING:
            # After a restore the inputs say once more that they have ended.
            return []
        if drain:
            self._state = LifecycleState.FINISHING
            return [FinishOperators()]
        self._state = LifecycleState.FINISHED
        return [EmitEndOfData(False), CloseOperators(), EmitEndOfPartition(), TaskFinished()]

    def _wait(self) -> list[LifecycleAction]:
        self._state = LifecycleState.WAITING_FOR_FINAL_CHECKPOINT
        actions: list[LifecycleAction] = [EmitEndOfData(True)]
        if self._checkpointing:
            return actions
        return [*actions, CommitUpTo(None), *self._end()]

    def _completed(self, checkpoint_id: int) -> list[LifecycleAction]:
        if self._state is LifecycleState.FINISHED:
            return []
        self._before_finish.discard(checkpoint_id)
        # A later checkpoint holds what an earlier one held, so any id from the first one on lets the task go.
        if any(taken <= checkpoint_id for taken in self._after_finish):
            self._final_completed = True
        return [CommitUpTo(checkpoint_id), *self._end_if_done()]

    def _end_if_done(self) -> list[LifecycleAction]:
        waiting = self._state is LifecycleState.WAITING_FOR_FINAL_CHECKPOINT
        if not waiting or not self._final_completed or self._before_finish:
            return []
        return self._end()

    def _end(self) -> list[LifecycleAction]:
        self._state = LifecycleState.FINISHED
        return [CloseOperators(), EmitEndOfPartition(), TaskFinished()]

    def _refuse(self, event: LifecycleEvent) -> NoReturn:
        raise UnexpectedEvent(
            f"A task that is {self._state.value} cannot take {event!r}: {_EXPECTED[self._state]}. "
            "The runtime delivered events in an order that the task's life does not have."
        )


_EXPECTED = {
    LifecycleState.RUNNING: "EndOfDataReceived comes first",
    LifecycleState.FINISHING: "OperatorsFinished comes next",
    LifecycleState.WAITING_FOR_FINAL_CHECKPOINT: "only snapshots and the outcomes of checkpoints come now",
    LifecycleState.FINISHED: "nothing comes any more",
}
