"""A trace: the events and actions of the state machines of a run, in order; their encoding, and their replay.

The runtime records it in a file that a user attaches to a bug report. A replay builds the same machines again, gives them the
same events at the same times, and compares their actions: so the machines that the simulator tests are the ones that ran. Must
not know the kinds of machines, nor files: entries are lines of JSON.

What is encoded are the values of the pure floors: numbers, texts, enumerations, tuples, lists, sets, mappings, datetimes, and
dataclasses, structs and named tuples of this package. A value of any other type is written as the name of its type, and so is the
state of a task, which the machines do not read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any, Protocol, TypeVar, cast

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


VERSION = 3
"""Of the format and of the names in it: those of the machines' events and actions."""


class Machine(Protocol):
    """A machine that can be recorded."""

    def handle(self, event: Any, now: float) -> list[Any]:
        """Take one event, return what to do."""


M = TypeVar("M", bound=Machine)


@dataclass(frozen=True, slots=True)
class Created:
    """A machine was made.

    Attributes:
        at: seconds, by the clock of the machines.
        machine: its name in the trace, such as `job` or `task hourly[0], attempt 2`.
        kind: its class.
        arguments: the arguments of its constructor, by name.
    """

    at: float
    machine: str
    kind: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Handled:
    """A machine took an event.

    Attributes:
        at: the `now` of the machine, seconds.
        machine: its name in the trace.
        event: the event.
        actions: its actions, as encoded in the trace.
        raised: the type of the error that it raised; "" without one.
    """

    at: float
    machine: str
    event: Any
    actions: Json
    raised: str = ""


@dataclass(frozen=True, slots=True)
class Difference:
    """A machine returns other actions now than in the run.

    Attributes:
        number: number of the entry, from 1.
        entry: the recorded entry.
        found: the present actions of the machine, as encoded in the trace.
    """

    number: int
    entry: Handled
    found: Json

    def __str__(self) -> str:
        recorded = self.entry.raised or self.entry.actions
        return (
            f"entry {self.number}: {self.entry.machine} at {self.entry.at:.3f} s took {self.entry.event}: "
            f"expected {recorded}, found {self.found}"
        )


class Recorder:
    """Writes a trace.

    Args:
        write: takes one line, without its end; called in the order in which the machines are used, from any thread.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def begin(self, about: Mapping[str, str]) -> None:
        """Write the first line: pipeline, run and versions that the trace belongs to."""
        self._line({"trace": VERSION, "about": dict(about)})

    def created(self, machine: str, made: Machine, arguments: Mapping[str, object], now: float) -> None:
        """A machine was made with these arguments, by name."""
        written = {name: encode(value) for name, value in arguments.items()}
        self._line({"at": now, "machine": machine, "kind": name_of(type(made)), "arguments": written})

    def handled(self, machine: str, event: object, now: float, actions: Iterable[object], raised: str = "") -> None:
        """A machine took an event and returned these actions, or raised an error."""
        line = {"at": now, "machine": machine, "event": encode(event), "actions": [encode(action) for action in actions]}
        self._line({**line, "raised": raised} if raised else line)

    def _line(self, content: Mapping[str, Json]) -> None:
        self._write(json.dumps(content, separators=(",", ":"), ensure_ascii=False))


def made(kind: Callable[..., M], name: str, recorder: Recorder | None, now: float, **arguments: object) -> M:
    """Make a machine, recorded if there is a recorder.

    Args:
        kind: its class.
        name: its name in the trace.
        recorder: writes the trace; None for no trace.
        now: seconds, by the clock of the machines.
        arguments: the arguments of its constructor.
    """
    machine = kind(**arguments)
    if recorder is None:
        return machine
    recorder.created(name, machine, arguments, now)
    return cast(M, RecordedMachine(machine, name, recorder))


class RecordedMachine:
    """Wraps a machine and records its events and actions; all other attributes are the machine's own.

    Args:
        machine: the machine.
        name: its name in the trace.
        recorder: writes the trace.
    """

    def __init__(self, machine: Machine, name: str, recorder: Recorder) -> None:
        self._machine = machine
        self._name = name
        self._recorder = recorder

    def handle(self, event: Any, now: float) -> list[Any]:
        """Handle the event as the machine does, and record it."""
        try:
            actions = self._machine.handle(event, now)
        except Exception as error:
            self._recorder.handled(self._name, event, now, (), type(error).__name__)
            raise
        self._recorder.handled(self._name, event, now, actions)
        return actions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)


def read(lines: Iterable[str]) -> Iterator[Created | Handled]:
    """The entries of a trace. An incomplete last line, which a killed run leaves, is skipped.

    Raises:
        CorruptTrace: it is no trace, of another version, or a line cannot be read.
    """
    waiting = iter(lines)
    head = _parsed(next(waiting, ""), 1)
    if head is None or head.get("trace") != VERSION:
        raise CorruptTrace(f"expected a trace of version {VERSION}, found {str(head)[:100]!r} in its first line")
    number, cut = 1, 0
    for line in waiting:
        number += 1
        if cut:
            raise CorruptTrace(f"line {cut} cannot be read, and others follow it")
        entry = _parsed(line, number)
        if entry is None:
            cut = number
            continue
        if "kind" in entry:
            arguments = {name: decode(value) for name, value in entry["arguments"].items()}
            yield Created(entry["at"], entry["machine"], entry["kind"], arguments)
        else:
            event = decode(entry["event"])
            yield Handled(entry["at"], entry["machine"], event, entry["actions"], entry.get("raised", ""))


def about(line: str) -> Mapping[str, str]:
    """The pipeline, run and versions in the first line of a trace. Raises CorruptTrace if it is none."""
    head = _parsed(line, 1)
    if head is None or head.get("trace") != VERSION:
        raise CorruptTrace(f"expected a trace of version {VERSION}, found {line[:100]!r} in its first line")
    found: Mapping[str, str] = head["about"]
    return found


def replay(entries: Iterable[Created | Handled]) -> Iterator[Difference]:
    """Give the same events to the same machines, and compare their actions.

    Args:
        entries: the entries of the trace.

    Returns:
        The differences. Later differences of a machine mostly follow from its first one.

    Raises:
        CorruptTrace: the trace names a machine that was not made, or of an unknown kind.
    """
    machines: dict[str, Machine] = {}
    for number, entry in enumerate(entries, 1):
        if isinstance(entry, Created):
            machines[entry.machine] = class_of(entry.kind)(**entry.arguments)
            continue
        if entry.machine not in machines:
            raise CorruptTrace(f"entry {number}: {entry.machine!r} takes an event, and was never made")
        raised, found = "", []
        try:
            found = [encode(action) for action in machines[entry.machine].handle(entry.event, entry.at)]
        except Exception as error:
            raised = type(error).__name__
        if (raised, found) != (entry.raised, entry.actions):
            yield Difference(number, entry, raised or found)


def _parsed(line: str, number: int) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    if not isinstance(found, dict):
        raise CorruptTrace(f"line {number}: expected an object, found {line[:100]!r}")
    return found
