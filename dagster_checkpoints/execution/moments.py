"""Wall-clock times in stored files: each has a zone, and is a time in UTC."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import msgspec

Moment = Annotated[datetime, msgspec.Meta(tz=True)]
"""A wall-clock time with its time zone: without one, two times could not be compared."""


class WithMoments(msgspec.Struct, frozen=True, kw_only=True):
    """Base of values with such times: a time that is before the year 1, or after 9999, in UTC cannot be decoded."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, datetime) and value.tzinfo is not None:
                try:
                    value.astimezone(UTC)
                except OverflowError:
                    raise ValueError(f"expected {name} in the years 1 to 9999 in UTC, found {value.isoformat()}") from None
