"""Columns in Delta's JSON (Spark's schemas have the same form), and what a Delta table asks of its writers.

Must not know files, rows or commits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dagster_checkpoints.sinks.lake.columns import Column

_CHECKED_BY_WRITERS = ("delta.generationExpression", "delta.identity.start", "delta.invariants")
_ONLY_FOR_ADDED_ROWS = ("delta.appendOnly", "delta.enableChangeDataFeed", "delta.enableDeletionVectors")
PARTITION_TYPES = ("string", "byte", "short", "integer", "long", "boolean", "date", "timestamp", "timestamp_ntz")
KEY_TYPES = (*PARTITION_TYPES, "binary")


def columns_of(schema: str) -> tuple[Column, ...]:
    """The columns of a schema in Delta's JSON."""
    return tuple(Column(field["name"], _relaxed(field["type"])) for field in json.loads(schema)["fields"])


def schema_of(columns: Sequence[Column]) -> str:
    """A schema of nullable columns in Delta's JSON."""
    fields = [{"name": c.name, "type": c.type, "nullable": True, "metadata": {}} for c in columns]
    return json.dumps({"type": "struct", "fields": fields})


def check_types(columns: Sequence[Column]) -> None:
    """Check that Delta has the types of columns: the library takes Spark's intervals, which readers would see as numbers.

    Raises:
        TypeError: a column is an interval, or has one in it.
    """
    for column in columns:
        interval = _interval_in(column.type)
        if interval:
            raise TypeError(f"column {column.name!r} with the type {interval}")


def required_columns(schema: str) -> frozenset[str]:
    """The names of a table's columns that hold no nulls."""
    return frozenset(field["name"] for field in json.loads(schema)["fields"] if not field["nullable"])


def unkept_promises(schema: str, configuration: Mapping[str, str | None], *, replaces: bool) -> list[str]:
    """What the table asks of its writers and this sink does not do, a text for each.

    Args:
        schema: the table's schema in Delta's JSON.
        configuration: the table's properties.
        replaces: whether the sink's rows replace others.
    """
    found = [
        f"column {field['name']!r} has {name}"
        for field in json.loads(schema)["fields"]
        for name in _CHECKED_BY_WRITERS
        if name in field.get("metadata", {})
    ]
    found += [f"table property {name}" for name in configuration if name.startswith("delta.constraints.")]
    if configuration.get("delta.columnMapping.mode") not in (None, "none"):
        found.append("table property delta.columnMapping.mode (files would need other column names)")
    if configuration.get("delta.setTransactionRetentionDuration") is not None:
        found.append("table property delta.setTransactionRetentionDuration (the table would forget what is committed)")
    if replaces:
        found += [f"table property {name}" for name in _ONLY_FOR_ADDED_ROWS if (configuration.get(name) or "").lower() == "true"]
    found += [f"column {field['name']!r} holds nested values that may not be null" for field in _nested_required(schema)]
    return found


def _nested_required(schema: str) -> list[dict[str, Any]]:
    return [field for field in json.loads(schema)["fields"] if _has_required(field["type"])]


def _has_required(kind: Any) -> bool:
    if not isinstance(kind, dict):
        return False
    if kind["type"] == "struct":
        return any(not field["nullable"] or _has_required(field["type"]) for field in kind["fields"])
    if kind["type"] == "array":
        return not kind["containsNull"] or _has_required(kind["elementType"])
    if kind["type"] == "map":
        return not kind["valueContainsNull"] or _has_required(kind["keyType"]) or _has_required(kind["valueType"])
    return False


def _interval_in(kind: Any) -> str:
    """The interval that a type is, or has in it; empty if there is none."""
    if not isinstance(kind, dict):
        return kind if str(kind).startswith("interval ") else ""
    parts = [field["type"] for field in kind.get("fields", ())] + [
        kind[part] for part in ("elementType", "keyType", "valueType") if part in kind
    ]
    return next(filter(None, map(_interval_in, parts)), "")


def _relaxed(kind: Any) -> Any:
    """A type in which everything is nullable and nothing has metadata."""
    if not isinstance(kind, dict):
        return kind
    match kind["type"]:
        case "struct":
            fields = [{"name": f["name"], "type": _relaxed(f["type"]), "nullable": True, "metadata": {}} for f in kind["fields"]]
            return {"type": "struct", "fields": fields}
        case "array":
            return {"type": "array", "elementType": _relaxed(kind["elementType"]), "containsNull": True}
        case "map":
            key, value = _relaxed(kind["keyType"]), _relaxed(kind["valueType"])
            return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
        case _:
            return kind
