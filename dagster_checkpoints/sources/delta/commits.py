"""What the commits of a Delta table say to a reader of new rows. Text in, values out; must not know files or Spark.

Source: https://github.com/delta-io/delta/blob/master/PROTOCOL.md, "Actions" and "Table Features"
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_READABLE = frozenset(
    {
        "columnMapping",
        "deletionVectors",
        "timestampNtz",
        "typeWidening",
        "typeWidening-preview",
        "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)
"""Reader features with which the data files are plain Parquet files as long as the two first ones are not in use."""
_PARTITION_TYPES = frozenset({"string", "byte", "short", "integer", "long", "boolean", "date"})
"""Types of partition columns whose values have one meaning as text, whatever the settings of the program that wrote them."""


@dataclass(frozen=True, slots=True)
class AddedFile:
    """A data file.

    Args:
        path: its path as the log has it: encoded, and relative to the table's directory.
        partition: the values of the partition columns.
        deleted_rows: whether the log marks some of its rows as deleted.
    """

    path: str
    partition: Mapping[str, str | None]
    deleted_rows: bool = False


@dataclass(frozen=True, slots=True)
class DeltaCommit:
    """What one commit has changed.

    Args:
        added: the files with new rows.
        removes_rows: whether rows were deleted or changed.
        schema: the table's new schema, as Delta's JSON; None if the commit does not change it.
        configuration: the table's new properties; None if the commit does not change them.
        features: the features that a reader must know from now on; None if the commit does not change them.
    """

    added: tuple[AddedFile, ...] = ()
    removes_rows: bool = False
    schema: str | None = None
    configuration: Mapping[str, str] | None = None
    features: tuple[str, ...] | None = None


def parse_commit(text: str) -> DeltaCommit:
    """A commit's file. Files that were only rewritten, as by OPTIMIZE, are neither added nor removed rows."""
    found: dict[str, Any] = {}
    added: list[AddedFile] = []
    for line in text.split("\n"):  # other line separators may be part of a text
        for kind, action in json.loads(line).items() if line.strip() else ():
            match kind:
                case "add" if action["dataChange"]:
                    marked = action.get("deletionVector") is not None
                    added.append(AddedFile(action["path"], action.get("partitionValues") or {}, marked))
                case "remove" if action["dataChange"]:
                    found["removes_rows"] = True
                case "metaData":
                    found |= {"schema": action["schemaString"], "configuration": action.get("configuration") or {}}
                case "protocol":
                    found["features"] = required_features(action["minReaderVersion"], action.get("readerFeatures"))
    return DeltaCommit(tuple(added), **found)


def required_features(reader_version: int, features: Iterable[str] | None) -> tuple[str, ...]:
    """The features that a reader must know."""
    return tuple(sorted(features or ())) if reader_version >= 3 else ("columnMapping",) if reader_version == 2 else ()


def unreadable(features: Iterable[str], configuration: Mapping[str, str | None]) -> list[str]:
    """What of a table its data files do not show by themselves, as text; empty if they can be read as they are."""
    found = [f"the feature {name}" for name in features if name not in _READABLE]
    mode = configuration.get("delta.columnMapping.mode") or "none"
    return found if mode == "none" else [*found, f"delta.columnMapping.mode = {mode}"]


def unreadable_partitions(fields: Iterable[Mapping[str, Any]], partition_by: Sequence[str]) -> list[str]:
    """The partition columns whose values have no certain meaning in the log, with their types."""
    kinds = {each["name"]: each["type"] for each in fields}
    return [f"{name} ({kinds[name]})" for name in partition_by if not _is_certain(kinds[name])]


def _is_certain(kind: Any) -> bool:
    return isinstance(kind, str) and (kind in _PARTITION_TYPES or kind.startswith("decimal("))
