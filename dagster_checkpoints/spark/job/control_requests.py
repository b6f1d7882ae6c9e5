"""What people ask of a running job: checkpoints, savepoints, stops, the end of a source.

Requests come from storage (`request_poller`) or from this process. They wait here until all tasks run, are handed to the
coordinator, and are answered exactly once. It must not know how a savepoint is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from dagster_checkpoints.control import Answer, ControlRequest
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
from dagster_checkpoints.spark.errors import StopFailedError
from dagster_checkpoints.spark.job.savepoints_in_progress import SavepointPlace, SavepointsInProgress
from dagster_checkpoints.spark.tasks.messages import Asked
from dagster_checkpoints.storage import CheckpointStorage, StorageError

if TYPE_CHECKING:
    from dagster_checkpoints.spark.job.job_loop import JobLoop


@dataclass(frozen=True)
class Stopped:
    """The job was stopped with a savepoint that has completed. `termination`: because its process was being terminated."""

    drain: bool
    checkpoint_id: int
    location: str
    termination: bool = False


@dataclass
class _Open:
    asked: Asked
    deadline: float
    handed_over: bool = False
    withdrawn: bool = False
    again: list[Asked] = field(default_factory=list)
    """The same request once more: it is done once, and answered to everybody."""

    @property
    def request(self) -> ControlRequest:
        return self.asked.request


class ControlRequests:
    """The requests that a run has taken and not yet answered; for the loop's thread alone.

    Attributes:
        stop: The stop with savepoint that is under way.
        stopped: Its savepoint, once that has completed; None again if the job had to go on.
    """

    def __init__(
        self, storage: CheckpointStorage, savepoints: SavepointsInProgress, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.stop: StopWithSavepoint | None = None
        self.stopped: Stopped | None = None
        self._storage = storage
        self._savepoints = savepoints
        self._monotonic = monotonic
        self._open: dict[str, _Open] = {}
        self._when_over: list[tuple[Asked, Answer]] = []

    def asked(self, request_id: str) -> ControlRequest | None:
        """The open request of that id."""
        found = self._open.get(request_id)
        return found.request if found else None

    def take(self, asked: Asked) -> None:
        """Somebody asks for something. It waits until all tasks run, at most until its deadline."""
        request = asked.request
        same = self._open.get(request.request_id)
        if same is not None:
            same.again.append(asked)
        else:
            self._open[request.request_id] = _Open(asked, asked.seen_at + request.deadline_seconds)

    def go_on(self, loop: JobLoop) -> None:
        """Hand over what can be done now, and give up what has taken too long."""
        now = self._monotonic()
        for open_request in list(self._open.values()):
            overdue = now >= open_request.deadline
            if open_request.handed_over:
                if overdue and not open_request.withdrawn:
                    open_request.withdrawn = True
                    loop.handle(RequestWithdrawn(open_request.request.request_id, self._too_late(open_request.request)))
            elif overdue:
                self._fail(
                    open_request.request.request_id, FailureReason.CHECKPOINT_EXPIRED, self._too_late(open_request.request)
                )
            elif not loop.restarting and isinstance(loop.coordinator.plan(), CheckpointPlan):
                open_request.handed_over = True
                self._hand_over(loop, open_request.request)

    @staticmethod
    def _too_late(request: ControlRequest) -> str:
        return f"not done within its deadline of {request.deadline_seconds:g} s"

    def _hand_over(self, loop: JobLoop, request: ControlRequest) -> None:
        request_id = request.request_id
        match request.kind:
            case "checkpoint":
                loop.handle(CheckpointRequested(request_id, CheckpointProperties()))
            case "savepoint":
                if self._place_is_good(request):
                    loop.handle(CheckpointRequested(request_id, CheckpointProperties.for_savepoint(target=request_id)))
            case "stop":
                if self._place_is_good(request):
                    self._begin_stop(loop, request)
            case "end_source":
                self._end_source(loop, request)

    def _place_is_good(self, request: ControlRequest) -> bool:
        try:
            self._savepoints.ask(request.request_id, SavepointPlace.of(request))
        except StorageError as error:
            self._fail(request.request_id, FailureReason.IO_EXCEPTION, str(error))
            return False
        return True

    def _begin_stop(self, loop: JobLoop, request: ControlRequest) -> None:
        properties = CheckpointProperties.for_savepoint(stops_job=True, target=request.request_id)
        loop.handle(StopRequested(request.request_id, request.drain, properties))
        if request.request_id in self._open:  # else it was refused, and is answered
            self.stop = StopWithSavepoint(request.request_id, request.drain)
            if request.drain:
                loop.end_sources(None, remember=False)

    def _end_source(self, loop: JobLoop, request: ControlRequest) -> None:
        sources = [(s.name, name) for s in loop.pipeline.stages if s.kind.is_source for name in s.instances]
        chosen = [(s, i) for s, i in sources if s == request.stage and request.instance in (None, i)]
        if not chosen:
            there = ", ".join(f"{stage}[{instance}]" for stage, instance in sources)
            wanted = request.stage if request.instance is None else f"{request.stage}[{request.instance}]"
            message = f"expected a source of pipeline {loop.pipeline.name!r}, found {wanted!r}; its sources are {there}"
            return self._fail(request.request_id, FailureReason.TRIGGER_CHECKPOINT_FAILURE, message)
        if self.stop is not None:
            message = f"a stop with savepoint is under way (request {self.stop.request_id})"
            return self._fail(request.request_id, FailureReason.CHECKPOINT_COORDINATOR_SUSPEND, message)
        loop.end_sources(request.stage, request.instance)
        self._answer(request.request_id, "done", details={"ended": [f"{stage}[{instance}]" for stage, instance in chosen]})

    # What becomes of them

    def completed(self, loop: JobLoop, request_id: str, checkpoint: CompletedCheckpoint) -> None:
        """The coordinator has completed what a request asked for."""
        if self.stop is not None and self.stop.request_id == request_id:
            found = self._open.get(request_id)
            termination = found is not None and found.asked.termination
            self.stopped = Stopped(self.stop.drain, checkpoint.checkpoint_id, checkpoint.location, termination)
            self._perform(request_id, self.stop.handle(SavepointCompleted(checkpoint.checkpoint_id, checkpoint.location)))
            return
        self._answer(
            request_id,
            "done",
            checkpoint_id=checkpoint.checkpoint_id,
            location=checkpoint.location,
            details={
                "roots": list(checkpoint.roots),
                "finished_stages": sorted(checkpoint.fully_finished),
                "duration": checkpoint.duration,
            },
        )

    def failed(self, loop: JobLoop, request_id: str, reason: FailureReason, message: str) -> None:
        """The coordinator cannot do what a request asked for."""
        stop = self.stop
        if stop is None or stop.request_id != request_id:
            return self._fail(request_id, reason, message)
        self.stop = None
        actions = stop.handle(SavepointFailed(reason, message))
        # A job that restarts already need not be told to.
        self._perform(request_id, [a for a in actions if not (loop.restarting and isinstance(a, FailOver))])
        if not loop.restarting:
            loop.drain_if_wanted()

    def attempt_failed(self, message: str) -> None:
        """A task has failed, and the job fails over by itself. A savepoint that has completed is named to whoever asked.

        One that is just being written may still complete, or fail: call it again when that is known.
        """
        if self.stop is not None and self.stop.savepoint is not None:
            request_id, actions = self.stop.request_id, self.stop.handle(TaskFailed(message))
            self.stop = self.stopped = None
            self._perform(request_id, [action for action in actions if not isinstance(action, FailOver)])

    def all_finished(self) -> None:
        """Every task has finished. Whoever asked for the stop is told when the job is over, see :meth:`over`."""
        if self.stop is not None:
            self._perform(self.stop.request_id, self.stop.handle(AllTasksFinished()))
            self.stop = None

    def over(self, status: str, error: BaseException | None, rest: Sequence[Asked] = ()) -> None:
        """The job has ended and is released: answer what is still open.

        Args:
            rest: Requests that nobody has taken.
        """
        for asked in rest:
            self.take(asked)
        if self.stop is not None:
            ended = JobCanceled() if status == "CANCELED" else JobFailed(str(error or status))
            self._perform(self.stop.request_id, self.stop.handle(ended))
            self.stop = None
        for request_id in list(self._open):
            self._fail(request_id, FailureReason.CHECKPOINT_COORDINATOR_SHUTDOWN, f"the pipeline's run has ended {status}")
        for asked, answer in self._when_over:
            asked.respond(answer)

    def _perform(self, request_id: str, actions: Sequence[StopAction]) -> None:
        fail_over: FailOver | None = None
        for action in actions:
            match action:
                case AnswerDone(checkpoint_id, location):
                    self._answer(request_id, "done", checkpoint_id=checkpoint_id, location=location, when_over=True)
                case AnswerFailed(reason, message, location):
                    self._answer(request_id, "failed", reason=reason.name, message=message, location=location or "")
                case FailOver():
                    fail_over = action
        if fail_over is not None:
            raise StopFailedError(fail_over.message)

    def _fail(self, request_id: str, reason: FailureReason, message: str) -> None:
        self._answer(request_id, "failed", reason=reason.name, message=message)

    def _answer(
        self,
        request_id: str,
        status: Literal["done", "failed"],
        *,
        reason: str = "",
        message: str = "",
        checkpoint_id: int | None = None,
        location: str = "",
        details: dict[str, Any] | None = None,
        when_over: bool = False,
    ) -> None:
        found = self._open.pop(request_id, None)
        if found is None:
            return
        answer = Answer(
            request_id=request_id,
            status=status,
            reason=reason,
            message=message,
            checkpoint_id=checkpoint_id,
            location=location,
            url=self._storage.url_of(location) if location else "",
            answered_at=datetime.now(UTC),
            details=details or {},
        )
        for asked in (found.asked, *found.again):
            if when_over:
                self._when_over.append((asked, answer))
            else:
                asked.respond(answer)
