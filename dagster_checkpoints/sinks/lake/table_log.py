"""A table and its log, as a table format provides them: opened, created, and changed by commits that compare and set numbers.

Must not know what the sink records, nor which rows belong to which checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from dagster_checkpoints.sinks.lake.columns import Column

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_checkpoints.systems.table_files import TableFiles


class DataFile(msgspec.Struct, frozen=True):
    """A data file below the table's location.

    Args:
        path: its name.
        size: its size in bytes.
        rows: the number of its rows.
        statistics: statistics of its columns in the format's terms, as JSON.
        partition: the partition's values by column, as the format writes them.
    """

    path: str
    size: int
    rows: int
    statistics: str
    partition: dict[str, str | None] = {}


@dataclass(frozen=True, slots=True)
class ActiveFile:
    """A file whose rows readers see.

    Args:
        path: its name below the table's location.
        logged: the name as the table's metadata writes it, with escapes.
        size: its size in bytes.
        rows: the number of its rows; None if the metadata does not say it.
        partition: the partition's values by column, as the format writes them.
    """

    path: str
    logged: str
    size: int
    rows: int | None
    partition: dict[str, str | None]


@dataclass(frozen=True, slots=True)
class PreparedFile:
    """A file that fits the table.

    Args:
        source: the file on this machine.
        rows: the number of its rows.
        nulls: the number of nulls of each column, as far as the file's footer says it; columns that it does not count are
            missing.
        statistics: statistics of its columns in the format's terms, as JSON.
        partition: the partition's values by column, as the format writes them.
    """

    source: Path
    rows: int
    nulls: dict[str, int]
    statistics: str
    partition: dict[str, str | None]


class StagedTransaction(msgspec.Struct, frozen=True):
    """Content of a transaction's file.

    Args:
        table: id of the table that its files were made for; empty if the table did not exist yet.
        schema: the columns of its rows, as the format writes them.
        partition_by: the table's partition columns.
        files: its data files.
    """

    table: str
    schema: str
    partition_by: tuple[str, ...]
    files: tuple[DataFile, ...]
    version: int = 1


@dataclass(frozen=True, slots=True)
class LakeChange:
    """One commit.

    Args:
        add: files whose rows become visible.
        remove: files whose rows vanish.
        numbers: numbers to record. Two commits that record the same name conflict.
        note: text for people, by name, in the commit's information.
        read_rows: whether the change depends on rows of the table: then every commit of another program conflicts with it.
    """

    add: Sequence[DataFile] = ()
    remove: Sequence[DataFile | ActiveFile] = ()
    numbers: Mapping[str, int] = field(default_factory=dict)
    note: Mapping[str, str] = field(default_factory=dict)
    read_rows: bool = False


@dataclass(frozen=True, slots=True)
class TableShape:
    """What a table demands of its rows.

    Args:
        table: id of the table, which it got when it was created.
        columns: its columns.
        required: those of its columns that hold no nulls.
        partition_by: its partition columns.
    """

    table: str
    columns: tuple[Column, ...]
    required: frozenset[str]
    partition_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TableFormat:
    """A table format, as texts name it.

    Args:
        name: its name.
        cleaning: a sentence: what deletes files that the table does not refer to, and when; without its full stop.
        rewriting: the operations of other programs that replace files.
    """

    name: str
    cleaning: str
    rewriting: str


class TableLog(ABC):
    """A table, which need not exist."""

    format: ClassVar[TableFormat]
    names_return: ClassVar[bool]
    """Whether a file that was removed can be added again under its name, so that no program deletes it as a removed one."""
    files: TableFiles

    @property
    @abstractmethod
    def exists(self) -> bool:
        """Whether there was a table when it was read last."""

    @abstractmethod
    def shape(self) -> TableShape:
        """What the table demands of its rows, as it was read last; the table exists."""

    @abstractmethod
    def columns_of(self, schema: str) -> tuple[Column, ...]:
        """The columns that a text of :meth:`schema_of` describes."""

    @abstractmethod
    def schema_of(self, columns: Sequence[Column]) -> str:
        """Columns as text, all of which may be null."""

    @abstractmethod
    def find(self) -> bool:
        """Read the table from its beginning. Returns whether there is one."""

    @abstractmethod
    def refresh(self) -> object:
        """Read all commits up to now.

        Raises:
            SinkTargetChanged: the table was dropped, or created again, since it was opened.
        """

    @abstractmethod
    def number(self, name: str) -> int | None:
        """The number that was recorded last under this name, as the table was read last; None if none was."""

    @abstractmethod
    def active_files(self) -> set[str]:
        """The names of the files whose rows readers see, as the table was read last."""

    @abstractmethod
    def create(self, schema: str, partition_by: Sequence[str], numbers: Mapping[str, int]) -> object:
        """Create the table without rows, unless there is one by now.

        Args:
            schema: the table's columns, as text of :meth:`schema_of`.
            partition_by: the partition columns.
            numbers: numbers to record.
        """

    @abstractmethod
    def add_columns(self, columns: Sequence[Column]) -> object:
        """Add columns that the table does not have. Another program may change it at the same moment: look at the result."""

    @abstractmethod
    def commit(self, plan: Callable[[], LakeChange | None]) -> int | None:
        """Plan a change from the newest state of the table and commit it, again until no other commit interferes.

        Args:
            plan: returns the change, or None if there is nothing to do (any more). The table has been refreshed.

        Returns:
            The table's version with the change; None if the plan found nothing to do.

        Raises:
            SinkUnavailable: the store did not answer, or other commits interfered again and again.
            SinkTargetChanged: the table was dropped, or created again.
        """

    def close(self) -> None:  # noqa: B027 - optional
        """Release the connection; the table can be read again."""

    @abstractmethod
    def active(self, bounds: Mapping[str, tuple[pa.Scalar, pa.Scalar]] | None = None) -> list[ActiveFile]:
        """The files whose rows readers see, as the table was read last; the table exists.

        Args:
            bounds: the smallest and the largest value of columns: without files that hold no row with values within them,
                as far as the metadata says it.
        """

    @abstractmethod
    def readable(self, name: str) -> Any:
        """A file for ``pyarrow.parquet``: its path, or an opened file that fetches only the parts that are read."""

    @abstractmethod
    def arrow_types(self) -> dict[str, pa.DataType]:
        """The type of each column of the table, as Arrow has it."""

    @abstractmethod
    def described(self, file: Path, partition: Mapping[str, str | None]) -> PreparedFile:
        """A file that fits the table, with its statistics.

        Args:
            file: a Parquet file on this machine.
            partition: the partition's values by column.
        """

    @abstractmethod
    def check_may_remove(self) -> None:
        """Check that files can be removed from the table. Raises SinkCannotTakeBack."""
