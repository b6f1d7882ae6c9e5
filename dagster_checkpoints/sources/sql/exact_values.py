"""The rule for every value that a database gives: it becomes a value of its column's type in Spark exactly, or it is refused.

Drivers and Arrow round, cut off and convert where a value does not fit (1.5 becomes 1, a time loses its zone). Here a value that
has the type is taken, a value that means the same in that type is converted, and each other value is refused. Must not know
tables, connections or errors of the source.

Source: https://www.sqlite.org/datatype3.html: a column of SQLite holds values of any type, whatever its declaration says.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as pa

_MOMENT = re.compile(r"\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.(?P<fraction>\d{1,9}))?)?)?(?P<zone>Z|[+-]\d\d(?::?\d\d)?)?")
_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_MICROSECOND_DIGITS = 6
_LONGEST_SHOWN = 80
_ANOTHER_TYPE = "it has another type"
# Arrow takes values of these Python types exactly, or raises: whole columns are 10 times as fast as value by value.
_TAKEN_BY_ARROW: dict[int, type] = {
    pa.bool_().id: bool,
    pa.int16().id: int,
    pa.int32().id: int,
    pa.int64().id: int,
    pa.float64().id: float,
    pa.decimal128(1).id: Decimal,
    pa.string().id: str,
    pa.binary().id: bytes,
    pa.date32().id: dt.date,
}


class ValueDoesNotFit(ValueError):
    """A value has no exact equal in its column's type.

    Args:
        row: the value's position in the column's values.
        value: the value.
        reason: what is wrong.
    """

    def __init__(self, row: int, value: object, reason: str) -> None:
        super().__init__(f"{shown(value)}: {reason}")
        self.row = row


def shown(value: object) -> str:
    """A value for errors."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"


def exact_array(values: Sequence[Any], arrow: pa.DataType) -> pa.Array:
    """Values as an Arrow array of exactly the same values.

    Args:
        values: the values as the driver gives them; None for NULL.
        arrow: the type, one of those in `TableColumn.arrow`.

    Raises:
        ValueDoesNotFit: a value has no exact equal of this type.
    """
    if {*map(type, values)} <= {_TAKEN_BY_ARROW.get(arrow.id), type(None)}:
        try:
            return pa.array(values, arrow)
        except (pa.ArrowException, ValueError, OverflowError):  # the rule says which value it is
            pass
    exact = _rule(arrow)
    converted = []
    for row, value in enumerate(values):
        try:
            converted.append(None if value is None else exact(value))
        except (ValueError, OverflowError) as error:
            raise ValueDoesNotFit(row, value, str(error)) from None
    return pa.array(converted, arrow)


def exact_value(value: Any, arrow: pa.DataType) -> Any:
    """One value as the Python value that `exact_array` takes for it.

    Raises:
        ValueDoesNotFit: it has no exact equal of this type.
    """
    try:
        return None if value is None else _rule(arrow)(value)
    except (ValueError, OverflowError) as error:
        raise ValueDoesNotFit(0, value, str(error)) from None


def _rule(arrow: pa.DataType) -> Callable[[Any], Any]:
    kinds = pa.types
    if kinds.is_boolean(arrow):
        return _boolean
    if kinds.is_integer(arrow):
        return partial(_integer, 2 ** (arrow.bit_width - 1))
    if kinds.is_float32(arrow):
        return _single
    if kinds.is_float64(arrow):
        return _double
    if kinds.is_decimal(arrow):
        return partial(_decimal, arrow.precision, arrow.scale)
    if kinds.is_string(arrow):
        return _text
    if kinds.is_binary(arrow):
        return _bytes
    if kinds.is_date(arrow):
        return _day
    return _moment if arrow.tz is None else _moment_utc


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value in (0, 1):
            return value == 1
        raise ValueError("it is neither 0 nor 1")
    raise ValueError(_ANOTHER_TYPE)


def _integer(limit: int, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(_ANOTHER_TYPE)
    if value != value or value in (float("inf"), float("-inf")) or int(value) != value:
        raise ValueError("it is not a whole number")
    if not -limit <= value < limit:
        raise ValueError("it is outside of the type's range")
    return int(value)


def _double(value: Any) -> float:
    if isinstance(value, float):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(_ANOTHER_TYPE)
    if int(float(value)) != value:
        raise ValueError("a floating-point number does not have all of its digits")
    return float(value)


def _single(value: Any) -> float:
    # The driver's number is the shortest decimal that stands for the column's 32 bits.
    number = _double(value)
    if abs(number) != float("inf") and pa.array([number], pa.float32())[0].as_py() in (float("inf"), float("-inf")):
        raise ValueError("it is outside of the type's range")
    return number


def _decimal(precision: int, scale: int, value: Any) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise ValueError(_ANOTHER_TYPE)
    number = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)  # repr: the digits that name this number
    if not number.is_finite():
        raise ValueError("the type has only finite numbers")
    if not number:
        return Decimal(0)
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    digits = number.as_tuple().digits
    while digits[-1] == 0:
        digits, exponent = digits[:-1], exponent + 1
    if -exponent > scale:
        raise ValueError(f"it has more than {scale} digits behind the point")
    if len(digits) + exponent > precision - scale:
        raise ValueError(f"it has more than {precision - scale} digits before the point")
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(_ANOTHER_TYPE)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("it is not UTF-8") from None
    return value


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise ValueError(_ANOTHER_TYPE)
    return bytes(value)


def _day(value: Any) -> dt.date:
    if isinstance(value, dt.datetime):
        raise ValueError(_ANOTHER_TYPE)
    if isinstance(value, dt.date):
        return value
    if not isinstance(value, str):
        raise ValueError(_ANOTHER_TYPE)
    if _DAY.fullmatch(value) is None:
        raise ValueError("it is not a date of the form YYYY-MM-DD, of the years 1 to 9999")
    return dt.date.fromisoformat(value)


def _moment(value: Any) -> dt.datetime:
    moment = _any_moment(value)
    if moment.tzinfo is not None:
        raise ValueError("it has a time zone, and the column's type has none")
    return moment


def _moment_utc(value: Any) -> dt.datetime:
    moment = _any_moment(value)
    if moment.tzinfo is None:
        raise ValueError("it has no time zone, and the column's type has one")
    return moment


def _any_moment(value: Any) -> dt.datetime:
    if isinstance(value, dt.datetime):
        return value
    if not isinstance(value, str):
        raise ValueError(_ANOTHER_TYPE)
    found = _MOMENT.fullmatch(value)
    if found is None:
        raise ValueError("it is not a time of the form YYYY-MM-DD HH:MM:SS.ffffff, of the years 1 to 9999")
    if len((found["fraction"] or "").rstrip("0")) > _MICROSECOND_DIGITS:
        raise ValueError("it is not a whole number of microseconds")
    return dt.datetime.fromisoformat(value)
