"""The names of files below the storage root. Must not read or write them.

::

    <root>/<pipeline>/state.json                          owner, epoch, lease, newest completed checkpoint
    <root>/<pipeline>/checkpoints/chk-42-<epoch>/_metadata
    <root>/<pipeline>/shared/<sha256>-<epoch>             state files, by content and the owner that stored them
    <root>/<pipeline>/savepoints/savepoint-43-<name>-<token>/_metadata
    <root>/<pipeline>/savepoints/savepoint-43-<name>-<token>/state/<sha256>
    <root>/<pipeline>/savepoints/savepoint-43-<name>-<token>/_incomplete   while it is being written
    <root>/<pipeline>/requests/<id>.json                  a request; <id>.accepted.json, <id>.answer.json: its answers
    <root>/<pipeline>/status.json                         the job's status, for display
    <root>/<pipeline>/history/<epoch>-<number>.json       what runs did, for the report
    <root>/<pipeline>/report.html                         the report, written while a run lives

A *location* is a checkpoint's directory relative to the pipeline's, such as ``checkpoints/chk-42-3``: it
stays valid when the whole root is moved or copied. The location of a savepoint outside the pipeline's directory is its URL.

An owner of the pipeline writes only names that contain its own epoch; :mod:`dagster_checkpoints.execution.shared_files` says why.
Files in ``shared/`` that are named by their sha256 alone were stored by releases without epochs in these names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dagster_checkpoints.errors import InvalidKey, InvalidRequest
from dagster_checkpoints.execution.shared_files import SharedName as SharedName

METADATA = "_metadata"
INCOMPLETE = "_incomplete"
STATE = "state/"
PIPELINE_STATE = "state.json"
SAVEPOINTS = "savepoints"
REPORT = "report.html"
_PIPELINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*")
_CHECKPOINT = re.compile(r"checkpoints/chk-(\d+)-(\d+)")
_SAVEPOINT = re.compile(r"savepoint-(\d+)(?:-(.+?))??(?:-[0-9a-f]{6})?")
_HISTORY = re.compile(r"(\d+)-(\d+)\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}")
_ACCEPTED = ".accepted"
_ANSWER = ".answer"


class CheckpointKey(NamedTuple):
    """A checkpoint attempt: a later owner, with a larger epoch, may use an id again that an earlier owner did not complete."""

    checkpoint_id: int
    epoch: int


class HistoryKey(NamedTuple):
    """A file in ``history/``: the epoch of the owner that writes it, and its number, from 1; a later file is larger."""

    epoch: int
    number: int


RequestPart = Literal["request", "accepted", "answer"]


class RequestFile(NamedTuple):
    """A file in ``requests/``: the request itself, the note that it was accepted, or its final answer."""

    request_id: str
    part: RequestPart


def validate_request_id(request_id: str) -> str:
    """Refuse ids that cannot be a file's name.

    Raises:
        InvalidRequest: says what an id may be.
    """
    if not _NAME.fullmatch(request_id) or request_id.endswith((_ACCEPTED, _ANSWER)):
        raise InvalidRequest(
            f"expected a request id of at most 128 letters, digits, '_', '-' and '.', beginning with a letter or digit and "
            f"not ending with {_ACCEPTED!r} or {_ANSWER!r}, found {request_id!r}: it names files of the checkpoint storage"
        )
    return request_id


def validate_savepoint_name(name: str) -> str:
    """Refuse names that cannot be part of a savepoint's directory.

    Raises:
        InvalidRequest: says what a name may be.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"expected a savepoint's name of at most 128 letters, digits, '_', '-' and '.', beginning with a letter or digit, "
            f"found {name!r}: it becomes part of a directory's name. Choose another one (in Dagster: a partition key); where a "
            "savepoint is stored, its target says (in Dagster: `path`)"
        )
    return name


def validate_sha256(sha256: str) -> str:
    """Refuse a text that is not a hash: it becomes part of a key. Raises InvalidKey."""
    if not _SHA256.fullmatch(sha256):
        raise InvalidKey(f"expected a sha256 of 64 hexadecimal digits, found {sha256!r}")
    return sha256


def sha256_in(key: str) -> str:
    """The hash that the key of a savepoint's state file ends with, or ""."""
    name = key.rpartition("/")[2]
    return name if _SHA256.fullmatch(name) else ""


