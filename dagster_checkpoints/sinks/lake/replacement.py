"""Which rows of a lake table a stage's rows replace: the setting, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replacement:
    """What the rows of a stage replace; nothing by default.

    Args:
        key: the columns by which a row replaces an earlier one; empty if rows do not replace rows.
        partitions: whether the rows of a job replace those of the partitions that they are in.
    """

    key: tuple[str, ...] = ()
    partitions: bool = False

    def __bool__(self) -> bool:
        return bool(self.key) or self.partitions
