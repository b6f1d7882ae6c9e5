"""A stop with savepoint in the coordinator: from its request to the job's end no other checkpoint is triggered.

Must not know: the pending checkpoints, what happens to the job after the savepoint (`stop_with_savepoint`).
Source: FLIP-34.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from dagster_checkpoints.coordination.checkpoints import CheckpointProperties
from dagster_checkpoints.coordination.events import CoordinatorAction, RequestNotCompleted
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.plan import CheckpointPlan
from dagster_checkpoints.coordination.progress import Obstacle, TaskProgress


class StopPhase(Enum):
    """How far a stop is."""

    WAITING = "its savepoint is not triggered yet"
    """Something is being finalized, a task is just finishing, or (drain) not every task is at its end of data."""
    PENDING = "its savepoint is pending"
    ENDING = "its savepoint has completed, the job ends"
    BROKEN = "its savepoint has failed, and a drained job cannot continue: it restarts"


@dataclass(slots=True)
class StopProgress:
    """The one stop that a job may have.

    Attributes:
        checkpoint_id: id of its savepoint; None before it is triggered.
    """

    request_id: str
    drain: bool
    properties: CheckpointProperties
    phase: StopPhase = StopPhase.WAITING
    checkpoint_id: int | None = None

    @property
    def waiting(self) -> bool:
        return self.phase is StopPhase.WAITING

    @property
    def title(self) -> str:
        """The stop in a sentence, for the answers to other requests."""
        how = "drain" if self.drain else "suspend"
        return f"the job is being stopped ({how}) by request {self.request_id!r}: {self.phase.value}"

    def binds_all_tasks(self, finalizing: int | None) -> bool:
        """Whether all tasks restart if one of them fails now.

        A drained task cannot go on; and tasks end with a savepoint that has completed, or may complete yet. Otherwise the stop
        fails, and the tasks that have not failed go on.

        Args:
            finalizing: id of the checkpoint whose metadata is being written; None without one.
        """
        written = self.checkpoint_id is not None and self.checkpoint_id == finalizing
        return self.drain or written or self.phase is StopPhase.ENDING

    def refuse(self, request_id: str) -> RequestNotCompleted:
        """The answer to any other request."""
        return RequestNotCompleted(request_id, FailureReason.CHECKPOINT_COORDINATOR_SUSPEND, self.title)

    def answered_by(self, actions: Iterable[CoordinatorAction]) -> bool:
        """Whether one of the actions answers the requester of the stop that it has failed."""
        return any(isinstance(action, RequestNotCompleted) and action.request_id == self.request_id for action in actions)

    def plan(self, tasks: TaskProgress, *, finalizing: bool) -> CheckpointPlan | Obstacle | None:
        """The plan of the savepoint; the obstacle if it can never be taken; None if it is triggered later or was triggered.

        No task may end in the middle of the savepoint, so it is triggered after the end of every task that is finishing.
        """
        if not self.waiting:
            return None
        busy = finalizing or tasks.any_finishing or (self.drain and not tasks.all_at_end_of_data)
        if busy and tasks.any_left:
            return None
        return tasks.plan_or_obstacle()

    def triggered(self, checkpoint_id: int) -> None:
        """The savepoint was given its id."""
        self.phase = StopPhase.PENDING
        self.checkpoint_id = checkpoint_id

    def completed(self) -> None:
        """The savepoint has completed."""
        self.phase = StopPhase.ENDING

    def failed(self, *, answered: bool) -> bool:
        """The savepoint has failed, or cannot be taken.

        Args:
            answered: whether the requester of the stop was answered. If not, a task has finished in the middle of the savepoint:
                nothing is lost, and the savepoint is taken again, without that task.

        Returns:
            Whether the stop has ended and the job continues as before.
        """
        if not answered:
            self._retry_savepoint()
        elif self.drain:
            self.phase = StopPhase.BROKEN
        return answered and not self.drain

    def _retry_savepoint(self) -> None:
        self.phase = StopPhase.WAITING
        self.checkpoint_id = None