@dataclass(frozen=True)
class Layout:
    """Keys of one pipeline's objects.

    Args:
        pipeline: the pipeline's name; becomes a directory.

    Raises:
        InvalidKey: the name cannot be a directory's name.
    """

    pipeline: str

    def __post_init__(self) -> None:
        if not _PIPELINE.fullmatch(self.pipeline):
            raise InvalidKey(
                f"expected a pipeline name of letters, digits, '_', '-' and '.', beginning with a letter or "
                f"digit, found {self.pipeline!r}: it names a directory of the checkpoint storage"
            )

    @property
    def state(self) -> str:
        return f"{self.pipeline}/{PIPELINE_STATE}"

    @property
    def checkpoints(self) -> str:
        return f"{self.pipeline}/checkpoints/"

    @property
    def shared(self) -> str:
        return f"{self.pipeline}/shared/"

    def shared_file(self, name: str) -> str:
        """The key of a file in ``shared/``. Raises InvalidKey if its name is not a :class:`SharedName`."""
        if SharedName.parse(name) is None:
            raise InvalidKey(f"expected a state file's name, <sha256>-<epoch> or <sha256> alone, found {name!r}")
        return f"{self.shared}{name}"

    @property
    def savepoints(self) -> str:
        return f"{self.pipeline}/{SAVEPOINTS}/"

    @property
    def status(self) -> str:
        return f"{self.pipeline}/status.json"

    @property
    def report(self) -> str:
        return f"{self.pipeline}/{REPORT}"

    @property
    def history(self) -> str:
        return f"{self.pipeline}/history/"

    def history_segment(self, key: HistoryKey) -> str:
        return f"{self.history}{key.epoch}-{key.number}.json"

    def parse_history(self, key: str) -> HistoryKey | None:
        """The epoch and number in a key below ``history/``; None if this package writes no such file."""
        match = _HISTORY.fullmatch(key.removeprefix(self.history))
        return HistoryKey(int(match[1]), int(match[2])) if match else None

    @property
    def requests(self) -> str:
        return f"{self.pipeline}/requests/"

    def request(self, request_id: str) -> str:
        return f"{self.requests}{validate_request_id(request_id)}.json"

    def accepted(self, request_id: str) -> str:
        """The key of the note that a request was accepted; the file may be replaced."""
        return f"{self.requests}{validate_request_id(request_id)}{_ACCEPTED}.json"

    def answer(self, request_id: str) -> str:
        """The key of a request's final answer; the file is created once."""
        return f"{self.requests}{validate_request_id(request_id)}{_ANSWER}.json"

    def parse_request(self, key: str) -> RequestFile | None:
        """The request and the part of it in a key below ``requests/``; None if this package writes no such file."""
        stem, dot, ending = key.removeprefix(self.requests).rpartition(".")
        if not dot or ending != "json":
            return None
        part: RequestPart = "request"
        if stem.endswith(_ACCEPTED):
            part, stem = "accepted", stem.removesuffix(_ACCEPTED)
        elif stem.endswith(_ANSWER):
            part, stem = "answer", stem.removesuffix(_ANSWER)
        return RequestFile(stem, part) if _NAME.fullmatch(stem) else None

    def at(self, location: str, name: str = "") -> str:
        """The key of the file ``name`` in the directory ``location``."""
        return f"{self.pipeline}/{location.strip('/')}/{name}"

    @staticmethod
    def checkpoint(checkpoint_id: int, epoch: int) -> str:
        """The location of a checkpoint."""
        return f"checkpoints/chk-{checkpoint_id}-{epoch}"

    @staticmethod
    def parse_checkpoint(location: str) -> CheckpointKey | None:
        """The id and epoch in a location; None if it is not a checkpoint's location."""
        match = _CHECKPOINT.fullmatch(location.strip("/"))
        return CheckpointKey(int(match[1]), int(match[2])) if match else None

    @staticmethod
    def savepoint(checkpoint_id: int, name: str, token: str) -> str:
        """The name of a new savepoint's directory.

        The token makes the name unique: an owner that lost the pipeline, or another pipeline, may write to the same directory
        at the same time.
        """
        return "-".join(part for part in ("savepoint", str(checkpoint_id), name, token) if part)

    @staticmethod
    def is_savepoint(location: str) -> bool:
        """Whether a location is a directory in ``savepoints/``, under any name: users may copy savepoints there."""
        folder, _, name = location.partition("/")
        return folder == SAVEPOINTS and bool(name) and "/" not in name

    @staticmethod
    def parse_savepoint(folder: str) -> tuple[int, str] | None:
        """The checkpoint's id and the savepoint's name in a directory's name; None if it is not a savepoint's directory."""
        match = _SAVEPOINT.fullmatch(folder)
        return (int(match[1]), match[2] or "") if match else None
