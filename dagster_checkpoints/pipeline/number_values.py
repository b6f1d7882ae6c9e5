"""Which numbers a setting may have. A truth value is no number, and neither is infinity: no time ever reaches it.

Must not know the settings: each states its range where it is declared.
"""

from __future__ import annotations

import math


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
