"""The columns of data files with their field ids, read from the files' footers through the table's own file system.

The metadata of a table does not say which columns a data file has, nor whether it has field ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from dagster_checkpoints.sources.iceberg.projection import FileField

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.io import FileIO

_PARALLEL_REQUESTS = 16
_ID = b"PARQUET:field_id"


def columns_of_files(io: FileIO, paths: Sequence[str]) -> list[tuple[FileField, ...]]:
    """The columns of Parquet files.

    Args:
        io: the table's file system.
        paths: the files, as Hadoop writes them (`file:/data/…`, `s3a://bucket/…`).

    Raises:
        FileNotFoundError: a file is gone.
        Exception: what the library raises if the place does not answer.
    """
    if len(paths) == 1:
        return [_columns(io, paths[0])]
    with ThreadPoolExecutor(_PARALLEL_REQUESTS, thread_name_prefix="footers") as threads:
        return list(threads.map(lambda path: _columns(io, path), paths))


def _columns(io: FileIO, path: str) -> tuple[FileField, ...]:
    import pyarrow.parquet as pq

    if path.startswith("file:"):  # not through the library, which takes some characters for parts of a URL
        return tuple(_field(each) for each in pq.read_schema(path.removeprefix("file:")))
    with io.new_input(path.replace("s3a://", "s3://", 1)).open() as file:
        return tuple(_field(each) for each in pq.read_schema(file))


def _field(field: pa.Field) -> FileField:
    import pyarrow as pa

    text = (field.metadata or {}).get(_ID)
    number, kind = None if text is None else int(text), field.type
    if pa.types.is_struct(kind):
        return FileField(field.name, number, "struct", tuple(_field(kind.field(at)) for at in range(kind.num_fields)))
    if pa.types.is_map(kind):
        return FileField(field.name, number, "map", (_field(kind.key_field), _field(kind.item_field)))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return FileField(field.name, number, "list", (_field(kind.value_field),))
    return FileField(field.name, number)
