"""A table and its log, as a table format provides them: opened, created, and changed by commits that compare and set numbers.

Must not know what the sink records, nor which rows belong to which checkpoint.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from dagster_checkpoints.sinks.lake.columns import Column
from dagster_checkpoints.sinks.unwritable import place_error
from dagster_checkpoints.systems.errors import SinkError, SinkTargetChanged, SinkUnavailable

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_checkpoints.systems.table_files import TableFiles


_PLANS = 30
_WAIT_SECONDS = 0.05


class DataFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


class StagedTransaction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    """A table format.

    Args:
        name: its name.
        cleaning: a sentence: what deletes files that the table does not refer to, and when; without its full stop.
        rewriting: the operations of other programs that replace files.
        access: what to look into if the table cannot be reached.
        numbers: where the sink's numbers are recorded.
        partition_types: the types that a partition column may have, beside decimals.
        key_types: likewise a column of a key.
        compression: how data files are compressed.
        partitions_in_files: whether data files have the partition columns, too.
        names_return: whether a file that was removed can be added again under its name, so that no program deletes it as a
            removed one.
    """

    name: str
    cleaning: str
    rewriting: str
    access: str
    numbers: str
    partition_types: tuple[str, ...]
    key_types: tuple[str, ...]
    compression: str
    partitions_in_files: bool
    names_return: bool


class TableLog(ABC):
    """A table, which need not exist.

    Args:
        sink: the sink as errors name it.
        where: the table's directory; for other locations a URL, or the name of its catalog, without credentials.
    """

    format: ClassVar[TableFormat]
    files: TableFiles
    _table: Any

    def __init__(self, sink: str, where: object) -> None:
        self._sink = sink
        self._where = where

    @property
    def exists(self) -> bool:
        """Whether there was a table when it was read last."""
        return self._table is not None

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
    def columns_in(self, file: Path) -> tuple[Column, ...]:
        """The columns of a Parquet file. Raises an exception of the format's library for a type that it does not have."""

    def holds(self, table: Any, stage: Any) -> bool:
        """Whether a column whose type is now `table` reads the values of files that were written for the type `stage`."""
        return bool(table == stage)

    @abstractmethod
    def check_table(self, *, replaces: bool) -> None:
        """Check that files of a stage can become a part of the table, which exists.

        Args:
            replaces: whether the stage's rows replace others.

        Raises:
            SinkColumnsMismatch: the table asks something of its writers that this sink does not do.
        """

    def find(self) -> bool:
        """Read the table from its beginning. Returns whether there is one."""
        with self._reached("read"):
            self._set(self._loaded())
        return self.exists

    @abstractmethod
    def _loaded(self) -> Any:
        """The table as the format's library has it, read from its beginning; None if there is none."""

    @abstractmethod
    def _set(self, table: Any) -> None:
        """Take a table as the one that was read last."""

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
        """The names of the files whose rows readers see, all rows of each, as the table was read last."""

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
        for attempt in range(_PLANS):
            self.refresh()
            change = plan()  # also after an unknown outcome: the plan finds what is recorded
            if change is None:
                return None
            try:
                with self._reached("commit to"):
                    return self._write(change)
            except SinkUnavailable as error:
                if attempt == _PLANS - 1 or not self._is_conflict(error.__cause__):
                    raise
                time.sleep(random.uniform(0, _WAIT_SECONDS * min(attempt, 10)))
        raise AssertionError("unreachable")

    @abstractmethod
    def _write(self, change: LakeChange) -> int:
        """Commit a change on top of the table as it was read last. Returns the table's version with it."""

    @abstractmethod
    def _is_conflict(self, error: BaseException | None) -> bool:
        """Whether the library has raised this since another commit interfered, or without knowing what became of its own."""

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
    def takes(self, metadata: Any) -> bool:
        """Whether a Parquet file of the stage, with this footer, can be a data file as it is, in a table without partitions."""

    @abstractmethod
    def partition_texts(self, values: Mapping[str, Any]) -> dict[str, str | None]:
        """The values of a partition, by column, as the format writes them."""

    @abstractmethod
    def described(self, file: Path, metadata: Any, partition: Mapping[str, str | None]) -> PreparedFile:
        """A file that fits the table, with its statistics.

        Args:
            file: a Parquet file on this machine.
            metadata: its footer.
            partition: the partition's values by column.
        """

    @abstractmethod
    def check_may_remove(self) -> None:
        """Check that files can be removed from the table. Raises SinkCannotTakeBack."""

    @abstractmethod
    def _library_errors(self) -> tuple[type[Exception], ...]:
        """What the library raises if a store or a catalog does not do what it was asked. Raises SinkLibraryMissing."""

    def _found(self, error: Exception) -> str:
        """The text of such an error, without credentials."""
        return " ".join(str(error).split())

    @contextmanager
    def _reached(self, what: str) -> Iterator[None]:
        """Turn errors of the library in the block into the sink's; `what` is what it does with the table."""
        errors = self._library_errors()
        try:
            yield
        except SinkError:
            raise
        except errors as error:
            found, name = self._found(error), self.format.name
            raise place_error(error, self._sink, self._where, found) or SinkUnavailable(
                f"{self._sink}: expected to {what} the {name} table, found: {found or type(error).__name__}. Check "
                f"{self.format.access}, and the space that is left; another attempt may succeed"
            ) from error

    def _changed(self, found: str) -> SinkTargetChanged:
        return SinkTargetChanged(
            f"{self._sink}: expected the {self.format.name} table that this run has opened, found {found}: it was dropped or "
            "replaced while the run wrote to it. Restore the table from a backup and start the run again; or begin a new job "
            "that writes all rows again"
        )
