"""The files whose rows readers of a Delta table see, chosen by the bounds of their columns, as its log says them.

Must not know which rows a sink has written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc

from dagster_checkpoints.sinks.delta.data_files import partition_text
from dagster_checkpoints.sinks.lake.table_log import ActiveFile

_BOUNDED = (
    pa.types.is_integer,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_date,
    pa.types.is_timestamp,
)
"""Types whose bounds are compared. Those of decimals may have been rounded: they are numbers in JSON."""
_NOT_ESCAPED = "!$&'()+,/:;=@~"
_COARSE = timedelta(milliseconds=1)
"""Bounds of times in the log may have been cut to milliseconds."""


def active_files(
    actions: pa.Table, partition_by: Sequence[str], bounds: Mapping[str, tuple[pa.Scalar, pa.Scalar]]
) -> list[ActiveFile]:
    """The files that may hold a row whose values are all within bounds.

    Args:
        actions: a row for each file, as ``DeltaTable.get_add_actions()`` returns them.
        partition_by: the table's partition columns.
        bounds: the smallest and the largest value of columns.
    """
    if bounds:
        actions = actions.filter(_may_hold(actions, bounds))
    count = actions.num_rows
    rows = actions["num_records"].to_pylist() if "num_records" in actions.column_names else [None] * count
    partitions = actions["partition"].to_pylist() if partition_by else [{}] * count
    return [
        ActiveFile(unquote(path), path, size, number, {name: partition_text(partition[name]) for name in partition_by})
        for path, size, number, partition in zip(
            actions["path"].to_pylist(), actions["size_bytes"].to_pylist(), rows, partitions, strict=True
        )
    ]


def is_removable(file: ActiveFile) -> bool:
    """Whether the library, which writes escapes of its own, means this file when it removes it from the log."""
    return quote(file.path, safe=_NOT_ESCAPED) == file.logged


def _may_hold(actions: pa.Table, bounds: Mapping[str, tuple[pa.Scalar, pa.Scalar]]) -> Any:
    chosen: Any = pa.repeat(True, actions.num_rows)
    for column, (low, high) in bounds.items():
        smallest, largest = _bound(actions, "min", column), _bound(actions, "max", column)
        if smallest is None or largest is None or not any(known(low.type) for known in _BOUNDED):
            continue
        if pa.types.is_timestamp(low.type):
            low = pc.subtract(low, pa.scalar(_COARSE, pa.duration(low.type.unit)))
        within = pc.and_(pc.less_equal(pc.cast(smallest, low.type), high), pc.greater_equal(pc.cast(largest, low.type), low))
        chosen = pc.and_(chosen, pc.fill_null(within, True))
    return chosen


def _bound(actions: pa.Table, which: str, column: str) -> pa.ChunkedArray | None:
    if which not in actions.column_names or actions[which].type.get_field_index(column) < 0:
        return None
    return pc.struct_field(actions[which], [column])
