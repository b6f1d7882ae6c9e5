"""Locations of Delta tables. Text only."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from dagster_checkpoints.systems.errors import InvalidSinkPath
from dagster_checkpoints.systems.locations import location_of, target_url

_UNUSABLE = re.compile(r"[\[\]^|\\\x00-\x1f\x7f]|%[0-9A-Fa-f]{2}")
"""With these the library ends with a panic, or reads another place than it writes to."""


def delta_url(table: str | os.PathLike[str], schemes: Sequence[str]) -> str:
    """A Delta table's location: an absolute path, or an object store's URL.

    Args:
        table: the path or the URL as the user wrote it.
        schemes: the kinds of URL that are allowed.

    Raises:
        InvalidSinkPath: it is no location, or one that the library ``deltalake`` cannot use.
    """
    url = target_url(table, schemes, "a Delta table", "storage_options")
    for place in (url, location_of(url)):  # the library follows symbolic links
        found = _UNUSABLE.search(place)
        if found is not None:
            raise InvalidSinkPath(
                "expected a location that the library deltalake can use, without [ ] ^ | \\, control characters, and % in front "
                f"of two hexadecimal digits, found {found[0]!r} in {place!r}: move or rename the directory"
            )
    return url
