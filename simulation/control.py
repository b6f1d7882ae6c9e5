"""What is asked of a simulated process, and the one stop it may be in; mirrors `spark.job.control_requests`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_checkpoints.coordination import (
    AllTasksFinished,
    AnswerDone,
    AnswerFailed,
    CheckpointPlan,
    CheckpointProperties,
    CheckpointRequested,
    CompletedCheckpoint,
    FailOver,
    FailureReason,
    JobCanceled,
    JobFailed,
    RequestWithdrawn,
    SavepointCompleted,
    SavepointFailed,
    StopAction,
    StopRequested,
    StopWithSavepoint,
    TaskFailed,
)
from simulation.violations import check

if TYPE_CHECKING:
    from simulation.process import Process


class StopFailed(Exception):
    """A drain whose savepoint failed: the job fails over."""


@dataclass(eq=False)
class Request:
    """Somebody asks for something. `answer`: "done" or "failed", once."""

    request_id: str
    kind: str
    deadline: float
    stage: int = 0
    handed_over: bool = False
    withdrawn: bool = False
    answer: str = ""
    location: str = ""
    checkpoint_id: int = 0


@dataclass(frozen=True)
class Stopped:
    """The stop's savepoint has completed."""

    drain: bool
    checkpoint_id: int
    location: str


class Control:
    """The requests that a process has taken and not yet answered."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.stop: StopWithSavepoint | None = None
        self.stopped: Stopped | None = None
        self.open: dict[str, Request] = {}
        self._when_over: list[Request] = []

    def take(self, request: Request) -> None:
        self.open.setdefault(request.request_id, request)

    def due_at(self) -> float | None:
        """When the next request is given up."""
        return min((r.deadline for r in self.open.values() if not r.withdrawn), default=None)

    def go_on(self) -> None:
        process = self.process
        if not self.open:
            return
        for request in list(self.open.values()):
            overdue = process.now >= request.deadline
            if request.handed_over:
                if overdue and not request.withdrawn:
                    request.withdrawn = True
                    process.handle(RequestWithdrawn(request.request_id, "too late"))
            elif overdue:
                self._fail(request.request_id)
            elif not process.restarting and isinstance(process.coordinator.plan(), CheckpointPlan):
                request.handed_over = True
                self._hand_over(request)

    def _hand_over(self, request: Request) -> None:
        process, request_id = self.process, request.request_id
        if request.kind == "checkpoint":
            process.handle(CheckpointRequested(request_id, CheckpointProperties()))
        elif request.kind == "savepoint":
            process.handle(CheckpointRequested(request_id, CheckpointProperties.for_savepoint(target=request_id)))
        elif request.kind == "end_source":
            if self.stop is not None:
                self._fail(request_id)
            else:
                process.end_sources(request.stage)
                self._answer(request_id, "done")
        else:
            self._begin_stop(request)

    def _begin_stop(self, request: Request) -> None:
        process, drain = self.process, request.kind == "drain"
        properties = CheckpointProperties.for_savepoint(stops_job=True, target=request.request_id)
        process.handle(StopRequested(request.request_id, drain, properties))
        if request.request_id in self.open:
            self.stop = StopWithSavepoint(request.request_id, drain)
            process.count("stops begun")
            if drain:
                for task in process.tasks.values():
                    task.drain_announced = True
                process.end_sources(None, remember=False)

    # What becomes of them

    def completed(self, request_id: str, checkpoint: CompletedCheckpoint) -> None:
        if self.stop is not None and self.stop.request_id == request_id:
            self.stopped = Stopped(self.stop.drain, checkpoint.checkpoint_id, checkpoint.location)
            self._perform(request_id, self.stop.handle(SavepointCompleted(checkpoint.checkpoint_id, checkpoint.location)))
            return
        self._answer(request_id, "done", checkpoint.location, checkpoint.checkpoint_id)

    def failed(self, request_id: str, reason: FailureReason, message: str) -> None:
        stop = self.stop
        if stop is None or stop.request_id != request_id:
            return self._fail(request_id)
        self.stop = None
        actions = stop.handle(SavepointFailed(reason, message))
        self._perform(request_id, [a for a in actions if not (self.process.restarting and isinstance(a, FailOver))])
        if not self.process.restarting:
            self.process.drain_if_wanted()

    def attempt_failed(self, message: str) -> None:
        if self.stop is not None and self.stop.savepoint is not None:
            request_id, actions = self.stop.request_id, self.stop.handle(TaskFailed(message))
            self.stop = self.stopped = None
            self._perform(request_id, [action for action in actions if not isinstance(action, FailOver)])

    def all_finished(self) -> None:
        if self.stop is not None:
            self._perform(self.stop.request_id, self.stop.handle(AllTasksFinished()))
            self.stop = None

    def over(self, status: str, rest: Sequence[Request]) -> None:
        for request in rest:
            self.take(request)
        if self.stop is not None:
            ended = JobCanceled() if status == "CANCELED" else JobFailed(status)
            self._perform(self.stop.request_id, self.stop.handle(ended))
            self.stop = None
        for request_id in list(self.open):
            self._fail(request_id)
        for request in self._when_over:
            self._respond(request, "done")

    def _perform(self, request_id: str, actions: Sequence[StopAction]) -> None:
        fail_over: FailOver | None = None
        for action in actions:
            match action:
                case AnswerDone(checkpoint_id, location):
                    self._answer(request_id, "done", location, checkpoint_id, when_over=True)
                case AnswerFailed(_, _, location):
                    self._answer(request_id, "failed", location or "")
                case FailOver():
                    fail_over = action
        if fail_over is not None:
            raise StopFailed(fail_over.message)

    def _fail(self, request_id: str) -> None:
        self._answer(request_id, "failed")

    def _answer(self, request_id: str, status: str, location: str = "", checkpoint_id: int = 0, when_over: bool = False) -> None:
        request = self.open.pop(request_id, None)
        if request is None:
            return
        request.location, request.checkpoint_id = location, checkpoint_id
        if when_over:
            self._when_over.append(request)
        else:
            self._respond(request, status)

    def _respond(self, request: Request, status: str) -> None:
        check(not request.answer, f"request {request.request_id} is answered a second time")
        request.answer = status
        if status == "done" and request.kind in ("savepoint", "suspend", "drain"):
            store = self.process.world.store
            if request.location not in store.claimed:
                store.check_whole(request.location)
