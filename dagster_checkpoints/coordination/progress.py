"""The progress of the job's tasks: which run, which have reached their end of data, which are finishing.

And of a stop with savepoint: from its request to the job's end no other checkpoint is triggered. Must not know: pending
checkpoints.

Source: FLIP-34.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from enum import Enum

from dagster_checkpoints.coordination.checkpoints import CheckpointProperties, CompletedCheckpoint
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.events import CoordinatorAction, RequestNotCompleted
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.plan import CheckpointPlan, NotAllRunning, TaskState, TaskStateTable, compute_plan
from dagster_checkpoints.pipeline import ExecutionGraph, TaskId

_RUNNING, _FINISHED = TaskState.RUNNING, TaskState.FINISHED  # a look-up in an enumeration is slow
_STARTING = frozenset({TaskState.CREATED, TaskState.DEPLOYING, TaskState.INITIALIZING})


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The reason why no checkpoint can be triggered now, for people."""

    message: str


class TaskProgress:
    """The progress of all tasks, in all attempts of the job.

    Args:
        graph: the execution graph of the job.
        config: the settings of checkpointing.
        finished: tasks that are not started, because they had finished before.
    """

    def __init__(self, graph: ExecutionGraph, config: CheckpointConfig, finished: Iterable[TaskId]) -> None:
        self._config = config
        self.states = TaskStateTable(graph, finished)
        self._at_end: set[TaskId] = set()
        """Unfinished tasks that have reached their end of data."""
        self._finishing: set[TaskId] = set()
        """Tasks whose final checkpoint has completed, and that are not FINISHED yet."""
        self._finishing_until = 0.0
        self._in_backlog: set[TaskId] = set()
        self._plan: CheckpointPlan | NotAllRunning | None = None
        """The plan for the present states, once it is computed: most checkpoints have that of the one before."""

    def reset(self, finished: Iterable[TaskId]) -> None:
        """The tasks start again, except those finished."""
        self.states.reset(finished)
        self._plan = None
        self._at_end.clear()
        self._finishing.clear()
        self._in_backlog.clear()

    def failed(self, vertices: Set[str], task: TaskId | None) -> None:
        """The unfinished tasks of these vertices were stopped, because this one has failed."""
        for each in list(self.states.unfinished_of(vertices)):
            self.changed(each, TaskState.FAILED if each == task else TaskState.CANCELED)

    def restart(self, vertices: Set[str], finished: Iterable[TaskId]) -> None:
        """The tasks of these vertices start again, except those finished; the others go on."""
        self.states.reset_vertices(vertices, finished)
        self._plan = None
        for tasks in (self._at_end, self._finishing, self._in_backlog):
            tasks.difference_update([task for task in tasks if task.vertex in vertices])

    @property
    def any_left(self) -> bool:
        return self.states.unfinished > 0

    @property
    def all_run(self) -> bool:
        """Whether tasks are left, and all of them run."""
        return self.states.all_unfinished_run

    @property
    def all_at_end_of_data(self) -> bool:
        """Whether tasks are left, all of them run, and every one has reached its end of data."""
        return self.all_run and len(self._at_end) == self.states.unfinished

    def plan(self) -> CheckpointPlan | NotAllRunning:
        if self._plan is None:
            self._plan = compute_plan(self.states, after_tasks_finish=self._config.checkpoints_after_tasks_finish)
        return self._plan

    def plan_or_obstacle(self) -> CheckpointPlan | Obstacle:
        """The plan of a checkpoint that waits for at least one task, or the reason why none can be triggered."""
        plan = self.plan()
        if isinstance(plan, NotAllRunning):
            return Obstacle(plan.message)
        return plan if plan.wait else Obstacle("every task has finished")

    # Events

    def changed(self, task: TaskId, state: TaskState) -> None:
        """A task has this state now. A task that has FINISHED stays so until the job restarts: later reports are late."""
        if self.states.get(task) is _FINISHED:
            return
        self.states.set(task, state)
        self._plan = None
        if state is not _RUNNING:
            self._finishing.discard(task)
        if state is _FINISHED or state in _STARTING:
            self._at_end.discard(task)
            self._in_backlog.discard(task)

    def at_end_of_data(self, task: TaskId) -> None:
        if self.states.get(task) is not _FINISHED:
            self._at_end.add(task)
            self._in_backlog.discard(task)

    def backlog_changed(self, task: TaskId, backlog: bool) -> None:
        if backlog and self.states.get(task) is not _FINISHED:
            self._in_backlog.add(task)
        else:
            self._in_backlog.discard(task)

    def final_checkpoint_completed(self, completed: CompletedCheckpoint, now: float) -> None:
        """A checkpoint that commits has completed: it was the final one of the tasks that took part after their finish()."""
        self._finishing |= {
            task
            for task, statistics in completed.statistics.items()
            if statistics.operators_finished and self.states.get(task) is _RUNNING
        }
        self._finishing_until = now + self._config.timeout

    @property
    def any_in_backlog(self) -> bool:
        """Whether some task processes a backlog."""
        return bool(self._in_backlog)

    # Tasks that are just finishing

    @property
    def any_finishing(self) -> bool:
        """Whether a task whose final checkpoint has completed is not FINISHED yet: it would abort the next one."""
        return bool(self._finishing)

    @property
    def finishing_expires_at(self) -> float | None:
        """When finishing tasks are no longer waited for, seconds; None if none is finishing."""
        return self._finishing_until if self._finishing else None

    def expire_finishing(self, now: float) -> None:
        """Stop waiting for finishing tasks after the timeout: a commit that hangs must not prevent checkpoints for ever. They are
        triggered again, fail, and the job fails with them."""
        if now >= self._finishing_until:
            self._finishing.clear()


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
