"""The names of a FileSink's files below its location, and what it records in those beside its rows.

::

    part-00000-42-job1.h1-0-e7.h1-<attempt>-000003.parquet               visible: file 0 of a transaction of checkpoint 42, job 1,
    day=2024-01-01/part-00000-….parquet                                  instance 0; likewise, of a partition
    _manifests/42-job1.h1-0-….manifest                                   the files of a commit, if asked for
    _dagster_checkpoints/stage                                           the stage that writes here
    _dagster_checkpoints/columns                                         the columns of its rows
    _dagster_checkpoints/0/ledger                                        what instance 0 has committed, see sinks/ledger.py
    _dagster_checkpoints/0/staged/e7.h1-<attempt>-000003/00000.staged    staged file
    _dagster_checkpoints/0/staged/e7.h1-<attempt>-000003/transaction     all staged files of a pre-committed transaction
    _dagster_checkpoints/0/commits/1.h1/42-job1.h1-0-…                   likewise, once they are visible
    _dagster_checkpoints/0/taken-back/42-job1.h1-0-…/00000.staged        file that a restore has taken back

Readers skip names that begin with ``_``. Those who read by a pattern such as ``**/*.json`` do not: so only visible files end with
the format's name. Values only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from dagster_checkpoints.sinks.engine import SinkScope
from dagster_checkpoints.sinks.ledger import Commit
from dagster_checkpoints.systems.errors import SinkPathInUse

OWN = "_dagster_checkpoints"
STAGE_MARK = f"{OWN}/stage"
COLUMNS = f"{OWN}/columns"
MANIFESTS = "_manifests"
STAGED = ".staged"
"""With what the names of staged files end."""

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"
_COMMIT = rf"(?P<id>\d+)-job(?P<job>\d+(?:\.\w+)?)-(?P<index>\d+)-(?P<name>{_NAME}-\d{{6,}})"
_TRANSACTION = re.compile(_COMMIT)
_PART = re.compile(rf"part-\d{{5,}}-{_COMMIT}\.\w+")

VALID_NAME = re.compile(_NAME)
"""What can be a part of these names."""


@dataclass(frozen=True, slots=True)
class FileCommitName:
    """A transaction of one instance, or its commit.

    Args:
        commit: what it is, or will be, committed under.
        name: the transaction's name.
    """

    commit: Commit
    name: str

    @property
    def text(self) -> str:
        """The name as text."""
        return f"{self.commit.checkpoint}-job{self.commit.job}-{self.commit.index}-{self.name}"

    @property
    def staged(self) -> str:
        """The folder of its staged files."""
        return f"{transactions_folder(self.commit.index)}/{self.name}"

    @property
    def transaction(self) -> str:
        """The file that lists its staged files."""
        return transaction_file(self.staged)

    @property
    def record(self) -> str:
        """The file that lists its committed files."""
        return f"{commits_folder(self.commit.index)}/{self.commit.job}/{self.text}"

    @property
    def manifest(self) -> str:
        """The file that lists its committed files for readers."""
        return f"{MANIFESTS}/{self.text}.manifest"

    def part(self, folder: str, number: int, extension: str) -> str:
        """The name of a visible file.

        Args:
            folder: the folder of its partition, empty if there is none.
            number: the file's number in the transaction, from 0.
            extension: the format's name.
        """
        name = f"part-{number:05d}-{self.text}.{extension}"
        return f"{folder}/{name}" if folder else name

    def staged_part(self, number: int) -> str:
        """The name of a staged file."""
        return f"{self.staged}/{staged_name(number, STAGED)}"

    def taken_back(self, number: int) -> str:
        """The name of a file that was taken back."""
        return f"{taken_back_folder(self.commit.index)}/{self.text}/{staged_name(number, STAGED)}"


def parse_commit(text: str) -> FileCommitName | None:
    """The commit that a text names; None for any other text."""
    return _commit(_TRANSACTION.fullmatch(text))


def commit_of_part(name: str) -> FileCommitName | None:
    """The commit that a visible file belongs to; None for a file that no FileSink has written."""
    return _commit(_PART.fullmatch(name.rpartition("/")[2]))


def instance_folder(index: int) -> str:
    """The folder of one instance's own files."""
    return f"{OWN}/{index}"


def ledger_name(index: int) -> str:
    return f"{instance_folder(index)}/ledger"


def former_owner(index: int) -> str:
    """What the names begin with of the files by which the records of an earlier release are known; in HDFS a number follows."""
    return f"{instance_folder(index)}/owner"


def commits_folder(index: int) -> str:
    return f"{instance_folder(index)}/commits"


def taken_back_folder(index: int) -> str:
    return f"{instance_folder(index)}/taken-back"


def transactions_folder(index: int) -> str:
    """The folder with the folders of all staged transactions."""
    return f"{instance_folder(index)}/staged"


def transaction_file(folder: str) -> str:
    """The file in a transaction's folder that lists its staged files."""
    return f"{folder}/transaction"


def staged_name(number: int, ending: str) -> str:
    """The name of a staged file in its folder."""
    return f"{number:05d}{ending}"


def _commit(found: re.Match[str] | None) -> FileCommitName | None:
    if found is None:
        return None
    return FileCommitName(Commit(found["job"], int(found["index"]), int(found["id"])), found["name"])


class StagedPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


class StagedParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


class StageMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
