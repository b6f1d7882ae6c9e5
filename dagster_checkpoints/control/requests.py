"""Requests to a running pipeline and their answers: values, their encoding, and the checks of a request.

Must not know url they are stored (:mod:`request_box`), or how a request is carried out.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from dagster_checkpoints.errors import CorruptAnswer, CorruptRequest, InvalidRequest, InvalidStorageUrl
from dagster_checkpoints.execution.job_requests import BoundedSources
from dagster_checkpoints.execution.moments import Moment, WithMoments
from dagster_checkpoints.files.urls import validate_directory
from dagster_checkpoints.storage.layout import validate_request_id, validate_savepoint_name

VERSION = 1
NO_RUNNING_PIPELINE = "NO_RUNNING_PIPELINE"
"""Reason of an answer: the run that the request was addressed to has ended."""
INVALID_REQUEST = "INVALID_REQUEST"
"""Reason of an answer: the request cannot be read, or no pipeline could carry it out."""

RequestKind = Literal["checkpoint", "savepoint", "stop", "end_source"]
AnswerStatus = Literal["accepted", "done", "failed"]


class ControlRequest(WithMoments, frozen=True, kw_only=True):
    """A request to a running pipeline.

    Args:
        request_id: id of the request, which makes repeating it harmless; letters, digits, ``_``, ``-`` and ``.``.
        kind: what the pipeline is to do.
        epoch: epoch of the owner that the request is addressed to; another owner does not carry it out.
        deadline_seconds: how long the owner may try, in seconds by its own clock, from when it first sees the request.
        asked_by: the requester, as people read it: a run, a sensor, a user and host.
        asked_at: wall clock of the requester when it sent the request; for display and order.
        drain: of a stop: True sends MAX_WATERMARK and end of data first; False suspends.
        bounded: of a drain: "cut" ends bounded sources where they are, "finish" waits until they have been read to their end.
        target: of a savepoint or stop: directory (URL or absolute path) in which the savepoint is made; "" for the directory
            of the pipeline's savepoints.
        name: of a savepoint or stop: part of the savepoint's directory's name; "" lets the owner choose one.
        stage: of end_source: name of the source that ends.
        instance: of end_source: name of the only instance that ends; None for all instances.
        recorded_by_asker: the requester records the savepoint in Dagster, so the owner does not.
        version: version of this format.
    """

    request_id: str
    kind: RequestKind
    epoch: int
    deadline_seconds: float
    asked_by: str
    asked_at: Moment
    drain: bool = False
    bounded: BoundedSources = "cut"
    target: str = ""
    name: str = ""
    stage: str = ""
    instance: str | None = None
    recorded_by_asker: bool = False
    version: int = VERSION

    @property
    def asks_for(self) -> dict[str, Any]:
        """The fields in which two requests of one id must agree."""
        names = ("kind", "drain", "bounded", "target", "name", "stage", "instance")
        return {name: getattr(self, name) for name in names}


class Answer(WithMoments, frozen=True, kw_only=True):
    """The owner's answer to a request.

    Args:
        request_id: id of the request.
        status: outcome of the request; after ``accepted`` a final answer follows.
        reason: of a failure: the name of a coordination ``FailureReason``, NO_RUNNING_PIPELINE or INVALID_REQUEST.
        message: explanation for people.
        checkpoint_id: id of the checkpoint or savepoint that was taken.
        location: location of that checkpoint or savepoint, as the storage floor takes it; also of a failure after the savepoint.
        url: URL of that checkpoint or savepoint, for people.
        answered_at: wall clock of the owner; for display.
        details: other facts that the owner reports, by name.
        version: version of this format.
    """

    request_id: str
    status: AnswerStatus
    answered_at: Moment
    reason: str = ""
    message: str = ""
    checkpoint_id: int | None = None
    location: str = ""
    url: str = ""
    details: dict[str, Any] = msgspec.field(default_factory=dict)
    version: int = VERSION

    @property
    def final(self) -> bool:
        """Whether no other answer follows."""
        return self.status != "accepted"


class _FileVersion(msgspec.Struct):
    version: int = VERSION


# Made at import: two threads that decode a type for the first time at the same moment crash msgspec.
_VERSIONS = msgspec.json.Decoder(_FileVersion)
_REQUESTS = msgspec.json.Decoder(ControlRequest)
_ANSWERS = msgspec.json.Decoder(Answer)


def validate_request(request: ControlRequest) -> ControlRequest:
    """Refuse a request that no pipeline could carry out.

    Raises:
        InvalidRequest: names the argument, what was expected and what was found.
    """
    validate_request_id(request.request_id)
    for name in ("target", "stage", "instance", "asked_by"):
        if not _is_unicode(value := getattr(request, name) or ""):
            raise InvalidRequest(f"expected a {name} that is text in UTF-8, found {value!r}: requests are stored as JSON")
    if not 0 < request.deadline_seconds < math.inf:
        raise InvalidRequest(f"expected a deadline of more than 0 seconds, found {request.deadline_seconds!r}")
    if request.kind not in ("savepoint", "stop") and (request.target or request.name):
        raise InvalidRequest(f"expected a target and a name only with a savepoint or a stop, found them with {request.kind!r}")
    if request.drain and request.kind != "stop":
        raise InvalidRequest(f"expected drain only with a stop, found it with {request.kind!r}")
    if request.bounded == "finish" and not request.drain:
        raise InvalidRequest(
            "expected bounded='finish' only with a drain, found it with another request: only a drain ends sources"
        )
    if request.kind == "end_source" and not request.stage:
        raise InvalidRequest("expected the name of the source that is to end, found none")
    if request.kind != "end_source" and (request.stage or request.instance is not None):
        raise InvalidRequest(f"expected a stage or instance only with end_source, found one with {request.kind!r}")
    if request.name:
        validate_savepoint_name(request.name)
    if request.target:
        try:
            validate_directory(request.target)
        except InvalidStorageUrl as error:
            raise InvalidRequest(f"the savepoint cannot be made in {request.target!r}: {error}") from error
    return request


def _is_unicode(text: str) -> bool:
    """Whether the text has no bytes that Python could not decode, as arguments of a command may have."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def failure(request_id: str, reason: str, message: str) -> Answer:
    """The final answer to a request that was refused or failed."""
    return Answer(request_id=request_id, status="failed", reason=reason, message=message, answered_at=datetime.now(UTC))


