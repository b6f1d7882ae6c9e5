"""`replay`: the trace of a run as a readable history, and whether this version's state machines decide the same as the run's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Set
from enum import Enum
from pathlib import Path
from typing import Any

import click
import msgspec

from dagster_checkpoints.cli.exits import NothingThere
from dagster_checkpoints.cli.output import JSON, count_of, write_json
from dagster_checkpoints.execution.trace import CorruptTrace, Created, Difference, Handled, Opaque, about, decode, read, replay
from dagster_checkpoints.pipeline import TaskId

_LONGEST_TEXT = 160
_MACHINE_WIDTH = 24
_EMPTY: tuple[Any, ...] = (None, "", (), [], {}, frozenset())


@click.command("replay")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--all", "everything", is_flag=True, help="Show the events without a decision, too.")
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON document.")
@click.pass_context
def replay_command(context: click.Context, file: Path, everything: bool, as_json: bool) -> None:
    """The history of a run from its recorded trace: time, state machine, decision, and the event that caused it.

    FILE is the trace that a run writes if its resource has `trace` set. The trace is replayed as well: the state machines of this
    version handle the same events and must decide the same. Needs neither storage nor Spark.
    """
    context.find_root().meta[JSON] = as_json
    try:
        if not file.is_file():
            raise NothingThere(f"expected a trace at {file}, found {'a directory' if file.is_dir() else 'no such file'}")
        with file.open(encoding="utf-8", errors="replace") as lines:
            header = about(lines.readline())
        with file.open(encoding="utf-8", errors="replace") as lines:
            entries = list(read(lines))
    except OSError as error:
        raise NothingThere(f"expected a trace that can be read at {file}, found: {error.strerror}") from error
    differences = list(replay(entries))
    if as_json:
        write_json({"about": dict(header), "entries": len(entries), "differences": list(map(str, differences))})
    else:
        click.echo("".join(f"{name}: {value}\n" for name, value in header.items()))
        for line in history(entries, everything=everything):
            click.echo(line)
        click.echo(verdict(entries, differences))
    if differences:
        raise TraceDiffers(
            f"{count_of(len(differences), 'decision')} of this version's machines differ from the trace; the first: "
            f"{differences[0]}. Did another version record the trace?"
        )


class TraceDiffers(CorruptTrace):
    """The state machines of this version decide otherwise than those of the run."""


def verdict(entries: list[Created | Handled], differences: list[Difference]) -> str:
    """The result of the replay, in one line."""
    events = sum(isinstance(entry, Handled) for entry in entries)
    same = "this version's machines decide the same" if not differences else f"{count_of(len(differences), 'decision')} differ"
    return f"\nreplayed: {count_of(events, 'event')} of {count_of(len(entries) - events, 'machine')}; {same}"


def history(entries: list[Created | Handled], *, everything: bool = False) -> Iterator[str]:
    """One line for each decision: seconds since the trace began, state machine, decision, event.

    Args:
        entries: entries of the trace.
        everything: whether events without a decision get a line, too.
    """
    began = entries[0].at if entries else 0.0
    for entry in entries:
        start = f"{entry.at - began:10.3f} s  {entry.machine:<{_MACHINE_WIDTH}}  "
        if isinstance(entry, Created):
            yield f"{start}created: {in_words(_parts(entry.arguments))}"
            continue
        event = in_words(entry.event)
        if entry.raised:
            yield f"{start}raised {entry.raised}, on: {event}"
        elif entry.actions:
            decisions = [in_words(decode(action)) for action in entry.actions]
            yield f"{start}{decisions[0]}  <- {event}"
            yield from (f"{'':{len(start)}}{decision}" for decision in decisions[1:])
        elif everything:
            yield f"{start}-  <- {event}"


def in_words(value: Any) -> str:
    """A value of a trace as text: the words of its type's name, and its fields."""
    text = _in_words(value)
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."


def _in_words(value: Any) -> str:
    match value:
        case TaskId():
            return str(value)
        case Opaque(type_name):
            return f"<{type_name}>"
        case Enum():
            return value.name
        case float():
            return f"{value:.3f}"
        case str():
            return value
        case Mapping():
            return "{" + ", ".join(f"{_in_words(key)}: {_in_words(item)}" for key, item in value.items()) + "}"
        case Set():
            return _in_words(sorted(value, key=str))
        case tuple() | list():
            return "[" + ", ".join(map(_in_words, value)) + "]"
    if dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct):
        parts = _fields_in_words(_parts(value))
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(value).__name__).lower()
        return f"{words} ({parts})" if parts else words
    return str(value)


def _fields_in_words(fields: Mapping[str, Any]) -> str:
    return ", ".join(_field_in_words(name, value) for name, value in fields.items() if value not in _EMPTY)


def _field_in_words(name: str, value: Any) -> str:
    """`barrier (checkpoint_id 5)`, not `barrier checkpoint barrier (checkpoint_id 5)`."""
    words = _in_words(value)
    return words if name in words.partition(" (")[0].split() else f"{name} {words}"


def _parts(value: Any) -> Mapping[str, Any]:
    """The fields that differ from their defaults."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, msgspec.Struct):
        defaults = dict(zip(reversed(value.__struct_fields__), reversed(value.__struct_defaults__), strict=False))
        return {name: item for name in value.__struct_fields__ if (item := getattr(value, name)) != defaults.get(name, ...)}
    fields = [field for field in dataclasses.fields(value) if field.init]
    return {field.name: item for field in fields if (item := getattr(value, field.name)) != field.default}
