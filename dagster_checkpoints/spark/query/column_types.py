"""The column types that a query's output may have: every output is written as Parquet, and a channel is read from these files.

An unknown type is refused: it would fail in the middle of the job, or be read as another type. So is a structure without
fields, which Parquet has not, and one with two fields of a name, which Spark writes and cannot read.

Source: https://spark.apache.org/docs/latest/sql-ref-datatypes.html
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pyspark.sql import types as t

_WRITTEN = (
    t.BinaryType,
    t.BooleanType,
    t.ByteType,
    t.CharType,
    t.DateType,
    t.DayTimeIntervalType,
    t.DecimalType,
    t.DoubleType,
    t.FloatType,
    t.GeographyType,
    t.GeometryType,
    t.IntegerType,
    t.LongType,
    t.ShortType,
    t.StringType,
    t.TimestampNTZType,
    t.TimestampType,
    t.VarcharType,
    t.VariantType,
    t.YearMonthIntervalType,
)


def not_written(schema: t.StructType) -> list[tuple[str, t.DataType]]:
    """The columns, nested ones included, whose type Spark's Parquet files cannot hold: path and type of each."""
    return [(path, kind) for path, kind in _atoms(schema) if not isinstance(kind, _WRITTEN)]


def repeated_names(kind: t.DataType) -> Iterator[str]:
    """The names that columns, or the fields of a structure in one, have more than once, in upper or lower case: path of each."""
    for path, each in _nested(kind):
        if isinstance(each, t.StructType):
            names = Counter(field.name.lower() for field in each.fields)
            yield from (_below(path, name) for name, count in sorted(names.items()) if count > 1)


def advice_on(path: str, kind: t.DataType) -> str:
    """What to do with such a column, for an error's text.

    Args:
        path: its path.
        kind: its type.
    """
    if isinstance(kind, t.StructType):
        return "Give the structure a field, or leave the column out."
    return f"Convert the column: F.col({path.split('.')[0]!r}).cast('string'), and cast it back where it is read."


def _atoms(kind: t.DataType) -> Iterator[tuple[str, t.DataType]]:
    """The types that hold no other ones, and structures without a field, each with its path."""
    for path, each in _nested(kind):
        if isinstance(each, t.StructType):
            if path and not each.fields:
                yield path, each
        elif not isinstance(each, t.ArrayType | t.MapType | t.UserDefinedType):
            yield path, each


def _nested(kind: t.DataType, path: str = "") -> Iterator[tuple[str, t.DataType]]:
    """A type, and all types in it, each with the path of its column or field."""
    yield path, kind
    match kind:
        case t.StructType():
            for field in kind.fields:
                yield from _nested(field.dataType, _below(path, field.name))
        case t.ArrayType():
            yield from _nested(kind.elementType, path)
        case t.MapType():
            yield from _nested(kind.keyType, path)
            yield from _nested(kind.valueType, path)
        case t.UserDefinedType():
            yield from _nested(kind.sqlType(), path)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
