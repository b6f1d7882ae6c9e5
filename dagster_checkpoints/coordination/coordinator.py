"""The checkpoint coordinator: one per job, events in, actions out.

It decides when a checkpoint is triggered, collects acknowledgements, and says who is told what. It has no
clock: every event comes with `now`; `next_deadline()` says when a Tick is due. The runtime performs the
actions in the order given. Must not know: threads, storage, what a state holds.

Source: FLIP-147; Flink's CheckpointCoordinator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import assert_never

from dagster_checkpoints.coordination.checkpoints import (
    AcknowledgeAnswer,
    CheckpointProperties,
    CompletedCheckpoint,
    PendingCheckpoint,
)
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.errors import CheckpointStillFinalizing
from dagster_checkpoints.coordination.events import (
    AcknowledgeAnswered,
    Acknowledged,
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointRequested,
    CoordinatorAction,
    CoordinatorEvent,
    Declined,
    DiscardCheckpoint,
    DiscardStates,
    DrainBegan,
    EndOfDataReached,
    FailJob,
    JobRestarting,
    MetadataOutcomeUnknown,
    MetadataWriteFailed,
    MetadataWritten,
    NotifyAborted,
    NotifyComplete,
    RequestCompleted,
    RequestFailed,
    Shutdown,
    TaskStateChanged,
    Tick,
    TriggerFailed,
    TriggerTask,
    WriteMetadata,
)
from dagster_checkpoints.coordination.failures import FailureCounter, FailureReason
from dagster_checkpoints.coordination.plan import (
    CheckpointPlan,
    NotAllRunning,
    TaskState,
    TaskStates,
    compute_plan,
)
from dagster_checkpoints.coordination.requests import CheckpointRequest, Dropped, RequestQueue
from dagster_checkpoints.coordination.retention import CompletedCheckpoints
from dagster_checkpoints.coordination.schedule import CheckpointSchedule
from dagster_checkpoints.pipeline import ExecutionGraph, TaskId

_GONE = frozenset({TaskState.FINISHED, TaskState.CANCELING, TaskState.CANCELED, TaskState.FAILED})
_STARTING = frozenset({TaskState.CREATED, TaskState.DEPLOYING, TaskState.INITIALIZING})


class CheckpointCoordinator:
    """Triggers, collects, completes and aborts the checkpoints of one job.

    Args:
        graph: what runs.
        config: the settings.
        next_checkpoint_id: restored id + 1, or 1.
        finished: tasks that had finished in the checkpoint restored from; they are not started.
        completed: the retained checkpoints that the store holds, in any order.
    """

    def __init__(
        self,
        graph: ExecutionGraph,
        config: CheckpointConfig,
        *,
        next_checkpoint_id: int = 1,
        finished: Iterable[TaskId] = (),
        completed: Sequence[CompletedCheckpoint] = (),
    ) -> None:
        self.config = config
        self._first_id = self._next_id = next_checkpoint_id
        self._states = TaskStates(graph, finished)
        self._at_end: set[TaskId] = set()
        """Unfinished tasks that have reached their end of data."""
        self._served: set[TaskId] = set()
        """Those of them that a completed checkpoint has let go: they are about to be FINISHED."""
        self._pending: dict[int, PendingCheckpoint] = {}
        self._completed = CompletedCheckpoints(config.retained, completed)
        self._completed_ids = {c.checkpoint_id for c in completed}
        self._failures = FailureCounter(config.tolerable_failed_checkpoints)
        self._queue = RequestQueue(max_concurrent=config.max_concurrent, min_pause=config.min_pause, max_queued=config.max_queued)
        self._schedule = CheckpointSchedule(config)
        self._last_completion: float | None = None
        self._shut_down = False

    # What others may ask

    @property
    def checkpointing_enabled(self) -> bool:
        """Whether there are periodic checkpoints."""
        return self.config.interval is not None

    @property
    def all_at_end_of_data(self) -> bool:
        """Whether tasks are left, all of them run, and every one has reached its end of data."""
        return self._states.all_unfinished_run and len(self._at_end) == self._states.unfinished

    @property
    def roots(self) -> tuple[str, ...]:
        """The stages in which a checkpoint would start now; empty if there can be none."""
        plan = self.plan()
        return plan.roots if isinstance(plan, CheckpointPlan) else ()

    @property
    def completed(self) -> tuple[CompletedCheckpoint, ...]:
        """The retained checkpoints, oldest first."""
        return self._completed.all

    @property
    def latest_completed(self) -> CompletedCheckpoint | None:
        """What a restart begins from (see MetadataOutcomeUnknown for the exception)."""
        return self._completed.latest

    @property
    def pending_ids(self) -> tuple[int, ...]:
        return tuple(self._pending)

    @property
    def finalizing(self) -> int | None:
        """The checkpoint whose metadata is being written; its outcome must be known before a restart."""
        return next((p.checkpoint_id for p in self._pending.values() if p.finalizing), None)

    @property
    def consecutive_failures(self) -> int:
        return self._failures.count

    def state_of(self, task: TaskId) -> TaskState:
        return self._states.get(task)

    def plan(self) -> CheckpointPlan | NotAllRunning:
        """The plan of a checkpoint triggered now, or what stands in its way."""
        return compute_plan(self._states, after_tasks_finish=self.config.checkpoints_after_tasks_finish)

    def next_deadline(self) -> float | None:
        """When a Tick is due, in the unit of `now`; None if nothing is."""
        if self._shut_down:
            return None
        due = [p.triggered_at + self.config.timeout for p in self._pending.values() if not p.fully_acknowledged]
        scheduled = self._schedule.next_due(periodic_queued=self._queue.has_periodic)
        if scheduled is not None:
            due.append(scheduled)
        return min(due, default=None)

    # Events

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorAction]:
        """Take one event and return what to do, in this order.

        Args:
            event: what has happened.
            now: seconds; never decreasing.

        Raises:
            UnknownTask: the event names a task that is not in the graph.
            CheckpointStillFinalizing: JobRestarting while metadata is being written.
        """
        if self._shut_down:
            return self._after_shutdown(event)
        actions = self._dispatch(event, now)
        if not self._shut_down:
            actions += self._go_on(now)
        # Last, because a runtime stops performing actions when it fails the job.
        return sorted(actions, key=lambda action: isinstance(action, FailJob))

    def _dispatch(self, event: CoordinatorEvent, now: float) -> list[CoordinatorAction]:
        match event:
            case Tick():
                return self._expire(now)
            case TaskStateChanged(task, state):
                return self._task_state(task, state, now)
            case EndOfDataReached(task):
                if self._states.get(task) is not TaskState.FINISHED:
                    self._at_end.add(task)
                return []
            case DrainBegan():
                self._schedule.drain()
                return []
            case CheckpointRequested(request_id, properties):
                return self._enqueue(CheckpointRequest(properties, now, request_id))
            case Acknowledged():
                return self._acknowledge(event, now)
            case Declined(task, checkpoint_id, reason, message):
                return self._decline(checkpoint_id, reason, f"{task}: {message or reason.value}", now)
            case TriggerFailed(task, checkpoint_id):
                reason = FailureReason.TRIGGER_CHECKPOINT_FAILURE
                return self._decline(checkpoint_id, reason, f"{task} could not be triggered", now)
            case MetadataWritten(checkpoint_id, location):
                return self._complete(checkpoint_id, location, now)
            case MetadataWriteFailed(checkpoint_id, message, reason):
                return self._finalize_failed(checkpoint_id, reason, message, now, discard=True)
            case MetadataOutcomeUnknown(checkpoint_id, message):
                reason = FailureReason.FINALIZE_CHECKPOINT_FAILURE
                return self._finalize_failed(checkpoint_id, reason, message, now, discard=False)
            case JobRestarting(finished, restored):
                return self._restart(finished, restored, now)
            case Shutdown():
                return self._shutdown(event, now)
        assert_never(event)

    def _after_shutdown(self, event: CoordinatorEvent) -> list[CoordinatorAction]:
        reason = FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN
        match event:
            case CheckpointRequested(request_id):
                return [RequestFailed(request_id, reason, reason.value)]
            case Acknowledged():
                return self._late(event, AcknowledgeAnswer.DISCARDED)
            case _:
                return []

    # Tasks

    def _task_state(self, task: TaskId, state: TaskState, now: float) -> list[CoordinatorAction]:
        self._states.set(task, state)
        if state is TaskState.FINISHED or state in _STARTING:
            self._at_end.discard(task)
            self._served.discard(task)
        if state not in _GONE:
            return []
        finished = state is TaskState.FINISHED
        reason = FailureReason.CHECKPOINT_DECLINED_TASK_CLOSING if finished else FailureReason.TASK_FAILURE
        actions: list[CoordinatorAction] = []
        for pending in [p for p in self._pending.values() if p.waits_for(task)]:
            message = f"task {task} is {state.name} and had not acknowledged"
            actions += self._abort(pending, reason, message, now)
        return actions

    # Requests and triggering

    def _go_on(self, now: float) -> list[CoordinatorAction]:
        """What time and the tasks' states ask for, then whatever request may run."""
        actions: list[CoordinatorAction] = []
        self._schedule.observe(
            running=self._states.all_unfinished_run,
            at_end=self.all_at_end_of_data,
            served=len(self._served),
            unserved=self._states.unfinished - len(self._served),
            now=now,
        )
        if not self._schedule.final_wanted:
            self._queue.withdraw_end_of_data()
        elif self._schedule.final_due(now) and not self._queue.has_end_of_data:
            properties = CheckpointProperties()
            actions += self._enqueue(CheckpointRequest(properties, now, for_end_of_data=True))
        if self._schedule.ends_periodic:
            self._queue.withdraw_periodic()
        elif self._schedule.take_periodic(now) and not self._queue.has_periodic:
            actions += self._enqueue(CheckpointRequest(CheckpointProperties.for_periodic(), now))
        while True:
            chosen = self._queue.choose(pending=len(self._pending), last_completion=self._last_completion, now=now)
            if chosen is None:
                return actions
            if isinstance(chosen, Dropped):
                actions += self._dropped(chosen)
            else:
                actions += self._trigger(chosen, now)

    def _enqueue(self, request: CheckpointRequest) -> list[CoordinatorAction]:
        dropped = self._queue.add(request)
        return self._dropped(dropped) if dropped is not None else []

    def _dropped(self, dropped: Dropped) -> list[CoordinatorAction]:
        request = dropped.request
        if request.request_id is not None:
            return [RequestFailed(request.request_id, dropped.reason, dropped.reason.value)]
        if dropped.retry_at is not None:
            self._schedule.postpone_periodic(dropped.retry_at)
        return []

    def _trigger(self, request: CheckpointRequest, now: float) -> list[CoordinatorAction]:
        plan = self.plan()
        if isinstance(plan, NotAllRunning) or not plan.wait:
            message = plan.message if isinstance(plan, NotAllRunning) else "every task has finished"
            return self._not_triggered(request, message, now)
        pending = PendingCheckpoint(self._next_id, request.properties, plan, now, request.request_id)
        self._next_id += 1
        self._pending[pending.checkpoint_id] = pending
        if self.all_at_end_of_data:
            # Triggered after every task's finish(): whoever asked for it, it is the final one.
            self._schedule.final_triggered(pending.checkpoint_id)
        barrier = pending.barrier
        return [TriggerTask(task, barrier) for task in plan.trigger]

    def _not_triggered(self, request: CheckpointRequest, message: str, now: float) -> list[CoordinatorAction]:
        reason = FailureReason.NOT_ALL_REQUIRED_TASKS_RUNNING
        if request.request_id is not None:
            return [RequestFailed(request.request_id, reason, message)]
        if request.for_end_of_data:
            self._schedule.final_failed(None, now)
        return [CheckpointFailed(None, reason, message)]

    # Acknowledgements

    def _acknowledge(self, event: Acknowledged, now: float) -> list[CoordinatorAction]:
        self._states.position(event.task)
        pending = self._pending.get(event.checkpoint_id)
        if pending is None:
            if event.checkpoint_id in self._completed_ids:
                # Its state belongs to the completed checkpoint: nothing may be thrown away.
                return [AcknowledgeAnswered(event.task, event.checkpoint_id, AcknowledgeAnswer.DUPLICATE)]
            known = self._first_id <= event.checkpoint_id < self._next_id
            return self._late(event, AcknowledgeAnswer.DISCARDED if known else AcknowledgeAnswer.UNKNOWN)
        answer = pending.acknowledge(event.task, event.state, event.statistics, now)
        answered = AcknowledgeAnswered(event.task, event.checkpoint_id, answer)
        if answer is AcknowledgeAnswer.SUCCESS and pending.fully_acknowledged:
            return [answered, *self._finalize_next()]
        return [answered]

    def _late(self, event: Acknowledged, answer: AcknowledgeAnswer) -> list[CoordinatorAction]:
        states = MappingProxyType({event.task: event.state})
        return [
            AcknowledgeAnswered(event.task, event.checkpoint_id, answer),
            DiscardStates(event.checkpoint_id, states),
        ]

    def _decline(self, checkpoint_id: int, reason: FailureReason, message: str, now: float) -> list[CoordinatorAction]:
        pending = self._pending.get(checkpoint_id)
        if pending is None or pending.fully_acknowledged:
            return []
        return self._abort(pending, reason, message, now)

    # Completion

    def _finalize_next(self) -> list[CoordinatorAction]:
        """Have the metadata of the oldest acknowledged checkpoint written; one at a time, so that the store's
        newest checkpoint never goes back."""
        if self.finalizing is not None:
            return []
        for pending in self._pending.values():
            if pending.fully_acknowledged:
                pending.finalizing = True
                return [WriteMetadata(pending.snapshot())]
        return []

    def _complete(self, checkpoint_id: int, location: str, now: float) -> list[CoordinatorAction]:
        pending = self._pending.get(checkpoint_id)
        if pending is None or not pending.finalizing:
            return []
        del self._pending[checkpoint_id]
        completed = pending.complete(location, now)
        given_up = self._completed.add(completed)
        self._completed_ids.add(checkpoint_id)
        self._failures.completed(checkpoint_id)
        self._last_completion = now
        self._schedule.completed(checkpoint_id)
        self._served |= {
            task
            for task, statistics in pending.statistics.items()
            if statistics.operators_finished and self._states.get(task) is TaskState.RUNNING
        }
        actions: list[CoordinatorAction] = [
            CheckpointCompleted(completed),
            NotifyComplete(self._states.running_among(pending.plan.commit), checkpoint_id),
        ]
        if not completed.is_savepoint:
            for older in [p for p in self._pending.values() if self._subsumes(completed, p)]:
                reason = FailureReason.CHECKPOINT_SUBSUMED
                actions += self._abort(older, reason, f"checkpoint {checkpoint_id} has completed", now)
        if pending.request_id is not None:
            actions.append(RequestCompleted(pending.request_id, completed))
        actions += [DiscardCheckpoint(checkpoint) for checkpoint in given_up]
        return actions + self._finalize_next()

    @staticmethod
    def _subsumes(completed: CompletedCheckpoint, pending: PendingCheckpoint) -> bool:
        return pending.checkpoint_id < completed.checkpoint_id and not pending.properties.is_savepoint

    def _finalize_failed(
        self, checkpoint_id: int, reason: FailureReason, message: str, now: float, *, discard: bool
    ) -> list[CoordinatorAction]:
        pending = self._pending.get(checkpoint_id)
        if pending is None or not pending.finalizing:
            return []
        actions = self._abort(pending, reason, message or reason.value, now, discard=discard)
        return actions + self._finalize_next()

    # Failure

    def _expire(self, now: float) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        for pending in list(self._pending.values()):
            overdue = now >= pending.triggered_at + self.config.timeout
            if overdue and not pending.fully_acknowledged:
                missing = [task for task, _ in zip(self._missing(pending), range(5), strict=False)]
                message = (
                    f"not complete {self.config.timeout} s after it was triggered; "
                    f"{len(pending.plan.wait) - len(pending.states)} tasks have not acknowledged, "
                    f"among them {', '.join(str(task) for task in missing)}"
                )
                actions += self._abort(pending, FailureReason.CHECKPOINT_EXPIRED, message, now)
        return actions

    @staticmethod
    def _missing(pending: PendingCheckpoint) -> Iterable[TaskId]:
        return (task for task in pending.plan.wait if task not in pending.states)

    def _abort(
        self,
        pending: PendingCheckpoint,
        reason: FailureReason,
        message: str,
        now: float,
        *,
        discard: bool = True,
    ) -> list[CoordinatorAction]:
        checkpoint_id = pending.checkpoint_id
        del self._pending[checkpoint_id]
        self._schedule.final_failed(checkpoint_id, now)
        actions: list[CoordinatorAction] = [CheckpointFailed(checkpoint_id, reason, message)]
        tasks = self._states.running_among(pending.plan.wait)
        if tasks:
            actions.append(NotifyAborted(tasks, checkpoint_id, reason, self._completed.latest_id))
        if discard and pending.states:
            actions.append(DiscardStates(checkpoint_id, MappingProxyType(pending.states)))
        if pending.request_id is not None:
            actions.append(RequestFailed(pending.request_id, reason, message))
        # A savepoint's failure is answered to whoever asked for it; the job does not fail because of it.
        if not pending.properties.is_savepoint and self._failures.failed(checkpoint_id, reason):
            tolerable = self.config.tolerable_failed_checkpoints
            actions.append(
                FailJob(
                    reason,
                    f"more than {tolerable} checkpoints in a row failed (tolerable_failed_checkpoints); "
                    f"the last, {checkpoint_id}: {message}",
                )
            )
        return actions

    # The job

    def _abort_everything(self, reason: FailureReason, now: float) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        for pending in list(self._pending.values()):
            # What is being written may land in the store after all: its states must stay.
            actions += self._abort(pending, reason, reason.value, now, discard=not pending.finalizing)
        for request in self._queue.drain():
            if request.request_id is not None:
                actions.append(RequestFailed(request.request_id, reason, reason.value))
        return actions

    def _restart(self, finished: Iterable[TaskId], restored: CompletedCheckpoint | None, now: float) -> list[CoordinatorAction]:
        if self.finalizing is not None:
            raise CheckpointStillFinalizing(
                f"The job was told to restart while the metadata of checkpoint {self.finalizing} is being "
                "written. A restart from an older checkpoint would abort the transactions that it holds. "
                "Wait "
                "for the outcome (MetadataWritten, MetadataWriteFailed, MetadataOutcomeUnknown) and send "
                "JobRestarting then."
            )
        # The tasks are stopped: none of them is told of an abort.
        self._states.reset(finished)
        actions = self._abort_everything(FailureReason.CHECKPOINT_COORDINATOR_SUSPEND, now)
        self._at_end.clear()
        self._served.clear()
        self._schedule = CheckpointSchedule(self.config)
        if restored is not None and restored.checkpoint_id not in self._completed_ids:
            self._completed_ids.add(restored.checkpoint_id)
            actions += [DiscardCheckpoint(checkpoint) for checkpoint in self._completed.add(restored)]
        return actions

    def _shutdown(self, event: Shutdown, now: float) -> list[CoordinatorAction]:
        actions = self._abort_everything(FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN, now)
        given_up = self._completed.shut_down(event.status, self.config.keep_on_finish)
        self._shut_down = True
        return actions + [DiscardCheckpoint(checkpoint) for checkpoint in given_up]
