"""Hive's names of partitions: ``day=2024-01-01/shop=a%2Fb``. Values and text only.

Source: Spark's ``ExternalCatalogUtils.escapePathName``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from typing import Any

from dagster_checkpoints.systems.errors import SinkRowsRefused

_NULL = "__HIVE_DEFAULT_PARTITION__"
_ESCAPED = re.compile("[\x00-\x1f\x7f\"#%'*/:=?\\\\{\\[\\]^]")
_LONGEST = 255


def partition_folder(values: Mapping[str, Any], sink: str) -> str:
    """The folder of the rows that have these values; empty if there are no partition columns.

    Args:
        values: the value of each partition column.
        sink: the sink as errors name it.

    Raises:
        SinkRowsRefused: a value is too long to be a directory's name.
    """
    parts = [f"{_escaped(name)}={_text(value)}" for name, value in values.items()]
    for name, part in zip(values, parts, strict=True):
        if len(part.encode()) > _LONGEST:
            raise SinkRowsRefused(
                f"{sink}: expected values of the partition column {name!r} that fit a directory's name ({_LONGEST} bytes with "
                f"the column's name), found one of {len(part.encode())} bytes, which begins with {part[:40]!r}. Choose another "
                "partition column, or shorten the values in the stage"
            )
    return "/".join(parts)


def _text(value: Any) -> str:
    if value is None or value == "":  # Hive reads the empty text as null
        return _NULL
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.isoformat() if isinstance(value, date) else _escaped(str(value))


def _escaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", text)
