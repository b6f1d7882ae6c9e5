"""What becomes of a table's rows when a transaction's rows join them: the files to add and the files to remove.

Must not know conflicts, nor which transaction is current.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dagster_checkpoints.sinks.lake.names import TransactionName
from dagster_checkpoints.sinks.lake.table_log import ActiveFile, DataFile, StagedTransaction


@dataclass(frozen=True, slots=True)
class Placement:
    """The files of one commit.

    Args:
        add: files whose rows become visible.
        remove: files whose rows vanish.
    """

    add: Sequence[DataFile]
    remove: Sequence[ActiveFile] = ()


class RowPlacement(Protocol):
    """How the rows of one transaction join those of the table."""

    def plan(self) -> Placement:
        """The files of the commit, for the table as it was read last. Called again after a conflict."""
        ...

    def committed(self) -> None:
        """The commit has succeeded: delete what it did not use."""
        ...


FilesOf = Callable[[TransactionName], Sequence[DataFile]]
"""Returns the data files of a transaction whose file exists."""

PlaceRows = Callable[[TransactionName, StagedTransaction], RowPlacement]
"""Begins to place the rows of a transaction that is not committed."""


class AppendedRows:
    """Rows that are added, and nothing else.

    Args:
        files: the transaction's data files.
    """

    def __init__(self, files: Sequence[DataFile]) -> None:
        self._files = files

    def plan(self) -> Placement:
        return Placement(self._files)

    def committed(self) -> None:
        pass
