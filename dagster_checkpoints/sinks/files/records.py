"""What a FileSink records beside its files: the files of a transaction, and the restores of a job.

Values only; must not know the file system.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dagster_checkpoints.sinks.branches import Branches
from dagster_checkpoints.sinks.files.names import FileCommitName, staged_name


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
        return [f"{name.staged}/{staged_name(part.number)}" for part in self.parts]

    def taken_back(self, name: FileCommitName) -> list[str]:
        """The names of the files when they are taken back."""
        return [name.taken_back(part.number) for part in self.parts]


class JobTimeline(msgspec.Struct, frozen=True):
    """What one instance of one job has recorded about its restores.

    Args:
        branches: the branches of the job's checkpoints.
        taken_back: the commits that readers do not see.
        unfinished: those of them whose files are being moved: each file is visible or taken back.
    """

    branches: Branches = Branches()
    taken_back: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    version: int = 1

    def taking_back(self, names: Iterable[str], unfinished: Iterable[str] = ()) -> JobTimeline:
        """The same branches, with these commits taken back."""
        return JobTimeline(self.branches, tuple(sorted(names)), tuple(sorted(unfinished)))


# Created at import: two threads that decode a type for the first time at the same moment crash msgspec.
PARTS = msgspec.json.Decoder(StagedParts)
TIMELINES = msgspec.json.Decoder(JobTimeline)
