"""Data files of a Delta table: the columns of a Parquet file, values of partitions, and statistics.

Of the files whose rows readers see, those are chosen that may hold some rows, by the bounds of their columns in the table's log.
Must not know checkpoints.

Source: Delta's protocol, "Partition Value Serialization" and "Per-file Statistics".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from dagster_checkpoints.sinks.delta.columns import columns_of
from dagster_checkpoints.sinks.lake.columns import Column
from dagster_checkpoints.sinks.lake.table_log import ActiveFile, PreparedFile
from dagster_checkpoints.sinks.parquet_files import arrow_schema, spark_schema

_INDEXED_COLUMNS = 32
_LONGEST_TEXT = 64
_STATISTICS = msgspec.json.Encoder(decimal_format="number")


def file_columns(file: Path) -> tuple[Column, ...]:
    """The columns of a Parquet file, in Delta's types.

    Raises:
        Exception: a type that Delta does not have; of the library ``deltalake``.
    """
    import pyarrow.parquet as pq
    from deltalake import Schema

    metadata = pq.read_metadata(file)
    recorded = spark_schema(metadata)
    return columns_of(Schema.from_arrow(arrow_schema(metadata)).to_json() if recorded is None else recorded)


def partition_text(value: Any) -> str | None:
    """A partition column's value as Delta's log writes it; None for null."""
    if value is None or value == "":  # Delta reads the empty text as null
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        if value.tzinfo is None:
            return value.isoformat(" ", "microseconds")
        return value.astimezone(UTC).replace(tzinfo=None).isoformat("T", "microseconds") + "Z"
    return value.isoformat() if isinstance(value, date) else str(value)


def described(file: Path, metadata: Any, columns: Sequence[Column], partition: Mapping[str, str | None]) -> PreparedFile:
    """A file that fits the table, with its statistics.

    Args:
        file: the file on this machine.
        metadata: the file's footer.
        columns: the table's columns.
        partition: the partition's values by column.
    """
    names = {column.name: column.type for column in columns[:_INDEXED_COLUMNS] if isinstance(column.type, str)}
    smallest: dict[str, Any] = {}
    largest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    with_nan = _with_nan(file, metadata)
    for number in range(metadata.num_columns):
        name = metadata.schema.column(number).path
        if name not in names or not _is_at_the_top(metadata.schema.column(number)):
            continue
        chunks = [metadata.row_group(group).column(number).statistics for group in range(metadata.num_row_groups)]
        if any(chunk is None or chunk.null_count is None for chunk in chunks):
            continue
        nulls[name] = sum(chunk.null_count for chunk in chunks)
        bounds = None if name in with_nan else _bounds(chunks)
        if bounds is not None:
            smallest[name], largest[name] = bounds
    statistics = {"numRecords": metadata.num_rows, "minValues": smallest, "maxValues": largest, "nullCount": nulls}
    return PreparedFile(file, metadata.num_rows, nulls, _STATISTICS.encode(statistics).decode(), dict(partition))


def _with_nan(file: Path, metadata: Any) -> frozenset[str]:
    """The columns with NaN, which is larger than every number, if the footer does not say so: Arrow's bounds leave it out.

    Source: Spark's writer, parquet-mr, gives NaN as the largest value.
    """
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    columns = [metadata.schema.column(number) for number in range(metadata.num_columns)]
    floating = [each.path for each in columns if each.physical_type in ("FLOAT", "DOUBLE") and _is_at_the_top(each)]
    if not floating or (metadata.created_by or "").startswith("parquet-mr"):
        return frozenset()
    with pq.ParquetFile(file) as parquet:
        found: set[str] = set()
        for batch in parquet.iter_batches(columns=floating):
            found.update(name for name in floating if pc.any(pc.is_nan(batch.column(name))).as_py())
    return frozenset(found)


def _is_at_the_top(column: Any) -> bool:
    """Whether a column of a Parquet file is one of the table's: the field `b` of a struct `a` has the path of a column `a.b`."""
    return bool(column.name == column.path) and not column.max_repetition_level


def _bounds(chunks: Sequence[Any]) -> tuple[Any, Any] | None:
    """The smallest and the largest value in the JSON of Delta's statistics; None if they are unknown."""
    with_values = [chunk for chunk in chunks if chunk.has_min_max]
    if not with_values or any(not chunk.has_min_max and chunk.num_values for chunk in chunks):
        return None
    try:
        low, high = min(chunk.min for chunk in with_values), max(chunk.max for chunk in with_values)
    except (ArithmeticError, ValueError, OSError):  # a date that Python's types cannot hold
        return None
    if any(each != each for chunk in with_values for each in (chunk.min, chunk.max)):  # NaN: comparisons with it are always false
        return None
    try:
        smallest, largest = _bound(low, up=False), _bound(high, up=True)
    except OverflowError:  # the last millisecond of the year 9999, rounded up
        return None
    return None if smallest is None or largest is None else (smallest, largest)


def _bound(value: Any, *, up: bool) -> Any:
    """A value in the JSON of Delta's statistics, which has milliseconds; None if it is not used for skipping files."""
    match value:
        case bool() | bytes():
            return None
        case float():
            return value if math.isfinite(value) else None
        case str():
            return value if len(value) <= _LONGEST_TEXT else None
        case int() | Decimal():
            return value
        case datetime():
            rounded = value.replace(microsecond=value.microsecond // 1000 * 1000)
            if up and rounded != value:
                rounded += timedelta(milliseconds=1)
            text = rounded.replace(tzinfo=None).isoformat(timespec="milliseconds")
            return f"{text}Z" if value.tzinfo is not None else text
        case date():
            return value.isoformat()
        case _:
            return None


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
        smallest, largest = _bound_of(actions, "min", column), _bound_of(actions, "max", column)
        if smallest is None or largest is None or not any(known(low.type) for known in _BOUNDED):
            continue
        if pa.types.is_timestamp(low.type):
            low = pc.subtract(low, pa.scalar(_COARSE, pa.duration(low.type.unit)))
        within = pc.and_(pc.less_equal(pc.cast(smallest, low.type), high), pc.greater_equal(pc.cast(largest, low.type), low))
        chosen = pc.and_(chosen, pc.fill_null(within, True))
    return chosen


def _bound_of(actions: pa.Table, which: str, column: str) -> pa.ChunkedArray | None:
    if which not in actions.column_names or actions[which].type.get_field_index(column) < 0:
        return None
    return pc.struct_field(actions[which], [column])
