"""The columns of a FileSink's rows: types that a format does not have, and the record that all its files have the same columns.

Must not know transactions or checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from dagster_checkpoints.sinks.files.names import COLUMNS
from dagster_checkpoints.systems.errors import SinkColumnsMismatch

if TYPE_CHECKING:
    from dagster_checkpoints.sinks.files.target_files import TargetFiles

FileFormat = Literal["parquet", "orc", "csv", "json"]
"""The formats of files."""

_SPARK_TYPES = frozenset(
    ("string", "byte", "short", "integer", "long", "float", "double", "boolean", "binary", "date", "timestamp", "timestamp_ntz")
)
_PARTITION_TYPES = "string, integer, boolean or date"


class FileColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the file that says what all files of the location have in common.

    Args:
        job: the job that wrote them first.
        format: the format.
        partition_by: the partition columns.
        columns: name and Arrow type of each column, in order.
    """

    job: str
    format: FileFormat
    partition_by: tuple[str, ...]
    columns: tuple[tuple[str, str], ...]
    version: int = 1


# Created at import: two threads that decode a type for the first time at the same moment crash msgspec.
_COLUMNS = msgspec.json.Decoder(FileColumns)


def read_columns(files: TargetFiles) -> FileColumns | None:
    """What the files of the location have in common; None if none was written yet.

    Raises:
        SinkColumnsMismatch: the file cannot be read.
    """
    data = files.read(COLUMNS)
    try:
        return None if data is None else _COLUMNS.decode(data)
    except msgspec.DecodeError as error:
        raise SinkColumnsMismatch(
            f"expected {files.place}/{COLUMNS} to list the columns of the files there, found a file that cannot be read: "
            f"{error}. Delete it: the next run writes it again"
        ) from error


def check_layout(found: FileColumns, format: FileFormat, partition_by: Sequence[str], files: TargetFiles) -> None:
    """Check the sink's format and partition columns against those of the files that are there.

    Raises:
        SinkColumnsMismatch: they differ.
    """
    if (found.format, found.partition_by) != (format, tuple(partition_by)):
        raise SinkColumnsMismatch(
            f"expected FileSink(format={format!r}, partition_by={list(partition_by)}) to fit the files in {files.place}, found "
            f"that these have format={found.format!r}, partition_by={list(found.partition_by)}. Give the sink the same settings, "
            "or another location"
        )


def agree_on_columns(files: TargetFiles, own: FileColumns) -> None:
    """Record the columns with the first rows; later rows must have the same.

    Args:
        files: the location.
        own: what the rows of this attempt have.

    Raises:
        SinkColumnsMismatch: the rows have other columns than the files that are there.
    """
    if files.create(COLUMNS, msgspec.json.format(msgspec.json.encode(own), indent=2) + b"\n"):
        return
    check_columns(files, own)


def check_columns(files: TargetFiles, own: FileColumns) -> None:
    """Check the columns of rows against those of the files that are there; changes nothing.

    Raises:
        SinkColumnsMismatch: the rows have other columns.
    """
    found = read_columns(files)
    if found is None:  # there are no rows; or another instance removes the files of an earlier job, and creates it again
        return
    check_layout(found, own.format, own.partition_by, files)
    problems = list(_differences(dict(found.columns), dict(own.columns)))
    if not problems and own.format == "csv" and found.columns != own.columns:
        problems.append(f"expected the order {[name for name, _ in found.columns]}, found {[name for name, _ in own.columns]}")
    if problems:
        raise SinkColumnsMismatch(
            f"the stage's rows do not fit the files in {files.place}: {'; '.join(problems)}. Change the stage, or choose another "
            f"location. If later files shall have other columns than earlier ones, delete {files.place}/{COLUMNS}"
        )


def check_types(schema: Any, recorded: str | None, format: FileFormat, sink: str) -> None:
    """Check that the format has all types of the rows.

    Args:
        schema: the Arrow schema of the rows.
        recorded: the schema of the rows that Spark has recorded, as JSON; None if it has not.
        format: the format of the files to write.
        sink: the sink as errors name it.

    Raises:
        SinkColumnsMismatch: the format does not have a type; the text names the column and the type.
    """
    spark = dict(_spark_types(recorded))
    problems = [
        f"column {field.name!r} of type {spark.get(field.name, field.type)}"
        for field in schema
        if not _only_known(spark.get(field.name, "long")) or not _fits(field.type, format)
    ]
    if problems:
        raise SinkColumnsMismatch(
            f"{sink}: expected columns of types that {format.upper()} files have, found {', '.join(problems)}. Cast these "
            "columns in the stage, for example to STRING, with to_json if the value is nested, or with base64 if it is binary"
        )


def check_partitions(schema: Any, partition_by: Sequence[str], sink: str) -> None:
    """Check that the partition columns exist, and that readers get back their values from the names of directories.

    Raises:
        SinkColumnsMismatch: a partition column is missing or has a type whose values are not read back, or all columns are.
    """
    import pyarrow as pa

    kinds = (pa.types.is_string, pa.types.is_integer, pa.types.is_boolean, pa.types.is_date)
    problems = []
    for name in partition_by:
        if name not in schema.names:
            problems.append(f"partition column {name!r}: expected a column of the rows, found {', '.join(schema.names)}")
        elif not any(kind(schema.field(name).type) for kind in kinds):
            problems.append(f"partition column {name!r}: expected type {_PARTITION_TYPES}, found {schema.field(name).type}")
    if len(partition_by) == len(schema.names):
        problems.append("expected at least one column that is not a partition column")
    if problems:
        raise SinkColumnsMismatch(f"{sink}: {'; '.join(problems)}. Add such a column in the stage, for example to_date(ts)")


def _differences(found: Mapping[str, str], own: Mapping[str, str]) -> Iterator[str]:
    for name, kind in found.items():
        if name not in own:
            yield f"column {name!r}: expected it in the rows, found none"
        elif own[name] != kind:
            yield f"column {name!r}: expected type {kind}, found {own[name]}"
    for name in own:
        if name not in found:
            yield f"column {name!r}: expected none, since the files do not have it, found it in the rows"


def _spark_types(recorded: str | None) -> Iterator[tuple[str, Any]]:
    for field in json.loads(recorded)["fields"] if recorded else ():
        yield field["name"], field["type"]


def _only_known(kind: Any) -> bool:
    """Whether Arrow has the same type as Spark: an interval, for example, is a number in a Parquet file."""
    if isinstance(kind, str):
        return kind in _SPARK_TYPES or kind.startswith(("decimal(", "char(", "varchar(", "string "))
    match kind["type"]:
        case "struct":
            return all(_only_known(field["type"]) for field in kind["fields"])
        case "array":
            return _only_known(kind["elementType"])
        case "map":
            return _only_known(kind["keyType"]) and _only_known(kind["valueType"])
        case _:
            return False


def _fits(kind: Any, format: FileFormat) -> bool:
    import pyarrow as pa

    nested = pa.types.is_nested(kind)
    binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    if pa.types.is_interval(kind) or pa.types.is_duration(kind) or pa.types.is_time(kind):
        return format == "parquet"
    if format == "csv":
        return not nested and not binary
    if not nested:
        return True
    if format == "json" and pa.types.is_map(kind) and not pa.types.is_string(kind.key_type):
        return False
    return all(_fits(kind.field(position).type, format) for position in range(kind.num_fields))