def encode(value: ControlRequest | Answer) -> bytes:
    """A request or an answer as the bytes of its file."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def decode_request(request_id: str, data: bytes, url: str) -> ControlRequest:
    """The request in the bytes of its file.

    Args:
        request_id: id that the request must have.
        data: content of the file.
        url: URL of the file, for errors.

    Raises:
        CorruptRequest: the file is no request, has another id, or was written by a newer release.
    """
    try:
        version = _VERSIONS.decode(data).version
        if version == VERSION:
            request = _REQUESTS.decode(data)
            if request.request_id == request_id:
                return request
            raise CorruptRequest(f"expected the request {request_id!r} in {url}, found that of {request.request_id!r}")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptRequest(
            f"expected a control request as JSON in {url}, found {len(data)} bytes that are not: {error}. Send "
            "requests with PipelineControl or the command line rather than by writing the file"
        ) from error
    raise CorruptRequest(f"expected a request of version {VERSION} in {url}, found version {version}: a newer release wrote it")


def decode_answer(data: bytes, url: str) -> Answer:
    """The answer in the bytes of its file.

    Args:
        data: content of the file.
        url: URL of the file, for errors.

    Raises:
        CorruptAnswer: the file is no answer, or a newer release wrote it.
    """
    try:
        version = _VERSIONS.decode(data).version
        if version == VERSION:
            return _ANSWERS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptAnswer(
            f"expected the answer to a control request as JSON in {url}, found {len(data)} bytes that are not: {error}. "
            "The pipeline's checkpoints and savepoints show whether the request was carried out"
        ) from error
    raise CorruptAnswer(f"expected an answer of version {VERSION} in {url}, found version {version}: a newer release wrote it")
