"""The coordinator of a job, the requests to it, and its tasks: the actions of each become events of the others.

The coordinator's answers go to the requests; the requests' actions go to the coordinator or to the sources. Must not
know: attempts, restarts, how a job begins or ends (`job_machine`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from dagster_checkpoints.coordination import lifecycle as life
from dagster_checkpoints.coordination.barriers.events import TriggerReceived
from dagster_checkpoints.coordination.checkpoints import CompletedCheckpoint
from dagster_checkpoints.coordination.coordinator import CheckpointCoordinator
from dagster_checkpoints.coordination.events import (
    AcknowledgeAnswered,
    Acknowledged,
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointTriggered,
    CoordinatorEvent,
    DiscardCheckpoint,
    DiscardLateState,
    DrainBegan,
    EventOfTask,
    FailJob,
    NotifyTasks,
    RegionFailed,
    RequestCompleted,
    RequestNotCompleted,
    StopRequested,
    TasksRestarting,
    TaskStateChanged,
    TriggerTask,
    WriteMetadata,
)
from dagster_checkpoints.coordination.plan import CheckpointPlan, TaskState
from dagster_checkpoints.coordination.restarts import FailoverStrategy
from dagster_checkpoints.coordination.retention import JobStatus
from dagster_checkpoints.coordination.stop_with_savepoint import FailOver
from dagster_checkpoints.execution.burst import Burst
from dagster_checkpoints.execution.job_actions import (
    DiscoverSplits,
    ForgetSavepoints,
    JobAction,
    SendToTasks,
    SourcesCut,
    TaskHasFinished,
)
from dagster_checkpoints.execution.job_events import Failure, TaskFailure
from dagster_checkpoints.execution.job_requests import (
    AnswerRequest,
    EndSources,
    JobRequests,
    RequestAction,
    SourceInstance,
    ToCoordinator,
)
from dagster_checkpoints.execution.pipeline_state import EndedBy, StopAskedBy
from dagster_checkpoints.execution.sources import SourceEnds
from dagster_checkpoints.execution.split_events import EnumeratorStart, SplitRequest, SplitsDiscovered
from dagster_checkpoints.execution.splits import SplitEnumerators
from dagster_checkpoints.execution.task_events import EndInput, SourceEnded, SourcesRead, TaskMessage
from dagster_checkpoints.pipeline import ExecutionGraph, TaskId, connected_regions

_FINISHED = TaskState.FINISHED  # read at every event, and a look-up in an enumeration is slow


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """Why an attempt, or the part of it that some tasks are, ends before every task has finished.

    Attributes:
        failure: why it failed; None if the job was canceled.
        final: how the job ends with it; None if tasks may restart.
        task: the task that has failed; None if it was not a task.
        vertices: the vertices whose tasks end; None for all.
        because: why a job that might have been restarted is not; "" for others.
    """

    failure: Failure | None
    final: JobStatus | None = None
    task: TaskId | None = None
    vertices: Set[str] | None = None
    because: str = ""


class JobCoordination:
    """The coordinator, the requests and the tasks of one job.

    Args:
        pipeline: name of the pipeline, for messages.
        failover: what restarts after the failure of a task.
        burst: the burst, if the job is suspended when its sources have read what is there; None for others.

    Attributes:
        actions: the actions for the driver, in order.
        requests: the requests to the job.
        splits: the enumerators of split sources.
        coordinator: None before the first attempt is deployed.
        finished: the tasks that have finished, in the present attempt or in what it was restored from.
        ended_sources: (stage, instance) of the sources that were asked to end, by name or, unbounded ones, by a drain.
        attempts: by vertex, the attempt whose tasks are deployed; without the vertices whose tasks were stopped.
        end: why tasks that are deployed end, as long as they are not stopped; None while none does.
        late_failure: a failure between two attempts, when no task is deployed; None without one.
    """

    def __init__(self, pipeline: str, failover: FailoverStrategy = "region", burst: Burst | None = None) -> None:
        self.actions: list[JobAction] = []
        self.requests = JobRequests(pipeline)
        self.splits = SplitEnumerators(burst=burst is not None)
        self.coordinator: CheckpointCoordinator | None = None
        self.finished: set[TaskId] = set()
        self.ended_sources: set[tuple[str, str]] = set()
        self._asked_to_end: set[tuple[str, str]] = set()
        """Those of them that a request has ended by name. A drain ends all of them in this run only."""
        self.attempts: dict[str, int] = {}
        self.end: AttemptEnd | None = None
        self.late_failure: Failure | None = None
        self._burst = burst
        self._ends = SourceEnds()
        self._pipeline = pipeline
        self._failover = failover
        self._regions: dict[str, frozenset[str]] = {}
        """By vertex, the vertices that restart with it."""
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
        self, coordinator: CheckpointCoordinator, graph: ExecutionGraph, passed_over: tuple[CompletedCheckpoint, ...]
    ) -> None:
        """The first attempt is deployed: the tasks and the coordinator are known.

        Args:
            coordinator: the coordinator of all attempts.
            graph: all tasks of the job.
            passed_over: checkpoints that are of no use once the job has completed one of its own.
        """
        self.coordinator = coordinator
        self._tasks = tuple(graph.tasks())
        self._passed_over = passed_over
        every = frozenset(vertex.name for vertex in graph.vertices)
        self._regions = connected_regions(graph) if self._failover == "region" else dict.fromkeys(every, every)

    def attempt_deployed(
        self, finished: Set[TaskId], sources: tuple[SourceInstance, ...], enumerators: Iterable[EnumeratorStart] = ()
    ) -> None:
        """The tasks of an attempt, or those that restart, are deployed; `finished` had finished before."""
        self.finished, self._sources = self._finished_after(finished), sources
        ended = {source.task for source in sources if (source.stage, source.instance) in self.ended_sources}
        self.splits.begin(enumerators, ended, self.down)

    def _finished_after(self, restored: Set[TaskId]) -> set[TaskId]:
        """The tasks that have finished, if those that restart are restored like this."""
        down = self.down
        if down is None:
            return set(restored)
        return {t for t in self.finished if t.vertex not in down} | {t for t in restored if t.vertex in down}

    @property
    def deployed(self) -> bool:
        """Whether tasks are deployed that were not stopped."""
        return bool(self.attempts)

    @property
    def down(self) -> Set[str] | None:
        """The vertices whose tasks are stopped; None if no task is deployed."""
        return self._regions.keys() - self.attempts.keys() if self.attempts else None

    @property
    def restarting(self) -> bool:
        """Whether tasks are being stopped, or are stopped and restart."""
        return self.end is not None or len(self.attempts) < len(self._regions)

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
        return stopped.asked_by if stopped is not None else ""

    # Tasks

    def take_report(
        self, attempt: int, report: EventOfTask | TaskFailure | SplitRequest | SplitsDiscovered | SourcesRead | SourceEnded
    ) -> None:
        """A task reports something: nothing follows if the task was stopped, and its attempt is not the present one."""
        if self.attempts.get(report.task.vertex) != attempt:
            return
        if type(report) is Acknowledged:  # the most frequent report
            return self.to_coordinator(report)
        if isinstance(report, TaskFailure):
            return self.fail(report.failure, report.task)
        if isinstance(report, SplitRequest | SplitsDiscovered):
            for task, message in self.splits.take(report, self._now):
                self._send((task,), message)
            return
        if isinstance(report, SourcesRead):
            if self._burst is not None:
                self._burst.read(report)
            return
        if isinstance(report, SourceEnded):
            return self._ends.take(report)
        self.to_coordinator(report)
        if type(report) is TaskStateChanged and report.state is _FINISHED:
            self.finished.add(report.task)
            self.actions.append(TaskHasFinished(report.task))

    def discover_splits(self) -> None:
        """Begin the discoveries of splits that are due."""
        self.actions += [DiscoverSplits(self.attempts[stage], stage) for stage in self.splits.discover(self._now, self.attempts)]

    def fail(self, failure: Failure, task: TaskId | None = None, *, vertices: Set[str] | None = None) -> None:
        """Tasks have failed, and may restart. Until they are stopped only the first failure counts; a later one can add tasks.

        Args:
            failure: why.
            task: the task that has failed, which takes its region along; None if it was not a task.
            vertices: if it was not a task: the vertices whose tasks have failed; None for all.
        """
        if task is not None and self.coordinator is not None and not self.coordinator.restarts_all_tasks:
            vertices = self._regions[task.vertex]
        if self.end is None:
            self.end = AttemptEnd(failure, task=task, vertices=vertices)
        self.end_also(vertices)

    def end_also(self, vertices: Set[str] | None) -> None:
        """The tasks of these vertices, None for all, end together with those that end."""
        end = self.end
        if end is None or end.final is not None or end.vertices is None:
            return
        together = end.vertices | vertices if vertices is not None else self._regions.keys()
        self.end = replace(end, vertices=together if len(together) < len(self._regions) else None)

    def stop(self, vertices: Set[str] | None) -> None:
        """The tasks of these vertices are being stopped, None for all: nothing is sent to them, and they report no more."""
        self.attempts = {} if vertices is None else {v: at for v, at in self.attempts.items() if v not in vertices}
        self._ends.stopped(vertices)
        if self._burst is not None:
            self._burst.stopped(vertices)

    def all_stopped(self, vertices: Set[str] | None) -> bool:
        """Whether no task of these vertices is deployed; None for all vertices."""
        return not self.attempts if vertices is None else self.attempts.keys().isdisjoint(vertices)

    def start(self, attempt: int) -> Set[str] | None:
        """The tasks that were stopped are deployed as this attempt. Returns their vertices; None for all."""
        started = self.down
        self.attempts.update(dict.fromkeys(self._regions if started is None else started, attempt))
        return started

    def tasks_are_gone(self, failed: TaskId | None) -> None:
        """Report the tasks that are stopped: until the restart no checkpoint is triggered, and none waits for a task.

        Args:
            failed: the task that has failed; the others were canceled. None if it was not a task.
        """
        down = self.down
        if down is not None:
            return self.to_coordinator(RegionFailed(down, failed))
        for task in self._tasks:
            if task not in self.finished:
                self.to_coordinator(TaskStateChanged(task, TaskState.FAILED if task == failed else TaskState.CANCELED))

    def restart(self, finished: Set[TaskId], newest: CompletedCheckpoint | None) -> None:
        """The tasks that are stopped start again.

        Args:
            finished: the tasks that had finished in the restored checkpoint.
            newest: the restored checkpoint; None if this run has not completed one.
        """
        self.finished = self._finished_after(finished)
        self.to_coordinator(TasksRestarting(finished, newest, self.down))
        # A drain that waits begins with the tasks: their unbounded sources read what is there, and end.
        self.perform(self.requests.advance_drain(self._unread()))

    def end_sources(self, action: EndSources) -> None:
        """End sources as if their input were exhausted; after a restart they end again."""
        if action.stops_job:
            self._send(self._unfinished(self._tasks), life.DrainAnnounced())
        chosen = [s for s in self._sources if action.stage in (None, s.stage) and action.instance in (None, s.instance)]
        if action.stage is None and (cut := self._unread()):
            self.actions.append(SourcesCut(tuple(map(str, cut))))
        if not action.stops_job:
            # Bounded sources end by themselves, also when they are built again: a drain that waits for them still does.
            names = {(source.stage, source.instance) for source in chosen if action.stage or not source.bounded}
            self.ended_sources |= names
            self._asked_to_end |= names if action.stage is not None else set()
        self.splits.end(source.task for source in chosen)
        if action.stage is None:
            return self._send(self._unfinished(source.task for source in chosen), EndInput())
        self._send(self._unfinished(source.task for source in chosen), EndInput(action.stage))

    def end_again(self, sources: Set[tuple[str, str]]) -> None:
        """Sources, as (stage, instance), that had been ended by name before the checkpoint that the job starts from."""
        self.ended_sources |= sources
        self._asked_to_end |= sources

    def _unread(self) -> tuple[SourceInstance, ...]:
        """The instances of bounded sources that run, have not been read to their end, and were not asked to end."""
        running = (s for s in self._sources if s.task.vertex in self.attempts)
        bounded = (s for s in running if s.bounded and (s.stage, s.instance) not in self.ended_sources)
        return self._ends.unread(bounded, self.finished)

    def _at_end(self) -> Set[SourceInstance]:
        """The instances of sources whose data has ended."""
        return set(self._sources).difference(self._ends.unread(self._sources, self.finished))

    def _unfinished(self, tasks: Iterable[TaskId]) -> tuple[TaskId, ...]:
        return tuple(task for task in tasks if task not in self.finished)

    def _send(self, tasks: Collection[TaskId], message: TaskMessage) -> None:
        if len(self.attempts) < len(self._regions):
            tasks = tuple([task for task in tasks if task.vertex in self.attempts])
        if tasks:
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

    def _triggered(self, action: CheckpointTriggered) -> None:
        self.splits.triggered(action.checkpoint_id)  # before the triggers, which follow
        self.actions.append(action)

    def _write(self, action: WriteMetadata) -> None:
        taken = self.splits.written(action.checkpoint.checkpoint_id)
        snapshot = structs.replace(action.checkpoint, enumerators=taken, ending=frozenset(self._asked_to_end))
        self.actions.append(WriteMetadata(snapshot))

    def _failed(self, action: CheckpointFailed) -> None:
        if action.checkpoint_id is not None:
            self.splits.failed(action.checkpoint_id)
        self.actions.append(action)

    def _completed(self, action: CheckpointCompleted) -> None:
        if action.checkpoint.properties.commits:
            # Later checkpoints than that the job has started from, and those of other jobs: it restarts from one of its own now.
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
        self.perform(self.requests.failed(action.request_id, action.reason, action.message, restarting=self.restarting))

    def _fail_job(self, action: FailJob) -> None:
        failure = Failure(f"Pipeline {self._pipeline!r}: {action.message} ({action.reason.name}).")
        if self.deployed or self.end is not None:
            self.fail(failure)
        else:
            self.late_failure = failure

    # Requests

    def asks_for_suspend(self) -> bool:
        """In a burst: ask for a suspend when every source has read what was there, unless the job is stopped or drained.

        Returns:
            Whether it is asked for now.
        """
        if self._burst is None or self.requests.stop is not None or self._drained or self.restarting:
            return False
        tasks = {source.task for source in self._sources} - self.finished
        ended = {task for task in tasks if self._ends.all_of(task)}
        due = self._burst.is_due(tasks, ended, self.splits.have_read_all, self._now)
        if not due or self.coordinator is None or not isinstance(self.coordinator.plan(), CheckpointPlan):
            return False
        self.requests.ask(self._burst.request(), self._now)
        return True

    def _answered(self, answer: AnswerRequest) -> None:
        self.actions.append(answer)
        if self._burst is None or not self._burst.is_own(answer.request_id) or answer.done:
            return
        message = self._burst.failed(answer.message, self._now, restarting=self.restarting)
        if message:
            self.end = AttemptEnd(Failure(f"Pipeline {self._pipeline!r}: {message}"), JobStatus.FAILED)

    @property
    def next_suspend(self) -> float | None:
        """When a suspend that has failed is asked for again, seconds; None if that is not known, or waits for an event by now."""
        at = self._burst.next_deadline if self._burst is not None else None
        return at if at is not None and at > self._now else None

    def advance_requests(self, *, all_run: bool) -> None:
        """Hand over the requests that can be done now, and withdraw those that are overdue.

        Args:
            all_run: whether the tasks were started; the coordinator knows whether all of them run by now.
        """
        ready: bool | None = None
        for request_id in self.requests.due_ids(self._now):
            if ready is None and self.requests.is_waiting(request_id):
                ready = all_run and self.coordinator is not None and isinstance(self.coordinator.plan(), CheckpointPlan)
            can_do = ready and self.end is None  # the request before may have ended the attempt
            sources = self._sources if can_do else None
            self.perform(self.requests.advance(request_id, self._now, sources, self._unread(), self._at_end()))
        if all_run and self.requests.drain_waits and not self.restarting:
            self.perform(self.requests.advance_drain(self._unread()))

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
                    self._answered(action)
                case FailOver(message):
                    self.fail(Failure(message))


def _account_by_checkpoint(job: JobCoordination, action: AcknowledgeAnswered | DiscardLateState) -> None:
    """Late states are accounted for by checkpoint, and deleted with it."""


_PERFORM: dict[type[object], Callable[[JobCoordination, Any], None]] = {
    AcknowledgeAnswered: _account_by_checkpoint,
    DiscardLateState: _account_by_checkpoint,
    TriggerTask: lambda job, action: job._send((action.task,), TriggerReceived(action.barrier)),
    NotifyTasks: lambda job, action: job._send(action.tasks, action.notice),
    CheckpointTriggered: JobCoordination._triggered,
    WriteMetadata: JobCoordination._write,
    CheckpointFailed: JobCoordination._failed,
    CheckpointCompleted: JobCoordination._completed,
    RequestCompleted: JobCoordination._request_completed,
    RequestNotCompleted: JobCoordination._request_failed,
    FailJob: JobCoordination._fail_job,
}
"""The coordinator's actions that the driver does not perform as they are."""
