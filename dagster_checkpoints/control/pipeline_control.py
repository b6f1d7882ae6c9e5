"""The requester's side of control requests: any process that reaches the storage can control a running pipeline.

Must not know how a request is carried out. It reads ``state.json`` before it sends a request: a pipeline without an owner cannot
answer. An owner counts as dead by the same rules as for a take-over: its processes, on this machine, have ended, or
``state.json`` is unchanged for a whole lease by the requester's own clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from uuid import uuid4

import msgspec

from dagster_checkpoints.control.last_sign import owner_is_gone
from dagster_checkpoints.control.request_box import RequestBox
from dagster_checkpoints.control.requests import (
    NO_RUNNING_PIPELINE,
    Answer,
    ControlRequest,
    RequestKind,
    validate_request,
)
from dagster_checkpoints.control.status import PipelineStatus, read_status
from dagster_checkpoints.errors import CorruptStatus, DagsterCheckpointsError, StorageUnavailable, UnknownRequest
from dagster_checkpoints.execution.job_requests import BoundedSources
from dagster_checkpoints.execution.pipeline_state import PipelineState, describe_end, describe_owner
from dagster_checkpoints.pipeline.setting_values import check_seconds
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.layout import validate_request_id
from dagster_checkpoints.storage.ownership import now_utc

_READS_PER_LEASE = 6


class ControlError(DagsterCheckpointsError):
    """Base of the errors of a control request that is not done."""


class RequestFailed(ControlError):
    """The pipeline answered that the request failed.

    Args:
        reason: see :class:`~dagster_checkpoints.control.requests.Answer`.
        message: the pipeline's explanation, for people.
        url: URL of the savepoint if one was made in spite of the failure; else "".
        answer: the whole answer.
    """

    def __init__(self, reason: str, message: str, url: str = "", answer: Answer | None = None) -> None:
        super().__init__(f"{reason}: {message}" + (f" The savepoint is kept: {url}" if url and url not in message else ""))
        self.reason = reason
        self.message = message
        self.url = url
        self.answer = answer


class RequestTimedOut(ControlError):
    """No final answer arrived in time. The request stays valid: its answer may still arrive."""


class NoRunningPipeline(ControlError):
    """No run owns the pipeline, so the request cannot be carried out."""


class RequestHandle:
    """A request that was sent, by this process or another one. Made by :class:`PipelineControl`."""

    def __init__(self, control: PipelineControl, request_id: str, request: ControlRequest | None) -> None:
        self.request_id = request_id
        self._control = control
        self._request = request

    def __repr__(self) -> str:
        return f"RequestHandle({self.request_id!r})"

    @property
    def request(self) -> ControlRequest:
        """The request as it is stored.

        Raises:
            UnknownRequest: no request has this id.
            CorruptRequest: the request cannot be read.
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
        """The newest answer, final or not; None before the owner has seen the request. Does not wait.

        Raises:
            UnknownRequest: no request has this id.
            CorruptAnswer, StorageUnavailable: the answer cannot be read.
        """
        answer = self._control.box.read_answer(self.request_id)
        if answer is None:
            _ = self.request  # raises UnknownRequest: without it, a missing request would look like a missing answer
        return answer

    def wait(self, timeout: float) -> Answer:
        """Wait until the request is done.

        Args:
            timeout: longest wait in seconds, by this process's clock; the owner alone counts the request's deadline.

        Raises:
            RequestFailed: the pipeline refused the request, or tried and failed.
            NoRunningPipeline: the run that the request was sent to has ended, or its process is dead, without an answer.
            RequestTimedOut: no final answer arrived in time.
            UnknownRequest, CorruptAnswer: see :meth:`poll`.
        """
        return self._control.wait(self, timeout)


