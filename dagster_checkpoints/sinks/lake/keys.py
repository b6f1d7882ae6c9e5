"""Rows by key: the newest row of each key in a transaction, and the rows of a table's files with these keys.

Keys are compared as values of the table's types; a row without a value in a key column has no key. Must not know the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_ROW = "row"


class KeyColumns:
    """The columns of a key.

    Args:
        key: their names, in order.
        types: the types of those that are not partition columns.
    """

    def __init__(self, key: Sequence[str], types: Mapping[str, pa.DataType]) -> None:
        self._key = tuple(key)
        self._types = dict(types)

    @property
    def names(self) -> tuple[str, ...]:
        return self._key

    def read(self, source: Any, partition: Mapping[str, str | None]) -> pa.Table:
        """The key of each row of a file: a column ``key0``, ``key1``, … for each column of the key.

        Args:
            source: path of a Parquet file, or an opened one.
            partition: the partition's values by column: these columns need not be in the file.
        """
        with pq.ParquetFile(source, coerce_int96_timestamp_unit="us") as file:
            there = set(file.schema_arrow.names)
            stored = file.read(columns=[name for name in self._key if name in there and name not in partition])
            rows = file.metadata.num_rows
        columns = []
        for name in self._key:
            if name in partition:
                columns.append(pa.chunked_array([pa.repeat(pa.scalar(partition[name], pa.string()), rows)]))
            elif name in stored.column_names:
                columns.append(stored[name].cast(self._types[name], safe=False))
            else:
                columns.append(pa.chunked_array([pa.nulls(rows, self._types[name])]))
        return pa.table(columns, names=[f"key{number}" for number in range(len(columns))])

    def bounds(self, keys: pa.Table) -> dict[str, tuple[pa.Scalar, pa.Scalar]]:
        """The smallest and the largest value of each column that is not a partition column."""
        found = {}
        for number, name in enumerate(self._key):
            if name in self._types:
                extremes = pc.min_max(keys.column(number))
                found[name] = (extremes["min"], extremes["max"])
        return found


def key_types(file: Any, key: Sequence[str]) -> dict[str, pa.DataType]:
    """The types of a key's columns in a file that a sink has staged, without those that it does not have."""
    with pq.ParquetFile(file) as opened:
        schema = opened.schema_arrow
    return {name: schema.field(name).type for name in key if name in schema.names}


def newest_of_each_key(files: Sequence[pa.Table]) -> tuple[pa.Table, list[pa.ChunkedArray | None]]:
    """The keys of a transaction, and for each of its files the rows that a later row of the transaction replaces.

    Args:
        files: the keys of the rows of each file, in the order in which the rows were written.

    Returns:
        Each key once; and for each file, True for each row that is replaced, or None if none is.
    """
    rows = pa.concat_tables(files)
    numbers = _numbers(rows.num_rows)
    last = rows.append_column(_ROW, numbers).group_by(rows.column_names).aggregate([(_ROW, "max")])
    keys = last.select(rows.column_names)
    if last.num_rows == rows.num_rows:
        return keys, [None] * len(files)
    replaced = pc.invert(pc.is_in(numbers, value_set=_one_array(last[f"{_ROW}_max"])))
    return keys, split(replaced, [file.num_rows for file in files])


def last_of_each_key(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """Rows without those that a later row with the same key replaces."""
    keys = rows.select(list(key)).rename_columns([f"key{number}" for number in range(len(key))])
    _, (replaced,) = newest_of_each_key([keys])
    return rows if replaced is None else rows.filter(pc.invert(replaced))


def with_keys(rows: pa.Table, keys: pa.Table) -> pa.ChunkedArray:
    """True for each row that has one of the keys.

    Args:
        rows: the key of each row.
        keys: keys, each once.
    """
    if rows.num_columns == 1:
        return pc.is_in(rows.column(0), value_set=_one_array(keys.column(0)))
    numbers = _numbers(rows.num_rows)
    found = rows.append_column(_ROW, numbers).join(keys, rows.column_names, join_type="left semi")
    return pc.is_in(numbers, value_set=_one_array(found[_ROW]))


def split(mask: pa.ChunkedArray, lengths: Sequence[int]) -> list[pa.ChunkedArray | None]:
    """Parts of a mask, None where a part has no True."""
    parts: list[pa.ChunkedArray | None] = []
    begin = 0
    for length in lengths:
        part = mask.slice(begin, length)
        parts.append(part if pc.any(part).as_py() else None)
        begin += length
    return parts


def _numbers(count: int) -> pa.ChunkedArray:
    return pa.chunked_array([pc.cumulative_sum(pa.repeat(pa.scalar(1, pa.int64()), count))])


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
