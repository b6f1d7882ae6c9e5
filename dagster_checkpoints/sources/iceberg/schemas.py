"""Iceberg's schemas as Spark's, and whether columns can be found in data files by their names. JSON in, JSON out.

Source: Iceberg's specification, "Appendix C: JSON serialization" and "Column Projection"
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_OF_ICEBERG = {
    "boolean": "boolean",
    "int": "integer",
    "long": "long",
    "float": "float",
    "double": "double",
    "string": "string",
    "binary": "binary",
    "date": "date",
    "timestamp": "timestamp_ntz",
    "timestamptz": "timestamp",
}
_DECIMAL = re.compile(r"decimal\((\d+), ?(\d+)\)")


def spark_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema in the JSON of Spark's types.

    Raises:
        TypeError: a column has a type that Spark does not have; the text names both.
    """
    return _struct(schema, "")


def _struct(struct: Mapping[str, Any], inside: str) -> dict[str, Any]:
    return {
        "type": "struct",
        "fields": [
            {"name": field["name"], "type": _type(field["type"], f"{inside}{field['name']}"), "nullable": True, "metadata": {}}
            for field in struct["fields"]
        ],
    }


def _type(kind: Any, path: str) -> Any:
    if isinstance(kind, str):
        decimal = _DECIMAL.fullmatch(kind)
        found = f"decimal({decimal[1]},{decimal[2]})" if decimal else _OF_ICEBERG.get(kind)
        if found is None:
            raise TypeError(f"{path} ({kind})")
        return found
    match kind["type"]:
        case "struct":
            return _struct(kind, f"{path}.")
        case "list":
            return {"type": "array", "elementType": _type(kind["element"], f"{path}.element"), "containsNull": True}
        case "map":
            key, value = _type(kind["key"], f"{path}.key"), _type(kind["value"], f"{path}.value")
            return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
    raise TypeError(f"{path} ({kind['type']})")


def renamed(schemas: Iterable[Mapping[str, Any]]) -> list[str]:
    """The columns that had another name, or whose name another column had; empty if names identify columns in all data files.

    Args:
        schemas: all schemas that the table has had.
    """
    names: dict[int, str] = {}
    ids: dict[str, int] = {}
    found: dict[str, None] = {}
    for schema in schemas:
        for path, number in _fields(schema, ""):
            if names.setdefault(number, path) != path or ids.setdefault(path, number) != number:
                found[path] = None
    return list(found)


def _fields(kind: Any, path: str) -> Iterator[tuple[str, int]]:
    """The fields in a type, also nested ones: path and id."""
    if isinstance(kind, str):
        return
    for field in kind.get("fields", ()):
        yield f"{path}{field['name']}", field["id"]
        yield from _fields(field["type"], f"{path}{field['name']}.")
    for part in ("element", "key", "value"):
        if part in kind:
            yield from _fields(kind[part], f"{path}{part}.")


def unknown(known: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """The columns of a schema that another one does not have, or has with another type. Both are Spark's JSON."""
    types = {field["name"]: field["type"] for field in known["fields"]}
    return [field["name"] for field in schema["fields"] if types.get(field["name"]) != field["type"]]
