"""The checkpoint coordinator: one per job, events in, actions out.

It decides when which checkpoint is triggered; `pending_checkpoints` follows it to its end. It
has no clock: every event comes with `now`; `next_deadline()` says when a Tick is due. The runtime performs the
actions in the order given. Must not know: threads, storage, what a state holds.

Source: FLIP-147; Flink's CheckpointCoordinator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import assert_never

from msgspec.structs import replace

from dagster_checkpoints.coordination.checkpoints import CheckpointProperties, CompletedCheckpoint
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.errors import CheckpointStillFinalizing
from dagster_checkpoints.coordination.events import (
    Acknowledged,
    BacklogChanged,
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointRequested,
    CheckpointTriggered,
    CoordinatorAction,
    CoordinatorEvent,
    Declined,
    DrainBegan,
    EndOfDataReached,
    FailJob,
    MetadataOutcomeUnknown,
    MetadataWriteFailed,
    MetadataWritten,
    RegionFailed,
    RequestNotCompleted,
    RequestWithdrawn,
    Shutdown,
    StopRequested,
    TasksRestarting,
    TaskStateChanged,
    Tick,
)
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.pending_checkpoints import PendingCheckpoints
from dagster_checkpoints.coordination.plan import (
    CheckpointPlan,
    NotAllRunning,
    TaskState,
)
from dagster_checkpoints.coordination.progress import Obstacle, StopProgress, TaskProgress
from dagster_checkpoints.coordination.requests import CheckpointRequest, Dropped, RequestQueue
from dagster_checkpoints.coordination.schedule import CheckpointSchedule
from dagster_checkpoints.coordination.statistics import CheckpointStatistics
from dagster_checkpoints.pipeline import ExecutionGraph, TaskId

_GONE = frozenset({TaskState.FINISHED, TaskState.CANCELING, TaskState.CANCELED, TaskState.FAILED})


class CheckpointCoordinator:
    """Triggers, collects, completes and aborts the checkpoints of one job.

    Args:
        graph: the execution graph of the job.
        config: the settings of checkpointing.
        next_checkpoint_id: id of the first checkpoint: that of the restored one + 1, or 1.
        finished: tasks that had finished in the restored checkpoint; they are not started.
        completed: the retained checkpoints that the store holds, in any order.
        restored: the checkpoint or savepoint that the job begins from, for the statistics; None for a new start.
    """

    def __init__(
        self,
        graph: ExecutionGraph,
        config: CheckpointConfig,
        *,
        next_checkpoint_id: int = 1,
        finished: Iterable[TaskId] = (),
        completed: Sequence[CompletedCheckpoint] = (),
        restored: CompletedCheckpoint | None = None,
    ) -> None:
        self.config = config
        self._tasks = TaskProgress(graph, config, finished)
        self._pending = PendingCheckpoints(self._tasks.states, config, next_checkpoint_id, completed)
        self._queue = RequestQueue(max_concurrent=config.max_concurrent, min_pause=config.min_pause, max_queued=config.max_queued)
        self._schedule = CheckpointSchedule(config)
        self._stop: StopProgress | None = None
        self._last_completion: float | None = None
        self.statistics = CheckpointStatistics(graph, config.history)
        if restored is not None:
            self.statistics.restored()
        self._failing = False
        """FailJob was returned, and the job has neither restarted nor ended yet: nothing is triggered."""
        self._shut_down = False

    # Queries

    @property
    def all_at_end_of_data(self) -> bool:
        """Whether tasks are left, all of them run, and every one has reached its end of data."""
        return self._tasks.all_at_end_of_data

    @property
    def roots(self) -> tuple[str, ...]:
        """The stages in which a checkpoint would start now; empty if none can be triggered."""
        plan = self.plan()
        return plan.roots if isinstance(plan, CheckpointPlan) else ()

    @property
    def completed(self) -> tuple[CompletedCheckpoint, ...]:
        """The retained checkpoints, oldest first."""
        return self._pending.completed.all

    @property
    def latest_completed(self) -> CompletedCheckpoint | None:
        """The checkpoint that a restart begins from (see MetadataOutcomeUnknown for the exception); None without any."""
        return self._pending.completed.latest

    @property
    def pending_ids(self) -> tuple[int, ...]:
        return self._pending.ids

    @property
    def finalizing(self) -> int | None:
        """The checkpoint whose metadata is being written; its outcome must be known before a restart."""
        return self._pending.finalizing

    @property
    def stopping(self) -> str | None:
        """Id of the request of the stop that is under way; None without one."""
        return self._stop.request_id if self._stop is not None else None

    @property
    def restarts_all_tasks(self) -> bool:
        """Whether a failure of one task, now, is a failure of all: because of a stop, or because the job is failing."""
        return self._failing or (self._stop is not None and self._stop.binds_all_tasks(self.finalizing))

    def state_of(self, task: TaskId) -> TaskState:
        return self._tasks.states.get(task)

    def plan(self) -> CheckpointPlan | NotAllRunning:
        """The plan of a checkpoint triggered now, or the first task that prevents one."""
        return self._tasks.plan()

    @property
    def interval(self) -> float | None:
        """The present interval of periodic checkpoints, seconds; None or 0 for none."""
        return self._schedule.interval

    @property
    def interval_since(self) -> float | None:
        """When that interval began to count, in the unit of `now`; None before the first event."""
        return self._schedule.interval_since

    def next_deadline(self) -> float | None:
        """When a Tick is due, in the unit of `now`; None if nothing is."""
        if self._shut_down:
            return None
        scheduled = self._schedule.next_due(self._queue) if self._stop is None and not self._failing else None
        due = [*self._pending.deadlines(), self._tasks.finishing_expires_at, scheduled]
        return min([at for at in due if at is not None], default=None)

    # Events

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorAction]:
        """Take one event and return what to do, in this order.

        Args:
            event: what has happened.
            now: seconds; never decreasing.

        Raises:
            UnknownTask: the event names a task that is not in the graph.
            CheckpointStillFinalizing: TasksRestarting while metadata is being written.
        """
        actions = self._after_shutdown(event) if self._shut_down else self._handle(event, now)
        self.statistics.observe(event, actions, now)
        return actions

    def _handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorAction]:
        actions = self._dispatch(event, now)
        if type(event) is Acknowledged:
            # The most frequent event. It is no reason to trigger anything: the last acknowledgement only begins a write.
            return actions
        if actions:
            self._take_outcomes(actions, now)
            actions = self._failing_once(actions)
        if not self._shut_down:
            actions += self._dispatch_ready(now)
        return actions

    def _failing_once(self, actions: list[CoordinatorAction]) -> list[CoordinatorAction]:
        """The actions with the job's failure, if any: once, and last, because a runtime stops performing actions then."""
        failures = [action for action in actions if type(action) is FailJob]
        if not failures:
            return actions
        others = [action for action in actions if type(action) is not FailJob]
        first, self._failing = not self._failing, True
        return [*others, failures[0]] if first else others

    def _dispatch(self, event: CoordinatorEvent, now: float) -> list[CoordinatorAction]:
        match event:
            case Acknowledged():
                return self._pending.acknowledge(event)
            case TaskStateChanged():
                return self._task_state(event.task, event.state)
            case EndOfDataReached():
                self._tasks.at_end_of_data(event.task)
                return []
            case Tick():
                return self._pending.expire(now)
            case MetadataWritten(checkpoint_id, location):
                return self._pending.complete(checkpoint_id, location, now)
            case BacklogChanged(task, backlog):
                self._tasks.backlog_changed(task, backlog)
                return []
            case DrainBegan():
                self._schedule.drain()
                return []
            case CheckpointRequested(request_id, properties):
                if self._stop is not None:
                    return [self._stop.refuse(request_id)]
                return self._enqueue(CheckpointRequest(properties, now, request_id), now)
            case StopRequested():
                return self._begin_stop(event)
            case RequestWithdrawn(request_id, message):
                return self._withdraw(request_id, message, now)
            case Declined(task, checkpoint_id, reason, message):
                return self._pending.decline(checkpoint_id, reason, f"{task}: {message or reason.value}")
            case MetadataWriteFailed(checkpoint_id, message, reason):
                return self._pending.finalize_failed(checkpoint_id, reason, message, discard=True)
            case MetadataOutcomeUnknown(checkpoint_id, message):
                reason = FailureReason.FINALIZE_CHECKPOINT_FAILURE
                return self._pending.finalize_failed(checkpoint_id, reason, message, discard=False)
            case RegionFailed():
                return self._region_failed(event, now)
            case TasksRestarting():
                return self._restart(event)
            case Shutdown():
                return self._shutdown(event)
        assert_never(event)

    def _after_shutdown(self, event: CoordinatorEvent) -> list[CoordinatorAction]:
        reason = FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN
        match event:
            case CheckpointRequested(request_id) | StopRequested(request_id):
                return [RequestNotCompleted(request_id, reason, reason.value)]
            case Acknowledged():
                return self._pending.acknowledge(event)
            case _:
                return []

    def _take_outcomes(self, actions: Iterable[CoordinatorAction], now: float) -> None:
        """Update the schedule, the tasks' progress and the stop with the checkpoints that have completed or failed."""
        for action in actions:
            if type(action) is CheckpointCompleted:
                completed = action.checkpoint
                self._last_completion = now
                self._schedule.completed(completed.checkpoint_id)
                if completed.properties.commits:
                    self._tasks.final_checkpoint_completed(completed, now)
                if self._stop is not None and completed.checkpoint_id == self._stop.checkpoint_id:
                    self._stop.completed()
            elif type(action) is CheckpointFailed and action.checkpoint_id is not None:
                self._schedule.failed(action.checkpoint_id, now)
                if self._stop is not None and action.checkpoint_id == self._stop.checkpoint_id:
                    self._stop_failed(self._stop, now, answered=self._stop.answered_by(actions))

    # Tasks

    def _task_state(self, task: TaskId, state: TaskState) -> list[CoordinatorAction]:
        self._tasks.changed(task, state)
        if state not in _GONE or not self._pending:
            return []
        finished = state is TaskState.FINISHED
        reason = FailureReason.CHECKPOINT_DECLINED_TASK_CLOSING if finished else FailureReason.TASK_FAILURE
        message = f"task {task} is {state.name} and had not acknowledged"
        again = finished and self._stop is not None  # the savepoint is taken again, without the task
        return self._pending.abort_where(lambda pending: pending.waits_for(task), reason, message, answer=not again)

    # What is triggered next

    def _dispatch_ready(self, now: float) -> list[CoordinatorAction]:
        """Trigger what is due by time and by the tasks' states, then the requests that may run; nothing if the job fails."""
        self._tasks.expire_finishing(now)
        if self._failing:
            return []
        actions = self._trigger_stop_savepoint(self._stop, now) if self._stop is not None else []
        if self._stop is not None:
            return actions
        for request in self._schedule.due(self._tasks, self._queue, now):
            actions += self._enqueue(request, now)
        # The end of a task that is just finishing would abort every checkpoint: it is waited for first.
        while not self._tasks.any_finishing:
            chosen = self._queue.choose(pending=len(self._pending), last_completion=self._last_completion, now=now)
            if chosen is None:
                break
            actions += self._dropped(chosen, now) if isinstance(chosen, Dropped) else self._run(chosen, now)
        return actions

    def _enqueue(self, request: CheckpointRequest, now: float) -> list[CoordinatorAction]:
        properties = self._as_configured(request.properties)
        dropped = self._queue.add(request if properties is request.properties else replace(request, properties=properties))
        return self._dropped(dropped, now) if dropped is not None else []

    def _as_configured(self, properties: CheckpointProperties) -> CheckpointProperties:
        return properties.under(unaligned_checkpoints=self.config.unaligned, overtakes_at_once=self.config.overtakes_at_once)

    def _dropped(self, dropped: Dropped, now: float) -> list[CoordinatorAction]:
        request = dropped.request
        if request.request_id is not None:
            return [RequestNotCompleted(request.request_id, dropped.reason, dropped.reason.value)]
        if request.for_end_of_data:
            self._schedule.final_failed(now)
        elif dropped.retry_at is not None:
            self._schedule.postpone_periodic(dropped.retry_at)
        return []

    def _run(self, request: CheckpointRequest, now: float) -> list[CoordinatorAction]:
        plan = self._tasks.plan_or_obstacle()
        if isinstance(plan, Obstacle):
            reason = FailureReason.NOT_ALL_REQUIRED_TASKS_RUNNING
            if request.request_id is not None:
                return [RequestNotCompleted(request.request_id, reason, plan.message)]
            return [CheckpointFailed(None, reason, plan.message)]
        actions = self._pending.trigger(request.properties, plan, request.request_id, now)
        if self.all_at_end_of_data and request.properties.commits:
            # Triggered after every task's finish(): it is the final one, also if a request asked for it.
            self._schedule.final_triggered(_triggered_id(actions))
            self._queue.withdraw_end_of_data()
        return actions

    def _withdraw(self, request_id: str, message: str, now: float) -> list[CoordinatorAction]:
        reason = FailureReason.CHECKPOINT_EXPIRED
        if self._queue.withdraw(request_id):
            return [RequestNotCompleted(request_id, reason, message)]
        if self._stop is not None and self._stop.waiting and self._stop.request_id == request_id:
            return self._fail_stop(self._stop, reason, message, now)
        return self._pending.abort_where(lambda p: p.request_id == request_id, reason, message)

    # Stopping with a savepoint

    def _begin_stop(self, event: StopRequested) -> list[CoordinatorAction]:
        if self._stop is not None:
            return [self._stop.refuse(event.request_id)]
        plan = self._tasks.plan_or_obstacle()
        if isinstance(plan, Obstacle):
            return [RequestNotCompleted(event.request_id, FailureReason.NOT_ALL_REQUIRED_TASKS_RUNNING, plan.message)]
        self._stop = stop = StopProgress(event.request_id, event.drain, self._as_configured(event.properties))
        reason = FailureReason.CHECKPOINT_COORDINATOR_SUSPEND
        return [
            *self._pending.abort_where(lambda pending: True, reason, stop.title),
            *self._refuse_queued(reason, stop.title),
        ]

    def _trigger_stop_savepoint(self, stop: StopProgress, now: float) -> list[CoordinatorAction]:
        plan = stop.plan(self._tasks, finalizing=self.finalizing is not None)
        if plan is None:
            return []
        if isinstance(plan, Obstacle):
            # With no unfinished task left the job has ended by itself.
            ended_by_itself = FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN
            reason = FailureReason.NOT_ALL_REQUIRED_TASKS_RUNNING if self._tasks.any_left else ended_by_itself
            return self._fail_stop(stop, reason, plan.message, now)
        actions = self._pending.trigger(stop.properties, plan, stop.request_id, now)
        stop.triggered(_triggered_id(actions))
        return actions

    def _fail_stop(self, stop: StopProgress, reason: FailureReason, message: str, now: float) -> list[CoordinatorAction]:
        self._stop_failed(stop, now, answered=True)
        return [RequestNotCompleted(stop.request_id, reason, message)]

    def _stop_failed(self, stop: StopProgress, now: float, *, answered: bool) -> None:
        if stop.failed(answered=answered):
            self._stop = None
            self._schedule.resume(now)

    def _refuse_queued(self, reason: FailureReason, message: str) -> list[CoordinatorAction]:
        ids = [request.request_id for request in self._queue.drain()]
        return [RequestNotCompleted(request_id, reason, message) for request_id in ids if request_id is not None]

    # The job

    def _abort_everything(self, reason: FailureReason, message: str) -> list[CoordinatorAction]:
        actions = self._pending.abort_all(reason, message) + self._refuse_queued(reason, message)
        if self._stop is not None and self._stop.waiting:
            actions.append(RequestNotCompleted(self._stop.request_id, reason, message))
        self._stop = None
        return actions

    def _region_failed(self, event: RegionFailed, now: float) -> list[CoordinatorAction]:
        cause = f"task {event.task} has failed" if event.task is not None else "tasks could not be started"
        message = f"{cause}, and what is connected with it restarts: {', '.join(sorted(event.vertices))}"
        reason = FailureReason.JOB_FAILOVER_REGION
        # First the states: tasks that are stopped are not notified of an abort.
        self._tasks.failed(event.vertices, event.task)
        actions = self._pending.abort_where(lambda pending: True, reason, message) + self._refuse_queued(reason, message)
        if self._stop is not None and self._stop.waiting:
            actions += self._fail_stop(self._stop, reason, message, now)
        return actions

    def _restart(self, event: TasksRestarting) -> list[CoordinatorAction]:
        if self.finalizing is not None:
            raise CheckpointStillFinalizing(
                f"TasksRestarting was sent while the metadata of checkpoint {self.finalizing} is being written. A "
                "restart from an older checkpoint would abort the transactions that it holds. Wait for the outcome "
                "(MetadataWritten, MetadataWriteFailed, MetadataOutcomeUnknown) and send TasksRestarting then."
            )
        self._failing = False
        actions: list[CoordinatorAction] = []
        if event.vertices is None:
            # The tasks are stopped: none of them is notified of an abort.
            self._tasks.reset(event.finished)
            actions += self._abort_everything(FailureReason.CHECKPOINT_COORDINATOR_SUSPEND, "the job is restarting")
        else:  # nothing is pending: RegionFailed came before
            self._tasks.restart(event.vertices, event.finished)
        self._schedule = CheckpointSchedule(self.config)
        if event.restored is not None:
            actions += self._pending.restored(event.restored)
        if event.restored is not None or self.latest_completed is not None:
            self.statistics.restored()
        return actions

    def _shutdown(self, event: Shutdown) -> list[CoordinatorAction]:
        reason = FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN
        self._shut_down = True
        return self._abort_everything(reason, reason.value) + self._pending.shut_down(event.status)


def _triggered_id(actions: Iterable[CoordinatorAction]) -> int:
    return next(action.checkpoint_id for action in actions if isinstance(action, CheckpointTriggered))