class PipelineControl:
    """Sends requests to a running pipeline.

    Args:
        storage: the pipeline's storage; its owner is another process.
        asked_by: the requester, as people read it: a run, a sensor, a user and host.
        monotonic: this process's clock, in seconds.
        sleep: waits for a number of seconds.
        wall: the wall clock, for the times that people read.
        poll: longest pause between two reads of the answer, in seconds; by default that of the storage
            (`ObjectStore.poll_seconds`).
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        *,
        asked_by: str,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        wall: Callable[[], datetime] = now_utc,
        poll: float | None = None,
    ) -> None:
        self.box = RequestBox(storage.store, storage.layout)
        self.pipeline = storage.pipeline
        self.url = storage.url
        self._storage = storage
        self._asked_by = asked_by
        self._monotonic = monotonic
        self._sleep = sleep
        self._wall = wall
        self._poll = storage.store.poll_seconds if poll is None else poll

    def checkpoint(self, *, request_id: str | None = None, deadline: float = 600.0) -> RequestHandle:
        """Request a checkpoint now.

        Args:
            request_id: id of the request; a second request under the same id has no effect. By default a random one.
            deadline: seconds that the owner may try; 600 by default.

        Raises:
            NoRunningPipeline: no run owns the pipeline; the text says how the last run ended.
            InvalidRequest: no pipeline could carry out the request.
            RequestConflict: the id was used before, for something else.
            StorageUnavailable: the request was not sent.
            OutcomeUnknown: the request may have been sent; send it again under the same id.
        """
        return self._send("checkpoint", request_id, deadline)

    def savepoint(
        self,
        *,
        target: str = "",
        name: str = "",
        request_id: str | None = None,
        deadline: float = 600.0,
        recorded_by_asker: bool = False,
    ) -> RequestHandle:
        """Request a savepoint; the pipeline runs on.

        Args:
            target: directory (``s3://…``, ``file://…`` or an absolute path) in which the savepoint is made; "" for the
                directory of the pipeline's savepoints.
            name: part of the savepoint's directory's name; "" lets the owner choose one.
            request_id, deadline: see :meth:`checkpoint`, whose errors are raised as well.
            recorded_by_asker: the requester records the savepoint in Dagster, so the owner does not.
        """
        return self._send("savepoint", request_id, deadline, target=target, name=name, recorded_by_asker=recorded_by_asker)

    def stop(
        self,
        *,
        drain: bool,
        bounded: BoundedSources = "cut",
        target: str = "",
        name: str = "",
        request_id: str | None = None,
        deadline: float = 600.0,
        recorded_by_asker: bool = False,
    ) -> RequestHandle:
        """Request a savepoint after which the pipeline ends.

        Args:
            drain: True ends all sources first, so that every window is emitted; False suspends the pipeline for a later resume.
            bounded: of a drain: "cut" ends bounded sources where they are, and the answer's details name them under "cut";
                "finish" waits until they have been read to their end, while unbounded sources go on, and drains then.
            target, name, request_id, deadline, recorded_by_asker: see :meth:`savepoint`.
        """
        return self._send(
            "stop",
            request_id,
            deadline,
            drain=drain,
            bounded=bounded,
            target=target,
            name=name,
            recorded_by_asker=recorded_by_asker,
        )

    def end_source(
        self, stage: str, instance: str | None = None, *, request_id: str | None = None, deadline: float = 600.0
    ) -> RequestHandle:
        """Request that one source, or one instance of it, ends as if its input were exhausted.

        Args:
            stage: name of the source.
            instance: name of the instance that ends; all instances by default. The answer's details name under "ended" those
                that end by this request; without that, they had ended before.
            request_id, deadline: see :meth:`checkpoint`.
        """
        return self._send("end_source", request_id, deadline, stage=stage, instance=instance)

    def handle(self, request_id: str) -> RequestHandle:
        """A request that was sent earlier, by any process. Raises InvalidRequest if ``request_id`` cannot be an id."""
        return RequestHandle(self, validate_request_id(request_id), None)

    def status(self) -> PipelineStatus | None:
        """The last status that the pipeline's newest run wrote; None if no run has written one. For display."""
        return read_status(self._storage)

    def state(self) -> PipelineState | None:
        """The pipeline's owner and newest checkpoint; None if the pipeline never ran in this storage."""
        return self._storage.read_state()

    def describe_unlisted(self, state: PipelineState | None) -> str:
        """The checkpoints and savepoints that a lost `state.json` has left, and the ways on; "" if there are none."""
        return self._storage.describe_unlisted(state)

    def wait(self, handle: RequestHandle, timeout: float) -> Answer:
        """See :meth:`RequestHandle.wait`."""
        until = self._monotonic() + timeout
        pause, watch, storage_error = min(0.1, self._poll), OwnerWatch(self._monotonic), ""
        while True:
            try:
                answer = handle.poll()
                if answer is None or not answer.final:
                    ended = watch.why_ended(self._storage.read_state, handle.request.epoch)
                    # The owner may have answered just before it ended.
                    answer = handle.poll() if ended else None
                    if ended and (answer is None or not answer.final):
                        raise NoRunningPipeline(f"request {handle.request_id} to {self._subject} has no final answer: {ended}")
                if answer is not None:
                    return self._final(answer)
            except StorageUnavailable as error:  # storage may be available again in time
                storage_error = f" The last read of the storage failed: {error}"
            left = until - self._monotonic()
            if left <= 0:
                raise RequestTimedOut(
                    f"expected a final answer to request {handle.request_id} from {self._subject} within {timeout:g} s, found "
                    f"none. The request stays valid, and its answer may still arrive under the same id.{storage_error}"
                )
            self._sleep(min(pause, left))
            pause = min(pause * 1.5, self._poll)

    @property
    def _subject(self) -> str:
        return f"pipeline {self.pipeline!r} ({self.url})"

    def _send(self, kind: RequestKind, request_id: str | None, deadline: float, **arguments: object) -> RequestHandle:
        check_seconds(kind, deadline=deadline)
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
            return RequestHandle(self, request_id, self.box.same(stored, request))  # also if its run has ended by now
        state = self._storage.read_state()
        if state is None or state.lease is None:
            raise NoRunningPipeline(f"{self._subject} is not running. {describe_end(state)}")
        stored = self.box.ask(msgspec.structs.replace(request, epoch=state.epoch))
        return RequestHandle(self, stored.request_id, stored)

    @staticmethod
    def _final(answer: Answer) -> Answer:
        if answer.status == "done":
            return answer
        if answer.reason == NO_RUNNING_PIPELINE:
            raise NoRunningPipeline(f"request {answer.request_id}: {answer.message}")
        raise RequestFailed(answer.reason, answer.message, answer.url, answer)


def newest_status(control: PipelineControl) -> PipelineStatus | None:
    """The newest status; None if there is none that can be read."""
    try:
        return control.status()
    except CorruptStatus:  # it is for display; the owner writes it again
        return None


class OwnerWatch:
    """Finds out from the storage whether a pipeline's owner is still alive; reads ``state.json`` a few times per lease."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._token = ""
        self._changed_at = 0.0
        self._next_read = 0.0

    def why_ended(self, read: Callable[[], PipelineState | None], epoch: int) -> str:
        """Why the owner of this epoch can no longer answer; "" while it can."""
        if self._token and self._monotonic() < self._next_read:
            return ""
        state = read()
        if state is not None and state.lease is not None:
            self._next_read = self._monotonic() + state.lease.seconds / _READS_PER_LEASE
        return self.why_dead(state, epoch)

    def why_dead(self, state: PipelineState | None, epoch: int) -> str:
        """As :meth:`why_ended`, of a state that was just read."""
        now = self._monotonic()
        if state is None or state.lease is None:
            return f"the run has ended. {describe_end(state)}"
        if state.epoch != epoch:
            now_owned = f"the pipeline is now {describe_owner(state)}"
            return f"the run that it was sent to (epoch {epoch}) has ended, and {now_owned}. Send the request again"
        if owner_is_gone(state.lease.owner):
            return f"it is {describe_owner(state)}, and that run is dead: its process has ended. {describe_end(state)}"
        if state.token != self._token:
            self._token, self._changed_at = state.token, now
        elif now - self._changed_at >= state.lease.seconds:
            return (
                f"it is {describe_owner(state)}, and that run is dead: it has not renewed its lease for a whole "
                f"{state.lease.seconds:g} s. {describe_end(state)}"
            )
        return ""
