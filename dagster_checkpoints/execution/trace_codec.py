"""The encoding of a trace: values of the machines as JSON and back.

Encodes the values of the pure floors: numbers, texts, enumerations, tuples, lists, sets, mappings, datetimes, and dataclasses,
structs and named tuples of this package. A value of any other type is written as the name of its type, and so is the state of a
task, which the machines do not read. Must not know where a trace is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from datetime import datetime
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any

import msgspec

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.state.metadata import TaskSnapshot

Json = Any
"""A value that `json` encodes."""

_PACKAGE = "dagster_checkpoints."
_KIND, _VALUE = "~", "v"
_PLAIN = (bool, int, float, str, type(None))
_OPAQUE = (TaskSnapshot,)
_FLOORS = ("coordination", "execution", "pipeline", "state")
"""The floors whose classes a trace may name."""


class CorruptTrace(DagsterCheckpointsError):
    """A trace cannot be read: it is damaged, or another version of this package has written it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Opaque:
    """A value that a trace does not contain.

    Attributes:
        type_name: the name of its type.
    """

    type_name: str


def encode(value: object) -> Json:
    """A value as JSON.

    Args:
        value: an event, an action, or an argument of a machine. An exception is encoded as its type and text.
    """
    if isinstance(value, _PLAIN) and not isinstance(value, Enum):
        return value
    if isinstance(value, Enum):
        return _tagged("enum", [name_of(type(value)), value.name])
    if isinstance(value, Opaque):
        return _tagged("opaque", value.type_name)
    if isinstance(value, datetime):
        return _tagged("moment", value.isoformat())
    if isinstance(value, BaseException):
        return _tagged("opaque", f"{type(value).__name__}: {value}")
    kind: Any = type(value)
    if _is_record(kind):
        return _tagged("record", [name_of(kind), {name: encode(getattr(value, name)) for name in _fields(kind)}])
    return _collection(value)


def _collection(value: object) -> Json:
    if isinstance(value, tuple) and type(value) is tuple:
        return _tagged("tuple", [encode(item) for item in value])
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, Set):
        return _tagged("set", sorted((encode(item) for item in value), key=repr))
    if isinstance(value, Mapping):
        return _tagged("mapping", [[encode(key), encode(item)] for key, item in value.items()])
    return _tagged("opaque", type(value).__name__)


def decode(value: Json) -> Any:
    """The value that `encode` has written. A set becomes a frozenset, a mapping a dict.

    Raises:
        CorruptTrace: no such value can have been written.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list):
        return [decode(item) for item in value]
    try:
        return _decoded(value[_KIND], value[_VALUE])
    except (KeyError, TypeError, ValueError, AttributeError, ImportError) as error:
        raise CorruptTrace(f"expected a value of a trace, found {str(value)[:200]} ({type(error).__name__}: {error})") from error


def _decoded(kind: str, value: Json) -> Any:
    match kind:
        case "enum":
            return class_of(value[0])[value[1]]
        case "opaque":
            return Opaque(value)
        case "moment":
            return datetime.fromisoformat(value)
        case "tuple":
            return tuple(decode(item) for item in value)
        case "set":
            return frozenset(decode(item) for item in value)
        case "mapping":
            return {decode(key): decode(item) for key, item in value}
        case "record":
            return class_of(value[0])(**{name: decode(item) for name, item in value[1].items()})
    raise ValueError(f"unknown kind {kind!r}")


def _tagged(kind: str, value: Json) -> Json:
    return {_KIND: kind, _VALUE: value}


@cache
def _is_record(kind: Any) -> bool:
    ours = kind.__module__.removeprefix(_PACKAGE).partition(".")[0] in _FLOORS and not issubclass(kind, _OPAQUE)
    made_of_fields = dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct) or hasattr(kind, "_fields")
    return ours and made_of_fields and kind.__module__.startswith(_PACKAGE)


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    """The names of the constructor's arguments."""
    if issubclass(kind, msgspec.Struct):
        return tuple(kind.__struct_fields__)
    if issubclass(kind, tuple):
        return tuple(kind._fields)
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


def name_of(kind: type) -> str:
    """The name of a class of this package in a trace."""
    return f"{kind.__module__.removeprefix(_PACKAGE)}:{kind.__qualname__}"


@cache
def class_of(name: str) -> Any:
    """The class of this package with this name in a trace.

    Raises:
        CorruptTrace: no class has it.
    """
    module, _, attribute = name.partition(":")
    floor = module.partition(".")[0]
    try:
        found = getattr(import_module(_PACKAGE + module), attribute) if floor in _FLOORS else None
    except (ImportError, AttributeError):
        found = None
    if not isinstance(found, type):
        raise CorruptTrace(
            f"expected a class of {', '.join(_FLOORS)}, found {name!r}: another version may have written the trace"
        )
    return found
