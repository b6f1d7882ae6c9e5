"""One execution of a job: its attempts, its restarts and its end; events in, actions out.

    CHOOSING ──> DEPLOYING ──> BEGINNING ──> CONFIRMING ──> RUNNING ──> STOPPING ──┬─> ENDING ──> CLOSING ──> OVER
                     └───────────────── READING <── RESTARTING <────────────────────────────────┘

The job begins when its first attempt is deployed (BEGINNING comes once). Ownership is confirmed before the sinks are
touched. An attempt ends when every task has finished and nothing is being finalized, or with a failure; then its tasks are
stopped. A restart waits for the checkpoint that is being finalized and for the strategy's delay, and begins from the newest
checkpoint in storage. The end of the job is recorded before its checkpoints are deleted.

A task that fails takes its region along (`pipeline.connected_regions`): from STOPPING to RUNNING the actions concern the region
alone, and the tasks of the others go on. A failure of another region in between adds it to what restarts.

The driver performs the actions in the order given and feeds the results back as events; the result of an action comes before any
other event. Must not know: threads, storage, how tasks are built, what a state holds.

Source: PROTOCOL sections 6 and 9.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, assert_never

from dagster_checkpoints.coordination.checkpoints import CompletedCheckpoint
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.coordinator import CheckpointCoordinator
from dagster_checkpoints.coordination.events import (
    CheckpointRequested,
    DiscardCheckpoint,
    DiscardStates,
    MetadataOutcomeUnknown,
    MetadataWriteFailed,
    MetadataWritten,
    Shutdown,
    Tick,
)
from dagster_checkpoints.coordination.restarts import FailoverStrategy, GiveUp, RestartStrategy
from dagster_checkpoints.coordination.retention import JobStatus
from dagster_checkpoints.execution import job_actions as do
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.execution.burst import Burst
from dagster_checkpoints.execution.job_actions import JobAction
from dagster_checkpoints.execution.job_coordination import AttemptEnd, JobCoordination
from dagster_checkpoints.execution.job_events import Failure, JobBeginning, JobMachineEvent, JobOutcome, RestorePoint
from dagster_checkpoints.execution.job_phases import JobPhase, check_awaited, refuse
from dagster_checkpoints.execution.job_requests import EndSources, JobRequests, RequestReceived
from dagster_checkpoints.execution.splits import SplitCounts
from dagster_checkpoints.pipeline import TaskId

_RUNNING, _RESTARTING = JobPhase.RUNNING, JobPhase.RESTARTING  # read at every event, and a look-up in an enumeration is slow
RETRY_SECONDS = 0.5
"""Seconds after which storage is asked again, if it has not answered."""


class JobMachine:
    """One execution of one job.

    Args:
        pipeline: name of the pipeline, for messages.
        config: the settings of its checkpoints.
        restart: the restart strategy: how often, and after what delay, the job is restarted.
        epoch: fencing epoch of this run, which the checkpoints that it completes carry.
        failover: what restarts after the failure of a task: its region, or all tasks.
        burst: whether the job is suspended when its sources have read what is there, see `execution.burst`.
    """

    def __init__(
        self,
        pipeline: str,
        config: CheckpointConfig,
        restart: RestartStrategy,
        epoch: int,
        failover: FailoverStrategy = "region",
        *,
        burst: bool = False,
    ) -> None:
        self._pipeline = pipeline
        self._config = config
        self._strategy = restart.fresh()
        self._epoch = epoch
        self._job = JobCoordination(pipeline, failover, Burst(config, epoch) if burst else None)
        self._phase = JobPhase.CHOOSING
        self._attempt = 0
        self._start: JobBeginning | None = None
        self._begun = False
        self._restored: RestorePoint | None = None
        """The checkpoint or savepoint that the present attempt, or the next one, starts from; None for a new start."""
        self._newest: CompletedCheckpoint | None = None
        """The newest checkpoint of this run in storage, from which the restart begins; None before the first."""
        self._message = ""
        """The latest failure after which tasks restart."""
        self._started: Set[str] | None = None
        """The vertices whose tasks were started last; None for all."""
        self._restart_at = 0.0
        self._retry_at: float | None = None
        self._to_discard: list[JobAction] = []
        self._outcome: JobOutcome | None = None
        self._now = 0.0

    # Queries of the driver

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
        """The coordinator of all attempts, for reading only; None before the first is deployed."""
        return self._job.coordinator

    @property
    def requests(self) -> JobRequests:
        """The requests to the job, for reading only."""
        return self._job.requests

    @property
    def splits(self) -> Mapping[str, SplitCounts]:
        """By split source, its progress in splits."""
        return self._job.splits.counts

    @property
    def finished(self) -> frozenset[TaskId]:
        """The tasks that have finished, in this attempt or in the checkpoint it was restored from."""
        return frozenset(self._job.finished)

    @property
    def runs_partly(self) -> bool:
        """Whether the tasks of a region restart while others go on."""
        return self._job.deployed and self._job.restarting

    def runs(self, task: TaskId, attempt: int) -> bool:
        """Whether the task is deployed, as part of this attempt."""
        return self._job.attempts.get(task.vertex) == attempt

    @property
    def outcome(self) -> JobOutcome | None:
        """How the job has ended; None before."""
        return self._outcome

    @property
    def begun(self) -> bool:
        """Whether it is recorded in storage that the job runs, or has run."""
        return self._begun

    def next_deadline(self) -> float | None:
        """When a Tick is due, in the unit of `now`; None if nothing is."""
        coordinator = self._job.coordinator
        due = [self._job.requests.next_deadline(), self._retry_at]
        if coordinator is not None:
            due.append(coordinator.next_deadline())
            if self._phase is _RESTARTING and not self._job.finalizing:
                due.append(self._restart_at)
            if self._phase is _RUNNING:
                due += [self._job.splits.next_discovery(self._job.attempts), self._job.next_suspend]
        return min([at for at in due if at is not None], default=None)

    # Events

    def handle(self, event: JobMachineEvent, now: float) -> list[JobAction]:
        """Take one event and return what to do, in this order.

        Args:
            event: what has happened.
            now: seconds; never decreasing.

        Raises:
            UnexpectedEvent: the event is the result of an action that was not asked for, or needs tasks that are not deployed.
        """
        self._now = now
        self._job.at(now)
        self._take(event)
        all_run = self._phase is _RUNNING
        self._job.advance_requests(all_run=all_run)
        if all_run and self._job.asks_for_suspend():  # behind a stop that has waited until now
            self._job.advance_requests(all_run=True)
        self._proceed()
        return self._job.actions

    def _take(self, event: JobMachineEvent) -> None:
        take = _TAKES_RESULT.get(type(event))
        if take is not None:
            check_awaited(event, self._phase)
            return take(self, event)
        match event:
            case on.TaskReport():
                self._job.take_report(event.attempt, event.event)
            case Tick():
                if self._job.coordinator is not None:
                    self._job.to_coordinator(event)
            case MetadataWritten() | MetadataWriteFailed() | MetadataOutcomeUnknown() | CheckpointRequested():
                self._need_tasks(event)
                self._job.to_coordinator(event)
            case RequestReceived():
                self._job.requests.receive(event)
                if self._phase is JobPhase.OVER:
                    self._answer_rest()
            case on.CancelRequested():
                self._end_at_once(JobStatus.CANCELED, None)
            case on.FatalError(failure):
                self._end_at_once(JobStatus.FAILED, failure)
            case on.DrainRequested() | on.EndSourceRequested():
                self._need_tasks(event)
                self._end_sources(event)
            case _:
                assert_never(event)  # type: ignore[arg-type]  # the results are in _TAKES_RESULT

    def _end_sources(self, event: on.DrainRequested | on.EndSourceRequested) -> None:
        if self._phase.ended:
            return
        if isinstance(event, on.DrainRequested):
            self._job.requests.drain()
        else:
            self._job.end_sources(EndSources(event.stage, event.instance))

    def _proceed(self) -> None:
        """What follows from the state, whatever the event was."""
        job = self._job
        if job.late_failure is not None:
            failure, job.late_failure = job.late_failure, None
            self._restart(AttemptEnd(failure))
        elif job.deployed and job.end is not None and self._phase is not JobPhase.STOPPING:
            self._stop_tasks()
        elif self._phase is _RUNNING and job.all_finished:
            job.perform(job.requests.all_finished())
            self._stop_tasks()
        elif self._phase is _RUNNING:
            job.discover_splits()
        elif self._phase is _RESTARTING and self._now >= self._restart_at and not job.finalizing:
            # Now it is known whether the savepoint of a stop has completed.
            job.perform(job.requests.attempt_failed(self._message))
            self._wait_for(JobPhase.READING, do.ConfirmOwnership())
        elif self._retry_at is not None and self._now >= self._retry_at:
            self._retry_at = None
            self._ask(do.ConfirmOwnership())

    # The beginning

    def _beginning_chosen(self, event: on.BeginningChosen) -> None:
        self._start, self._restored = event.start, event.start.restored
        if self._restored is not None:
            self._job.end_again(self._restored.ending)
        self._deploy()

    def _job_begun(self, event: on.JobBegun) -> None:
        self._begun = True
        # Only now: if `state.json` was lost, it lists no checkpoint, and they are all there is for a job that cannot begin.
        self._ask(do.Sweep())
        self._begin_attempt()

    @property
    def _started_from(self) -> JobBeginning:
        assert self._start is not None
        return self._start

    def _deploy(self) -> None:
        self._attempt += 1
        ended = frozenset(self._job.ended_sources)
        self._wait_for(JobPhase.DEPLOYING, do.Deploy(self._attempt, self._restored, ended, self._job.down))

    def _deployed(self, event: on.Deployed) -> None:
        self._job.attempt_deployed(event.finished, event.sources, event.enumerators)
        if self._job.coordinator is not None:
            return self._begin_attempt()
        start, restored = self._started_from, self._restored
        coordinator = CheckpointCoordinator(
            event.graph,
            self._config,
            next_checkpoint_id=start.next_checkpoint_id,
            finished=event.finished,
            completed=start.retained,
            restored=next((c for c in start.retained if restored is not None and c.location == restored.location), None),
        )
        self._job.begin(coordinator, event.graph, start.passed_over)
        # Only now, when all of its state is fetched: if a restore fails, storage must not say that the job continues from it.
        self._wait_for(JobPhase.BEGINNING, do.BeginJob())

    def _deploy_failed(self, event: on.DeployFailed) -> None:
        if self._begun and event.may_pass:
            self._restart(AttemptEnd(event.failure))
        elif self._job.deployed:
            self._job.end = AttemptEnd(event.failure, JobStatus.FAILED)
        elif not self._begun and event.unusable:
            self._wait_for(JobPhase.CHOOSING, do.ChooseOlderStart(event.failure))
        else:
            self._finish(JobStatus.FAILED, event.failure)

    def _begin_attempt(self) -> None:
        self._started = self._job.start(self._attempt)
        self._ask(do.AttemptBegan(self._attempt, self._restored, self._started))
        # Building the tasks takes time: before they use the sinks, check that no other run has taken the pipeline over.
        self._wait_for(JobPhase.CONFIRMING, do.ConfirmOwnership())

    # Storage's answers

    def _storage_silent(self, event: on.StorageSilent) -> None:
        self._retry_at = self._now + RETRY_SECONDS

    def _ownership_confirmed(self, event: on.OwnershipConfirmed) -> None:
        if self._phase is JobPhase.READING:
            self._newest_known(event)
        else:
            self._wait_for(JobPhase.RUNNING, do.StartTasks(self._started))

    def _newest_known(self, event: on.OwnershipConfirmed) -> None:
        """Storage, and not the coordinator, names the newest checkpoint: a write whose outcome is unknown may have succeeded."""
        self._newest = event.newest if event.epoch == self._epoch else None
        if self._newest is not None:
            self._ask(do.ReadNewest(self._newest))
        else:
            self._restart_from(self._started_from.restored)

    # The end of an attempt, and the next one

    def _stop_tasks(self) -> None:
        if self._phase is JobPhase.CONFIRMING:
            self._job.end_also(self._started)  # they are built, and would never be started
        vertices = self._ending()
        self._job.stop(vertices)
        self._wait_for(JobPhase.STOPPING, do.StopTasks(vertices))

    def _ending(self) -> Set[str] | None:
        """The vertices whose tasks end; None for all."""
        end = self._job.end
        return end.vertices if end is not None and end.final is None else None

    def _end_at_once(self, status: JobStatus, failure: Failure | None) -> None:
        """End the job without another attempt. A job that has ended, or whose end is decided, is not changed."""
        end = self._job.end
        if self._job.deployed or (self._phase is JobPhase.STOPPING and end is not None):
            if end is None or end.final is None:
                self._job.end = AttemptEnd(failure, status)
        elif self._phase is not JobPhase.STOPPING and not self._phase.ended:
            self._finish(status, failure)

    def _tasks_stopped(self, event: on.TasksStopped) -> None:
        end = self._job.end
        if end is None:
            self._finish(JobStatus.FINISHED, None)
        elif not self._job.all_stopped(self._ending()):
            self._stop_tasks()  # more tasks end by now
        elif end.final is not None:
            self._finish(end.final, end.failure, end.because)
        else:
            self._restart(end)

    def _restart(self, end: AttemptEnd) -> None:
        """Decide whether the tasks that were stopped are restarted; again if there is another failure until they are."""
        failure = end.failure
        assert failure is not None
        self._job.end, self._phase, self._message = None, JobPhase.RESTARTING, failure.message
        self._job.perform(self._job.requests.attempt_failed(failure.message))
        if failure.repeats:
            return self._give_up(failure, "another attempt would fail in the same way")
        decision = self._strategy.on_failure(self._now)
        if isinstance(decision, GiveUp):
            return self._give_up(failure, decision.reason)
        # A region that failed before may still wait.
        self._restart_at = max(self._restart_at, self._now + decision.delay)
        self._ask(do.AttemptRestarting(self._attempt + 1, decision.delay, failure, self._job.down))
        self._job.tasks_are_gone(end.task)

    def _give_up(self, failure: Failure, because: str) -> None:
        """The job fails; first the tasks that still run are stopped."""
        if self._job.deployed:
            self._job.end = AttemptEnd(failure, JobStatus.FAILED, because=because)
        else:
            self._finish(JobStatus.FAILED, failure, because)

    def _restart_from(self, restored: RestorePoint | None) -> None:
        self._restored = restored
        self._job.restart(restored.finished if restored is not None else frozenset(), self._newest)
        self._deploy()

    # The end of the job

    def _finish(self, status: JobStatus, failure: Failure | None, because: str = "") -> None:
        """The job has ended: shut the coordinator down, and discard the checkpoints that are no longer needed."""
        finished, job = status is JobStatus.FINISHED, self._job
        message = failure.message if failure is not None else ""
        if because:
            message = f"Pipeline {self._pipeline!r} failed, and {because}. {message}"
        self._outcome = JobOutcome(status, message, failure, bool(because), job.ended_by if finished else "")
        shutdown = job.coordinator.handle(Shutdown(status), self._now) if job.coordinator is not None else []
        discards: list[JobAction] = [a for a in shutdown if isinstance(a, DiscardCheckpoint | DiscardStates)]
        if finished:
            # The end is recorded first: after a crash, a running job without checkpoints would start from the beginning.
            self._to_discard = discards
            keep = not any(isinstance(action, DiscardCheckpoint) for action in discards)
            self._wait_for(JobPhase.ENDING, do.EndJob(keep, job.ended_by, job.stop_asked_by))
        else:
            job.actions += discards
            self._wait_for(JobPhase.CLOSING, do.FinishWork())

    def _end_recorded(self, event: on.JobEndRecorded) -> None:
        known = {action.checkpoint.location for action in self._to_discard if isinstance(action, DiscardCheckpoint)}
        self._job.actions += self._to_discard
        self._job.actions += [DiscardCheckpoint(c) for c in event.dropped if c.location not in known]  # of earlier jobs
        self._wait_for(JobPhase.CLOSING, do.FinishWork())

    def _work_ended(self, event: on.WorkEnded) -> None:
        # Before the release: a requester does not expect an answer from a pipeline that is released.
        self._answer_rest()
        status = self._outcome.status if self._outcome is not None and self._begun else None
        self._wait_for(JobPhase.OVER, do.Release(status))

    def _answer_rest(self) -> None:
        assert self._outcome is not None
        status = self._outcome.status if self._start is not None else None
        self._job.perform(self._job.requests.close(status, self._outcome.message))

    # Actions and order

    def _ask(self, action: JobAction) -> None:
        self._job.actions.append(action)

    def _wait_for(self, phase: JobPhase, action: JobAction) -> None:
        self._phase, self._retry_at = phase, None
        self._ask(action)

    def _need_tasks(self, event: JobMachineEvent) -> None:
        if self._job.coordinator is None:
            refuse(event, self._phase)


_TAKES_RESULT: Mapping[type[object], Callable[[JobMachine, Any], None]] = {
    on.BeginningChosen: JobMachine._beginning_chosen,
    on.Deployed: JobMachine._deployed,
    on.DeployFailed: JobMachine._deploy_failed,
    on.JobBegun: JobMachine._job_begun,
    on.OwnershipConfirmed: JobMachine._ownership_confirmed,
    on.StorageSilent: JobMachine._storage_silent,
    on.NewestRead: lambda machine, event: machine._restart_from(event.restored),
    on.StartFailed: lambda machine, event: machine._job.fail(event.failure, vertices=machine._started),
    on.TasksStopped: JobMachine._tasks_stopped,
    on.JobEndRecorded: JobMachine._end_recorded,
    on.JobEndNotRecorded: lambda machine, event: machine._wait_for(JobPhase.CLOSING, do.FinishWork()),
    on.WorkEnded: JobMachine._work_ended,
}
"""The results of actions: a job takes them only in the phases in which it waits for them."""
