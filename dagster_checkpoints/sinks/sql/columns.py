"""The columns of a SqlSink's table: SQL types for the stage's columns, and whether an existing table can hold them exactly.

Must not know transactions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from sqlalchemy import types as sql
from sqlalchemy.dialects import postgresql

from dagster_checkpoints.sinks.exact_values import ColumnLimits
from dagster_checkpoints.sinks.parquet_files import intervals_in
from dagster_checkpoints.systems.errors import ReservedSinkColumn, SinkColumnsMismatch
from dagster_checkpoints.systems.sql_address import IDENTIFIER_BYTES, DatabaseKind

POSITION = "_dagster_position"
"""Column of staging tables: the row's number in its transaction, from 0."""
_SQLITE_EXACT_DIGITS = 15
"""Digits of a decimal that SQLite keeps in a column of type NUMERIC."""
_INTEGER_DIGITS = {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}


@dataclass(frozen=True, slots=True)
class SinkColumn:
    """A column of the stage's rows.

    Args:
        name: the column's name.
        arrow: its type in the batches' files.
        type: the SQL type that a table created by the sink has.
    """

    name: str
    arrow: pa.DataType
    type: Any


def stage_columns(
    schema: pa.Schema, kind: DatabaseKind, checkpoint_column: str | None, key: Sequence[str], sink: str
) -> tuple[SinkColumn, ...]:
    """The stage's columns with their SQL types.

    Args:
        schema: the schema of a batch's files, with their metadata.
        kind: the kind of the database.
        checkpoint_column: name of the column that the sink adds; None without one.
        key: names of the columns by which rows are replaced.
        sink: the sink as errors name it.

    Raises:
        ReservedSinkColumn: a column has a name that the sink uses.
        SinkColumnsMismatch: a column has a type or a name that the database cannot hold; or a column of the key is missing.
    """
    _check_names(schema.names, kind, checkpoint_column, sink)
    intervals = intervals_in(schema)
    columns = []
    for field in schema:
        sql_type = None if field.name in intervals else _sql_type(field.type, kind)
        if sql_type is None:
            raise SinkColumnsMismatch(
                f"{sink}: expected columns of simple types, found column {field.name!r} of type "
                f"{intervals.get(field.name, field.type)}. Give a nested column as text, F.to_json({field.name!r}), and an "
                "interval as a number"
            )
        columns.append(SinkColumn(field.name, field.type, sql_type))
    missing = [name for name in key if name not in schema.names]
    if missing:
        raise SinkColumnsMismatch(f"{sink}: expected the key's columns {', '.join(key)}, found rows without {', '.join(missing)}")
    return tuple(columns)


def _check_names(names: Sequence[str], kind: DatabaseKind, checkpoint_column: str | None, sink: str) -> None:
    folded: dict[str, str] = {}
    for name in names:
        if name.lower() in (POSITION, (checkpoint_column or POSITION).lower()):
            raise ReservedSinkColumn(f"{sink}: expected rows without a column {name!r}, which the sink adds: rename it")
        if kind == "postgresql" and len(name.encode()) > IDENTIFIER_BYTES:
            raise SinkColumnsMismatch(
                f"{sink}: expected column names of at most {IDENTIFIER_BYTES} bytes, found {name!r}: PostgreSQL would shorten it"
            )
        other = folded.setdefault(name.lower() if kind == "sqlite" else name, name)
        if other != name:
            raise SinkColumnsMismatch(f"{sink}: expected names that SQLite can distinguish, found {other!r} and {name!r}")


def _sql_type(arrow: pa.DataType, kind: DatabaseKind) -> Any:
    """The type of a created table's column; None if there is none."""
    kinds = pa.types
    postgres = kind == "postgresql"
    if kinds.is_boolean(arrow):
        return sql.Boolean()
    if arrow in _INTEGER_DIGITS:
        digits = _INTEGER_DIGITS[arrow]
        return sql.SmallInteger() if digits <= 5 else sql.Integer() if digits <= 10 else sql.BigInteger()
    if kinds.is_float32(arrow):
        return sql.REAL()
    if kinds.is_float64(arrow):
        return sql.DOUBLE_PRECISION() if postgres else sql.REAL()
    if kinds.is_decimal(arrow):
        fits = postgres or arrow.precision <= _SQLITE_EXACT_DIGITS
        return sql.Numeric(arrow.precision, arrow.scale) if fits else sql.Text()
    if kinds.is_string(arrow) or kinds.is_large_string(arrow):
        return sql.Text()
    if kinds.is_binary(arrow) or kinds.is_large_binary(arrow):
        return sql.LargeBinary()
    if kinds.is_date(arrow):
        return sql.Date()
    if kinds.is_timestamp(arrow):
        return sql.TIMESTAMP(timezone=arrow.tz is not None)
    return None


