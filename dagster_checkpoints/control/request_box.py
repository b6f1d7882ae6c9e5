"""Requests to a running pipeline, and their answers, as objects below ``requests/``.

Must not know who carries a request out, or how. Everybody who reaches storage may ask. A request is addressed to an owner by
its epoch and never changes; a final answer is written once. So both may be tried again after any failure: whoever comes
second finds what is there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

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
from dagster_checkpoints.storage.base import ObjectInfo, ObjectStore, create_if_absent
from dagster_checkpoints.storage.errors import (
    CorruptRequest,
    InvalidRequest,
    NotFound,
    RequestConflict,
    StorageError,
)
from dagster_checkpoints.storage.layout import Layout, RequestFile

_log = logging.getLogger(__name__)


class RequestBox:
    """The requests of one pipeline, for those who ask and for the owner who answers. Thread-safe.

    Requests and final answers never change, so each is read at most once: the owner's polling is one listing.

    Args:
        store: the root.
        layout: of the pipeline.
    """

    def __init__(self, store: ObjectStore, layout: Layout) -> None:
        self._store = store
        self._layout = layout
        self._read: dict[str, ControlRequest] = {}
        self._ignored: set[str] = set()
        self._lock = threading.Lock()

    # -- the asker

    def ask(self, request: ControlRequest) -> ControlRequest:
        """Put a request where its owner finds it, once.

        Returns:
            The request as it is stored: this one, or the one that was asked under this id before, which may be addressed to
            an earlier owner.

        Raises:
            InvalidRequest: no pipeline could carry it out.
            RequestConflict: the id was used before, for something else.
            StorageUnavailable: it was not asked.
            OutcomeUnknown: it may have been asked; ask again under the same id.
        """
        validate_request(request)
        if create_if_absent(self._store, self._layout.request(request.request_id), encode(request)):
            return request
        stored = self.read_request(request.request_id)
        if stored is None:  # swept in this moment: it was answered long ago
            raise RequestConflict(f"expected a new request id, found that {request.request_id!r} was in use until just now")
        return self.same(stored, request)

    def same(self, stored: ControlRequest, request: ControlRequest) -> ControlRequest:
        """The stored request if the other one asks for the same. Raises RequestConflict."""
        if stored.asks_for != request.asks_for:
            found, wanted = stored.asks_for, request.asks_for
            differs = ", ".join(f"{name}={found[name]!r}, now {wanted[name]!r}" for name in found if found[name] != wanted[name])
            raise RequestConflict(
                f"request id {request.request_id!r} was used before, by {stored.asked_by}, for something else: {differs}. "
                "Use a new id, or ask for the same again"
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
        """What has been said about a request; None before the owner has seen it. Raises CorruptAnswer."""
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

        A file that is no request, or asks for what no pipeline could do, is answered INVALID_REQUEST here, and never stops
        the others.

        Raises:
            StorageUnavailable: storage cannot be asked; nothing is lost.
        """
        requests = [request for request in self._unanswered() if request.epoch == epoch]
        return sorted(requests, key=lambda request: (request.asked_at, request.request_id))

    def refuse_older(self, epoch: int, message: str = "") -> list[str]:
        """Answer what was asked of earlier owners, who will not: NO_RUNNING_PIPELINE. Call it once after acquiring.

        Args:
            epoch: of the caller, who owns the pipeline.
            message: what is known of how the earlier run ended.

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
        """Say what became of a request. The first final answer stands.

        Returns:
            The answer that stands.

        Raises:
            StorageUnavailable, OutcomeUnknown: call it again.
        """
        if not answer.final:
            self._store.put(self._layout.accepted(answer.request_id), encode(answer))
            return answer
        key = self._layout.answer(answer.request_id)
        if create_if_absent(self._store, key, encode(answer)):
            return answer
        try:
            return decode_answer(self._store.get(key), self._url(key))
        except NotFound:  # swept in this moment
            return answer

    def sweep(self, seconds: float) -> int:
        """Delete requests answered long ago, with their answers. Their ids can then be used anew.

        Ages are measured by the store's own clock, against the newest file here, so no two machines' clocks are compared.

        Args:
            seconds: between the answer and the newest file in ``requests/``.

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
            files = self._list()
            asked = {file.request_id for file in files if file.part == "request"}
            answered = {file.request_id for file in files if file.part == "answer"}
            for gone in self._read.keys() - (asked - answered):
                del self._read[gone]
            return list(self._read_new(sorted(asked - answered)))

    def _read_new(self, request_ids: Iterable[str]) -> Iterable[ControlRequest]:
        for request_id in request_ids:
            if request_id not in self._read:
                try:
                    request = self.read_request(request_id)
                    if request is not None:
                        self._read[request_id] = validate_request(request)
                except (CorruptRequest, InvalidRequest) as error:
                    self._refuse_broken(request_id, error)
            if request_id in self._read:
                yield self._read[request_id]

    def _refuse_broken(self, request_id: str, why: StorageError) -> None:
        try:
            self.answer(failure(request_id, INVALID_REQUEST, str(why)))
            _log.warning("Refused request %s: %s", request_id, why)
        except StorageError as error:  # the next listing shows it again
            _log.warning("Request %s is broken (%s), and that could not be answered: %s", request_id, why, error)

    def _url(self, key: str) -> str:
        return f"{self._store.url}/{key}"
