"""How far a table with versions was read: all files of its first version, then the files that each later version has added.

Must not know a table's format, Spark, or files' contents. It checks the arguments that all such tables have
in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol, get_args

from dagster_checkpoints.pipeline.setting_values import is_count
from dagster_checkpoints.sources.errors import InvalidSource, SourceRowsLost

ChangedRows = Literal["refuse", "skip"]
"""What happens to a later version that deletes or changes rows: it ends the run, or none of its rows is read."""


def check_arguments(shown: str, files_per_trigger: int, changed_rows: ChangedRows) -> None:
    """Check the arguments of a function that reads such a table.

    Args:
        shown: the function and the table, for errors.
        files_per_trigger: the largest number of data files in one micro-batch.
        changed_rows: what happens to versions that delete or change rows.

    Raises:
        InvalidSource: one of them has no meaning.
    """
    if not is_count(files_per_trigger, least=1):
        raise InvalidSource(f"{shown}: expected files_per_trigger of at least 1, found {files_per_trigger!r}")
    if changed_rows not in get_args(ChangedRows):
        raise InvalidSource(f"{shown}: expected changed_rows 'refuse' or 'skip', found {changed_rows!r}")


@dataclass(frozen=True, slots=True)
class LakeFile:
    """A data file.

    Args:
        path: its path as Hadoop writes it: ``file:/data/…`` or ``s3a://bucket/…``.
        partition: the values of the partition columns that are not in the file, as text.
        columns: the columns to read from the file by their names in it, as the JSON of Spark's types; "" if they are those of
            the table.
    """

    path: str
    partition: tuple[str | None, ...] = ()
    columns: str = ""


class TableHistory(Protocol):
    """The versions of a table, in their order. A version never changes."""

    def newest(self) -> int:
        """The newest version there is now."""

    def after(self, version: int) -> int | None:
        """The version that follows; None if there is none yet."""

    def files(self, version: int) -> Sequence[LakeFile]:
        """All data files of a version, always in the same order."""

    def added(self, version: int) -> Sequence[LakeFile]:
        """The data files whose rows are new in a version, always in the same order."""


@dataclass(frozen=True, slots=True)
class TablePosition:
    """A position in the files of a table's versions.

    Args:
        table: the id of the table: another table at the same place has another one.
        first: the version with which reading began: all its files are read.
        version: the version that is being read.
        read: the number of its files that were read; of the first version all files count, of others those that it has added.
    """

    table: str
    first: int
    version: int
    read: int

    @classmethod
    def at_start(cls, table: str, first: int) -> TablePosition:
        """In front of the first version's files."""
        return cls(table, first, first, 0)

    @classmethod
    def from_json(cls, offset: Mapping[str, Any]) -> TablePosition:
        return cls(**offset)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_table(shown: str, known: str, found: str) -> None:
    """Check that a table is the one of which it is known how far it was read.

    Args:
        shown: the table, for errors.
        known: the id of the table that was read.
        found: the id of the table that is there now.

    Raises:
        SourceRowsLost: it is another one.
    """
    if known != found:
        raise SourceRowsLost(
            f"{shown}: expected the table with the id {known}, of which it is known how far it was read, found another one with "
            f"the id {found}: it was created again. Read it in a stage with another name, or make a new start"
        )


def files_at(history: TableHistory, position: TablePosition) -> Sequence[LakeFile]:
    """The files of the version at a position, also those that were read."""
    return history.files(position.version) if position.version == position.first else history.added(position.version)


def advanced(history: TableHistory, position: TablePosition, at_most: int | None, last: int | None) -> TablePosition:
    """The position after some more files.

    Args:
        history: the table's versions.
        position: where to begin.
        at_most: the largest number of files; None: no limit.
        last: the last version that is read; None: no limit.
    """
    left = at_most
    while True:
        files = len(files_at(history, position))
        count = files - position.read if left is None else min(left, files - position.read)
        position = replace(position, read=position.read + count)
        left = None if left is None else left - count
        if position.read < files or position.version == last:
            return position
        following = history.after(position.version)
        if following is None or left == 0:
            return position
        position = replace(position, version=following, read=0)


def leads_to(history: TableHistory, position: TablePosition, last: int) -> bool:
    """Whether reading on from a position comes to a version.

    Args:
        history: the table's versions.
        position: where to begin.
        last: the version; it may be that of the position.
    """
    version: int | None = position.version
    while version is not None and version != last:
        version = history.after(version)
    return version is not None


def files_between(history: TableHistory, start: TablePosition, end: TablePosition) -> list[LakeFile]:
    """The files from one position to another.

    Args:
        history: the table's versions.
        start: the first position. In front of the first version's files it may name another first version than the end: the
            table has got a newer version since the end was planned.
        end: the second position.
    """
    position = start if start.first == end.first else TablePosition.at_start(end.table, end.first)
    found: list[LakeFile] = []
    while position.version != end.version:
        found += files_at(history, position)[position.read :]
        following = history.after(position.version)
        assert following is not None, "the end was planned when its version existed"
        position = replace(position, version=following, read=0)
    return found + list(files_at(history, end)[position.read : end.read])
