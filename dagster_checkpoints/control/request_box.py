"""Requests to a running pipeline, and their answers, as objects below ``requests/``.

Must not know how a request is carried out. Any process that reaches the storage may write a request. A request is addressed to
an owner by its epoch and never changes; a final answer is written once. So both writes may be repeated after any failure: the
second one finds the first one's file.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from dagster_checkpoints.control.requests import (
    INVALID_REQUEST,
    NO_RUNNING_PIPELINE,
    Answer,
    ControlRequest,
    decode_answer,
    decode_request,
    encode,
    failure,
    validate_request,
)
from dagster_checkpoints.errors import (
    CorruptRequest,
    InvalidRequest,
    NotFound,
    RequestConflict,
    StorageError,
)
from dagster_checkpoints.files.store import ObjectInfo, ObjectStore
from dagster_checkpoints.storage.created_objects import create_if_absent
from dagster_checkpoints.storage.layout import Layout, RequestFile

_log = logging.getLogger(__name__)
TICK_SECONDS = 0.05
"""A listing that begins this number of seconds after a change was seen shows also those that have left the mark as it was."""
LIST_SECONDS = 1.0
"""Seconds after which the requests are listed again although their folder shows no change: file systems with longer ticks."""


class RequestBox:
    """The requests to one pipeline, for the requesters and for the owner, which answers. Thread-safe.

    Requests and final answers never change, so each is read at most once: the owner's polling is one listing, and less where the
    store shows without one that nothing has changed.

    Args:
        store: the object store with the root of the storage.
        layout: the keys of the pipeline's objects.
        monotonic: this process's clock, in seconds.
    """

    def __init__(self, store: ObjectStore, layout: Layout, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._layout = layout
        self._monotonic = monotonic
        self._mark: str | None = None
        self._marked_at = 0.0
        """When the mark of the folder was first seen."""
        self._listed_at = 0.0
        """When the last listing began that was read to its end."""
        self._open: list[ControlRequest] = []
        """The requests without a final answer in that listing."""
        self._read: dict[str, ControlRequest] = {}
        self._ignored: set[str] = set()
        self._lock = threading.Lock()

    # -- the requester

    def ask(self, request: ControlRequest) -> ControlRequest:
        """Store a request for the owner, once.

        Returns:
            The request as it is stored: this one, or the one that was stored under this id before, which may be addressed to
            an earlier owner.

        Raises:
            InvalidRequest: no pipeline could carry out the request.
            RequestConflict: the id was used before, for something else.
            StorageUnavailable: the request was not stored.
            OutcomeUnknown: the request may be stored; repeat it under the same id.
        """
        validate_request(request)
        if create_if_absent(self._store, self._layout.request(request.request_id), encode(request)):
            return request
        stored = self.read_request(request.request_id)
        if stored is None:  # a sweep has just deleted it: it was answered long ago
            raise RequestConflict(f"expected a new request id, found that {request.request_id!r} was in use until just now")
        return self.same(stored, request)

    def same(self, stored: ControlRequest, request: ControlRequest) -> ControlRequest:
        """The stored request, if ``request`` asks for the same. Raises RequestConflict if not."""
        if stored.asks_for != request.asks_for:
            before, now = stored.asks_for, request.asks_for
            differs = ", ".join(f"{name}={before[name]!r}, now {now[name]!r}" for name in before if before[name] != now[name])
            raise RequestConflict(
                f"request id {request.request_id!r} was used before, by {stored.asked_by}, for something else: {differs}. "
                "Use a new id, or repeat the first request unchanged"
            )
        return stored

    def read_request(self, request_id: str) -> ControlRequest | None:
        """The request of an id, or None if there is none. Raises CorruptRequest."""
        key = self._layout.request(request_id)
        try:
            return decode_request(request_id, self._store.get(key), self._url(key))
        except NotFound:
            return None

    def read_answer(self, request_id: str) -> Answer | None:
        """The newest answer to a request; None before the owner has seen the request. Raises CorruptAnswer."""
        for key in (self._layout.answer(request_id), self._layout.accepted(request_id)):
            try:
                data = self._store.get(key)
            except NotFound:
                continue
            return decode_answer(data, self._url(key))
        return None

    # -- the owner

    def open_requests(self, epoch: int) -> list[ControlRequest]:
        """The requests to the owner of this epoch that have no final answer, oldest first; accepted ones included.

        A file that is no request, or that no pipeline could carry out, is answered INVALID_REQUEST and does not hold up the
        other requests.

        Raises:
            StorageUnavailable: the requests cannot be listed or read; none is lost.
        """
        requests = [request for request in self._unanswered() if request.epoch == epoch]
        return sorted(requests, key=lambda request: (request.asked_at, request.request_id))

    def refuse_older(self, epoch: int, message: str = "") -> list[str]:
        """Answer the requests to earlier owners with NO_RUNNING_PIPELINE. Call it once, after acquiring the pipeline.

        Args:
            epoch: epoch of the caller, which owns the pipeline.
            message: how the earlier run ended; "" if that is unknown.

        Returns:
            The ids of the requests refused.
        """
        refused = []
        for request in self._unanswered():
            if request.epoch < epoch:
                text = (
                    f"the run that this request was addressed to (epoch {request.epoch}) ended without an answer; the pipeline "
                    f"has a new owner (epoch {epoch}). {message}".rstrip()
                )
                self.answer(failure(request.request_id, NO_RUNNING_PIPELINE, text))
                refused.append(request.request_id)
        return refused

    def answer(self, answer: Answer) -> Answer:
        """Store the answer to a request. The first final answer stands.

        Returns:
            The answer that stands.

        Raises:
            StorageUnavailable, OutcomeUnknown: the answer may be missing; call again.
        """
        if not answer.final:
            self._store.put(self._layout.accepted(answer.request_id), encode(answer))
            return answer
        key = self._layout.answer(answer.request_id)
        if create_if_absent(self._store, key, encode(answer)):
            return answer
        try:
            return decode_answer(self._store.get(key), self._url(key))
        except NotFound:  # a sweep has just deleted it
            return answer

    def sweep(self, seconds: float) -> int:
        """Delete requests answered long ago, with their answers. Their ids can then be used again.

        Ages are measured by the store's clock, against the newest file in ``requests/``, so the clocks of two machines are not
        compared.

        Args:
            seconds: smallest age of a deleted answer: seconds from it to the newest file in ``requests/``.

        Returns:
            The number of requests deleted.
        """
        files = self._list()
        newest = max((info.modified for info in files.values()), default=None)
        old = [
            file.request_id
            for file, info in files.items()
            if file.part == "answer" and newest is not None and (newest - info.modified).total_seconds() >= seconds
        ]
        for request_id in old:
            # The request first: without its answer it would be carried out again.
            self._store.delete([self._layout.request(request_id), self._layout.accepted(request_id)])
            self._store.delete([self._layout.answer(request_id)])
        return len(old)

    # -- reading and writing

    def _list(self) -> dict[RequestFile, ObjectInfo]:
        files = {}
        for info in self._store.list(self._layout.requests):
            file = self._layout.parse_request(info.key)
            if file is not None:
                files[file] = info
            elif info.key not in self._ignored:
                self._ignored.add(info.key)
                _log.warning("Ignoring %s/%s: its name is not that of a request or an answer", self._store.url, info.key)
        return files

    def _unanswered(self) -> list[ControlRequest]:
        with self._lock:
            now = self._monotonic()
            if self._is_as_listed(now):
                return self._open
            files = self._list()
            sent = {file.request_id for file in files if file.part == "request"}
            answered = {file.request_id for file in files if file.part == "answer"}
            for closed in self._read.keys() - (sent - answered):
                del self._read[closed]
            self._open = list(self._read_new(sorted(sent - answered)))
            self._listed_at = now
            return self._open

    def _is_as_listed(self, now: float) -> bool:
        """Whether the store shows that the last listing is the newest one."""
        mark = self._store.change_mark(self._layout.requests)
        if mark != self._mark:
            self._mark, self._marked_at = mark, now
        if mark is None or self._listed_at - self._marked_at < TICK_SECONDS:
            return False
        return now - self._listed_at < LIST_SECONDS

    def _read_new(self, request_ids: Iterable[str]) -> Iterable[ControlRequest]:
        for request_id in request_ids:
            if request_id not in self._read:
                try:
                    request = self.read_request(request_id)
                    if request is not None:
                        self._read[request_id] = validate_request(request)
                except (CorruptRequest, InvalidRequest) as error:
                    self._refuse_invalid(request_id, error)
            if request_id in self._read:
                yield self._read[request_id]

    def _refuse_invalid(self, request_id: str, error: StorageError) -> None:
        try:
            self.answer(failure(request_id, INVALID_REQUEST, str(error)))
            _log.warning("Refused request %s: %s", request_id, error)
        except StorageError as failed:  # the next listing contains the request again
            _log.warning("Request %s is not valid (%s), and the refusal could not be stored: %s", request_id, error, failed)

    def _url(self, key: str) -> str:
        return f"{self._store.url}/{key}"
