"""`read_sql_table`: what a user calls in a bounded source. Checks in the driver what can be known before the first row."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.pipeline.setting_values import is_count
from dagster_checkpoints.sources.errors import InvalidSource, SourceLibraryMissing
from dagster_checkpoints.systems.errors import InvalidSinkDatabase, SinkLibraryMissing
from dagster_checkpoints.systems.sql_address import sql_address

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_REGISTRATION = threading.Lock()
_FIRST_SPARK = (4, 2)
"""The first version whose Python sources can limit a micro-batch."""


def read_sql_table(
    spark: SparkSession,
    url: Any,
    table: str,
    *,
    split_by: str,
    splits: int,
    splits_per_trigger: int = 1,
    columns: Sequence[str] | None = None,
    schema: str | None = None,
) -> DataFrame:
    """A table of a PostgreSQL or SQLite database as a stream that ends: for a ``@bounded_source``.

    The table is divided into ranges of one column, from its smallest to its largest value. A micro-batch reads some of these
    splits. A checkpoint remembers which splits were read; a restore does not read them again.

    Args:
        spark: the session, ``context.spark``.
        url: the database's URL as text, such as ``postgresql+psycopg://user:password@host/database`` or
            ``sqlite:////path/of/file.db``; or ``dg.EnvVar``; or a function without arguments that returns the URL.
        table: the name of the table or view.
        split_by: the column by which the table is divided: of a whole number, decimal, date or timestamp type. The database
            should have an index of it.
        splits: the number of splits; fewer if the column has fewer values.
        splits_per_trigger: the number of splits in one micro-batch; they are read at the same time. Default: 1.
        columns: the names of the columns to read. Default: all.
        schema: the table's schema. Default: the database's default.

    Raises:
        InvalidSource: the database, the table, a column or an argument cannot be used.
        SourceUnavailable: the database does not answer.
        SourceLibraryMissing: SQLAlchemy, the driver or a recent Spark is not installed.

    Source: https://spark.apache.org/docs/latest/sql-data-sources-jdbc.html, for the division
    """
    from pyspark import __version__

    if tuple(int(part) for part in __version__.split(".")[:2]) < _FIRST_SPARK:
        raise SourceLibraryMissing(
            f"read_sql_table: expected Spark 4.2 or later, found {__version__}: a Python source of earlier versions cannot limit "
            "a micro-batch. Read the table with spark.read.jdbc, as one micro-batch"
        )
    for name, value in (("splits", splits), ("splits_per_trigger", splits_per_trigger)):
        if not is_count(value, least=1):
            raise InvalidSource(f"read_sql_table({table!r}): expected {name} of at least 1, found {value!r}")
    try:
        address = sql_address(url, "read_sql_table")
    except SinkLibraryMissing as error:
        raise SourceLibraryMissing(str(error)) from None
    except InvalidSinkDatabase as error:
        raise InvalidSource(str(error)) from None
    from dagster_checkpoints.sources.sql.rows import SqlTable
    from dagster_checkpoints.sources.sql.stream import NAME, SqlDataSource, SqlReading

    source = SqlTable(address, table, schema)
    found = {column.name: column for column in source.columns(None if columns is None else (*columns, split_by))}
    by = found.get(split_by)
    if by is None or by.unit is None:
        usable = [column.name for column in found.values() if column.unit is not None]
        raise InvalidSource(
            f"{source.shown}: expected split_by to name a column of whole numbers, decimals, dates or timestamps, found "
            f"{split_by!r}{'' if by is None else f' of type {by.type.simpleString()}'}; such columns are: "
            f"{', '.join(usable) or 'none'}"
        )
    chosen = tuple(found[name] for name in (columns if columns is not None else found))
    reading = SqlReading(source, chosen, by, splits, splits_per_trigger)
    with _REGISTRATION:  # load() finds the class by its name, and keeps it
        spark.dataSource.register(type("SqlTableSource", (SqlDataSource,), {"reading": reading}))
        # A checkpoint names both: its division into splits is of this column.
        return spark.readStream.format(NAME).options(dbtable=source.title, split_by=split_by).load()
