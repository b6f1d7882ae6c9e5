"""Columns in the JSON of Iceberg's schemas, without field ids; and what an Iceberg table asks of its writers.

Must not know files, rows or commits.

Source: Iceberg's specification, "Appendix C: JSON serialization".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from dagster_checkpoints.sinks.lake.columns import Column

_OF_SPARK = {
    "boolean": "boolean",
    "byte": "int",
    "short": "int",
    "integer": "int",
    "long": "long",
    "float": "float",
    "double": "double",
    "string": "string",
    "binary": "binary",
    "date": "date",
    "timestamp": "timestamptz",
    "timestamp_ntz": "timestamp",
}
_DECIMAL = re.compile(r"decimal\((\d+), ?(-?\d+)\)")
_WIDER = (("long", "int"), ("double", "float"))
PARTITION_TYPES = ("boolean", "int", "long", "string", "date", "timestamp", "timestamptz")
KEY_TYPES = (*PARTITION_TYPES, "binary")


def columns_of(schema: str) -> tuple[Column, ...]:
    """The columns of a schema in Iceberg's JSON."""
    return tuple(Column(field["name"], _without_ids(field["type"])) for field in json.loads(schema)["fields"])


def schema_of(columns: Sequence[Column]) -> str:
    """A schema of columns that may be null, in Iceberg's JSON; the field ids count from 1."""
    ids = count(1)
    fields = [{"id": next(ids), "name": c.name, "type": _with_ids(c.type, ids), "required": False} for c in columns]
    return json.dumps({"type": "struct", "schema-id": 0, "fields": fields})


def required_columns(schema: str) -> frozenset[str]:
    """The names of a table's columns that hold no nulls."""
    return frozenset(field["name"] for field in json.loads(schema)["fields"] if field["required"])


def columns_of_spark(schema: str) -> tuple[Column, ...]:
    """The columns of a schema in Spark's JSON.

    Raises:
        TypeError: a type that Iceberg does not have.
    """
    return tuple(Column(field["name"], _of_spark(field["type"], field["name"])) for field in json.loads(schema)["fields"])


def columns_of_arrow(schema: Any) -> tuple[Column, ...]:
    """The columns of a ``pyarrow.Schema`` with times in microseconds.

    Raises:
        TypeError: a type that Iceberg does not have.
    """
    return tuple(Column(field.name, _of_arrow(field.type, field.name)) for field in schema)


def nested_required(schema: str) -> list[str]:
    """The columns with nested values that may not be null, a text for each."""
    return [
        f"column {field['name']!r} holds nested values that may not be null"
        for field in json.loads(schema)["fields"]
        if _has_required(field["type"])
    ]


def holds(table: Any, stage: Any) -> bool:
    """Whether a column reads the values of files that were written for another type: it is the same, or was made wider.

    Args:
        table: the table's type.
        stage: the type in the files.

    Source: Iceberg's specification, "Schema Evolution".
    """
    if isinstance(table, dict) and isinstance(stage, dict) and table["type"] == stage["type"]:
        wider, narrower = _parts(table), _parts(stage)
        return wider.keys() == narrower.keys() and all(holds(wider[name], narrower[name]) for name in wider)
    decimals = [_DECIMAL.fullmatch(str(kind)) for kind in (table, stage)]
    if decimals[0] is not None and decimals[1] is not None:
        return decimals[0][2] == decimals[1][2] and int(decimals[0][1]) >= int(decimals[1][1])
    return table == stage or (table, stage) in _WIDER


def _parts(kind: Any) -> dict[str, Any]:
    """The types in a nested type, by name."""
    match kind["type"]:
        case "struct":
            return {field["name"]: field["type"] for field in kind["fields"]}
        case "list":
            return {"element": kind["element"]}
        case _:
            return {"key": kind["key"], "value": kind["value"]}


