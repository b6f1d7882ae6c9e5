"""The column types that a query's output may have: every output is written as Parquet, and a channel is read as Arrow.

An unknown type is refused: it would fail in the middle of the job, or be read as another type.

Source: https://spark.apache.org/docs/latest/sql-ref-datatypes.html
"""

from __future__ import annotations

from collections.abc import Iterator

from pyspark.sql import types as t

_BOTH = (
    t.BinaryType,
    t.BooleanType,
    t.ByteType,
    t.CharType,
    t.DateType,
    t.DayTimeIntervalType,
    t.DecimalType,
    t.DoubleType,
    t.FloatType,
    t.IntegerType,
    t.LongType,
    t.ShortType,
    t.StringType,
    t.TimestampNTZType,
    t.TimestampType,
    t.VarcharType,
)
_PARQUET_ONLY = (t.GeographyType, t.GeometryType, t.VariantType, t.YearMonthIntervalType)


def not_written(schema: t.StructType) -> list[tuple[str, t.DataType]]:
    """The columns, nested ones included, whose type Spark's Parquet files cannot hold: path and type of each."""
    return [(path, kind) for path, kind in _atoms(schema) if not isinstance(kind, _BOTH + _PARQUET_ONLY)]


def not_carried(schema: t.StructType) -> list[tuple[str, t.DataType]]:
    """The columns, nested ones included, whose type a channel cannot carry: path and type of each."""
    return [(path, kind) for path, kind in _atoms(schema) if not isinstance(kind, _BOTH)]


def text_of(path: str, kind: t.DataType) -> str:
    """An expression that converts such a column into a type that a channel can carry, for an error's advice."""
    column = path.split(".")[0]
    match kind:
        case t.VariantType():
            return f"F.to_json({column!r}), and F.parse_json where it is read"
        case t.GeometryType() | t.GeographyType():
            return f"F.st_asbinary({column!r}), and F.st_geomfromwkb where it is read"
        case _:
            return f"F.col({column!r}).cast('string'), and cast it back where it is read"


def _atoms(kind: t.DataType, path: str = "") -> Iterator[tuple[str, t.DataType]]:
    match kind:
        case t.StructType():
            for field in kind.fields:
                yield from _atoms(field.dataType, f"{path}.{field.name}" if path else field.name)
        case t.ArrayType():
            yield from _atoms(kind.elementType, path)
        case t.MapType():
            yield from _atoms(kind.keyType, path)
            yield from _atoms(kind.valueType, path)
        case t.UserDefinedType():
            yield from _atoms(kind.sqlType(), path)
        case _:
            yield path, kind
