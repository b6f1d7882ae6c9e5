"""What a simulated process does at once: it hands events to the job machine and performs the actions that need no storage.

The actions that stop in front of a write are `process`'s. What must never happen is checked where it would be done.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.coordination import (
    Acknowledged,
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointTriggered,
    CompletedCheckpoint,
    Declined,
    DiscardCheckpoint,
    DiscardStates,
    FailureReason,
    RequestCompleted,
    RequestFailed,
    Tick,
    WriteMetadata,
)
from dagster_checkpoints.coordination import lifecycle as life
from dagster_checkpoints.execution import job_actions as do
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.execution.job_actions import JobAction
from dagster_checkpoints.execution.job_events import Failure, JobEvent, TaskFailure, TaskReport
from dagster_checkpoints.execution.job_requests import AnswerRequest, RequestReceived
from simulation.storage import StorageError
from simulation.task_data import TaskData
from simulation.user_requests import UserRequest
from simulation.violations import Violation, check
from simulation.writing import Writer

if TYPE_CHECKING:
    from simulation.restoring import From
    from simulation.world import World

_REPORTS = (
    do.Sweep,
    do.AttemptBegan,
    do.AttemptRestarting,
    do.TaskHasFinished,
    do.ForgetSavepoints,
    CheckpointTriggered,
    CheckpointCompleted,
    CheckpointFailed,
    RequestCompleted,
    RequestFailed,
)


class Loop(Writer):
    """Deals with one item of the queue after the other."""

    def __init__(self, world: World, number: int, start: From) -> None:
        super().__init__(world, number, start)
        self._slow: deque[JobAction] = deque()
        """Actions that stop in front of writes, in order."""
        self._requesters: list[UserRequest] = []

    def _next(self) -> JobEvent:
        item = self.queue.popleft() if self.queue else Tick()
        return on.FatalError(Failure(repr(item))) if isinstance(item, StorageError) else item

    def hand_in(self, event: JobEvent) -> None:
        for action in self.job.handle(event, self.now):
            self.perform(action)

    def perform(self, action: JobAction) -> None:
        match action:
            case do.SendToTasks(tasks, message):
                self._check_named(message)
                for task in tasks:
                    self.tasks[task].mailbox.append(message)
            case AnswerRequest():
                for requester in action.requesters:
                    self._answer(self._requesters[requester], action)
            case WriteMetadata(snapshot):
                ghosts = {task: self.ghosts[task] for task in snapshot.plan.finished}
                self.io.append(lambda: self._write(snapshot, ghosts))
            case DiscardStates(discarded):
                self.io.append(lambda: self._discard_states(discarded))
            case DiscardCheckpoint(checkpoint):
                self._check_deletable(checkpoint)
                self.io.append(lambda: self._delete(checkpoint.location))
            case do.StartTasks():
                self.running = list(self.tasks.values())
            case _ if isinstance(action, _REPORTS):
                self._report(action)
            case _:
                self._slow.append(action)

    def _report(self, action: Any) -> None:
        match action:
            case do.Sweep():
                self.io.append(self._sweep)
            case do.AttemptBegan():
                self.count("attempts")
            case do.AttemptRestarting():
                self.count("restarts")
            case do.TaskHasFinished():
                self.count("finished tasks")
            case CheckpointTriggered(checkpoint_id, properties):
                last = max(self._last_id, self.world.store.taken.get(self.job_id, 0))
                if checkpoint_id <= last and not self.superseded:
                    raise Violation(f"id {checkpoint_id} after {last}")
                self._last_id = checkpoint_id
                if properties.is_savepoint:
                    self._savepoint_directory(checkpoint_id)
                self.world.counts["stops begun"] += properties.stops_job
            case CheckpointCompleted(completed):
                self.completed += not completed.is_savepoint
                self.count("savepoints" if completed.is_savepoint else "checkpoints")
            case do.ForgetSavepoints(retained):
                assert self.ownership is not None
                self.ownership.steps.forget_savepoints(retained)
            case CheckpointFailed(checkpoint_id, reason):
                subsumed = reason is FailureReason.CHECKPOINT_SUBSUMED and checkpoint_id in self._savepoints
                check(not subsumed, f"savepoint {checkpoint_id} was subsumed")
                self.world.counts[f"failed: {reason.name}"] += 1
                if checkpoint_id is not None and checkpoint_id in self._savepoints:
                    self.io.append(lambda: self._discard_savepoint(checkpoint_id))

    def _check_named(self, message: object) -> None:
        """Tasks commit what they are told of: a crash must not take it back."""
        if isinstance(message, life.CheckpointCompleted):
            checkpoint_id = message.checkpoint_id
            if (self.job_id, checkpoint_id) not in self.world.store.named:
                raise Violation(f"tasks are told that {checkpoint_id} has completed, and the state has never named it")

    def _check_deletable(self, checkpoint: CompletedCheckpoint) -> None:
        """Without its newest checkpoint a job that runs would begin again after a crash; and before a run has a checkpoint of
        its own, its user may still decide to go back to a later one than the run has started from."""
        state = self.world.store.state
        needed = state is not None and state.job.status == "RUNNING" and state.newest is not None
        newest = state.newest.location if state is not None and state.newest is not None else ""
        check(not needed or newest != checkpoint.location, f"{newest} is deleted before storage says that the job has ended")
        passed_over = self._start is not None and checkpoint in self._start.passed_over
        own = self.world.store.taken.get(self.job_id, 0) > checkpoint.checkpoint_id or self.shut_down
        check(own or not passed_over, f"{checkpoint.location} is deleted before the run has a checkpoint of its own")

    # Users

    def ask(self, request: UserRequest) -> None:
        """Users ask for something: what they ask for comes into the queue, once for each of them."""
        for _ in range(request.users):
            self._requesters.append(request)
            self.queue.append(RequestReceived(request.as_received(), len(self._requesters) - 1, self.now))

    def _answer(self, request: UserRequest, answer: AnswerRequest) -> None:
        request.answer(answer)
        if request.names_savepoint and answer.location not in self.world.store.claimed:
            self.world.store.check_whole(answer.location)

    # Tasks

    def report(self, attempt: int, event: object) -> None:
        item = TaskReport(attempt, event)  # type: ignore[arg-type]
        if isinstance(event, Acknowledged | Declined):
            self.said.append(item)
        self.queue.append(item)

    def repeat(self, which: int) -> None:
        """Something that a task has said comes a second time, late: perhaps after the job's end."""
        item = self.said[which]
        if self.shut_down and not isinstance(item.event, TaskFailure):
            for action in self.coordinator.handle(item.event, self.now):
                if isinstance(action, DiscardStates):
                    self.perform(action)
        else:
            self.queue.append(item)

    def task_failed(self, task: TaskData, message: str) -> None:
        self.count("task failures")
        self.running = [t for t in self.running if t is not task]
        self.report(task.attempt, TaskFailure(task.id, Failure(f"{task.id}: {message}")))

    def task_ended(self, task: TaskData) -> None:
        """Called by the task when it is FINISHED."""
        self.ghosts[task.id] = task.ghost()
        self.running = [t for t in self.running if t is not task]
        stopped = self.job.requests.stopped
        if stopped is not None:
            check(
                task.ended_with == stopped.checkpoint_id,
                f"{task.id} ends with checkpoint {task.ended_with}, the others with {stopped.checkpoint_id}",
            )
