"""One execution of a job: its attempts, its restarts and its end, around the coordinator; events in, actions out.

    CHOOSING ──> DEPLOYING ──> BEGINNING ──> CLAIMING ──> CONFIRMING ──> RUNNING ──> STOPPING ──┬─> ENDING ──> CLOSING ──> OVER
                     └───────────────── READING <── RESTARTING <────────────────────────────────┘

The job begins when its first attempt is deployed (BEGINNING, CLAIMING come once). Ownership is confirmed before the sinks are
touched. An attempt ends when every task has finished and nothing is being finalized, or with a failure; then its tasks are
stopped. A restart waits for what is being finalized and for the strategy's delay, and begins from the checkpoint that storage
says is the newest. The end of the job is recorded before its checkpoints are deleted.

The driver performs the actions in the order given and feeds the results back as events. Must not know: threads, storage, how
tasks are built, what a state holds.

Source: PROTOCOL sections 6 and 9.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NoReturn, assert_never

from dagster_checkpoints.coordination import (
    AcknowledgeAnswered,
    CheckpointCompleted,
    CheckpointConfig,
    CheckpointCoordinator,
    CheckpointPlan,
    CheckpointRequested,
    CompletedCheckpoint,
    CoordinatorAction,
    CoordinatorEvent,
    DiscardCheckpoint,
    DiscardLateState,
    DiscardStates,
    DrainBegan,
    FailJob,
    FailOver,
    GiveUp,
    JobRestarting,
    JobStatus,
    MetadataOutcomeUnknown,
    MetadataWriteFailed,
    MetadataWritten,
    NotifyAborted,
    NotifyComplete,
    NotifySavepointComplete,
    RequestCompleted,
    RequestFailed,
    RestartStrategy,
    Shutdown,
    StopRequested,
    TaskState,
    TaskStateChanged,
    Tick,
    TriggerReceived,
    TriggerTask,
    UnexpectedEvent,
)
from dagster_checkpoints.coordination.lifecycle import CheckpointAborted, DrainAnnounced, SavepointCompleted
from dagster_checkpoints.coordination.lifecycle import CheckpointCompleted as TaskCheckpointCompleted
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.execution.job_events import Failure, JobAction, JobEvent, JobOutcome, JobStart, RestorePoint
from dagster_checkpoints.execution.job_requests import (
    AnswerRequest,
    EndSources,
    JobRequests,
    RequestAction,
    RequestReceived,
    SourceInstance,
    ToCoordinator,
)
from dagster_checkpoints.execution.messages import EndInput, TaskMessage
from dagster_checkpoints.pipeline import TaskId

RETRY_SECONDS = 0.5
"""After so long storage is asked again, if it has not answered."""


class JobPhase(Enum):
    """What a job waits for."""

    CHOOSING = auto()
    """What it starts from."""
    DEPLOYING = auto()
    """The tasks of an attempt."""
    BEGINNING = auto()
    """Storage, to say that the job runs."""
    CLAIMING = auto()
    """Storage, to say that the savepoint is the job's own."""
    CONFIRMING = auto()
    """Storage, to say that this run still owns the pipeline: the tasks are deployed and not started."""
    RUNNING = auto()
    """The tasks."""
    STOPPING = auto()
    """The end of the tasks."""
    RESTARTING = auto()
    """The delay of the strategy, and the outcome of what is being finalized."""
    READING = auto()
    """Storage, to say what the restart begins from."""
    ENDING = auto()
    """Storage, to say that the job has ended."""
    CLOSING = auto()
    """The end of uploads, writes and deletions."""
    OVER = auto()


_WITH_TASKS = frozenset({JobPhase.CONFIRMING, JobPhase.RUNNING})
_ENDED = frozenset({JobPhase.ENDING, JobPhase.CLOSING, JobPhase.OVER})


@dataclass(frozen=True, slots=True)
class _AttemptEnd:
    """Why an attempt ends before every task has finished.

    Attributes:
        final: how the job ends with it; None if there may be another attempt.
        task: the one that has failed.
    """

    failure: Failure | None
    final: JobStatus | None = None
    task: TaskId | None = None


