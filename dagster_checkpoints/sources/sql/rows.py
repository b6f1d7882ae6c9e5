"""Reads a table of a database: its columns, the range of a column, and the rows of one split.

Values come as they are stored, also those for which the database's driver has no Python type. Runs in the driver and in Spark's
workers.

Source: https://docs.sqlalchemy.org/en/20/core/connections.html#streaming-with-a-fixed-buffer-via-yield-per,
https://www.psycopg.org/psycopg3/docs/advanced/adapt.html
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import sqlalchemy as sa

from dagster_checkpoints.sources.errors import InvalidSource, SourceUnavailable
from dagster_checkpoints.sources.sql.columns import TableColumn, table_column
from dagster_checkpoints.sources.sql.exact_values import ValueDoesNotFit, exact_array, exact_value, shown
from dagster_checkpoints.sources.sql.splits import SplitRange
from dagster_checkpoints.systems.sql_address import SqlAddress
from dagster_checkpoints.systems.sql_database import DatabaseFailure, failure_of


def engine_of(address: SqlAddress, shown: str) -> sa.Engine:
    """An engine without a pool.

    Args:
        address: the database.
        shown: the source as errors name it.

    Raises:
        InvalidSource: SQLite's file does not exist.
    """
    if address.kind == "sqlite":
        if not Path(str(address.url.database)).is_file():  # SQLite would create it
            raise InvalidSource(f"{shown}: expected the database's file, found none")
        engine = sa.create_engine(address.url, hide_parameters=True, poolclass=sa.NullPool, connect_args={"timeout": 60.0})
        sa.event.listen(engine, "connect", _take_any_text)
        return engine
    given = address.url.query
    defaults = {"connect_timeout": "10", "application_name": "dagster-checkpoints"}
    arguments: dict[str, Any] = {name: value for name, value in defaults.items() if name not in given}
    arguments |= {"client_encoding": "utf8", "prepare_threshold": None}  # servers behind a pool know no prepared statements
    engine = sa.create_engine(address.url, hide_parameters=True, poolclass=sa.NullPool, connect_args=arguments)
    sa.event.listen(engine, "connect", _take_any_time)
    return engine


def _take_any_text(connection: Any, record: Any) -> None:
    """Let a text that is not UTF-8 come as a text that cannot be encoded, instead of an error that names no row."""
    connection.text_factory = lambda stored: stored.decode(errors="surrogateescape")


def _take_any_time(connection: Any, record: Any) -> None:
    """Let a date or a time that Python does not have (infinity, BC, after 9999) come as the server's text, likewise."""
    import psycopg
    from psycopg.adapt import Loader

    for name in ("date", "timestamp"):
        known = connection.adapters.types[name]
        of_driver: Any = connection.adapters.get_loader(known.oid, psycopg.pq.Format.TEXT)

        class AnyTime(Loader):
            driver = of_driver

            def __init__(self, oid: int, context: Any = None) -> None:
                super().__init__(oid, context)
                self._load = self.driver(oid, context).load

            def load(self, data: Any) -> Any:
                try:
                    return self._load(data)
                except (psycopg.DataError, ValueError):
                    return bytes(data).decode()

        connection.adapters.register_loader(name, AnyTime)


_ROWS_OF_A_BATCH = 10_000
_REPEATED = (DatabaseFailure.AWAY, DatabaseFailure.NO_SPACE)


