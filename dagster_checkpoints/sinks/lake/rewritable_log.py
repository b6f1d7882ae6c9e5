"""A table in which rows replace others: its files can be read, and removed by commits that depend on what was read.

Must not know which rows are replaced.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.sinks.lake.fitting import PreparedFile
from dagster_checkpoints.sinks.lake.table_log import ActiveFile, TableLog

if TYPE_CHECKING:
    import pyarrow as pa


class RewritableLog(TableLog):
    """A table whose rows can be replaced."""

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
