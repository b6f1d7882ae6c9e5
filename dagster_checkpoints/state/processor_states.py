"""Whether the states that a ``transformWithState`` processor declares fit those in a checkpoint, in which it declared others.

Spark keeps each declared state under its name, checks that its kind has not changed, and reads old values with a new schema only
where they are encoded as Avro. What it would refuse in the first batch, or read otherwise than it was written, does not fit.

Operators are compared as text, as in :mod:`plans`. Must not know Spark.

Source: "State Schema Evolution" of Spark's programming guide on transformWithState; Avro's specification, "Schema Resolution".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ENCODED_AS_AVRO = ", encoded as avro"
"""The end of an operator's text, in front of its watermark, if Spark encodes its states as Avro."""

_OPERATOR = re.compile(
    r"(transformWithState by .*: \S+ with )(.*?)(, output mode \w+, time mode \w+)(, encoded as avro)?((?:; .*)?)"
)
_STATE = re.compile(r"(?P<kind>value|list|map) (?P<name>\S+) (?:(?P<key>\S+) -> )?(?P<value>\S+)(?P<kept>, kept \d+ ms)?")
_BETWEEN_STATES = re.compile(r", (?=(?:value|list|map) )")
_WIDER = {("int", "bigint"), ("float", "double")}


@dataclass(frozen=True, slots=True)
class _DeclaredState:
    """A state that a processor declares: its kind, the types of a map's keys and of its values, and how long it is kept."""

    kind: str
    key: str | None
    value: str
    kept: str | None


def fits_states(before: str, now: str) -> bool:
    """Whether the state of an operator in a checkpoint fits another text of this operator.

    States may be added, or left out, but not both at once: that may be another name for the same state. So may fields of the
    values of a state, if they are encoded as Avro; then fields may also change places, and ``int`` may become ``bigint``,
    ``float`` ``double``.

    Args:
        before: the text of the operator in the checkpoint.
        now: its present text.
    """
    old, new = _OPERATOR.fullmatch(before), _OPERATOR.fullmatch(now)
    if old is None or new is None or old.group(1, 3, 5) != new.group(1, 3, 5):
        return False
    held, declared = _states(old[2]), _states(new[2])
    if held is None or declared is None or _renamed(held, declared):
        return False
    evolves = old[4] is not None  # Spark goes on with the encoding in which a query has begun
    return all(_fits(state, declared[name], evolves=evolves) for name, state in held.items() if name in declared)


def with_encoding(before: str, now: str) -> str:
    """The text of an operator with the encoding of the restored query: Spark goes on with the one in which a query has begun.

    Args:
        before: the text of the operator in the checkpoint.
        now: its present text, with the encoding that the session has now.
    """
    old = _OPERATOR.fullmatch(before)
    return now if old is None else as_encoded(now, avro=old[4] is not None)


def as_encoded(text: str, *, avro: bool) -> str:
    """The text of an operator, if it declares states, with the encoding in which its query has begun.

    Args:
        text: the text of the operator.
        avro: whether that is Avro.
    """
    found = _OPERATOR.fullmatch(text)
    return text if found is None else "".join((*found.group(1, 2, 3), ENCODED_AS_AVRO if avro else "", found[5]))


def _renamed(before: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """Whether some names were added and others left out."""
    return bool(before.keys() - now.keys() and now.keys() - before.keys())


def _fits(before: _DeclaredState, now: _DeclaredState, *, evolves: bool) -> bool:
    if (before.kind, before.key, before.kept) != (now.kind, now.key, now.kept):
        return False
    return before.value == now.value or (evolves and _fields_fit(before.value, now.value))


def _fields_fit(before: str, now: str) -> bool:
    held, declared = _fields(before), _fields(now)
    if held is None or declared is None or _renamed(held, declared):
        return False
    return all(kind == declared[name] or (kind, declared[name]) in _WIDER for name, kind in held.items() if name in declared)


def _states(text: str) -> dict[str, _DeclaredState] | None:
    """The declared states by name; None if the text cannot be read."""
    states: dict[str, _DeclaredState] = {}
    for part in _BETWEEN_STATES.split(text) if text != "no state" else ():
        found = _STATE.fullmatch(part)
        if found is None or found["name"] in states:
            return None
        states[found["name"]] = _DeclaredState(found["kind"], found["key"], found["value"], found["kept"])
    return states


def _fields(kind: str) -> dict[str, str] | None:
    """The types of a struct's fields by name; None if the text is no struct that can be read."""
    if not (kind.startswith("struct<") and kind.endswith(">")):
        return None
    fields: dict[str, str] = {}
    for text in _split(kind[len("struct<") : -1]):
        name, colon, field = text.partition(":")
        if not colon or name in fields:
            return None
        fields[name] = field
    return fields


def _split(text: str) -> Sequence[str]:
    """The parts of a text between the commas that are in no brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "<(") - (character in ">)")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
