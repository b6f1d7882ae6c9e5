"""Values of settings: numbers, and durations in seconds.

A truth value is no number, and neither is infinity: no time ever reaches it. The lateness of event time is no duration, but a
Spark interval. Must not know the settings: each states its range where it is declared.
"""

from __future__ import annotations

import math
import re

from dagster_checkpoints.pipeline.errors import InvalidDurationError


def is_number(value: object, *, least: float = 0, above: float | None = None) -> bool:
    """Whether a setting is a finite number of its range, such as a number of seconds.

    Args:
        value: the value that the user gave.
        least: the smallest allowed number.
        above: a number that it has to be greater than; None for no such number.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return False
    return value >= least and (above is None or value > above)


def is_count(value: object, *, least: int = 0) -> bool:
    """Whether a setting is a whole number of things, at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_SECONDS_PER_UNIT = {
    "ms": 0.001,
    "millisecond": 0.001,
    "s": 1.0,
    "sec": 1.0,
    "second": 1.0,
    "m": 60.0,
    "min": 60.0,
    "minute": 60.0,
    "h": 3600.0,
    "hr": 3600.0,
    "hour": 3600.0,
    "d": 86400.0,
    "day": 86400.0,
}
_TEXT = re.compile(r"\s*(?:PT)?(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def no_seconds(value: object, *, least: float = -math.inf, above: float | None = None) -> str:
    """Why a value is not a duration of a range; empty if it is one.

    Args:
        value: The value that the user gave.
        least: The shortest duration allowed, in seconds.
        above: A number of seconds that it has to be greater than; None for no such number.

    Returns:
        What was expected and found, and the number to write if the value says one.
    """
    if is_number(value, least=least, above=above):
        return ""
    if is_number(value, least=-math.inf):
        least_or_more = f"at least {least:g} seconds" if above is None else f"seconds greater than {above:g}"
        return f"expected {least_or_more}, found {value!r}"
    if isinstance(value, float):
        return f"expected seconds, as a finite number, found {value!r}"
    meant = _meant(value)
    advice = f". Write {meant:g}" if meant is not None else ", such as 30 or 0.5"
    return f"expected seconds, as a number, found {value!r}{advice}"


def check_seconds(where: str, *, least: float = 0, above: float | None = None, **settings: object) -> None:
    """Refuse settings that are not durations of a range; None is no setting.

    Args:
        where: What has the settings, for the error.
        least: The shortest duration allowed, in seconds.
        above: A number of seconds that each has to be greater than; None for no such number.
        settings: The values, by their names.

    Raises:
        InvalidDurationError: One of them is not a number of seconds.
    """
    for name, value in settings.items():
        problem = "" if value is None else no_seconds(value, least=least, above=above)
        if problem:
            raise InvalidDurationError(f"{where}({name}=...): {problem}")


def _meant(value: object) -> float | None:
    total_seconds = getattr(value, "total_seconds", None)  # of a timedelta
    if callable(total_seconds):
        return float(total_seconds())
    found = _TEXT.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    unit = found[2].lower()
    factor = _SECONDS_PER_UNIT.get(unit or "s") or _SECONDS_PER_UNIT.get(unit.removesuffix("s"))
    return None if factor is None else float(found[1]) * factor