@dataclass(frozen=True, slots=True)
class SqlTable:
    """A table, or a view, of a database.

    Args:
        address: the database.
        name: the table's name.
        schema: its schema; None: the database's default.
    """

    address: SqlAddress
    name: str
    schema: str | None

    @property
    def title(self) -> str:
        """The table as errors name it."""
        return f"{self.schema}.{self.name}" if self.schema else self.name

    @property
    def shown(self) -> str:
        """The table with its database, without credentials."""
        return f"read_sql_table({self.title!r}) in {self.address.shown}"

    def columns(self, wanted: Sequence[str] | None) -> tuple[TableColumn, ...]:
        """The table's columns.

        Args:
            wanted: the names of the columns to read; None: all.

        Raises:
            InvalidSource: there is no such table or column, or a column's type is not supported.
            SourceUnavailable: the database does not answer.
        """
        with self.connected() as connection:
            inspector = sa.inspect(connection)
            try:
                found = {str(column["name"]): column["type"] for column in inspector.get_columns(self.name, schema=self.schema)}
            except sa.exc.NoSuchTableError:
                raise InvalidSource(
                    f"{self.shown}: expected a table or a view of this name, found none. Names are case-sensitive; `schema=` "
                    "names the schema if it is not the database's default"
                ) from None
        missing = [name for name in wanted or () if name not in found]
        if missing:
            raise InvalidSource(f"{self.shown}: expected the columns {', '.join(missing)}, found only {', '.join(found)}")
        columns = [table_column(name, found[name], self.address.kind) for name in wanted or found]
        unknown = [f"{name} ({found[name]!r})" for name, column in zip(wanted or found, columns, strict=True) if column is None]
        if unknown:
            raise InvalidSource(
                f"{self.shown}: expected columns whose type Spark has, found {', '.join(unknown)}. Leave them out with columns=, "
                "or read a view that casts them"
            )
        return tuple(column for column in columns if column is not None)

    def bounds(self, column: TableColumn) -> tuple[int | None, int | None]:
        """The smallest and the largest value of a column, as numbers; None if no row has one.

        Raises:
            InvalidSource: the table cannot be divided by its values.
            SourceUnavailable: the database does not answer.
        """
        of: Any = sa.column(column.name)
        ends = [self._sent(function(of), column) for function in (sa.func.min, sa.func.max)]
        assert column.unit is not None
        with self.connected() as connection:
            found = connection.execute(sa.select(*ends).select_from(self._clause([column]))).one()
        numbers: list[int | None] = []
        for value in found:
            try:
                exact = exact_value(self._received(column)(value), column.arrow)
            except ValueDoesNotFit as error:
                raise self._misfit(column, error, "as its smallest or largest value") from None
            numbers.append(None if exact is None else column.unit.to_number(exact))
        lower, upper = numbers
        return lower, upper

    def rows(self, columns: Sequence[TableColumn], by: TableColumn, split: SplitRange) -> Iterator[pa.RecordBatch]:
        """The rows of a split, as the database has them when it is asked.

        Args:
            columns: the columns to read.
            by: the column by which the table is split.
            split: the values of that column.

        Raises:
            InvalidSource: the table has changed, or a value does not have its column's type.
            SourceUnavailable: the database does not answer.
        """
        clause = self._clause({column.name: column for column in (*columns, by)}.values())
        selected = [self._sent(sa.column(column.name), column) for column in (*columns, by)]
        query = sa.select(*selected).select_from(clause).where(*_conditions(clause.c[by.name], by, split))
        with self.connected() as connection:
            result = connection.execution_options(stream_results=True, yield_per=_ROWS_OF_A_BATCH).execute(query)
            for rows in result.partitions():
                yield self._batch(columns, by, rows)

    def _batch(self, columns: Sequence[TableColumn], by: TableColumn, rows: Sequence[Any]) -> pa.RecordBatch:
        *values, keys = zip(*rows, strict=True)
        arrays = []
        for column, found in zip(columns, values, strict=True):
            try:
                arrays.append(exact_array([*map(self._received(column), found)], column.arrow))
            except ValueDoesNotFit as error:
                raise self._misfit(column, error, f"in a row with {by.name} = {shown(keys[error.row])}") from None
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([(column.name, column.arrow) for column in columns]))

    def _misfit(self, column: TableColumn, error: ValueDoesNotFit, where: str) -> InvalidSource:
        return InvalidSource(
            f"{self.shown}: expected values of {column.name!r} that fit {column.type.simpleString()} exactly, found {error}, "
            f"{where}. Correct the row, or read a view that converts or leaves out such values"
        )

    def _sent(self, value: Any, column: TableColumn) -> Any:
        """What the database is asked for: the value as it is stored. SQLAlchemy's types would round it."""
        if self.address.kind == "sqlite":
            return value
        if column.as_text:
            return sa.cast(value, sa.Text)
        # Without the session's zone: in it, a time of the years 1 to 9999 may be outside of them.
        return sa.func.timezone("UTC", value) if pa.types.is_timestamp(column.arrow) and column.arrow.tz else value

    def _received(self, column: TableColumn) -> Callable[[Any], Any]:
        """What a value that the database has sent stands for."""
        if self.address.kind == "sqlite":
            return _json if column.as_text else _same
        return _in_utc if pa.types.is_timestamp(column.arrow) and column.arrow.tz else _same

    def _clause(self, columns: Any) -> Any:
        return sa.table(self.name, *[sa.column(column.name, column.sql) for column in columns], schema=self.schema)

    @contextmanager
    def connected(self) -> Iterator[sa.Connection]:
        """A connection, with the driver's errors as errors of the source."""
        engine: Any = engine_of(self.address, self.shown)
        try:
            with engine.connect() as connection:
                yield connection
        except (sa.exc.DBAPIError, sa.exc.TimeoutError, engine.dialect.dbapi.Error) as error:
            raise self._translated(error) from None  # the driver's error may show credentials
        except UnicodeDecodeError as error:  # a server whose encoding is SQL_ASCII
            raise InvalidSource(
                f"{self.shown}: expected text in UTF-8, found {shown(error.object)}. Correct the row, or read a view that "
                "converts it"
            ) from None
        finally:
            engine.dispose()

    def _translated(self, error: Exception) -> Exception:
        driver = error.orig if isinstance(error, sa.exc.DBAPIError) else error
        found = self.address.without_credentials(str(driver)).strip()
        failure = failure_of(error)
        if failure in _REPEATED:
            return SourceUnavailable(f"{self.shown}: expected the database to answer, found: {found}")
        if failure is DatabaseFailure.OTHER:
            return SourceUnavailable(f"{self.shown}: expected the database to perform a query, found: {found}")
        return InvalidSource(
            f"{self.shown}: expected a table that can be read, with the columns that it had when the run began, found: {found}"
        )


def _conditions(column: Any, by: TableColumn, split: SplitRange) -> Iterator[Any]:
    assert by.unit is not None
    if split.begin is not None:
        yield column >= by.unit.to_value(split.begin)
    if split.end is not None:
        before = column < by.unit.to_value(split.end)
        yield before if split.begin is not None else sa.or_(before, column.is_(None))


def _same(value: Any) -> Any:
    return value


def _json(value: Any) -> Any:
    """SQLite stores a JSON text that is a number as a number."""
    return repr(value) if isinstance(value, int | float) else value


def _in_utc(value: Any) -> Any:
    return value.replace(tzinfo=dt.UTC) if isinstance(value, dt.datetime) else value
