"""Compares two results without regard to the order of rows; numbers of floating point are equal within rounding."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from dagster_checkpoints.testing.source_rows import InvalidTestRowsError

_RELATIVE = 1e-9
"""Sums of floating-point numbers depend on the order in which they are added up, in their last digits."""


def differences(expected: Iterable[Sequence[Any]], found: Iterable[Sequence[Any]]) -> tuple[list[Any], list[Any]]:
    """The rows that are expected and not found, and the rows that are found and not expected."""
    by_key: dict[Any, list[tuple[tuple[float, ...], Any]]] = {}
    for row in expected:
        key, numbers = _key(row)
        by_key.setdefault(key, []).append((numbers, row))
    unexpected = []
    for row in found:
        key, numbers = _key(row)
        candidates = by_key.get(key, [])
        match = next((index for index, (others, _) in enumerate(candidates) if all(map(_same, numbers, others))), None)
        if match is None:
            unexpected.append(row)
        else:
            candidates.pop(match)
    return [row for rest in by_key.values() for _, row in rest], unexpected


def column_names(row: Any) -> list[str]:
    """The names of a row's columns; a plain tuple has none."""
    return list(row if isinstance(row, Mapping) else getattr(row, "__fields__", ()))


def in_column_order(stage: str, rows: Iterable[Any], order: Sequence[str] | None, ignored: Collection[str]) -> list[Any]:
    """Rows whose values are in the order of the stage's columns; plain tuples stay as they are.

    Args:
        stage: The stage's name.
        rows: Dictionaries, Spark's rows, or tuples.
        order: The names of the stage's columns; None if it has emitted no row.
        ignored: The names of columns that are left out.

    Raises:
        InvalidTestRowsError: A dictionary has other columns than the stage.
    """
    wanted = None if order is None else [name for name in order if name not in ignored]
    return [_in_order(stage, row, wanted, ignored) for row in rows]


def _in_order(stage: str, row: Any, wanted: Sequence[str] | None, ignored: Collection[str]) -> Any:
    names = column_names(row)
    if not names or (names == wanted and not isinstance(row, Mapping)):
        return row
    values = [(name, row[name] if isinstance(row, Mapping) else row[place]) for place, name in enumerate(names)]
    values = [(name, value) for name, value in values if name not in ignored]
    found = [name for name, _ in values]
    if wanted is not None and sorted(found) == sorted(wanted):
        values.sort(key=lambda each: wanted.index(each[0]))
    elif wanted is not None and isinstance(row, Mapping):
        raise InvalidTestRowsError(
            f"Stage {stage!r}: expected rows with the columns {', '.join(wanted)}, which the stage emits, found a dictionary "
            f"with {', '.join(found)} in the result of expected=. Give it the names of the stage's columns"
        )
    return tuple(value for _, value in values)


def _key(row: Any) -> tuple[Any, tuple[float, ...]]:
    """What has to be equal, and the floating-point numbers in order."""
    numbers: list[float] = []
    return _exact(row, numbers), tuple(numbers)


def _exact(value: Any, numbers: list[float]) -> Any:
    if isinstance(value, float):
        numbers.append(value)
        return "float"
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        value = value.astimezone().replace(tzinfo=None)  # as PySpark gives a timestamp: in the zone of the Python process
    if isinstance(value, Mapping):
        return ("map", *(_exact(each, numbers) for each in sorted(value.items(), key=repr)))
    if isinstance(value, list | tuple):
        return ("items", *(_exact(each, numbers) for each in value))
    return type(value).__name__, repr(value)


def _same(one: float, other: float) -> bool:
    return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=_RELATIVE, abs_tol=1e-12)
