"""The coordinator of a job, the requests to it, and its tasks: the actions of each become events of the others.

The coordinator's answers go to the requests; the requests' actions go to the coordinator or to the sources. Must not
know: attempts, restarts, how a job begins or ends (`job_machine`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import dataclass
from typing import Any

from dagster_checkpoints.coordination import (
    AcknowledgeAnswered,
    Acknowledged,
    CheckpointCompleted,
    CheckpointCoordinator,
    CheckpointPlan,
    CompletedCheckpoint,
    CoordinatorEvent,
    DiscardCheckpoint,
    DiscardLateState,
    DrainBegan,
    FailJob,
    FailOver,
    JobStatus,
    NotifyTasks,
    RequestCompleted,
    RequestNotCompleted,
    StopRequested,
    TaskState,
    TaskStateChanged,
    TriggerReceived,
    TriggerTask,
)
from dagster_checkpoints.coordination import lifecycle as life
from dagster_checkpoints.execution.job_actions import ForgetSavepoints, JobAction, SendToTasks, TaskHasFinished
from dagster_checkpoints.execution.job_events import Failure, TaskFailure
from dagster_checkpoints.execution.job_requests import (
    AnswerRequest,
    EndSources,
    JobRequests,
    RequestAction,
    SourceInstance,
    ToCoordinator,
)
from dagster_checkpoints.execution.messages import EndInput, TaskMessage
from dagster_checkpoints.execution.pipeline_state import EndedBy, StopAskedBy
from dagster_checkpoints.pipeline import TaskId


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """Why an attempt ends before every task has finished.

    Attributes:
        failure: why it failed; None if the job was canceled.
        final: how the job ends with it; None if the job may restart.
        task: the task that has failed; None if it was not a task.
    """

    failure: Failure | None
    final: JobStatus | None = None
    task: TaskId | None = None


class JobCoordination:
    """The coordinator, the requests and the tasks of one job.

    Args:
        pipeline: name of the pipeline, for messages.

    Attributes:
        actions: the actions for the driver, in order.
        requests: the requests to the job.
        coordinator: None before the first attempt is deployed.
        finished: the tasks that have finished, in the present attempt or in what it was restored from.
        ended_sources: (stage, instance) of the sources that were asked to end.
        deployed: whether the tasks of an attempt are deployed and were not stopped.
        end: why the present attempt ends; None while it does not.
        fatal: the failure of a job without a deployed attempt; None without one.
    """

    def __init__(self, pipeline: str) -> None:
        self.actions: list[JobAction] = []
        self.requests = JobRequests(pipeline)
        self.coordinator: CheckpointCoordinator | None = None
        self.finished: set[TaskId] = set()
        self.ended_sources: set[tuple[str, str]] = set()
        self.deployed = False
        self.end: AttemptEnd | None = None
        self.fatal: Failure | None = None
        self._pipeline = pipeline
        self._tasks: tuple[TaskId, ...] = ()
        self._sources: tuple[SourceInstance, ...] = ()
        self._passed_over: tuple[CompletedCheckpoint, ...] = ()
        self._drained = False
        self._now = 0.0

    def at(self, now: float) -> None:
        """Begin a step at this time, in seconds: its actions are collected from now on."""
        self._now = now
        self.actions = []

    def begin(
        self, coordinator: CheckpointCoordinator, tasks: Iterable[TaskId], passed_over: tuple[CompletedCheckpoint, ...]
    ) -> None:
        """The first attempt is deployed: the tasks and the coordinator are known.

        Args:
            coordinator: the coordinator of all attempts.
            tasks: all tasks of the job.
            passed_over: checkpoints that are later than the one from which the job starts.
        """
        self.coordinator = coordinator
        self._tasks = tuple(tasks)
        self._passed_over = passed_over

    def attempt_deployed(self, finished: Set[TaskId], sources: tuple[SourceInstance, ...]) -> None:
        """The tasks of an attempt are deployed; `finished` had finished before."""
        self.finished, self._sources = set(finished), sources

    @property
    def runs(self) -> bool:
        """Whether an attempt is deployed, and is not about to end."""
        return self.deployed and self.end is None

    @property
    def all_finished(self) -> bool:
        """Whether every task has finished, and the outcome of every checkpoint is known."""
        return len(self.finished) >= len(self._tasks) and not self.finalizing

    @property
    def finalizing(self) -> bool:
        """Whether the metadata of a checkpoint is being written."""
        return self.coordinator is not None and self.coordinator.finalizing is not None

    @property
    def ended_by(self) -> EndedBy:
        """What brings the job to its end, if every task finishes now."""
        stopped = self.requests.stopped
        if stopped is not None:
            return "drain" if stopped.drain else "suspend"
        return "drain" if self._drained else "end_of_data"

    @property
    def stop_asked_by(self) -> StopAskedBy:
        """What asked for the stop that has succeeded; "" without one."""
        stopped = self.requests.stopped
        if stopped is None:
            return ""
        return "termination" if stopped.termination else "request"

    # Tasks

    def take_report(self, report: CoordinatorEvent | TaskFailure) -> None:
        """A task of the present attempt reports something."""
        if isinstance(report, Acknowledged):  # the most frequent report
            return self.to_coordinator(report)
        if isinstance(report, TaskFailure):
            return self.fail(report.failure, report.task)
        self.to_coordinator(report)
        if isinstance(report, TaskStateChanged) and report.state is TaskState.FINISHED:
            self.finished.add(report.task)
            self.actions.append(TaskHasFinished(report.task))

    def fail(self, failure: Failure, task: TaskId | None = None) -> None:
        """The present attempt has failed; another one may follow. Only the first failure counts."""
        if self.end is None:
            self.end = AttemptEnd(failure, task=task)

    def tasks_are_gone(self, failed: TaskId | None) -> None:
        """Report all unfinished tasks as ended: until the restart no checkpoint is triggered, and none waits for a task.

        Args:
            failed: the task that has failed; the others were canceled. None if it was not a task.
        """
        for task in self._tasks:
            if task not in self.finished:
                self.to_coordinator(TaskStateChanged(task, TaskState.FAILED if task == failed else TaskState.CANCELED))

    def end_sources(self, action: EndSources) -> None:
        """End sources as if their input were exhausted; after a restart they end again."""
        if action.stops_job:
            self._send(self._unfinished(self._tasks), life.DrainAnnounced())
        chosen = [s for s in self._sources if action.stage in (None, s.stage) and action.instance in (None, s.instance)]
        if not action.stops_job:
            self.ended_sources.update((source.stage, source.instance) for source in chosen)
        self._send(self._unfinished(source.task for source in chosen), EndInput())

    def _unfinished(self, tasks: Iterable[TaskId]) -> tuple[TaskId, ...]:
        return tuple(task for task in tasks if task not in self.finished)

    def _send(self, tasks: Collection[TaskId], message: TaskMessage) -> None:
        if tasks and self.deployed:
            self.actions.append(SendToTasks(tasks, message))

    # The coordinator

    def to_coordinator(self, event: CoordinatorEvent) -> None:
        """Hand the event to the coordinator, and perform its actions."""
        assert self.coordinator is not None
        for action in self.coordinator.handle(event, self._now):
            perform = _PERFORM.get(type(action))
            if perform is None:
                self.actions.append(action)  # type: ignore[arg-type]  # the others are in _PERFORM
            else:
                perform(self, action)

    def _completed(self, action: CheckpointCompleted) -> None:
        # The job has started from an earlier checkpoint: the later ones are of no use once it has completed one of its own.
        self.actions += [DiscardCheckpoint(later) for later in self._passed_over]
        self._passed_over = ()
        if not action.checkpoint.is_savepoint:
            assert self.coordinator is not None
            self.actions.append(ForgetSavepoints(frozenset(kept.location for kept in self.coordinator.completed)))
        self.actions.append(action)

    def _request_completed(self, action: RequestCompleted) -> None:
        self.actions.append(action)
        self.perform(self.requests.completed(action.request_id, action.checkpoint))

    def _request_failed(self, action: RequestNotCompleted) -> None:
        self.actions.append(action)
        self.perform(self.requests.failed(action.request_id, action.reason, action.message, restarting=not self.runs))

    def _fail_job(self, action: FailJob) -> None:
        failure = Failure(f"Pipeline {self._pipeline!r}: {action.message} ({action.reason.name}).")
        if self.deployed:
            self.fail(failure)
        else:
            self.fatal = failure

    # Requests

    def advance_requests(self, *, all_run: bool) -> None:
        """Hand over the requests that can be done now, and withdraw those that are overdue.

        Args:
            all_run: whether the tasks were started; the coordinator knows whether all of them run by now.
        """
        ready: bool | None = None
        for request_id in self.requests.due_ids(self._now):
            if ready is None and self.requests.is_waiting(request_id):
                ready = all_run and self.coordinator is not None and isinstance(self.coordinator.plan(), CheckpointPlan)
            can_do = ready is True and self.runs
            self.perform(self.requests.advance(request_id, self._now, self._sources if can_do else None))

    def perform(self, actions: Iterable[RequestAction]) -> None:
        """Perform the actions of the requests."""
        for action in actions:
            match action:
                case ToCoordinator(event):
                    self._drained = self._drained or isinstance(event, DrainBegan)
                    self.to_coordinator(event)
                    if isinstance(event, StopRequested) and self.requests.is_open(event.request_id):
                        self.perform(self.requests.stop_accepted(event.request_id))
                case EndSources():
                    self.end_sources(action)
                case AnswerRequest():
                    self.actions.append(action)
                case FailOver(message):
                    self.fail(Failure(message))


def _account_by_checkpoint(job: JobCoordination, action: AcknowledgeAnswered | DiscardLateState) -> None:
    """Late states are accounted for by checkpoint, and deleted with it."""


_PERFORM: dict[type[object], Callable[[JobCoordination, Any], None]] = {
    AcknowledgeAnswered: _account_by_checkpoint,
    DiscardLateState: _account_by_checkpoint,
    TriggerTask: lambda job, action: job._send((action.task,), TriggerReceived(action.barrier)),
    NotifyTasks: lambda job, action: job._send(action.tasks, action.notice),
    CheckpointCompleted: JobCoordination._completed,
    RequestCompleted: JobCoordination._request_completed,
    RequestNotCompleted: JobCoordination._request_failed,
    FailJob: JobCoordination._fail_job,
}
"""The coordinator's actions that the driver does not perform as they are."""
