"""The memory of a sensor between ticks: JSON with a version.

A cursor may be lost, cut, of another release, or edited by hand in the UI. Then the sensor starts with an empty one, which is
harmless: the ids of its requests make a repetition harmless.
"""

from __future__ import annotations

import logging
from typing import TypeVar

import msgspec

_log = logging.getLogger(__name__)


class Cursor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The base of all cursors; every field has a default.

    Args:
        version: version of the cursor's format; a cursor of another version is not read.
    """

    version: int = 1

    def __post_init__(self) -> None:
        if self.version != 1:
            raise ValueError(f"expected version 1, found {self.version}")


AnyCursor = TypeVar("AnyCursor", bound=Cursor)


def read_cursor(text: str | None, kind: type[AnyCursor]) -> AnyCursor:
    """The cursor of the sensor's last tick; an empty one if it cannot be read.

    Args:
        text: the stored cursor; None if there is none.
        kind: the type of the sensor's cursor.
    """
    if not text:
        return kind()
    try:
        return msgspec.json.decode(text, type=kind)
    except (ValueError, RecursionError) as error:
        _log.warning("The sensor starts with an empty cursor, because its cursor cannot be read (%s): %.200r", error, text)
        return kind()


def write_cursor(cursor: Cursor) -> str:
    """The cursor as text, with its version."""
    return msgspec.json.encode({"version": cursor.version, **msgspec.to_builtins(cursor)}).decode()
