"""A process's main loop around the coordinator: items in, actions out; mirrors `spark.job.job_loop`.

Must not know how a job begins, restarts or ends.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    DrainBegan,
    FailJob,
    FailureReason,
    NotifyAborted,
    NotifyComplete,
    NotifySavepointComplete,
    RequestCompleted,
    RequestFailed,
    TaskState,
    TaskStateChanged,
    Tick,
    TriggerFailed,
    TriggerTask,
    WriteMetadata,
)
from dagster_checkpoints.pipeline import TaskId
from simulation.control import Request
from simulation.storage import (
    StorageError,
)
from simulation.task_life import TaskLife
from simulation.violations import Violation, check
from simulation.writing import Writer

if TYPE_CHECKING:
    pass


class Canceled(Exception):
    """Somebody cancels the job."""


class AttemptFailed(Exception):
    """A task has failed."""


class FetchFailed(Exception):
    """Storage was away while a restart read what it restores: the strategy is asked once more."""


class JobFailed(Exception):
    """Too many checkpoints in a row have failed."""


class Loop(Writer):
    """Deals with one item after the other."""

    def _turn(self) -> None:
        self._take(self._next())
        self.control.go_on()

    def _next(self) -> Any:
        if self.queue:
            return self.queue.popleft()
        return Tick()

    def _take(self, item: Any) -> None:
        if isinstance(item, tuple) and item[0] == "report":
            _, attempt, event = item
            if attempt == self.attempt and not self.restarting:
                self._take_report(event)
        elif isinstance(item, Request):
            self.control.take(item)
        elif isinstance(item, StorageError):
            raise item
        elif item == "cancel":
            raise Canceled
        elif item == "drain":
            self.drain()
        else:
            self.handle(item)

    def _take_report(self, event: Any) -> None:
        if isinstance(event, AttemptFailed):
            raise event
        self.handle(event)
        if isinstance(event, TaskStateChanged) and event.state is TaskState.FINISHED:
            self.finished.add(event.task)
            self.count("finished tasks")

    def handle(self, event: Any) -> None:
        for action in self.coordinator.handle(event, self.now):
            self.perform(action)

    def perform(self, action: Any) -> None:
        match action:
            case TriggerTask(task, barrier):
                if task in self.tasks and task not in self.finished:
                    self._send([task], ("trigger", barrier))
                else:
                    self.queue.append(TriggerFailed(task, barrier.checkpoint_id))
            case WriteMetadata(snapshot):
                ghosts = {task: self.ghosts[task] for task in snapshot.plan.finished}
                self.io.append(lambda: self._write(snapshot, ghosts))
            case NotifyComplete(tasks, checkpoint_id):
                named = (self.job_id, checkpoint_id) in self.world.store.named
                if not named:
                    raise Violation(f"tasks are told that {checkpoint_id} has completed, and the state has never named it")
                self._send(tasks, ("complete", checkpoint_id))
            case NotifySavepointComplete(tasks, checkpoint_id):
                self._send(tasks, ("savepoint", checkpoint_id))
            case NotifyAborted(tasks, checkpoint_id):
                self._send(tasks, ("aborted", checkpoint_id))
            case DiscardStates(discarded):
                self.io.append(lambda: self._discard_states(discarded))
            case DiscardCheckpoint(checkpoint):
                self.io.append(lambda: self._delete(checkpoint.location))
            case CheckpointTriggered(checkpoint_id, properties):
                last = max(self._last_id, self.world.store.taken.get(self.job_id, 0))
                if checkpoint_id <= last and not self.superseded:
                    raise Violation(f"id {checkpoint_id} after {last}")
                self._last_id = checkpoint_id
                if properties.is_savepoint:
                    self._savepoint_directory(checkpoint_id)
            case CheckpointCompleted(completed):
                self._completed(completed)
            case RequestCompleted(request_id, completed):
                self.control.completed(request_id, completed)
            case RequestFailed(request_id, reason, message):
                self.control.failed(request_id, reason, message)
            case CheckpointFailed(checkpoint_id, reason):
                subsumed = reason is FailureReason.CHECKPOINT_SUBSUMED and checkpoint_id in self._savepoints
                check(not subsumed, f"savepoint {checkpoint_id} was subsumed")
                self.world.counts[f"failed: {reason.name}"] += 1
                if checkpoint_id is not None and checkpoint_id in self._savepoints:
                    self.io.append(lambda: self._discard_savepoint(checkpoint_id))
            case FailJob(_, message):
                raise JobFailed(message)

    def _send(self, tasks: Iterable[TaskId], mail: tuple[str, Any]) -> None:
        for task in tasks:
            if task in self.tasks:
                self.tasks[task].mailbox.append(mail)

    def _completed(self, completed: CompletedCheckpoint) -> None:
        for passed_over in self._passed_over:
            self.perform(passed_over)
        self._passed_over = ()
        if completed.is_savepoint:
            self.count("savepoints")
        else:
            self.completed += 1
            self.count("checkpoints")
            kept = {checkpoint.location for checkpoint in self.coordinator.completed}
            assert self.ownership is not None
            for pointer in self.ownership.retained:
                if not pointer.ours and pointer.location not in kept:
                    self.ownership.forget_later(pointer.location)

    def drain(self) -> None:
        """End every source, without a savepoint."""
        if self.control.stop is not None:
            self._drain_later = True
            return
        self._draining = True
        self.handle(DrainBegan())
        self.end_sources(None)

    def drain_if_wanted(self) -> None:
        if self._drain_later:
            self._drain_later = False
            self.drain()

    def end_sources(self, stage: int | None, *, remember: bool = True) -> None:
        for task in self.tasks.values():
            if task.source and stage in (None, task.head):
                if remember:
                    self.ended_sources.add(task.head)
                self._send([task.id], ("end_input", None))

    def report(self, attempt: int, event: object) -> None:
        item = ("report", attempt, event)
        if isinstance(event, Acknowledged | Declined):
            self.said.append(item)
        self.queue.append(item)

    def repeat(self, which: int) -> None:
        """Something that a task has said comes a second time, late: perhaps after the job's end."""
        item = self.said[which]
        if self.shut_down:
            self.handle(item[2])
        else:
            self.queue.append(item)

    def task_failed(self, task: TaskLife, message: str) -> None:
        self.count("task failures")
        self.running = [t for t in self.running if t is not task]
        self.report(task.attempt, AttemptFailed(f"{task.id}: {message}", task.id))

    def task_ended(self, task: TaskLife) -> None:
        """Called by the task when it is FINISHED."""
        self.ghosts[task.id] = task.ghost()
        self.running = [t for t in self.running if t is not task]
        stopped = self.control.stopped
        if stopped is not None:
            check(
                task.ended_with == stopped.checkpoint_id,
                f"{task.id} ends with checkpoint {task.ended_with}, the others with {stopped.checkpoint_id}",
            )
