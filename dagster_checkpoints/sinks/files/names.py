"""The names of a FileSink's files below its location.

::

    part-00000-42-job1.h1-0-e7.h1-<attempt>-000003.parquet               visible: file 0 of a transaction of checkpoint 42, job 1,
    day=2024-01-01/part-00000-….parquet                                  instance 0; likewise, of a partition
    _manifests/42-job1.h1-0-….manifest                                   the files of a commit, if asked for
    _dagster_checkpoints/stage                                           the stage that writes here
    _dagster_checkpoints/columns                                         the columns of its rows
    _dagster_checkpoints/0/owner                                         the newest owner of instance 0
    _dagster_checkpoints/0/staged/e7.h1-<attempt>/000003/00000.staged    staged file
    _dagster_checkpoints/0/staged/e7.h1-<attempt>/000003/transaction     all staged files of a pre-committed transaction
    _dagster_checkpoints/0/commits/1.h1/42-job1.h1-0-…                   likewise, once its commit has begun
    _dagster_checkpoints/0/taken-back/42-job1.h1-0-…/00000.staged        file that a restore has taken back
    _dagster_checkpoints/0/timelines/1.h1                                the restores of job 1, see sinks/branches.py

Readers skip names that begin with ``_``. Those who read by a pattern such as ``**/*.json`` do not: so only visible files end with
the format's name. Must not know what is in the files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dagster_checkpoints.sinks.base import SinkContext

OWN = "_dagster_checkpoints"
STAGE_MARK = f"{OWN}/stage"
COLUMNS = f"{OWN}/columns"
MANIFESTS = "_manifests"

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"
_COMMIT = rf"(?P<id>\d+)-job(?P<job>\d+(?:\.\w+)?)-(?P<index>\d+)-(?P<attempt>{_NAME})-(?P<number>\d{{6,}})"
_TRANSACTION = re.compile(_COMMIT)
_PART = re.compile(rf"part-\d{{5,}}-{_COMMIT}\.\w+")
_STAGED = re.compile(rf"{OWN}/(?P<index>\d+)/staged/(?P<attempt>{_NAME})/(?P<number>\d{{6,}})/.*")

VALID_ATTEMPT = re.compile(_NAME)
"""A token that can be a part of these names."""


@dataclass(frozen=True, slots=True)
class FileCommitName:
    """A transaction of one instance, or its commit.

    Args:
        checkpoint_id: the checkpoint that it was pre-committed for.
        job: the job, see :func:`job_of`.
        index: the instance's index.
        attempt: the attempt that wrote it, with its owner.
        number: its number in that attempt, from 0.
    """

    checkpoint_id: int
    job: str
    index: int
    attempt: str
    number: int

    @property
    def text(self) -> str:
        """The name as text."""
        return f"{self.checkpoint_id}-job{self.job}-{self.index}-{self.attempt}-{self.number:06d}"

    @property
    def staged(self) -> str:
        """The folder of its staged files."""
        return staged_folder(self.index, self.attempt, self.number)

    @property
    def transaction(self) -> str:
        """The file that lists its staged files."""
        return f"{self.staged}/transaction"

    @property
    def commit(self) -> str:
        """The file that lists its committed files."""
        return f"{commits_folder(self.index)}/{self.job}/{self.text}"

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

    def taken_back(self, number: int) -> str:
        """The name of a file that was taken back."""
        return f"{taken_back_folder(self.index)}/{self.text}/{staged_name(number)}"


def parse_commit(text: str) -> FileCommitName | None:
    """The commit that a text names; None for any other text."""
    return _commit(_TRANSACTION.fullmatch(text))


def commit_of_part(name: str) -> FileCommitName | None:
    """The commit that a visible file belongs to; None for a file that no FileSink has written."""
    return _commit(_PART.fullmatch(name.rpartition("/")[2]))


def staged_parts(name: str) -> tuple[str, int] | None:
    """Attempt and number of the transaction that a staged file, or a file of it, belongs to; None for any other file."""
    found = _STAGED.fullmatch(name)
    return None if found is None else (found["attempt"], int(found["number"]))


def instance_folder(index: int) -> str:
    """The folder of one instance's own files."""
    return f"{OWN}/{index}"


def owner_name(index: int) -> str:
    return f"{instance_folder(index)}/owner"


def timeline_name(index: int, job: str) -> str:
    return f"{timelines_folder(index)}/{job}"


def timelines_folder(index: int) -> str:
    return f"{instance_folder(index)}/timelines"


def commits_folder(index: int) -> str:
    return f"{instance_folder(index)}/commits"


def taken_back_folder(index: int) -> str:
    return f"{instance_folder(index)}/taken-back"


def attempts_folder(index: int) -> str:
    """The folder with the staged files of all attempts."""
    return f"{instance_folder(index)}/staged"


def staged_folder(index: int, attempt: str, number: int) -> str:
    return f"{attempts_folder(index)}/{attempt}/{number:06d}"


def staged_name(number: int) -> str:
    """The name of a staged file in its folder."""
    return f"{number:05d}.staged"


def job_of(context: SinkContext) -> str:
    """The job's number, with the history that counts it."""
    return f"{context.job_id}.{context.history}" if context.history else str(context.job_id)


def _commit(found: re.Match[str] | None) -> FileCommitName | None:
    if found is None:
        return None
    return FileCommitName(int(found["id"]), found["job"], int(found["index"]), found["attempt"], int(found["number"]))