class JobMachine:
    """One execution of one job.

    Args:
        pipeline: name of the pipeline, for messages.
        config: the settings of its checkpoints.
        restart: how often a failed attempt is followed by another, and after what time.
        epoch: fencing epoch of this run: the checkpoints that it completes carry it.
    """

    def __init__(self, pipeline: str, config: CheckpointConfig, restart: RestartStrategy, epoch: int) -> None:
        self.requests = JobRequests(pipeline)
        self._pipeline = pipeline
        self._config = config
        self._strategy = restart.fresh()
        self._epoch = epoch
        self._phase = JobPhase.CHOOSING
        self._attempt = 0
        self._start: JobStart | None = None
        self._begun = False
        self._coordinator: CheckpointCoordinator | None = None
        self._tasks: tuple[TaskId, ...] = ()
        self._sources: tuple[SourceInstance, ...] = ()
        self._finished: set[TaskId] = set()
        self._ended_sources: set[tuple[str, str]] = set()
        self._drained = False
        self._passed_over: tuple[CompletedCheckpoint, ...] = ()
        self._restored: RestorePoint | None = None
        """What the present attempt, or the next one, starts from."""
        self._newest: CompletedCheckpoint | None = None
        """What storage says that the restart begins from."""
        self._end: _AttemptEnd | None = None
        """Why the present attempt ends, or has ended."""
        self._restart_at = 0.0
        self._retry_at: float | None = None
        self._to_discard: list[JobAction] = []
        self._outcome: JobOutcome | None = None
        self._now = 0.0
        self._actions: list[JobAction] = []

    # What the driver may ask

    @property
    def phase(self) -> JobPhase:
        """What the job waits for."""
        return self._phase

    @property
    def attempt(self) -> int:
        """Number of the present attempt, from 1; 0 before the first."""
        return self._attempt

    @property
    def coordinator(self) -> CheckpointCoordinator | None:
        """The coordinator of all attempts; None before the first is deployed. To be looked at only."""
        return self._coordinator

    @property
    def finished(self) -> frozenset[TaskId]:
        """The tasks that have finished, in this attempt or in what it was restored from."""
        return frozenset(self._finished)

    @property
    def outcome(self) -> JobOutcome | None:
        """How the job has ended; None before."""
        return self._outcome

    @property
    def begun(self) -> bool:
        """Whether storage says that the job runs, or has run."""
        return self._begun

    def next_deadline(self) -> float | None:
        """When a Tick is due, in the unit of `now`; None if nothing is."""
        if self._phase is JobPhase.OVER:
            return None
        coordinator = self._coordinator
        due = [self.requests.next_deadline(), self._retry_at]
        if coordinator is not None:
            due.append(coordinator.next_deadline())
            if self._phase is JobPhase.RESTARTING and coordinator.finalizing is None:
                due.append(self._restart_at)
        return min((at for at in due if at is not None), default=None)

    # Events

    def handle(self, event: JobEvent, now: float) -> list[JobAction]:
        """Take one event and return what to do, in this order.

        Args:
            event: what has happened.
            now: seconds; never decreasing.

        Raises:
            UnexpectedEvent: the event is the result of an action that was not asked for, or needs tasks that are not deployed.
        """
        self._now, self._actions = now, []
        self._take(event)
        self._advance_requests()
        self._go_on()
        return self._actions

    def _take(self, event: JobEvent) -> None:
        match event:
            case on.TaskReport(attempt, report):
                if attempt == self._attempt and self._phase in _WITH_TASKS:
                    self._take_report(report)
            case RequestReceived():
                self._receive(event)
            case on.CancelRequested():
                self._end_at_once(JobStatus.CANCELED, None)
            case on.FatalError(failure):
                self._end_at_once(JobStatus.FAILED, failure)
            case on.DrainRequested():
                self._need_tasks(event)
                if self._phase not in _ENDED:
                    self._perform(self.requests.drain())
            case on.EndSourceRequested(stage, instance):
                self._need_tasks(event)
                self._end_sources(EndSources(stage, instance))
            case Tick():
                if self._coordinator is not None:
                    self._to_coordinator(event)
            case on.StartChosen() | on.Deployed() | on.DeployFailed() | on.JobBegun() | on.SavepointClaimed():
                self._take_beginning(event)
            case on.OwnershipConfirmed() | on.StorageSilent() | on.CheckpointRead():
                self._take_storage(event)
            case on.StartFailed(failure):
                self._expect(event, JobPhase.RUNNING, JobPhase.STOPPING)
                self._fail_attempt(failure)
            case on.TasksStopped():
                self._expect(event, JobPhase.STOPPING)
                self._tasks_stopped()
            case on.JobEndRecorded() | on.JobEndNotRecorded() | on.WorkEnded():
                self._take_end(event)
            case CheckpointRequested() | MetadataWritten() | MetadataWriteFailed() | MetadataOutcomeUnknown():
                self._need_tasks(event)
                self._to_coordinator(event)
            case _:
                assert_never(event)

    def _take_beginning(self, event: on.StartChosen | on.Deployed | on.DeployFailed | on.JobBegun | on.SavepointClaimed) -> None:
        match event:
            case on.StartChosen(start):
                self._expect(event, JobPhase.CHOOSING)
                if self._start is None:
                    self._actions.append(on.Sweep())
                self._start, self._restored = start, start.restored
                self._deploy()
            case on.Deployed():
                self._expect(event, JobPhase.DEPLOYING)
                self._deployed(event)
            case on.DeployFailed():
                self._expect(event, JobPhase.DEPLOYING)
                self._deploy_failed(event)
            case on.JobBegun():
                self._expect(event, JobPhase.BEGINNING)
                self._begun = True
                if self._start is not None and self._start.claims:
                    self._wait_for(JobPhase.CLAIMING, on.ClaimSavepoint())
                else:
                    self._begin_attempt()
            case on.SavepointClaimed():
                self._expect(event, JobPhase.CLAIMING)
                self._begin_attempt()

    def _take_storage(self, event: on.OwnershipConfirmed | on.StorageSilent | on.CheckpointRead) -> None:
        self._retry_at = None
        match event:
            case on.StorageSilent():
                self._expect(event, JobPhase.CONFIRMING, JobPhase.READING)
                self._retry_at = self._now + RETRY_SECONDS
            case on.CheckpointRead(restored):
                self._expect(event, JobPhase.READING)
                self._restart_from(restored)
            case on.OwnershipConfirmed() if self._phase is JobPhase.READING:
                self._newest_known(event)
            case on.OwnershipConfirmed():
                self._expect(event, JobPhase.CONFIRMING)
                self._phase = JobPhase.RUNNING
                self._actions.append(on.StartTasks())

    def _go_on(self) -> None:
        """What follows of itself from what has happened."""
        coordinator = self._coordinator
        if coordinator is None or self._phase in _ENDED:
            return
        if self._phase in _WITH_TASKS and self._end is not None:
            self._wait_for(JobPhase.STOPPING, on.StopTasks())
        elif self._phase is JobPhase.RUNNING:
            # What is being written has an outcome, and a requester may wait for it.
            if len(self._finished) >= len(self._tasks) and coordinator.finalizing is None:
                self._perform(self.requests.all_finished())
                self._wait_for(JobPhase.STOPPING, on.StopTasks())
        elif self._phase is JobPhase.RESTARTING:
            # Also the start is chosen only when the outcome of what is being finalized is known.
            if self._now >= self._restart_at and coordinator.finalizing is None:
                self._perform(self.requests.attempt_failed(self._message()))
                self._wait_for(JobPhase.READING, on.ConfirmOwnership())
        elif self._retry_at is not None and self._now >= self._retry_at:
            self._retry_at = None
            self._actions.append(on.ConfirmOwnership())

    # The beginning

    def _deploy(self) -> None:
        self._attempt += 1
        self._wait_for(JobPhase.DEPLOYING, on.Deploy(self._attempt, self._restored, frozenset(self._ended_sources)))

    def _deployed(self, event: on.Deployed) -> None:
        self._sources, self._finished = event.sources, set(event.finished)
        if self._coordinator is not None:
            return self._begin_attempt()
        assert self._start is not None
        start, restored = self._start, self._restored
        self._coordinator = CheckpointCoordinator(
            event.graph,
            self._config,
            next_checkpoint_id=start.next_checkpoint_id,
            finished=event.finished,
            completed=start.retained,
            restored=next((c for c in start.retained if restored is not None and c.location == restored.location), None),
        )
        self._tasks = tuple(event.graph.tasks())
        self._passed_over = start.passed_over
        # Only now, when all of its state is here: a restore that fails must not leave behind that the job goes on from it.
        self._wait_for(JobPhase.BEGINNING, on.BeginJob())

    def _deploy_failed(self, event: on.DeployFailed) -> None:
        if self._begun and event.may_pass:
            self._end = _AttemptEnd(event.failure)
            self._restart(event.failure)
        elif not self._begun and event.unusable:
            self._wait_for(JobPhase.CHOOSING, on.ChooseOlderStart(event.failure))
        else:
            self._finish(JobStatus.FAILED, event.failure)

    def _begin_attempt(self) -> None:
        self._end = None
        self._actions.append(on.AttemptBegan(self._attempt, self._restored))
        # Building the tasks takes a while: before they touch the sinks it must be known that no other run does by now.
        self._wait_for(JobPhase.CONFIRMING, on.ConfirmOwnership())

    # The coordinator

    def _take_report(self, report: CoordinatorEvent | on.TaskFailure) -> None:
        if isinstance(report, on.TaskFailure):
            return self._fail_attempt(report.failure, report.task)
        self._to_coordinator(report)
        if isinstance(report, TaskStateChanged) and report.state is TaskState.FINISHED:
            self._finished.add(report.task)
            self._actions.append(on.TaskHasFinished(report.task))

    def _to_coordinator(self, event: CoordinatorEvent) -> None:
        assert self._coordinator is not None
        for action in self._coordinator.handle(event, self._now):
            self._perform_coordinators(action, self._coordinator)

    def _perform_coordinators(self, action: CoordinatorAction, coordinator: CheckpointCoordinator) -> None:
        match action:
            case TriggerTask(task, barrier):
                self._send((task,), TriggerReceived(barrier))
            case NotifyComplete(tasks, checkpoint_id):
                self._send(tasks, TaskCheckpointCompleted(checkpoint_id))
            case NotifySavepointComplete(tasks, checkpoint_id):
                self._send(tasks, SavepointCompleted(checkpoint_id))
            case NotifyAborted(tasks, checkpoint_id):
                self._send(tasks, CheckpointAborted(checkpoint_id))
            case CheckpointCompleted(completed):
                # The job has gone on from an earlier checkpoint: the later ones are of no use, now that there is a new one.
                self._actions += [DiscardCheckpoint(later) for later in self._passed_over]
                self._passed_over = ()
                if not completed.is_savepoint:
                    self._actions.append(on.ForgetSavepoints(frozenset(kept.location for kept in coordinator.completed)))
                self._actions.append(action)
            case RequestCompleted(request_id, completed):
                self._actions.append(action)
                self._perform(self.requests.completed(request_id, completed))
            case RequestFailed(request_id, reason, message):
                self._actions.append(action)
                self._perform(self.requests.failed(request_id, reason, message, restarting=not self._runs))
            case FailJob(reason, message):
                failure = Failure(f"Pipeline {self._pipeline!r}: {message} ({reason.name}).")
                if self._phase in _WITH_TASKS:
                    self._fail_attempt(failure)
                else:
                    self._end_at_once(JobStatus.FAILED, failure)
            case AcknowledgeAnswered() | DiscardLateState():
                pass  # late states are accounted for by checkpoint, and go with it
            case _:
                self._actions.append(action)

    @property
    def _runs(self) -> bool:
        """Whether an attempt is deployed, and does not end."""
        return self._phase in _WITH_TASKS and self._end is None

    def _send(self, tasks: Collection[TaskId], message: TaskMessage) -> None:
        if tasks and self._phase in _WITH_TASKS:
            self._actions.append(on.SendToTasks(tasks, message))

    # Requests

    def _receive(self, event: RequestReceived) -> None:
        self.requests.receive(event)
        if self._phase is JobPhase.OVER:
            self._answer_rest()

    def _advance_requests(self) -> None:
        """Hand over what can be done now, and withdraw what is overdue."""
        ready: bool | None = None
        for request_id in self.requests.open_ids:
            if ready is None and self.requests.is_waiting(request_id):
                ready = self._phase is JobPhase.RUNNING and self._can_trigger
            can_do = bool(ready) and self._runs
            self._perform(self.requests.advance(request_id, self._now, self._sources if can_do else None))

    @property
    def _can_trigger(self) -> bool:
        return self._coordinator is not None and isinstance(self._coordinator.plan(), CheckpointPlan)

    def _perform(self, actions: Iterable[RequestAction]) -> None:
        for action in actions:
            match action:
                case ToCoordinator(event):
                    self._drained = self._drained or isinstance(event, DrainBegan)
                    self._to_coordinator(event)
                    if isinstance(event, StopRequested) and self.requests.is_open(event.request_id):
                        self._perform(self.requests.stop_accepted(event.request_id))
                case EndSources():
                    self._end_sources(action)
                case AnswerRequest():
                    self._actions.append(action)
                case FailOver(message):
                    self._fail_attempt(Failure(message))

    def _end_sources(self, action: EndSources) -> None:
        if action.stops_job:
            self._send(tuple(task for task in self._tasks if task not in self._finished), DrainAnnounced())
        chosen = [s for s in self._sources if action.stage in (None, s.stage) and action.instance in (None, s.instance)]
        if not action.stops_job:
            self._ended_sources.update((source.stage, source.instance) for source in chosen)
        self._send(tuple(source.task for source in chosen if source.task not in self._finished), EndInput())

    # The end of an attempt, and the next one

    def _fail_attempt(self, failure: Failure, task: TaskId | None = None) -> None:
        if self._end is None:
            self._end = _AttemptEnd(failure, task=task)

    def _end_at_once(self, status: JobStatus, failure: Failure | None) -> None:
        """The job ends, and there is no other attempt. What has ended, or has finished, stays as it is."""
        if self._phase in _WITH_TASKS or (self._phase is JobPhase.STOPPING and self._end is not None):
            if self._end is None or self._end.final is None:
                self._end = _AttemptEnd(failure, status)
        elif self._phase is not JobPhase.STOPPING and self._phase not in _ENDED:
            self._finish(status, failure)

    def _tasks_stopped(self) -> None:
        if self._end is None:
            self._finish(JobStatus.FINISHED, None)
        elif self._end.final is not None:
            self._finish(self._end.final, self._end.failure)
        else:
            assert self._end.failure is not None
            self._restart(self._end.failure, self._end.task)

    def _restart(self, failure: Failure, failed: TaskId | None = None) -> None:
        """Decide whether there is another attempt."""
        self._phase = JobPhase.RESTARTING
        self._perform(self.requests.attempt_failed(failure.message))
        if failure.repeats:
            return self._finish(JobStatus.FAILED, failure, "another attempt would fail in the same way")
        decision = self._strategy.on_failure(self._now)
        if isinstance(decision, GiveUp):
            return self._finish(JobStatus.FAILED, failure, decision.reason)
        self._restart_at = self._now + decision.delay
        self._actions.append(on.AttemptRestarting(decision.attempt + 1, decision.delay, failure))
        # No checkpoint is triggered, and none waits for a task, until the restart.
        for task in self._tasks:
            if task not in self._finished:
                self._to_coordinator(TaskStateChanged(task, TaskState.FAILED if task == failed else TaskState.CANCELED))

    def _newest_known(self, event: on.OwnershipConfirmed) -> None:
        """Storage may name a checkpoint whose write has reported an unknown outcome: it is asked, not the coordinator."""
        self._newest = event.newest if event.epoch == self._epoch else None
        if self._newest is not None:
            self._actions.append(on.ReadCheckpoint(self._newest))
        else:
            assert self._start is not None
            self._restart_from(self._start.restored)

    def _restart_from(self, restored: RestorePoint | None) -> None:
        self._restored = restored
        finished = restored.finished if restored is not None else frozenset()
        self._finished = set(finished)
        self._to_coordinator(JobRestarting(finished, self._newest))
        self._perform(self.requests.resume_drain())
        self._deploy()

    def _message(self) -> str:
        return self._end.failure.message if self._end is not None and self._end.failure is not None else ""

    # The end of the job

    def _finish(self, status: JobStatus, failure: Failure | None, because: str = "") -> None:
        """The job has ended: shut the coordinator down, and discard what is of no use without it."""
        stopped, finished = self.requests.stopped, status is JobStatus.FINISHED
        message = failure.message if failure is not None else ""
        if because:
            message = f"Pipeline {self._pipeline!r} failed, and {because}. {message}"
        self._outcome = JobOutcome(status, message, failure, bool(because), self._ended_by if finished else "")
        self._retry_at = None
        shutdown = self._coordinator.handle(Shutdown(status), self._now) if self._coordinator is not None else []
        discards: list[JobAction] = [a for a in shutdown if isinstance(a, DiscardCheckpoint | DiscardStates)]
        if not finished:
            self._actions += discards
            return self._wait_for(JobPhase.CLOSING, on.FinishWork())
        # First it is said that the job is over: without its checkpoints a crash would look like a new start.
        self._to_discard = discards
        keep = not any(isinstance(action, DiscardCheckpoint) for action in discards)
        asked_by: on.StopAskedBy = "" if stopped is None else "termination" if stopped.termination else "request"
        self._wait_for(JobPhase.ENDING, on.EndJob(keep, self._ended_by, asked_by))

    @property
    def _ended_by(self) -> on.EndedBy:
        stopped = self.requests.stopped
        if stopped is not None:
            return "drain" if stopped.drain else "suspend"
        return "drain" if self._drained else "end_of_data"

    def _take_end(self, event: on.JobEndRecorded | on.JobEndNotRecorded | on.WorkEnded) -> None:
        match event:
            case on.JobEndRecorded(dropped):
                self._expect(event, JobPhase.ENDING)
                known = {action.checkpoint.location for action in self._to_discard if isinstance(action, DiscardCheckpoint)}
                self._actions += self._to_discard
                self._actions += [DiscardCheckpoint(c) for c in dropped if c.location not in known]  # of earlier jobs
                self._wait_for(JobPhase.CLOSING, on.FinishWork())
            case on.JobEndNotRecorded():
                self._expect(event, JobPhase.ENDING)
                self._wait_for(JobPhase.CLOSING, on.FinishWork())
            case on.WorkEnded():
                self._expect(event, JobPhase.CLOSING)
                # Before the release: a requester takes a pipeline that is released, and has not answered, for one that never
                # will.
                self._answer_rest()
                status = self._outcome.status if self._outcome is not None and self._begun else None
                self._wait_for(JobPhase.OVER, on.Release(status))

    def _answer_rest(self) -> None:
        assert self._outcome is not None
        status = self._outcome.status if self._start is not None else None
        self._perform(self.requests.close(status, self._outcome.message))

    # Order

    def _wait_for(self, phase: JobPhase, action: JobAction) -> None:
        self._phase = phase
        self._actions.append(action)

    def _need_tasks(self, event: JobEvent) -> None:
        if self._coordinator is None:
            self._refuse(event)

    def _expect(self, event: JobEvent, *phases: JobPhase) -> None:
        if self._phase not in phases:
            self._refuse(event)

    def _refuse(self, event: JobEvent) -> NoReturn:
        raise UnexpectedEvent(
            f"A job that is {self._phase.name} cannot take {event!r}: the driver hands in the result of an action that was not "
            "asked for, or what needs tasks before the first attempt is deployed."
        )
