"""The rule for every value that a sink writes as text or into a database: readers get it back exactly, or it is refused.

Databases and text formats round, cut off and replace what they cannot hold, some of them without an error. Types are compared
elsewhere, when the target is prepared; here are the values of columns whose types fit. Must not know targets.

Source: https://spark.apache.org/docs/latest/sql-ref-datatypes.html: dates and timestamps are of the years 1 to 9999.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dagster_checkpoints.systems.errors import SinkRowsRefused

_MICROSECOND_DIGITS = 6
_YEARS_IN_DAYS = (-719_162, 2_932_896)
_YEARS_IN_MICROSECONDS = (-62_135_596_800_000_000, 253_402_300_799_999_999)
_GREGORIAN_SINCE_DAY = -141_427
_SECOND, _DAY = 1_000_000, 86_400_000_000
_LONGEST_SHOWN = 80


@dataclass(frozen=True, slots=True)
class ColumnLimits:
    """What a column of the target cannot hold, although its type fits.

    Args:
        required: whether it holds no NULL.
        characters: the largest number of characters of a text; None without a limit.
        second_digits: the number of digits of a second's fraction.
        zero_characters: whether a text may contain the character U+0000.
        nan: whether it holds NaN.
    """

    required: bool = False
    characters: int | None = None
    second_digits: int = _MICROSECOND_DIGITS
    zero_characters: bool = True
    nan: bool = True


_NO_LIMITS = ColumnLimits()


def check_values(batch: pa.RecordBatch, limits: Mapping[str, ColumnLimits], key: Sequence[str], sink: str) -> None:
    """Refuse rows with a value that readers would not get back.

    Args:
        batch: the rows.
        limits: the limits of the target's columns by name; a column that is missing has none of its own.
        key: names of the columns by which an error names the row.
        sink: the sink as errors name it.

    Raises:
        SinkRowsRefused: names the column, the value, the row and the remedy.
    """
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        problem = _problem(name, column, limits.get(name, _NO_LIMITS))
        if problem is None:
            continue
        row, expected, remedy = problem
        where = ", ".join(f"{each} = {_shown(batch.column(each), row)}" for each in key if each != name)
        raise SinkRowsRefused(
            f"{sink}: expected {expected}, found {_shown(column, row)} in column {name!r}{' of the row with ' if where else ''}"
            f"{where}. {remedy}"
        )


def check_orc_times(batch: pa.RecordBatch, sink: str) -> None:
    """Refuse dates and times that Spark and Hive would not read back from ORC files of Arrow's writer, also nested ones.

    That writer does not record which calendar its days are of, so Java's readers take those before 1582-10-15 for days of the
    Julian calendar. Fractions of seconds before 1970 it stores as negative ones, for which these readers fail.

    Args:
        batch: the rows.
        sink: the sink as errors name it.

    Raises:
        SinkRowsRefused: names the column, the value and the remedy.
    """
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for values in _simple_values(column):
            problem = _orc_problem(values)
            if problem is not None:
                row, expected = problem
                raise SinkRowsRefused(
                    f"{sink}: expected {expected}, found {_shown(values, row)} in column {name!r}. Choose another format, or "
                    "give the column as text"
                )


def _orc_problem(values: pa.Array) -> tuple[int, str] | None:
    """The first value that would not be read back, and what was expected."""
    if pa.types.is_date(values.type):
        units, first = values.cast(pa.date32()).view(pa.int32()), _GREGORIAN_SINCE_DAY
    elif pa.types.is_timestamp(values.type):
        units, first = values.cast(pa.timestamp("us", values.type.tz)).view(pa.int64()), _GREGORIAN_SINCE_DAY * _DAY
        whole = pc.multiply(pc.divide(units, _SECOND), _SECOND)
        if _any(found := pc.and_(pc.less(units, 0), pc.not_equal(whole, units))):
            return _first(found), "times of whole seconds before 1970, since Spark cannot read others from this ORC file"
    else:
        return None
    if _any(found := pc.less(units, first)):
        return _first(found), "dates and times since 1582-10-15, since Spark reads earlier ones from this ORC file as others"
    return None


def _simple_values(column: pa.Array) -> Iterator[pa.Array]:
    """The values of a column that are not nested: those in its arrays, maps and structures."""
    if pa.types.is_struct(column.type):
        parts = column.flatten()
    elif pa.types.is_map(column.type):
        first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
        parts = [values.slice(first, last - first) for values in (column.keys, column.items)]
    elif pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        parts = [column.flatten()]
    else:
        yield column
        return
    for part in parts:
        yield from _simple_values(part)


def _problem(name: str, column: pa.Array, limits: ColumnLimits) -> tuple[int, str, str] | None:
    """The first row that does not fit, what was expected, and the remedy."""
    kinds = pa.types
    if limits.required and column.null_count:
        return (
            _first(pc.is_null(column)),
            "a value in every row (the column belongs to the key, or the table declares it NOT NULL; or it is the only one of a "
            "CSV file, whose readers skip empty lines)",
            "Filter these rows, or give them a value",
        )
    if kinds.is_string(column.type) or kinds.is_large_string(column.type):
        return _text_problem(name, column, limits)
    if kinds.is_floating(column.type) and not limits.nan and _any(found := pc.is_nan(column)):
        remedy = f"SQLite would store NULL. Replace it in the stage: F.nanvl({name!r}, F.lit(None))"
        return _first(found), "numbers", remedy
    if kinds.is_date(column.type):
        return _years_problem(column.view(pa.int32()), _YEARS_IN_DAYS)
    if kinds.is_timestamp(column.type):
        microseconds = column.cast(pa.timestamp("us", column.type.tz)).view(pa.int64())
        return _years_problem(microseconds, _YEARS_IN_MICROSECONDS) or _fraction_problem(name, microseconds, limits.second_digits)
    return None


def _text_problem(name: str, column: pa.Array, limits: ColumnLimits) -> tuple[int, str, str] | None:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        row = next(row for row, value in enumerate(_bytes(column)) if value is not None and not _is_utf8(value))
        return row, "text in UTF-8", f"Give the column as binary, or decode it in the stage: F.decode({name!r}, 'ISO-8859-1')"
    if not limits.zero_characters and _any(found := pc.match_substring(column, "\0")):
        remedy = f"PostgreSQL cannot hold it. Remove it in the stage: F.translate({name!r}, '\\x00', '')"
        return _first(found), "text without the character U+0000", remedy
    if limits.characters is not None and _any(found := pc.greater(pc.utf8_length(column), limits.characters)):
        remedy = f"Enlarge the table's column, or shorten the text in the stage: F.left({name!r}, F.lit({limits.characters}))"
        return _first(found), f"text of at most {limits.characters} characters", remedy
    return None


def _years_problem(numbers: pa.Array, years: tuple[int, int]) -> tuple[int, str, str] | None:
    ends = pc.min_max(numbers).as_py()
    if ends["min"] is None or (years[0] <= ends["min"] and ends["max"] <= years[1]):
        return None
    outside = pc.or_(pc.less(numbers, years[0]), pc.greater(numbers, years[1]))
    return _first(outside), "times of the years 1 to 9999", "Replace such a value in the stage"


def _fraction_problem(name: str, microseconds: pa.Array, digits: int) -> tuple[int, str, str] | None:
    if digits >= _MICROSECOND_DIGITS:
        return None
    step = 10 ** (_MICROSECOND_DIGITS - digits)
    if not _any(found := pc.not_equal(pc.multiply(pc.divide(microseconds, step), step), microseconds)):
        return None
    unit = "second" if digits == 0 else "millisecond" if digits <= 3 else "microsecond"
    remedy = f"Enlarge the table's column, or cut the time off in the stage: F.date_trunc({unit!r}, {name!r})"
    return _first(found), f"times of at most {digits} digits of a second's fraction, as the table's column has", remedy


def _any(found: pa.Array) -> bool:
    return bool(pc.any(found).as_py())


def _first(found: pa.Array) -> int:
    return int(pc.index(found, True).as_py())


def _bytes(column: pa.Array) -> list[bytes | None]:
    large = pa.types.is_large_string(column.type)
    values: list[bytes | None] = column.view(pa.large_binary() if large else pa.binary()).to_pylist()
    return values


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _shown(column: pa.Array, row: int) -> str:
    """A value for errors, also one that Python does not have."""
    value: Any
    one = column.slice(row, 1)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        value = _bytes(one)[0]
        text = "NULL" if value is None else repr(value.decode()) if _is_utf8(value) else repr(value)
    elif pa.types.is_date(column.type) or pa.types.is_timestamp(column.type):
        text = str(pc.cast(_without_zone(one), pa.string())[0].as_py() or "NULL")
    else:
        value = one[0].as_py()
        text = "NULL" if value is None else "NaN" if value != value else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"


def _without_zone(column: pa.Array) -> pa.Array:
    return column.view(pa.timestamp(column.type.unit)) if pa.types.is_timestamp(column.type) else column
