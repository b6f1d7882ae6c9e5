"""What a sensor remembers from one tick to the next: JSON with a version.

A cursor may be lost, cut, of another release or written by hand in the UI. Then the sensor starts with an empty one, which is
harmless: what it asks of a pipeline it asks under ids that make a repetition harmless.
"""

from __future__ import annotations

import logging
from typing import TypeVar

import msgspec

_log = logging.getLogger(__name__)


class Cursor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The base of all cursors; every field has a default.

    Args:
        version: of the cursor's format; another one is not read.
    """

    version: int = 1

    def __post_init__(self) -> None:
        if self.version != 1:
            raise ValueError(f"expected version 1, found {self.version}")


AnyCursor = TypeVar("AnyCursor", bound=Cursor)


def read_cursor(text: str | None, kind: type[AnyCursor]) -> AnyCursor:
    """The cursor that a sensor left, or an empty one if it left none that can be read."""
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
