"""Sources beside those that Spark brings along: functions that a source's stage calls, and that return a streaming DataFrame.

:mod:`sql` reads a table of a database in splits, :mod:`delta` a Delta Lake table, :mod:`iceberg`
an Apache Iceberg table; :mod:`lake` is what the last two have in common. :mod:`splits` has discoveries for split sources.
"""

from dagster_checkpoints.sources.delta.table import read_delta_table
from dagster_checkpoints.sources.errors import (
    InvalidSource,
    SourceColumnsChanged,
    SourceColumnsUnreadable,
    SourceError,
    SourceLibraryMissing,
    SourceRowsChanged,
    SourceRowsLost,
    SourceUnavailable,
)
from dagster_checkpoints.sources.iceberg.table import read_iceberg_table
from dagster_checkpoints.sources.splits.files import FileSplits
from dagster_checkpoints.sources.splits.kafka import KafkaSplit, KafkaSplits
from dagster_checkpoints.sources.sql.table import read_sql_table

__all__ = [
    "FileSplits",
    "InvalidSource",
    "KafkaSplit",
    "KafkaSplits",
    "SourceColumnsChanged",
    "SourceColumnsUnreadable",
    "SourceError",
    "SourceLibraryMissing",
    "SourceRowsChanged",
    "SourceRowsLost",
    "SourceUnavailable",
    "read_delta_table",
    "read_iceberg_table",
    "read_sql_table",
]