def check_table(
    found: Sequence[Any], columns: Sequence[SinkColumn], kind: DatabaseKind, checkpoint_column: str | None, sink: str
) -> None:
    """Check that an existing table holds the stage's rows exactly.

    Args:
        found: the table's columns, as SQLAlchemy's inspector gives them.
        columns: the stage's columns.
        kind: the kind of the database.
        checkpoint_column: name of the column that the sink adds; None without one.
        sink: the sink as errors name it.

    Raises:
        SinkColumnsMismatch: a column is missing, has another type, or cannot be left out.
    """
    existing = {column["name"]: column for column in found}
    wanted = list(columns)
    if checkpoint_column is not None:
        wanted.append(SinkColumn(checkpoint_column, pa.string(), sql.Text()))
    for column in wanted:
        table_column = existing.pop(column.name, None)
        if table_column is None:
            raise SinkColumnsMismatch(
                f"{sink}: expected a column {column.name!r} of type {column.type} in the table, found {', '.join(existing)}. Add "
                "it (ALTER TABLE … ADD COLUMN), or leave it out in the stage"
            )
        if is_computed(table_column):
            raise SinkColumnsMismatch(
                f"{sink}: expected a column {column.name!r} that can be written, found that the database computes it. Leave it "
                "out in the stage"
            )
        if not _holds(table_column["type"], column.arrow, kind):
            raise SinkColumnsMismatch(
                f"{sink}: expected column {column.name!r} to have the type {column.type}, or a wider one, for the stage's "
                f"{column.arrow}, found {table_column['type']}. Change the table's column, or cast the stage's"
            )
    for name, table_column in existing.items():
        optional = table_column["nullable"] or table_column.get("default") is not None
        if not optional and not table_column.get("computed") and not table_column.get("identity"):
            raise SinkColumnsMismatch(
                f"{sink}: expected a value for column {name!r} of the table, which is NOT NULL and has no default, found that "
                "the stage has no such column. Add it to the stage, or give the table's column a default"
            )


def column_limits(
    found: Sequence[Any], columns: Sequence[SinkColumn], key: Sequence[str], kind: DatabaseKind
) -> dict[str, ColumnLimits]:
    """What the columns of a table that fits the stage's rows cannot hold, by name.

    Args:
        found: the table's columns, as SQLAlchemy's inspector gives them; empty if the sink has created it.
        columns: the stage's columns.
        key: names of the columns by which rows are replaced.
        kind: the kind of the database.
    """
    existing = {column["name"]: column for column in found}
    limits = {}
    for column in columns:
        table_column = existing.get(column.name, {"nullable": True, "type": column.type})
        required = column.name in key or not table_column["nullable"]
        if kind == "sqlite":  # it enforces no lengths, stores times as text, and takes NaN for NULL
            limits[column.name] = ColumnLimits(required, nan=False)
            continue
        of = table_column["type"]
        length = None if isinstance(of, sql.Enum) or not isinstance(of, sql.String) else of.length
        precision = getattr(of, "precision", None) if isinstance(of, sql.DateTime) else None
        digits = {} if precision is None else {"second_digits": precision}
        limits[column.name] = ColumnLimits(required, characters=length, zero_characters=False, **digits)
    return limits


def is_computed(table_column: Any) -> bool:
    """Whether the database computes the column's values itself, and accepts no others."""
    return bool(table_column.get("computed") or (table_column.get("identity") or {}).get("always"))


def _holds(found: Any, arrow: pa.DataType, kind: DatabaseKind) -> bool:
    """Whether a column of this SQL type holds every value of the Arrow type exactly."""
    kinds = pa.types
    if kinds.is_boolean(arrow):
        return isinstance(found, sql.Boolean)
    if arrow in _INTEGER_DIGITS:
        return _holds_integer(found, _INTEGER_DIGITS[arrow], kind)
    if kinds.is_float32(arrow):
        return isinstance(found, sql.Float)
    if kinds.is_float64(arrow):
        return isinstance(found, sql.Float) and (kind == "sqlite" or not isinstance(found, sql.REAL))
    if kinds.is_decimal(arrow):
        return _holds_decimal(found, arrow, kind)
    if kinds.is_string(arrow) or kinds.is_large_string(arrow):
        # PostgreSQL's types "char" and name, which cut text off, are plain String.
        cuts = isinstance(found, sql.CHAR) or (kind == "postgresql" and type(found) is sql.String)
        others = (sql.JSON, sql.Uuid, postgresql.CITEXT)
        return (isinstance(found, sql.String) and not cuts) or (kind == "postgresql" and isinstance(found, others))
    if kinds.is_binary(arrow) or kinds.is_large_binary(arrow):
        return isinstance(found, sql.LargeBinary)
    if kinds.is_date(arrow):
        return isinstance(found, sql.Date)
    return isinstance(found, sql.DateTime) and (kind == "sqlite" or found.timezone is (arrow.tz is not None))


def _holds_integer(found: Any, digits: int, kind: DatabaseKind) -> bool:
    if isinstance(found, sql.Numeric) and not isinstance(found, sql.Float):
        scale = found.scale or 0
        return kind == "postgresql" and (found.precision is None or (scale >= 0 and found.precision - scale >= digits))
    if not isinstance(found, sql.Integer):
        return False
    if kind == "sqlite" or isinstance(found, sql.BigInteger):
        return True
    return digits <= (5 if isinstance(found, sql.SmallInteger) else 10)


def _holds_decimal(found: Any, arrow: pa.DataType, kind: DatabaseKind) -> bool:
    if kind == "sqlite" and isinstance(found, sql.Text | sql.VARCHAR):
        return True
    if not isinstance(found, sql.Numeric) or isinstance(found, sql.Float):
        return False
    if kind == "sqlite" and arrow.precision > _SQLITE_EXACT_DIGITS:
        return False
    if found.precision is None:
        return True
    scale = found.scale or 0
    return bool(scale >= arrow.scale and found.precision - scale >= arrow.precision - arrow.scale)
