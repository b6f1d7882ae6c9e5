"""What is asked of a running pipeline, and what is answered: values, their encoding, and what makes no sense.

Must not know where they lie (:mod:`request_box`), who carries a request out, or how.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec

from dagster_checkpoints.storage.errors import CorruptAnswer, CorruptRequest, InvalidRequest, InvalidStorageUrl
from dagster_checkpoints.storage.layout import validate_request_id, validate_savepoint_name
from dagster_checkpoints.storage.urls import validate_directory

VERSION = 1
NO_RUNNING_PIPELINE = "NO_RUNNING_PIPELINE"
"""Reason of an answer: the run that the request was addressed to is over."""
INVALID_REQUEST = "INVALID_REQUEST"
"""Reason of an answer: the request cannot be read, or asks for what no pipeline could do."""

Moment = Annotated[datetime, msgspec.Meta(tz=True)]
"""A wall-clock time that says its time zone: one without could not be compared with the others."""
RequestKind = Literal["checkpoint", "savepoint", "stop", "end_source"]
AnswerStatus = Literal["accepted", "done", "failed"]


class ControlRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody asks of a running pipeline.

    Args:
        request_id: makes a repeated request harmless; letters, digits, ``_``, ``-`` and ``.``.
        kind: what is to be done.
        epoch: of the owner that it is addressed to; another one does not carry it out.
        deadline_seconds: how long the owner may try, by its own clock, from when it first sees the request.
        asked_by: who, for people: a run, a sensor, a user and host.
        asked_at: wall clock of the asker; for display and order.
        drain: of a stop: with MAX_WATERMARK and end of data; otherwise it suspends.
        target: of a savepoint or stop: directory (URL or absolute path) in which the savepoint is made; "" for the pipeline's
            own.
        name: of a savepoint or stop: part of the savepoint's directory's name; "" leaves it to the owner.
        stage: of end_source: the source that ends.
        instance: of end_source: only this one of its instances.
        recorded_by_asker: the asker reports the savepoint to people, so the owner need not.
        version: of this format.
    """

    request_id: str
    kind: RequestKind
    epoch: int
    deadline_seconds: float
    asked_by: str
    asked_at: Moment
    drain: bool = False
    target: str = ""
    name: str = ""
    stage: str = ""
    instance: str | None = None
    recorded_by_asker: bool = False
    version: int = VERSION

    @property
    def asks_for(self) -> dict[str, Any]:
        """What two requests of one id must agree in."""
        names = ("kind", "drain", "target", "name", "stage", "instance")
        return {name: getattr(self, name) for name in names}


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request.

    Args:
        request_id: of the request.
        status: ``accepted`` is not the last word.
        reason: of a failure: the name of a coordination ``FailureReason``, NO_RUNNING_PIPELINE or INVALID_REQUEST.
        message: for people.
        checkpoint_id: of the checkpoint or savepoint taken.
        location: where it lies, as the storage floor takes it; also of a failure after the savepoint.
        url: where it lies, for people.
        answered_at: wall clock of the owner; for display.
        details: whatever else the owner tells.
        version: of this format.
    """

    request_id: str
    status: AnswerStatus
    answered_at: Moment
    reason: str = ""
    message: str = ""
    checkpoint_id: int | None = None
    location: str = ""
    url: str = ""
    details: dict[str, Any] = {}
    version: int = VERSION

    @property
    def final(self) -> bool:
        """Nothing more will be said about the request."""
        return self.status != "accepted"


class _Version(msgspec.Struct):
    version: int = VERSION


# Made here: two threads that decode a type for the first time at the same moment crash msgspec.
_VERSIONS = msgspec.json.Decoder(_Version)
_REQUESTS = msgspec.json.Decoder(ControlRequest)
_ANSWERS = msgspec.json.Decoder(Answer)


def validate_request(request: ControlRequest) -> ControlRequest:
    """Refuse what no pipeline could carry out.

    Raises:
        InvalidRequest: names the argument, what was expected and what was found.
    """
    validate_request_id(request.request_id)
    if not 0 < request.deadline_seconds < math.inf:
        raise InvalidRequest(f"expected a deadline of more than 0 seconds, found {request.deadline_seconds!r}")
    if request.kind not in ("savepoint", "stop") and (request.target or request.name):
        raise InvalidRequest(f"expected a target and a name only with a savepoint or a stop, found them with {request.kind!r}")
    if request.drain and request.kind != "stop":
        raise InvalidRequest(f"expected drain only with a stop, found it with {request.kind!r}")
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
            raise InvalidRequest(f"the savepoint cannot be made there: {error}") from error
    return request


def failure(request_id: str, reason: str, message: str) -> Answer:
    """A final answer that says no."""
    return Answer(request_id=request_id, status="failed", reason=reason, message=message, answered_at=datetime.now(UTC))


def encode(value: ControlRequest | Answer) -> bytes:
    """A request or an answer as the bytes of its file."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def decode_request(request_id: str, data: bytes, where: str) -> ControlRequest:
    """The request of an id in the bytes of its file, which lies at the URL ``where``.

    Raises:
        CorruptRequest: it is no request, another id's, or a newer release wrote it.
    """
    try:
        version = _VERSIONS.decode(data).version
        if version == VERSION:
            request = _REQUESTS.decode(data)
            if request.request_id == request_id:
                return request
            raise CorruptRequest(f"expected the request {request_id!r} in {where}, found that of {request.request_id!r}")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptRequest(
            f"expected a control request as JSON in {where}, found {len(data)} bytes that are not: {error}. Ask through "
            "PipelineControl or the command line rather than by writing the file"
        ) from error
    raise CorruptRequest(f"expected a request of version {VERSION} in {where}, found version {version}: a newer release asked")


def decode_answer(data: bytes, where: str) -> Answer:
    """The answer in the bytes of its file, which lies at the URL ``where``.

    Raises:
        CorruptAnswer: it is none, or a newer release wrote it.
    """
    try:
        version = _VERSIONS.decode(data).version
        if version == VERSION:
            return _ANSWERS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptAnswer(
            f"expected the answer to a control request as JSON in {where}, found {len(data)} bytes that are not: {error}. "
            "Whether the request was carried out is to be seen from the pipeline's checkpoints and savepoints"
        ) from error
    raise CorruptAnswer(f"expected an answer of version {VERSION} in {where}, found version {version}: a newer release answered")
