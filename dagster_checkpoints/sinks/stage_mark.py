"""The mark in a sink's place that says which stage writes there: a file that the first run creates.

Must not know the rows, nor where the file is.
"""

from __future__ import annotations

import msgspec

from dagster_checkpoints.sinks.engine import SinkScope
from dagster_checkpoints.systems.errors import SinkPathInUse


class StageMark(msgspec.Struct, frozen=True):
    """Content of the file.

    Args:
        pipeline: the pipeline's name.
        stage: the stage's name.
        history: the history of the storage that counted the stage's jobs first.
    """

    pipeline: str
    stage: str
    history: str = ""
    version: int = 1


# Created at import: two threads that decode a type for the first time at the same moment crash msgspec.
_MARKS = msgspec.json.Decoder(StageMark)


def mark_of(scope: SinkScope) -> StageMark:
    """The mark that a stage leaves."""
    return StageMark(scope.pipeline, scope.stage, scope.owner.history)


def encoded(mark: StageMark) -> bytes:
    """The file's bytes."""
    return msgspec.json.format(msgspec.json.encode(mark), indent=2) + b"\n"


def read_mark(data: bytes, scope: SinkScope, place: object, file: object) -> StageMark:
    """The mark in a file, if it names the stage.

    Args:
        data: the file's bytes.
        scope: an instance of the stage.
        place: path or URL of the sink's place, for errors.
        file: path or URL of the file, for errors.

    Raises:
        SinkPathInUse: another stage or pipeline writes there, or the file cannot be read.
    """
    try:
        found = _MARKS.decode(data)
    except msgspec.DecodeError as error:
        raise SinkPathInUse(
            f"expected {file} to say which stage writes to {place}, found a file that cannot be "
            f"read: {error}. If only this stage writes there, delete that file"
        ) from error
    if (found.pipeline, found.stage) != (scope.pipeline, scope.stage):
        raise SinkPathInUse(
            f"expected {place} to belong to stage {scope.stage!r} of pipeline {scope.pipeline!r}, "
            f"found that stage {found.stage!r} of pipeline {found.pipeline!r} writes there. Give each "
            f"sink its own path; if the stage was renamed, correct {file}"
        )
    return found
