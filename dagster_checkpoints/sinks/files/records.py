"""What a FileSink records beside its files: the files of a transaction, and those of a commit for readers.

Values only; must not know the file system.
"""

from __future__ import annotations

import msgspec

from dagster_checkpoints.sinks.files.names import FileCommitName


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
