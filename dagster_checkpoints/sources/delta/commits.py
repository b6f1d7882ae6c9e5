"""What the log of a Delta table says to a reader of new rows: its commits, and its schemas. Text in, values out.

Source: https://github.com/delta-io/delta/blob/master/PROTOCOL.md, "Actions", "Table Features" and
"Type Widening"; for columns of older schemas Spark's `ParquetVectorUpdaterFactory`
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


_WHOLE = ("byte", "short", "integer", "long")
_DIGITS = {"byte": 3, "short": 5, "integer": 10, "long": 20}
"""Digits that the whole numbers of a type take in a decimal; of longs what Delta asks for."""
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")


def other_columns(known: str, schema: str) -> list[str]:
    """The columns of a schema that another one does not have, or has with another type; nested ones by their path.

    Args:
        known: the other schema, as Delta's JSON.
        schema: the schema.
    """
    return [path for path, has, _ in _compared(json.loads(schema), json.loads(known), "") if not has]


def unreadable_columns(schema: str, wanted: str) -> list[str]:
    """The columns of a schema whose files cannot be read with the types of another one, with both types.

    Args:
        schema: the schema with which files were written, as Delta's JSON. A column that is not wanted is no problem.
        wanted: the columns to read, as Delta's JSON.
    """
    found = []
    for path, has, kinds in _compared(json.loads(schema), json.loads(wanted), ""):
        if not has and kinds is not None and not _widens(*kinds):
            found.append(f"{path} ({_shown(kinds[0])} there, {_shown(kinds[1])} now)")
    return found


def _compared(one: Any, other: Any, path: str) -> Iterator[tuple[str, bool, tuple[Any, Any] | None]]:
    """The fields of a type: path, whether the other type has the same, and both types if it has another one."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping) and one["type"] == other["type"]):
        yield path, one == other, (one, other)
        return
    match one["type"]:
        case "struct":
            there = {field["name"]: field["type"] for field in other["fields"]}
            for field in one["fields"]:
                inner = f"{path}.{field['name']}" if path else field["name"]
                if field["name"] in there:
                    yield from _compared(field["type"], there[field["name"]], inner)
                else:
                    yield inner, False, None
        case "array":
            yield from _compared(one["elementType"], other["elementType"], f"{path}.element")
        case "map":
            yield from _compared(one["keyType"], other["keyType"], f"{path}.key")
            yield from _compared(one["valueType"], other["valueType"], f"{path}.value")


def _widens(kind: Any, wider: Any) -> bool:
    """Whether every value of a type is read exactly as another type."""
    if not isinstance(kind, str) or not isinstance(wider, str):
        return False
    if kind in _WHOLE and wider in _WHOLE:
        return _WHOLE.index(kind) < _WHOLE.index(wider)
    to = _DECIMAL.fullmatch(wider)
    if to is not None:
        found = _DECIMAL.fullmatch(kind)
        whole, scale = (int(found[1]) - int(found[2]), int(found[2])) if found else (_DIGITS.get(kind, 99), 0)
        return int(to[2]) >= scale and int(to[1]) - int(to[2]) >= whole
    exact = {("float", "double"), ("date", "timestamp_ntz"), *((each, "double") for each in _WHOLE[:3])}
    return (kind, wider) in exact


def _shown(kind: Any) -> str:
    return kind if isinstance(kind, str) else str(kind["type"])
