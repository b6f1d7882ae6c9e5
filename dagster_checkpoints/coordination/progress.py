"""How far the job's tasks are: who runs, who has reached its end of data, who is finishing.

Must not know: checkpoints under way, requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dagster_checkpoints.coordination.checkpoints import CompletedCheckpoint
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.plan import CheckpointPlan, NotAllRunning, TaskState, TaskStateTable, compute_plan
from dagster_checkpoints.pipeline import ExecutionGraph, TaskId

_STARTING = frozenset({TaskState.CREATED, TaskState.DEPLOYING, TaskState.INITIALIZING})


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The reason why there can be no checkpoint now, for people."""

    message: str


class TaskProgress:
    """The tasks of one attempt after the other.

    Args:
        graph: what runs.
        config: the settings.
        finished: tasks that are not started, because they had finished before.
    """

    def __init__(self, graph: ExecutionGraph, config: CheckpointConfig, finished: Iterable[TaskId]) -> None:
        self._config = config
        self.states = TaskStateTable(graph, finished)
        self._at_end: set[TaskId] = set()
        """Unfinished tasks that have reached their end of data."""
        self._finishing: set[TaskId] = set()
        self._finishing_until = 0.0
        self._in_backlog: set[TaskId] = set()

    def reset(self, finished: Iterable[TaskId]) -> None:
        """The tasks start again, except those finished."""
        self.states.reset(finished)
        self._at_end.clear()
        self._finishing.clear()
        self._in_backlog.clear()

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
        return compute_plan(self.states, after_tasks_finish=self._config.checkpoints_after_tasks_finish)

    def plan_or_obstacle(self) -> CheckpointPlan | Obstacle:
        """The plan of a checkpoint that waits for at least one task, or the reason why there is none."""
        plan = self.plan()
        if isinstance(plan, NotAllRunning):
            return Obstacle(plan.message)
        return plan if plan.wait else Obstacle("every task has finished")

    # Events

    def changed(self, task: TaskId, state: TaskState) -> None:
        """A task has this state now. One that has finished stays so until the job restarts: later reports are leftovers."""
        if self.states.get(task) is TaskState.FINISHED:
            return
        self.states.set(task, state)
        if state is not TaskState.RUNNING:
            self._finishing.discard(task)
        if state is TaskState.FINISHED or state in _STARTING:
            self._at_end.discard(task)
            self._in_backlog.discard(task)

    def at_end_of_data(self, task: TaskId) -> None:
        if self.states.get(task) is not TaskState.FINISHED:
            self._at_end.add(task)
            self._in_backlog.discard(task)

    def backlog_changed(self, task: TaskId, backlog: bool) -> None:
        if backlog and self.states.get(task) is not TaskState.FINISHED:
            self._in_backlog.add(task)
        else:
            self._in_backlog.discard(task)

    def final_checkpoint_completed(self, completed: CompletedCheckpoint, now: float) -> None:
        """A checkpoint that commits has completed: for whoever took part after its finish() it was the final one."""
        self._finishing |= {
            task
            for task, statistics in completed.statistics.items()
            if statistics.operators_finished and self.states.get(task) is TaskState.RUNNING
        }
        self._finishing_until = now + self._config.timeout

    @property
    def any_in_backlog(self) -> bool:
        """Whether some task works off a backlog."""
        return bool(self._in_backlog)

    # Tasks that are just finishing

    @property
    def any_finishing(self) -> bool:
        """Whether a task whose final checkpoint has completed is not FINISHED yet: it would abort the next one."""
        return bool(self._finishing)

    @property
    def finishing_expires_at(self) -> float | None:
        """When those who are finishing are no longer waited for, seconds."""
        return self._finishing_until if self._finishing else None

    def expire_finishing(self, now: float) -> None:
        """A commit that hangs must not silence checkpoints for ever: they fail then, and the job with them."""
        if now >= self._finishing_until:
            self._finishing.clear()
