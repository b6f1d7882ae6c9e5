"""Columns: the stage's against the table's. Which difference is refused, and which columns may be added.

Must not know files, rows or commits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

SchemaEvolution = Literal["refuse", "add"]
"""What happens to differences between a stage's columns and its table's. ``refuse``: both have the same columns; ``add``: columns
that the table does not have are added to it, and columns that the stage does not have are null in its rows."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, and its type without names of nullability and metadata.

    Args:
        name: the column's name.
        type: the type in the format's terms: text, or JSON in which everything is nullable.
    """

    name: str
    type: Any

    @property
    def shown(self) -> str:
        """The type as text for people."""
        return self.type if isinstance(self.type, str) else json.dumps(self.type)


def differences(
    table: Sequence[Column], stage: Sequence[Column], required: frozenset[str], evolution: SchemaEvolution
) -> list[str]:
    """What is wrong with the stage's columns, a text for each column; empty if its rows can be written.

    Args:
        table: the table's columns.
        stage: the stage's columns.
        required: the table's columns that hold no nulls.
        evolution: what happens to differences.
    """
    by_name = {column.name: column for column in table}
    by_small = {column.name.lower(): column.name for column in table}
    found = []
    for column in stage:
        other = by_name.get(column.name)
        if other is None and column.name.lower() in by_small:
            found.append(f"column {column.name!r}: expected its name as the table has it, {by_small[column.name.lower()]!r}")
        elif other is None and evolution == "refuse":
            found.append(f"column {column.name!r}: expected a column of the table, found that the table has none of this name")
        elif other is not None and other.type != column.type:
            found.append(f"column {column.name!r}: expected type {other.shown}, found {column.shown}")
    present = {column.name.lower() for column in stage}
    for column in table:
        if column.name.lower() not in present and (evolution == "refuse" or column.name in required):
            null = " and it holds no nulls" if column.name in required else ""
            found.append(f"column {column.name!r}: expected it in the stage's rows since the table has it{null}, found none")
    return found


def unfit(columns: Sequence[Column], names: Sequence[str], what: str, types: Sequence[str]) -> list[str]:
    """What is wrong with columns of a key or of partitions, a text for each.

    Args:
        columns: the stage's columns.
        names: the names of the columns.
        what: what they are for.
        types: the types that they may have, beside decimals.
    """
    by_name = {column.name: column for column in columns}
    found = []
    for name in names:
        column = by_name.get(name)
        if column is None:
            found.append(f"{what} column {name!r}: expected a column of the stage's rows, found {', '.join(by_name)}")
        elif not (column.type in types or str(column.type).startswith("decimal")):
            found.append(f"{what} column {name!r}: expected type {', '.join(types)} or decimal, found {column.shown}")
    return found


def added(table: Sequence[Column], stage: Sequence[Column]) -> list[Column]:
    """The stage's columns that the table does not have."""
    names = {column.name for column in table}
    return [column for column in stage if column.name not in names]