def _without_ids(kind: Any) -> Any:
    if not isinstance(kind, dict):
        return kind
    match kind["type"]:
        case "struct":
            return {"type": "struct", "fields": [{"name": f["name"], "type": _without_ids(f["type"])} for f in kind["fields"]]}
        case "list":
            return {"type": "list", "element": _without_ids(kind["element"])}
        case _:
            return {"type": "map", "key": _without_ids(kind["key"]), "value": _without_ids(kind["value"])}


def _with_ids(kind: Any, ids: Iterator[int]) -> Any:
    if not isinstance(kind, dict):
        return kind
    match kind["type"]:
        case "struct":
            fields = [
                {"id": next(ids), "name": f["name"], "type": _with_ids(f["type"], ids), "required": False} for f in kind["fields"]
            ]
            return {"type": "struct", "fields": fields}
        case "list":
            element = {"element-id": next(ids), "element-required": False}
            return {"type": "list", **element, "element": _with_ids(kind["element"], ids)}
        case _:
            of_map = {"key-id": next(ids), "value-id": next(ids), "value-required": False}
            return {"type": "map", **of_map, "key": _with_ids(kind["key"], ids), "value": _with_ids(kind["value"], ids)}


def _has_required(kind: Any) -> bool:
    if not isinstance(kind, dict):
        return False
    match kind["type"]:
        case "struct":
            return any(field["required"] or _has_required(field["type"]) for field in kind["fields"])
        case "list":
            return kind["element-required"] or _has_required(kind["element"])
        case _:
            return kind["value-required"] or _has_required(kind["key"]) or _has_required(kind["value"])


def _of_spark(kind: Any, name: str) -> Any:
    match kind:
        case str() if kind in _OF_SPARK:
            return _OF_SPARK[kind]
        case str() if (decimal := _DECIMAL.fullmatch(kind)) is not None:
            return f"decimal({decimal[1]}, {decimal[2]})"
        case {"type": "struct", "fields": fields}:
            return {"type": "struct", "fields": [_of_spark_field(field, name) for field in fields]}
        case {"type": "array", "elementType": element}:
            return {"type": "list", "element": _of_spark(element, f"{name}.element")}
        case {"type": "map", "keyType": key, "valueType": value}:
            return {"type": "map", "key": _of_spark(key, f"{name}.key"), "value": _of_spark(value, f"{name}.value")}
        case _:
            raise TypeError(f"column {name!r} of type {kind if isinstance(kind, str) else kind.get('type')}")


def _of_spark_field(field: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {"name": field["name"], "type": _of_spark(field["type"], f"{name}.{field['name']}")}


def _of_arrow(kind: Any, name: str) -> Any:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        fields = [{"name": field.name, "type": _of_arrow(field.type, f"{name}.{field.name}")} for field in kind]
        return {"type": "struct", "fields": fields}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return {"type": "list", "element": _of_arrow(kind.value_type, f"{name}.element")}
    if pa.types.is_map(kind):
        key, value = _of_arrow(kind.key_type, f"{name}.key"), _of_arrow(kind.item_type, f"{name}.value")
        return {"type": "map", "key": key, "value": value}
    if pa.types.is_decimal128(kind):
        return f"decimal({kind.precision}, {kind.scale})"
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        return "timestamptz" if kind.tz else "timestamp"
    found = _simple_arrow_types().get(kind)
    if found is None:
        raise TypeError(f"column {name!r} of type {kind}")
    return found


def _simple_arrow_types() -> dict[Any, str]:
    import pyarrow as pa

    return {
        pa.bool_(): "boolean",
        pa.int8(): "int",
        pa.int16(): "int",
        pa.int32(): "int",
        pa.int64(): "long",
        pa.float32(): "float",
        pa.float64(): "double",
        pa.string(): "string",
        pa.large_string(): "string",
        pa.binary(): "binary",
        pa.large_binary(): "binary",
        pa.date32(): "date",
    }
