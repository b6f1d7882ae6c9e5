"""What a FileSink records beside its files: the files of a transaction, those of a commit for readers, and the stage.

Values only; must not know the file system.
"""

from __future__ import annotations

import msgspec

from dagster_checkpoints.sinks.engine import SinkScope
from dagster_checkpoints.sinks.files.names import FileCommitName
from dagster_checkpoints.systems.errors import SinkPathInUse


class StagedPart(msgspec.Struct, frozen=True):
    """A staged file, which becomes a visible one.

    Args:
        number: its number in the transaction, from 0.
        folder: the folder of its partition, empty if there is none.
        rows: the number of its rows.
        bytes: its size.
    """

    number: int
    folder: str
    rows: int
    bytes: int


class StagedParts(msgspec.Struct, frozen=True):
    """Content of a transaction's file, and of its commit's.

    Args:
        extension: the format's name, with which the names of visible files end.
        parts: the files.
    """

    extension: str
    parts: tuple[StagedPart, ...]
    version: int = 1

    def visible(self, name: FileCommitName) -> list[str]:
        """The names of the files when they are visible."""
        return [name.part(part.folder, part.number, self.extension) for part in self.parts]

    def staged(self, name: FileCommitName) -> list[str]:
        """The names of the files when they are staged."""
        return [name.staged_part(part.number) for part in self.parts]

    def taken_back(self, name: FileCommitName) -> list[str]:
        """The names of the files when they are taken back."""
        return [name.taken_back(part.number) for part in self.parts]


class ManifestFile(msgspec.Struct, frozen=True):
    path: str
    rows: int
    bytes: int


class FileManifest(msgspec.Struct, frozen=True):
    """Content of a manifest, for readers.

    Args:
        checkpoint: id of the checkpoint.
        pipeline: the pipeline's name.
        stage: the stage's name.
        instance: the instance's index.
        files: path relative to the sink's location, number of rows and size of each file.
    """

    checkpoint: int
    pipeline: str
    stage: str
    instance: int
    files: tuple[ManifestFile, ...]
    version: int = 1


# Created at import: two threads that decode a type for the first time at the same moment crash msgspec.
PARTS = msgspec.json.Decoder(StagedParts)


class StageMark(msgspec.Struct, frozen=True):
    """Content of the file that says which stage writes to the location; the first run creates it.

    Args:
        pipeline: the pipeline's name.
        stage: the stage's name.
        history: the history of the storage that counted the stage's jobs first.
    """

    pipeline: str
    stage: str
    history: str = ""
    version: int = 1


_MARKS = msgspec.json.Decoder(StageMark)


def encoded_mark(scope: SinkScope) -> bytes:
    """The mark that a stage leaves, as the file's bytes."""
    mark = StageMark(scope.pipeline, scope.stage, scope.owner.history)
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
