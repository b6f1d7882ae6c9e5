"""The checkpoints under way: acknowledgements in, completion or abort out.

Collects, has the metadata written, keeps what has completed, counts failures. Must not know: when a checkpoint
is triggered, which request it answers first, what a stop is.

Source: Flink's CheckpointCoordinator (receiveAcknowledgeMessage, completePendingCheckpoint, abortPendingCheckpoint).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from types import MappingProxyType

from dagster_checkpoints.coordination.checkpoints import (
    AcknowledgeAnswer,
    CheckpointProperties,
    CompletedCheckpoint,
    PendingCheckpoint,
)
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.events import (
    AcknowledgeAnswered,
    Acknowledged,
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointTriggered,
    CoordinatorAction,
    DiscardCheckpoint,
    DiscardLateState,
    DiscardStates,
    FailJob,
    NotifyTasks,
    RequestCompleted,
    RequestNotCompleted,
    TriggerTask,
    WriteMetadata,
)
from dagster_checkpoints.coordination.failures import FailureCounter, FailureReason
from dagster_checkpoints.coordination.id_ranges import IdRanges
from dagster_checkpoints.coordination.lifecycle import (
    CheckpointAbortedNotice,
    CheckpointCompletedNotice,
    SavepointCompletedNotice,
)
from dagster_checkpoints.coordination.plan import CheckpointPlan, TaskStateTable
from dagster_checkpoints.coordination.retention import CompletedCheckpoints, JobStatus

_SHOWN = 5
"""Number of tasks that a message names."""


class PendingCheckpoints:
    """The pending checkpoints, each from its trigger to its completion or abort.

    Args:
        states: the latest known state of every task; only running tasks are notified of an outcome.
        config: the settings of checkpointing.
        next_checkpoint_id: id of the next checkpoint.
        completed: the retained checkpoints that the store holds, in any order.
    """

    def __init__(
        self, states: TaskStateTable, config: CheckpointConfig, next_checkpoint_id: int, completed: Sequence[CompletedCheckpoint]
    ) -> None:
        self._states = states
        self._config = config
        self._first_id = self._next_id = next_checkpoint_id
        self._pending: dict[int, PendingCheckpoint] = {}
        self._finalizing: PendingCheckpoint | None = None
        self.completed = CompletedCheckpoints(config.retained, completed)
        self._stored_ids = IdRanges()
        """Checkpoints that the store names, or may name: none of their states may be deleted."""
        for each in completed:
            self._stored_ids.add(each.checkpoint_id)
        self.failures = FailureCounter(config.tolerable_failed_checkpoints)

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self._pending)

    @property
    def finalizing(self) -> int | None:
        """The checkpoint whose metadata is being written."""
        return self._finalizing.checkpoint_id if self._finalizing is not None else None

    def deadlines(self) -> list[float]:
        """When the checkpoints that wait for acknowledgements expire, seconds."""
        return [self._expires_at(pending) for pending in self._pending.values() if not pending.fully_acknowledged]

    def trigger(
        self, properties: CheckpointProperties, plan: CheckpointPlan, request_id: str | None, now: float
    ) -> list[CoordinatorAction]:
        """Give a checkpoint its id and start it in the plan's roots; the first action is its CheckpointTriggered."""
        pending = PendingCheckpoint(self._next_id, properties, plan, now, request_id)
        self._next_id += 1
        self._pending[pending.checkpoint_id] = pending
        barrier = pending.barrier
        triggered = CheckpointTriggered(pending.checkpoint_id, properties, request_id, len(plan.wait), plan.finished)
        return [triggered, *(TriggerTask(task, barrier) for task in plan.trigger)]

    # Acknowledgements

    def acknowledge(self, event: Acknowledged) -> list[CoordinatorAction]:
        self._states.position(event.task)
        pending = self._pending.get(event.checkpoint_id)
        if pending is None:
            return self._late(event)
        answer = pending.acknowledge(event.task, event.state, event.statistics)
        actions: list[CoordinatorAction] = [AcknowledgeAnswered(event.task, event.checkpoint_id, answer)]
        if answer is AcknowledgeAnswer.UNKNOWN:
            actions.append(DiscardLateState(event.task, event.checkpoint_id, event.state))
        elif pending.fully_acknowledged:
            actions += self._finalize_next()
        return actions

    def _late(self, event: Acknowledged) -> list[CoordinatorAction]:
        """The answer to an acknowledgement of a checkpoint that is not pending; also after the shutdown."""
        checkpoint_id = event.checkpoint_id
        if checkpoint_id in self._stored_ids:
            return [AcknowledgeAnswered(event.task, checkpoint_id, AcknowledgeAnswer.DUPLICATE)]
        known = self._first_id <= checkpoint_id < self._next_id
        answer = AcknowledgeAnswer.DISCARDED if known else AcknowledgeAnswer.UNKNOWN
        states = MappingProxyType({event.task: event.state})
        return [AcknowledgeAnswered(event.task, checkpoint_id, answer), DiscardStates(checkpoint_id, states)]

    def decline(self, checkpoint_id: int, reason: FailureReason, message: str) -> list[CoordinatorAction]:
        pending = self._pending.get(checkpoint_id)
        if pending is None or pending.fully_acknowledged:
            return []
        return self._abort(pending, reason, message)

    # Completion

    def _finalize_next(self) -> list[CoordinatorAction]:
        """Write the metadata of the oldest acknowledged checkpoint; one at a time, so that the newest checkpoint of the store
        is never replaced by an older one."""
        if self._finalizing is not None:
            return []
        for pending in self._pending.values():
            if pending.fully_acknowledged:
                self._finalizing = pending
                return [WriteMetadata(pending.snapshot())]
        return []

    def complete(self, checkpoint_id: int, location: str, now: float) -> list[CoordinatorAction]:
        """The store names the checkpoint: the tasks that took part are notified, and older checkpoints are discarded."""
        if checkpoint_id != self.finalizing:
            return []
        pending = self._take(checkpoint_id)
        completed = pending.complete(location, now)
        discarded = self.completed.add(completed)
        self._stored_ids.add(checkpoint_id)
        self.failures.completed(checkpoint_id)
        tasks = self._states.running_among(pending.plan.commit)
        notice = CheckpointCompletedNotice if completed.properties.commits else SavepointCompletedNotice
        actions: list[CoordinatorAction] = [CheckpointCompleted(completed), NotifyTasks(tasks, notice(checkpoint_id))]
        if not completed.is_savepoint:
            actions += self._subsume_older(checkpoint_id, f"checkpoint {checkpoint_id} has completed")
        if pending.request_id is not None:
            actions.append(RequestCompleted(pending.request_id, completed))
        actions += [DiscardCheckpoint(checkpoint) for checkpoint in discarded]
        return actions + self._finalize_next()

    def finalize_failed(
        self, checkpoint_id: int, reason: FailureReason, message: str, *, discard: bool
    ) -> list[CoordinatorAction]:
        if checkpoint_id != self.finalizing:
            return []
        pending = self._pending[checkpoint_id]
        actions = self._abort(pending, reason, message or reason.value, discard=discard)
        if not discard and pending.properties.commits:
            # It may be the newest of the store by now, and an older one must not replace it.
            actions += self._subsume_older(checkpoint_id, f"checkpoint {checkpoint_id} may have completed")
        return actions + self._finalize_next()

    def _subsume_older(self, checkpoint_id: int, message: str) -> list[CoordinatorAction]:
        """Abort the checkpoints that are older than this one, but no savepoints."""
        return self.abort_where(
            lambda other: other.checkpoint_id < checkpoint_id and not other.properties.is_savepoint,
            FailureReason.CHECKPOINT_SUBSUMED,
            message,
        )

    def restored(self, checkpoint: CompletedCheckpoint) -> list[CoordinatorAction]:
        """The store names a checkpoint that was never reported as written."""
        if any(known.checkpoint_id == checkpoint.checkpoint_id for known in self.completed.all):
            return []
        self._stored_ids.add(checkpoint.checkpoint_id)
        self.failures.completed(checkpoint.checkpoint_id)
        return [DiscardCheckpoint(discarded) for discarded in self.completed.add(checkpoint)]

    def shut_down(self, status: JobStatus) -> list[CoordinatorAction]:
        """The job has ended: discard the checkpoints that are no longer needed."""
        discarded = self.completed.shut_down(status, self._config.keep_on_finish)
        return [DiscardCheckpoint(checkpoint) for checkpoint in discarded]

    # Failure

    def expire(self, now: float) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        for pending in list(self._pending.values()):
            if now >= self._expires_at(pending) and not pending.fully_acknowledged:
                missing = (task for task in pending.plan.wait if task not in pending.states)
                named = ", ".join(map(str, islice(missing, _SHOWN)))
                message = (
                    f"not complete {self._config.timeout} s after it was triggered; "
                    f"{len(pending.plan.wait) - len(pending.states)} tasks have not acknowledged, among them {named}"
                )
                actions += self._abort(pending, FailureReason.CHECKPOINT_EXPIRED, message)
        return actions

    def abort_where(
        self,
        chosen: Callable[[PendingCheckpoint], bool],
        reason: FailureReason,
        message: str,
        *,
        answer: bool = True,
    ) -> list[CoordinatorAction]:
        """Abort the chosen checkpoints whose metadata is not being written; for the others the outcome of the write decides.

        These aborts do not count as failures: that a checkpoint is no longer wanted, or not possible, is no sign of a problem.

        Args:
            chosen: which pending checkpoints are aborted.
            reason: why, for the failure reports and the answers.
            message: the same for people.
            answer: whether the requesters are answered.
        """
        aborted = [p for p in self._pending.values() if p is not self._finalizing and chosen(p)]
        return [a for pending in aborted for a in self._abort(pending, reason, message, counts=False, answer=answer)]

    def abort_all(self, reason: FailureReason, message: str) -> list[CoordinatorAction]:
        """Abort all. The states of a checkpoint whose metadata is being written stay: the store may name it after all."""
        return [
            action
            for pending in list(self._pending.values())
            for action in self._abort(pending, reason, message, discard=pending is not self._finalizing)
        ]

    def _abort(
        self,
        pending: PendingCheckpoint,
        reason: FailureReason,
        message: str,
        *,
        discard: bool = True,
        counts: bool = True,
        answer: bool = True,
    ) -> list[CoordinatorAction]:
        checkpoint_id = self._take(pending.checkpoint_id).checkpoint_id
        actions: list[CoordinatorAction] = [CheckpointFailed(checkpoint_id, reason, message)]
        tasks = self._states.running_among(pending.plan.wait)
        if tasks:
            actions.append(NotifyTasks(tasks, CheckpointAbortedNotice(checkpoint_id)))
        if discard:
            # Also without any state: a part of an interrupted upload may be in the store.
            actions.append(DiscardStates(checkpoint_id, MappingProxyType(pending.states)))
        else:
            self._stored_ids.add(checkpoint_id)
        if answer and pending.request_id is not None:
            actions.append(RequestNotCompleted(pending.request_id, reason, message))
        # The failure of a savepoint is reported to its requester; the job does not fail because of it.
        if counts and not pending.properties.is_savepoint and self.failures.failed(checkpoint_id, reason):
            actions.append(FailJob(reason, self._too_many(checkpoint_id, message)))
        return actions

    def _too_many(self, checkpoint_id: int, message: str) -> str:
        tolerable = self._config.tolerable_failed_checkpoints
        return (
            f"more than {tolerable} consecutive checkpoints failed (tolerable_failed_checkpoints); "
            f"the last, {checkpoint_id}: {message}"
        )

    def _take(self, checkpoint_id: int) -> PendingCheckpoint:
        pending = self._pending.pop(checkpoint_id)
        if pending is self._finalizing:
            self._finalizing = None
        return pending

    def _expires_at(self, pending: PendingCheckpoint) -> float:
        return pending.triggered_at + self._config.timeout
