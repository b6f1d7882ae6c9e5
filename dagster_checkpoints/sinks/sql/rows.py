"""A batch's files as rows for a database: text for PostgreSQL's COPY, tuples for SQLite.

Each value keeps its exact meaning: timestamps are UTC, decimals keep every digit. Must not know tables or transactions.

Source: https://www.postgresql.org/docs/current/sql-copy.html, "Text Format"; https://www.sqlite.org/datatype3.html.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_ROWS_AT_A_TIME = 16384
_ESCAPES = (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t"))


def read_batches(files: Sequence[Path]) -> Iterator[pa.RecordBatch]:
    """The rows of Parquet files, in the order of the files."""
    for file in files:
        with pq.ParquetFile(file) as parquet:
            yield from parquet.iter_batches(_ROWS_AT_A_TIME)


def copy_text(batch: pa.RecordBatch, first: int) -> bytes:
    """Rows as text for COPY; the first field is the row's number.

    Args:
        batch: rows whose values PostgreSQL can hold.
        first: number of the first row.
    """
    numbers = pa.array(range(first, first + batch.num_rows), pa.int64())
    fields = [pc.cast(numbers, pa.large_string())]
    fields += [_copy_field(column) for column in batch.columns]
    rows = pc.binary_join_element_wise(
        *fields, pa.scalar("\t", pa.large_string()), null_handling="replace", null_replacement="\\N"
    )
    lines = pc.binary_join_element_wise(rows, pa.scalar("", pa.large_string()), pa.scalar("\n", pa.large_string()))
    _, _, data = lines.buffers()
    return bytes(data)


def _text(value: str) -> pa.Scalar:
    return pa.scalar(value, pa.large_string())


def _copy_field(column: pa.Array) -> pa.Array:
    kinds = pa.types
    if kinds.is_binary(column.type) or kinds.is_large_binary(column.type):
        texts = [None if value is None else "\\\\x" + value.hex() for value in column.to_pylist()]
        return pa.array(texts, pa.large_string())
    if kinds.is_timestamp(column.type) and column.type.tz is not None:
        texts = pc.cast(_plain(column), pa.large_string())
        return pc.binary_join_element_wise(texts, _text("+00"), _text(""))  # otherwise it is in the session's zone
    if not (kinds.is_string(column.type) or kinds.is_large_string(column.type)):
        return pc.cast(_plain(column), pa.large_string())
    text = pc.cast(column, pa.large_string())
    if not pc.any(pc.match_substring_regex(text, r"[\\\n\r\t]")).as_py():
        return text
    for character, escaped in _ESCAPES:
        text = pc.replace_substring(text, character, escaped)
    return text


def _plain(column: pa.Array) -> pa.Array:
    """Timestamps as microseconds, in UTC, without a zone; 32-bit numbers with all digits, since the column may have 64."""
    if pa.types.is_float32(column.type):
        return pc.cast(column, pa.float64())
    if not pa.types.is_timestamp(column.type):
        return column
    if column.type.tz is None:
        return pc.cast(column, pa.timestamp("us"))
    return pc.cast(pc.cast(column, pa.timestamp("us", "UTC")), pa.timestamp("us"))


def sqlite_rows(batch: pa.RecordBatch, first: int) -> list[tuple[Any, ...]]:
    """Rows as values of Python's sqlite3; the first value is the row's number.

    Args:
        batch: rows whose values SQLite can hold.
        first: number of the first row.
    """
    columns = [_sqlite_values(column) for column in batch.columns]
    return list(zip(range(first, first + batch.num_rows), *columns, strict=True))


def _sqlite_values(column: pa.Array) -> list[Any]:
    kinds = pa.types
    if kinds.is_decimal(column.type):
        return [None if value is None else format(value, "f") for value in column.to_pylist()]
    if kinds.is_timestamp(column.type) or kinds.is_date(column.type):
        values: list[Any] = pc.cast(_plain(column), pa.string()).to_pylist()
        return values
    if kinds.is_boolean(column.type):
        column = pc.cast(column, pa.int8())
    values = column.to_pylist()
    return values
