"""The requests to a running job: checkpoints, savepoints, a stop, the end of a source, a drain.

A request waits until every task runs, is handed to the coordinator once, and is answered once, to every requester that asked
with its id. A request that is not done within its deadline is withdrawn. During a stop every other request is refused, except for
the stop with which a terminated run ends: it waits for the end of the other one. Must not know: where a requester is, how it is
answered, whether the target location of a savepoint can be used.

Source: PROTOCOL sections 3 and 6; FLIP-34.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from dagster_checkpoints.coordination.checkpoints import CheckpointProperties, CompletedCheckpoint
from dagster_checkpoints.coordination.events import (
    CheckpointRequested,
    CoordinatorEvent,
    DrainBegan,
    RequestWithdrawn,
    StopRequested,
)
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.retention import JobStatus
from dagster_checkpoints.coordination.stop_with_savepoint import (
    AllTasksFinished,
    AnswerDone,
    AnswerFailed,
    FailOver,
    JobCanceled,
    JobFailed,
    SavepointCompleted,
    SavepointFailed,
    StopAction,
    StopWithSavepoint,
    TaskFailed,
)
from dagster_checkpoints.execution.pipeline_state import StopAskedBy
from dagster_checkpoints.pipeline import TaskId

BoundedSources = Literal["cut", "finish"]
"""What a drain does with bounded sources: it ends them where they are, or waits until they have been read to their end."""


class Request(msgspec.Struct, frozen=True):
    """A request to a running job.

    Attributes:
        request_id: id of the request. Requests with the same id are one: it is done once, and every requester is answered.
        kind: what is requested.
        deadline_seconds: time that the job has for the request, counted from when it received it.
        drain: for a stop: whether it drains, with MAX_WATERMARK and the end of the data; otherwise it suspends.
        bounded: for a drain: whether bounded sources are cut where they are, or read to their end first.
        stage: for end_source: name of the source that ends.
        instance: for end_source: the only instance that ends; None for all instances.
        asked_by: for a stop: what asks for it: a user, the termination of the job's own process, or the job itself, because its
            sources have read what was there (`execution.burst`).
    """

    request_id: str
    kind: Literal["checkpoint", "savepoint", "stop", "end_source"]
    deadline_seconds: float
    drain: bool = False
    bounded: BoundedSources = "cut"
    stage: str = ""
    instance: str | None = None
    asked_by: StopAskedBy = "request"


class RequestReceived(msgspec.Struct, frozen=True):
    """A request was received; the target location of a savepoint was checked before.

    Attributes:
        request: the request.
        requester: number of the requester, which the answer names.
        received_at: when the request was received, in the unit of `now`; its deadline counts from then.
    """

    request: Request
    requester: int
    received_at: float


class SourceInstance(msgspec.Struct, frozen=True):
    """One instance of a source, the task that runs it, and whether its data ends by itself."""

    stage: str
    instance: str
    task: TaskId
    bounded: bool = False

    def __str__(self) -> str:
        return f"{self.stage}[{self.instance}]"


class Stopped(msgspec.Struct, frozen=True):
    """The job was stopped with a savepoint, which has completed.

    Attributes:
        drain: whether the stop was a drain.
        checkpoint_id: id of the savepoint.
        location: location of the savepoint.
        asked_by: what asked for the stop.
    """

    drain: bool
    checkpoint_id: int
    location: str
    asked_by: StopAskedBy = "request"


# Actions


class ToCoordinator(msgspec.Struct, frozen=True):
    """Hand this event to the coordinator."""

    event: CoordinatorEvent


class EndSources(msgspec.Struct, frozen=True):
    """End sources as if their input were exhausted.

    Attributes:
        stage: name of the source; None for every source.
        instance: the only instance that ends; None for all instances.
        stops_job: whether it is for the drain of a stop with savepoint. The drain is announced to every task first; if the stop
            fails, the sources continue, so a restart does not end them again.
    """

    stage: str | None = None
    instance: str | None = None
    stops_job: bool = False


class AnswerRequest(msgspec.Struct, frozen=True):
    """Send the requesters the one answer to their request.

    Attributes:
        request_id: id of the request.
        requesters: numbers of all requesters with this id; none of a request of the job itself.
        reason: why the request failed; None if it is done.
        message: the failure, for people.
        checkpoint_id: id of the savepoint or checkpoint; None without one.
        location: location of the savepoint or checkpoint; also for a failure after the savepoint has completed.
        checkpoint: the checkpoint or savepoint that was taken for the request, if the job continues.
        ended: the instances of sources that were asked to end, and had not ended before.
        cut: the instances of bounded sources that a drain has ended before they were read to their end.
    """

    request_id: str
    requesters: tuple[int, ...]
    reason: FailureReason | None = None
    message: str = ""
    checkpoint_id: int | None = None
    location: str = ""
    checkpoint: CompletedCheckpoint | None = None
    ended: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """Whether the request is done."""
        return self.reason is None


RequestAction = ToCoordinator | EndSources | AnswerRequest | FailOver


class WaitingDrain(NamedTuple):
    """A drain that was not begun yet: it waits until these instances of bounded sources have been read to their end."""

    request_id: str
    waits_for: tuple[str, ...]


@dataclass(slots=True)
class _OpenRequest:
    """A request that is not answered."""

    request: Request
    deadline: float
    requesters: list[int] = field(default_factory=list)
    handed_over: bool = False
    withdrawn: bool = False
    unread: tuple[str, ...] = ()
    """Of a drain: the instances of bounded sources that it waits for, or that it has cut."""


class JobRequests:
    """The requests that a job has received and not answered, and the one stop that it may be in.

    Args:
        pipeline: name of the pipeline, for messages.
    """

    def __init__(self, pipeline: str) -> None:
        self._pipeline = pipeline
        self._open: dict[str, _OpenRequest] = {}
        self._stop: StopWithSavepoint | None = None
        self._stopped: Stopped | None = None
        self._answers_at_end: list[RequestAction] = []
        """Answers to a successful stop: the requester may start the pipeline again at once, so the job ends first."""
        self.drain_waits = False
        """Whether a drain without a savepoint was requested, and has not begun."""

    @property
    def stop(self) -> StopWithSavepoint | None:
        """The stop with savepoint that is under way; None without one."""
        return self._stop

    @property
    def stopped(self) -> Stopped | None:
        """The stop whose savepoint has completed; None without one, and again if the job had to continue."""
        return self._stopped

    def due_ids(self, now: float) -> tuple[str, ...]:
        """The ids of the open requests that wait to be handed over, or are overdue, in the order in which they came."""
        found = self._open.items()
        return tuple([id for id, r in found if not r.handed_over or (now >= r.deadline and not r.withdrawn)]) if found else ()

    def next_deadline(self) -> float | None:
        """When the next request is overdue, in the unit of `now`; None if none has to be withdrawn."""
        return min([entry.deadline for entry in self._open.values() if not entry.withdrawn], default=None)

    def receive(self, event: RequestReceived) -> None:
        """Take a request; it waits until it is dispatched."""
        self.ask(event.request, event.received_at).requesters.append(event.requester)

    def ask(self, request: Request, at: float) -> _OpenRequest:
        """Take a request of the job itself, which has no requester.

        Args:
            request: the request.
            at: when its deadline begins to count, seconds.
        """
        return self._open.setdefault(request.request_id, _OpenRequest(request, at + request.deadline_seconds))

    def is_open(self, request_id: str) -> bool:
        """Whether the request is not answered."""
        return request_id in self._open

    def asked_by(self, request_id: str) -> StopAskedBy:
        """What asks for the open request of this id; "" if it is not open."""
        return self._open[request_id].request.asked_by if request_id in self._open else ""

    def is_waiting(self, request_id: str) -> bool:
        """Whether the request is open and was not handed over."""
        return request_id in self._open and not self._open[request_id].handed_over

    @property
    def waiting_drain(self) -> WaitingDrain | None:
        """The drain that waits until bounded sources have been read to their end; None without one."""
        found = (entry for entry in self._open.values() if entry.unread and not entry.handed_over)
        return next((WaitingDrain(entry.request.request_id, entry.unread) for entry in found), None)

    def advance(
        self,
        request_id: str,
        now: float,
        sources: Sequence[SourceInstance] | None,
        unread: Sequence[SourceInstance] = (),
        at_end: Collection[SourceInstance] = (),
    ) -> list[RequestAction]:
        """Hand a request over if that is possible now, or withdraw it if it is overdue.

        Args:
            request_id: id of a request; nothing is done if it is answered.
            now: seconds.
            sources: all instances of all sources, if every task runs; None while requests have to wait.
            unread: the instances of bounded sources that have not been read to their end.
            at_end: the instances of sources whose data has ended.
        """
        entry = self._open.get(request_id)
        if entry is None or entry.withdrawn:
            return []
        if now >= entry.deadline:
            return self._withdraw(entry)
        if sources is None or entry.handed_over:
            return []
        if self._stop is not None and entry.request.asked_by == "termination":
            return []  # the job ends with the stop that is under way; if that fails, it is stopped for this request
        if entry.request.drain:
            entry.unread = tuple(map(str, unread))
            if entry.unread and entry.request.bounded == "finish":
                return []
        entry.handed_over = True
        return self._hand_over(entry.request, sources, at_end)

    def _withdraw(self, overdue: _OpenRequest) -> list[RequestAction]:
        request_id = overdue.request.request_id
        message = f"not done within its deadline of {overdue.request.deadline_seconds:g} s"
        if overdue.unread and not overdue.handed_over:
            message += f": it waited for bounded sources to be read to their end: {', '.join(overdue.unread)}"
        if not overdue.handed_over:
            return self._fail(request_id, FailureReason.CHECKPOINT_EXPIRED, message)
        overdue.withdrawn = True
        return [ToCoordinator(RequestWithdrawn(request_id, message))]

    def _hand_over(
        self, request: Request, sources: Sequence[SourceInstance], at_end: Collection[SourceInstance]
    ) -> list[RequestAction]:
        request_id = request.request_id
        match request.kind:
            case "checkpoint":
                return [ToCoordinator(CheckpointRequested(request_id, CheckpointProperties()))]
            case "savepoint":
                return [ToCoordinator(CheckpointRequested(request_id, CheckpointProperties.for_savepoint(request_id=request_id)))]
            case "stop":
                properties = CheckpointProperties.for_savepoint(stops_job=True, request_id=request_id)
                return [ToCoordinator(StopRequested(request_id, request.drain, properties))]
            case "end_source":
                return self._end_source(request, sources, at_end)

    def _end_source(
        self, request: Request, sources: Sequence[SourceInstance], at_end: Collection[SourceInstance]
    ) -> list[RequestAction]:
        chosen = [s for s in sources if s.stage == request.stage and request.instance in (None, s.instance)]
        if not chosen:
            wanted = request.stage if request.instance is None else f"{request.stage}[{request.instance}]"
            known = ", ".join(map(str, sources))
            message = f"expected a source of pipeline {self._pipeline!r}, found {wanted!r}; its sources are {known}"
            return self._fail(request.request_id, FailureReason.TRIGGER_CHECKPOINT_FAILURE, message)
        if self._stop is not None:
            message = f"a stop with savepoint is under way (request {self._stop.request_id})"
            return self._fail(request.request_id, FailureReason.CHECKPOINT_COORDINATOR_SUSPEND, message)
        end = EndSources(request.stage, request.instance)
        return [end, *self._answer(request.request_id, ended=tuple(str(s) for s in chosen if s not in at_end))]

    # A drain without a savepoint

    def drain(self) -> None:
        """Every source shall end, without a savepoint; see :meth:`advance_drain`."""
        self.drain_waits = True

    def advance_drain(self, unread: Sequence[SourceInstance]) -> list[RequestAction]:
        """End every source if a drain waits, no stop is under way, and bounded sources have been read to their end.

        Args:
            unread: the instances of bounded sources that have not been read to their end.
        """
        if not self.drain_waits or self._stop is not None or unread:
            return []
        self.drain_waits = False
        return [ToCoordinator(DrainBegan()), EndSources()]

    # Outcomes of requests

    def stop_accepted(self, request_id: str) -> list[RequestAction]:
        """The coordinator has not refused the stop that was handed to it."""
        drain = self._open[request_id].request.drain
        self._stop = StopWithSavepoint(request_id, drain)
        return [EndSources(stops_job=True)] if drain else []

    def completed(self, request_id: str, checkpoint: CompletedCheckpoint) -> list[RequestAction]:
        """The coordinator has completed the checkpoint or savepoint of a request."""
        checkpoint_id, location = checkpoint.checkpoint_id, checkpoint.location
        if self._stop is None or self._stop.request_id != request_id:
            return self._answer(request_id, checkpoint_id=checkpoint_id, location=location, checkpoint=checkpoint)
        entry = self._open.get(request_id)
        asked_by = entry.request.asked_by if entry is not None else "request"
        self._stopped = Stopped(self._stop.drain, checkpoint_id, location, asked_by)
        return self._perform(self._stop, self._stop.handle(SavepointCompleted(checkpoint_id, location)))

    def failed(self, request_id: str, reason: FailureReason, message: str, *, restarting: bool) -> list[RequestAction]:
        """The coordinator cannot complete the checkpoint or savepoint of a request.

        Args:
            request_id: id of the request.
            reason: why it failed.
            message: the same for people.
            restarting: whether the job restarts already: a stop that fails does not ask for a restart then.
        """
        stop = self._stop
        if stop is None or stop.request_id != request_id:
            return self._fail(request_id, reason, message)
        self._stop = None
        actions = self._perform(stop, stop.handle(SavepointFailed(reason, message)))
        return [action for action in actions if not (restarting and isinstance(action, FailOver))]

    def attempt_failed(self, message: str) -> list[RequestAction]:
        """The job restarts, or fails: answer the requester of a stop whose savepoint has completed, and name the savepoint.

        A savepoint that is being written may still complete or fail: call this method again when its outcome is known.
        """
        stop = self._stop
        if stop is None or stop.savepoint is None:
            return []
        self._stop = self._stopped = None
        actions = self._perform(stop, stop.handle(TaskFailed(message)))
        return [action for action in actions if not isinstance(action, FailOver)]

    def all_finished(self) -> list[RequestAction]:
        """Every task has finished. The requester of the stop is answered when the job has ended, see `close`."""
        return self._end_stop(AllTasksFinished())

    def close(self, status: JobStatus | None, message: str) -> list[RequestAction]:
        """The job has ended: answer the requests that are still open.

        Args:
            status: how the job has ended; None if it had not begun.
            message: why it has failed; empty if it has not.
        """
        ended = status.name if status is not None else "before it began"
        actions = self._end_stop(JobCanceled() if status is JobStatus.CANCELED else JobFailed(message or ended))
        stopped = self._stopped if status is JobStatus.FINISHED else None
        for request_id in tuple(self._open):
            if stopped is not None and self.asked_by(request_id) == "termination":
                actions += self._answer(request_id, checkpoint_id=stopped.checkpoint_id, location=stopped.location)
            reason = FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN
            actions += self._fail(request_id, reason, f"the pipeline's run has ended {ended}")
        actions += self._answers_at_end
        self._answers_at_end = []
        return actions

    def _end_stop(self, event: AllTasksFinished | JobCanceled | JobFailed) -> list[RequestAction]:
        stop, self._stop = self._stop, None
        return [] if stop is None else self._perform(stop, stop.handle(event))

    # Answers

    def _perform(self, stop: StopWithSavepoint, actions: Sequence[StopAction]) -> list[RequestAction]:
        performed: list[RequestAction] = []
        for action in actions:
            match action:
                case AnswerDone(checkpoint_id, location):
                    self._answers_at_end += self._answer(stop.request_id, checkpoint_id=checkpoint_id, location=location)
                case AnswerFailed(reason, message, location):
                    performed += self._fail(stop.request_id, reason, message, location or "")
                case FailOver():
                    performed.append(action)
        return performed

    def _fail(self, request_id: str, reason: FailureReason, message: str, location: str = "") -> list[RequestAction]:
        return self._answer(request_id, reason=reason, message=message, location=location)

    def _answer(
        self,
        request_id: str,
        *,
        reason: FailureReason | None = None,
        message: str = "",
        checkpoint_id: int | None = None,
        location: str = "",
        checkpoint: CompletedCheckpoint | None = None,
        ended: tuple[str, ...] = (),
    ) -> list[RequestAction]:
        """The one answer to an open request; none if the request is answered."""
        entry = self._open.pop(request_id, None)
        if entry is None:
            return []
        requesters, cut = tuple(entry.requesters), entry.unread if entry.handed_over else ()
        return [AnswerRequest(request_id, requesters, reason, message, checkpoint_id, location, checkpoint, ended, cut)]
