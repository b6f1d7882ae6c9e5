"""A batch's Parquet files: whether a lake table can have them as they are, and their rows by partition where it cannot.

Lake tables store times in microseconds, and so does FileSink. Must not know a table format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

_FIELD_ID = b"PARQUET:field_id"
_SPARK_SCHEMA = b"org.apache.spark.sql.parquet.row.metadata"


def parquet_rows(file: Path) -> int:
    """The number of rows that a Parquet file's footer counts."""
    import pyarrow.parquet as pq  # the command line reads transactions without it

    return int(pq.read_metadata(file).num_rows)


def null_count(file: Path, column: str) -> int:
    """The number of nulls in a column of a Parquet file that has it, counted in its rows."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as parquet:
        return int(parquet.read(columns=[column])[column].null_count)


def fits(metadata: Any) -> bool:
    """Whether all times are in microseconds.

    Args:
        metadata: the file's ``pyarrow.parquet.FileMetaData``.
    """
    for number in range(metadata.num_columns):
        column = metadata.schema.column(number)
        if column.physical_type == "INT96":
            return False
        logical = str(column.logical_type)
        if logical.startswith("Timestamp") and "timeUnit=microseconds" not in logical:
            return False
    return True


def has_field_ids(fields: Iterable[Any]) -> bool:
    """Whether columns of a file have ids, also nested ones.

    Args:
        fields: the fields of its ``pyarrow.Schema``.
    """
    return any(
        _FIELD_ID in (field.metadata or {}) or has_field_ids(field.type.field(place) for place in range(field.type.num_fields))
        for field in fields
    )


def spark_schema(metadata: Any) -> str | None:
    """The schema that Spark recorded in the file's footer, as JSON; None if Spark has not written the file."""
    text = (metadata.metadata or {}).get(_SPARK_SCHEMA)
    return None if text is None else text.decode()


def intervals_in(schema: Any) -> dict[str, str]:
    """The columns that are intervals in Spark, with their types; in the file they are numbers.

    Args:
        schema: the file's ``pyarrow.Schema``, with the file's metadata.
    """
    text = (schema.metadata or {}).get(_SPARK_SCHEMA)
    fields = [] if text is None else json.loads(text)["fields"]
    return {f["name"]: f["type"] for f in fields if isinstance(f["type"], str) and f["type"].startswith("interval")}


def arrow_schema(metadata: Any) -> Any:
    """The file's ``pyarrow.Schema``, with all times in microseconds and instants in UTC, without field ids."""
    return _in_microseconds(metadata.schema.to_arrow_schema(), _instants(metadata))


def rows_in_microseconds(file: Path, metadata: Any) -> Any:
    """The file's rows, as a ``pyarrow.Table`` with all times in microseconds, without field ids."""
    import pyarrow.parquet as pq

    table = pq.read_table(file, coerce_int96_timestamp_unit="us")
    return table.cast(_in_microseconds(table.schema, _instants(metadata)))


def partitions(table: Any, partition_by: Sequence[str]) -> Iterator[tuple[dict[str, Any], Any]]:
    """The rows of each partition, with the partition's values by column."""
    if not partition_by:
        yield {}, table
        return
    # Under names of its own: Arrow takes some, such as ".day", for the path of a field.
    named = table.rename_columns([f"c{number}" for number in range(table.num_columns)])
    columns = {f"c{table.column_names.index(name)}": name for name in partition_by}
    order = [(column, "ascending") for column in columns]
    counts = named.group_by(list(columns)).aggregate([([], "count_all")]).sort_by(order)
    rows = named.sort_by(order).rename_columns(table.column_names)
    begin = 0
    for values in counts.to_pylist():
        count = values.pop("count_all")
        yield {columns[column]: value for column, value in values.items()}, rows.slice(begin, count)
        begin += count


def _instants(metadata: Any) -> frozenset[str]:
    """The top-level columns with INT96 timestamps: these are instants, although the file does not say so."""
    columns = (metadata.schema.column(number) for number in range(metadata.num_columns))
    return frozenset(column.path.partition(".")[0] for column in columns if column.physical_type == "INT96")


def _in_microseconds(schema: Any, instants: frozenset[str]) -> Any:
    import pyarrow as pa

    return pa.schema([_plain(field, field.name in instants) for field in schema])


def _plain(field: Any, instant: bool) -> Any:
    return field.remove_metadata().with_type(_type_in_microseconds(field.type, instant))


def _type_in_microseconds(kind: Any, instant: bool) -> Any:
    import pyarrow as pa

    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz or instant else None)
    if pa.types.is_struct(kind):
        return pa.struct([_plain(field, instant) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_type_in_microseconds(kind.value_type, instant))
    if pa.types.is_map(kind):
        return pa.map_(_type_in_microseconds(kind.key_type, instant), _type_in_microseconds(kind.item_type, instant))
    return kind
