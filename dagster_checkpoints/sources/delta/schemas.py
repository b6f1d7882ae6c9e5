"""Which columns of a Delta table's older and newer schemas can be read with the columns of a plan. Text in, values out.

Source: https://github.com/delta-io/delta/blob/master/PROTOCOL.md, "Type Widening", and Spark's `ParquetVectorUpdaterFactory`
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

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
