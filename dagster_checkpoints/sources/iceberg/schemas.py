"""Iceberg's schemas as Spark's. JSON in, JSON out.

Source: Iceberg's specification, "Appendix C: JSON serialization"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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


def field_of(name: str, kind: Any) -> dict[str, Any]:
    """A column of one of Spark's types."""
    return {"name": name, "type": kind, "nullable": True, "metadata": {}}


def _struct(struct: Mapping[str, Any], inside: str) -> dict[str, Any]:
    fields = [field_of(each["name"], _type(each["type"], f"{inside}{each['name']}")) for each in struct["fields"]]
    return {"type": "struct", "fields": fields}


def spark_type(kind: str, path: str = "") -> str:
    """A primitive type in the JSON of Spark's types.

    Args:
        kind: the type.
        path: the column, for the error.

    Raises:
        TypeError: Spark does not have it.
    """
    decimal = _DECIMAL.fullmatch(kind)
    found = f"decimal({decimal[1]},{decimal[2]})" if decimal else _OF_ICEBERG.get(kind)
    if found is None:
        raise TypeError(f"{path} ({kind})")
    return found


def _type(kind: Any, path: str) -> Any:
    if isinstance(kind, str):
        return spark_type(kind, path)
    match kind["type"]:
        case "struct":
            return _struct(kind, f"{path}.")
        case "list":
            return {"type": "array", "elementType": _type(kind["element"], f"{path}.element"), "containsNull": True}
        case "map":
            key, value = _type(kind["key"], f"{path}.key"), _type(kind["value"], f"{path}.value")
            return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
    raise TypeError(f"{path} ({kind['type']})")
