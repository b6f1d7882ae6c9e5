"""What a run of the simulator can find."""

from __future__ import annotations


class Violation(AssertionError):
    """An invariant does not hold: the protocol, or the simulator's runtime, is wrong."""


def check(condition: object, *said: object) -> None:
    """Raise a Violation unless the condition holds; texts are only put together then."""
    if not condition:
        raise Violation(" ".join(str(one) for one in said))
