"""The asker's side of control requests: any process that reaches storage may hold a running pipeline's reins.

Must not know how a request is carried out. It looks before it asks: where nobody owns the pipeline there is nobody to ask.
Whether an owner still lives is found by observation, as for a take-over: ``state.json`` unchanged for a whole lease by the
asker's own clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from uuid import uuid4

import msgspec

from dagster_checkpoints.control.request_box import RequestBox
from dagster_checkpoints.control.requests import (
    NO_RUNNING_PIPELINE,
    Answer,
    ControlRequest,
    RequestKind,
    validate_request,
)
from dagster_checkpoints.control.status import PipelineStatus, read_status
from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.execution.pipeline_state import PipelineState, describe_end, describe_owner
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.errors import StorageUnavailable, UnknownRequest
from dagster_checkpoints.storage.layout import validate_request_id
from dagster_checkpoints.storage.ownership import now_utc

_LOOKS_PER_LEASE = 6


class ControlError(DagsterCheckpointsError):
    """Base of what can become of a control request, other than being done."""


class RequestFailed(ControlError):
    """The pipeline answered that the request failed.

    Args:
        reason: see :class:`~dagster_checkpoints.control.requests.Answer`.
        message: the pipeline's own words.
        url: of the savepoint, where one was made nevertheless; else "".
        answer: all of it.
    """

    def __init__(self, reason: str, message: str, url: str = "", answer: Answer | None = None) -> None:
        super().__init__(f"{reason}: {message}" + (f" The savepoint is kept: {url}" if url and url not in message else ""))
        self.reason = reason
        self.message = message
        self.url = url
        self.answer = answer


class RequestTimedOut(ControlError):
    """No final answer has come in time. The request stands: its answer may still come."""


class NoRunningPipeline(ControlError):
    """Nobody runs the pipeline, so nobody can carry out the request."""


class RequestHandle:
    """A request that was asked, in this process or another. Made by :class:`PipelineControl`."""

    def __init__(self, control: PipelineControl, request_id: str, request: ControlRequest | None) -> None:
        self.request_id = request_id
        self._control = control
        self._request = request

    def __repr__(self) -> str:
        return f"RequestHandle({self.request_id!r})"

    @property
    def request(self) -> ControlRequest:
        """What was asked.

        Raises:
            UnknownRequest: no request has this id.
            CorruptRequest: it cannot be read.
        """
        if self._request is None:
            self._request = self._control.box.read_request(self.request_id)
        if self._request is None:
            raise UnknownRequest(
                f"expected a request {self.request_id!r} of pipeline {self._control.pipeline!r} in {self._control.url}, found "
                "none. Is the id right? Answered requests are deleted after a while"
            )
        return self._request

    def poll(self) -> Answer | None:
        """The newest answer, final or not; None before the owner has seen the request. Never blocks.

        Raises:
            UnknownRequest: no request has this id.
            CorruptAnswer, StorageUnavailable: it cannot be read.
        """
        answer = self._control.box.read_answer(self.request_id)
        if answer is None:
            _ = self.request  # that there is none would else look like no answer yet, for ever
        return answer

    def wait(self, timeout: float) -> Answer:
        """Wait for the request to be done.

        Args:
            timeout: seconds, by this process's clock; the request's own deadline is the owner's affair.

        Raises:
            RequestFailed: the pipeline said no, or tried and failed.
            NoRunningPipeline: the run that was asked is over, or its process is dead, and has not answered.
            RequestTimedOut: nothing final came in time.
            UnknownRequest, CorruptAnswer: see :meth:`poll`.
        """
        return self._control.wait(self, timeout)


class PipelineControl:
    """Asks a running pipeline for things.

    Args:
        storage: of the pipeline; need not own it.
        asked_by: who asks, for people.
        monotonic: this process's clock, seconds.
        sleep: waits so many seconds between two looks.
        wall: for the times people read.
        poll: seconds between two looks at the answer, at most.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        *,
        asked_by: str,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        wall: Callable[[], datetime] = now_utc,
        poll: float = 1.0,
    ) -> None:
        self.box = RequestBox(storage.store, storage.layout)
        self.pipeline = storage.pipeline
        self.url = storage.url
        self._storage = storage
        self._asked_by = asked_by
        self._monotonic = monotonic
        self._sleep = sleep
        self._wall = wall
        self._poll = poll

    def checkpoint(self, *, request_id: str | None = None, deadline: float = 600.0) -> RequestHandle:
        """Ask for a checkpoint now.

        Args:
            request_id: the same id asks only once, whoever repeats it; one is made up by default.
            deadline: seconds that the owner may try.

        Raises:
            NoRunningPipeline: there is nobody to ask; says how the last run ended.
            InvalidRequest: no pipeline could carry it out.
            RequestConflict: the id was used before, for something else.
            StorageUnavailable: it was not asked.
            OutcomeUnknown: it may have been asked; ask again under the same id.
        """
        return self._ask("checkpoint", request_id, deadline)

    def savepoint(
        self,
        *,
        target: str = "",
        name: str = "",
        request_id: str | None = None,
        deadline: float = 600.0,
        recorded_by_asker: bool = False,
    ) -> RequestHandle:
        """Ask for a savepoint of the pipeline, which runs on.

        Args:
            target: directory (``s3://…``, ``file://…`` or an absolute path) in which the savepoint is made; "" for the
                pipeline's own.
            name: part of its directory's name; "" leaves it to the owner.
            request_id, deadline: see :meth:`checkpoint`, whose errors are raised as well.
            recorded_by_asker: the asker tells people of it, so the owner need not.
        """
        return self._ask("savepoint", request_id, deadline, target=target, name=name, recorded_by_asker=recorded_by_asker)

    def stop(
        self,
        *,
        drain: bool,
        target: str = "",
        name: str = "",
        request_id: str | None = None,
        deadline: float = 600.0,
        recorded_by_asker: bool = False,
    ) -> RequestHandle:
        """Ask for a savepoint after which the pipeline ends.

        Args:
            drain: end all sources first, so that every window comes out; otherwise the pipeline is meant to be resumed.
            target, name, request_id, deadline, recorded_by_asker: see :meth:`savepoint`.
        """
        return self._ask("stop", request_id, deadline, drain=drain, target=target, name=name, recorded_by_asker=recorded_by_asker)

    def end_source(
        self, stage: str, instance: str | None = None, *, request_id: str | None = None, deadline: float = 600.0
    ) -> RequestHandle:
        """Ask that one source, or one instance of it, ends as if its input were exhausted.

        Args:
            stage: the source's name.
            instance: its instance; all of them by default.
            request_id, deadline: see :meth:`checkpoint`.
        """
        return self._ask("end_source", request_id, deadline, stage=stage, instance=instance)

    def handle(self, request_id: str) -> RequestHandle:
        """An earlier request, asked here or elsewhere. Raises InvalidRequest if it can be no id."""
        return RequestHandle(self, validate_request_id(request_id), None)

    def status(self) -> PipelineStatus | None:
        """How the pipeline's newest run goes or ended, as it said itself; None if none ever said. For display."""
        return read_status(self._storage)

    def state(self) -> PipelineState | None:
        """Who owns the pipeline, and its newest checkpoint; None if it never ran here."""
        return self._storage.read_state()

    def wait(self, handle: RequestHandle, timeout: float) -> Answer:
        """See :meth:`RequestHandle.wait`."""
        until = self._monotonic() + timeout
        pause, watched, trouble = min(0.1, self._poll), _Watched(self._monotonic), ""
        while True:
            try:
                answer = handle.poll()
                if answer is None or not answer.final:
                    over = watched.look(self._storage.read_state, handle.request.epoch)
                    # It may have answered just before it ended.
                    answer = handle.poll() if over else None
                    if over and (answer is None or not answer.final):
                        raise NoRunningPipeline(f"request {handle.request_id} to {self._subject} has no final answer: {over}")
                if answer is not None:
                    return self._done(answer)
            except StorageUnavailable as error:  # it may come back in time
                trouble = f" Storage did not answer the last time: {error}"
            left = until - self._monotonic()
            if left <= 0:
                raise RequestTimedOut(
                    f"expected a final answer to request {handle.request_id} from {self._subject} within {timeout:g} s, found "
                    f"none. The request stands, and its answer may still come: look again under the same id.{trouble}"
                )
            self._sleep(min(pause, left))
            pause = min(pause * 1.5, self._poll)

    @property
    def _subject(self) -> str:
        return f"pipeline {self.pipeline!r} ({self.url})"

    def _ask(self, kind: RequestKind, request_id: str | None, deadline: float, **arguments: object) -> RequestHandle:
        request = ControlRequest(
            request_id=request_id if request_id is not None else f"{kind.replace('_', '-')}-{uuid4().hex[:12]}",
            kind=kind,
            epoch=0,
            deadline_seconds=deadline,
            asked_by=self._asked_by,
            asked_at=self._wall(),
            **arguments,  # type: ignore[arg-type]
        )
        validate_request(request)
        if request_id is not None and (stored := self.box.read_request(request_id)) is not None:
            return RequestHandle(self, request_id, self.box.same(stored, request))  # whether or not its run is over by now
        state = self._storage.read_state()
        if state is None or state.lease is None:
            raise NoRunningPipeline(f"{self._subject} is not running. {describe_end(state)}")
        stored = self.box.ask(msgspec.structs.replace(request, epoch=state.epoch))
        return RequestHandle(self, stored.request_id, stored)

    @staticmethod
    def _done(answer: Answer) -> Answer:
        if answer.status == "done":
            return answer
        if answer.reason == NO_RUNNING_PIPELINE:
            raise NoRunningPipeline(f"request {answer.request_id}: {answer.message}")
        raise RequestFailed(answer.reason, answer.message, answer.url, answer)


class _Watched:
    """Watches a pipeline's owner from outside, now and then."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._token = ""
        self._changed_at = 0.0
        self._next_look = 0.0

    def look(self, read: Callable[[], PipelineState | None], epoch: int) -> str:
        """Why the owner of this epoch will not answer any more; "" while it may."""
        if self._token and self._monotonic() < self._next_look:
            return ""
        state = read()
        now = self._monotonic()
        if state is None or state.lease is None:
            return f"the run is over. {describe_end(state)}"
        if state.epoch != epoch:
            return f"the run that was asked (epoch {epoch}) is over, and the pipeline is now {describe_owner(state)}. Ask again"
        if state.token != self._token:
            self._token, self._changed_at = state.token, now
        elif now - self._changed_at >= state.lease.seconds:
            return (
                f"it is {describe_owner(state)}, and that run is dead: it has not renewed its lease for a whole "
                f"{state.lease.seconds:g} s. {describe_end(state)}"
            )
        self._next_look = now + state.lease.seconds / _LOOKS_PER_LEASE
        return ""
