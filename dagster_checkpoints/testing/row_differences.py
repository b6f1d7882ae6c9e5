"""Compares two results without regard to the order of rows; numbers of floating point are equal within rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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


def _key(row: Any) -> tuple[Any, tuple[float, ...]]:
    """What has to be equal, and the floating-point numbers in order."""
    numbers: list[float] = []
    return _exact(row, numbers), tuple(numbers)


def _exact(value: Any, numbers: list[float]) -> Any:
    if isinstance(value, float):
        numbers.append(value)
        return "float"
    if isinstance(value, Mapping):
        return ("map", *(_exact(each, numbers) for each in sorted(value.items(), key=repr)))
    if isinstance(value, list | tuple):
        return ("items", *(_exact(each, numbers) for each in value))
    return type(value).__name__, repr(value)


def _same(one: float, other: float) -> bool:
    return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=_RELATIVE, abs_tol=1e-12)
