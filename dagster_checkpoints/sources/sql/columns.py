"""The columns of a database's table as Spark's types, and the columns by which a table can be split.

Must not connect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import types as spark
from sqlalchemy import types as sql

from dagster_checkpoints.sources.sql.splits import SplitUnit
from dagster_checkpoints.systems.sql_address import DatabaseKind

_LARGEST_DECIMAL = 38
_SCALE_OF_ANY = 18
"""Digits behind the point of a NUMERIC without a precision, as in Spark's JDBC source."""
_SQLITE_EXACT_DIGITS = 15
"""Digits of a decimal that SQLite keeps in a column of type NUMERIC."""
_ARROW: dict[spark.DataType, pa.DataType] = {
    spark.BooleanType(): pa.bool_(),
    spark.ShortType(): pa.int16(),
    spark.IntegerType(): pa.int32(),
    spark.LongType(): pa.int64(),
    spark.FloatType(): pa.float32(),
    spark.DoubleType(): pa.float64(),
    spark.StringType(): pa.string(),
    spark.BinaryType(): pa.binary(),
    spark.DateType(): pa.date32(),
    spark.TimestampType(): pa.timestamp("us", tz="UTC"),
    spark.TimestampNTZType(): pa.timestamp("us"),
}


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of the table.

    Args:
        name: the column's name.
        type: its type in Spark.
        sql: its type in the database.
        as_text: whether the database sends it as text.
        unit: what its values count if the table can be split by it.
    """

    name: str
    type: spark.DataType
    sql: Any
    as_text: bool
    unit: SplitUnit | None

    @property
    def arrow(self) -> pa.DataType:
        """The type in the batches that Spark takes."""
        if isinstance(self.type, spark.DecimalType):
            return pa.decimal128(self.type.precision, self.type.scale)
        return _ARROW[self.type]


def table_column(name: str, found: Any, kind: DatabaseKind) -> TableColumn | None:
    """A column that the database describes; None if there is no type for it in Spark.

    Args:
        name: the column's name.
        found: its type, as SQLAlchemy reflects it.
        kind: the kind of the database.
    """
    if isinstance(found, sql.JSON | sql.Uuid | sql.Enum):  # Enum is a String, but its values are checked
        return TableColumn(name, spark.StringType(), found, True, None)
    chosen = _type(found, kind)
    return None if chosen is None else TableColumn(name, chosen, found, False, _unit(chosen))


def _type(found: Any, kind: DatabaseKind) -> spark.DataType | None:
    match found:
        case sql.Boolean():
            return spark.BooleanType()
        case sql.SmallInteger() if kind == "postgresql":
            return spark.ShortType()
        case sql.BigInteger():
            return spark.LongType()
        case sql.Integer():
            return spark.IntegerType() if kind == "postgresql" else spark.LongType()  # SQLite keeps 64 bits
        case sql.REAL() if kind == "postgresql":
            return spark.FloatType()
        case sql.Float():
            return spark.DoubleType()
        case sql.Numeric():
            return _decimal(found, kind)
        case sql.String():
            return spark.StringType()
        case sql.LargeBinary():
            return spark.BinaryType()
        case sql.DateTime():
            return spark.TimestampType() if found.timezone else spark.TimestampNTZType()
        case sql.Date():
            return spark.DateType()
    return None


def _decimal(found: Any, kind: DatabaseKind) -> spark.DataType | None:
    if found.precision is None:
        return spark.DecimalType(_LARGEST_DECIMAL, _SCALE_OF_ANY) if kind == "postgresql" else None
    if found.precision > (_LARGEST_DECIMAL if kind == "postgresql" else _SQLITE_EXACT_DIGITS):
        return None
    return spark.DecimalType(found.precision, found.scale or 0) if 0 <= (found.scale or 0) <= found.precision else None


def _unit(chosen: spark.DataType) -> SplitUnit | None:
    match chosen:
        case spark.ShortType() | spark.IntegerType() | spark.LongType() | spark.DecimalType():
            return SplitUnit.NUMBER
        case spark.DateType():
            return SplitUnit.DAY
        case spark.TimestampNTZType():
            return SplitUnit.MICROSECOND
        case spark.TimestampType():
            return SplitUnit.MICROSECOND_UTC
    return None
