"""Sinks whose rows become visible exactly once.

:mod:`base` is the contract. :mod:`engine` is the life of a sink's instance, :mod:`ledger` what it records, :mod:`target` what a
destination does, :mod:`target_sink` the sink that joins them. :mod:`files` writes files, :mod:`delta` a Delta Lake table,
:mod:`iceberg` an Apache Iceberg table, :mod:`sql` a table of a database, :mod:`kafka` a topic. :mod:`lake` is what sinks of lake
tables have in common. A sink is imported when it is first used, with the libraries that it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.sinks.base import AtNewStart, SinkCommit, SinkContext, TwoPhaseCommitSink, merged
from dagster_checkpoints.systems.errors import (
    InvalidSinkDatabase,
    InvalidSinkPath,
    InvalidSinkTopic,
    ReservedSinkColumn,
    SinkAheadOfStorage,
    SinkCannotTakeBack,
    SinkColumnsMismatch,
    SinkError,
    SinkFenced,
    SinkHoldsEarlierRows,
    SinkLibraryMissing,
    SinkNotOpen,
    SinkPathInUse,
    SinkRowsRefused,
    SinkTargetChanged,
    SinkTransactionConflict,
    SinkTransactionLost,
    SinkUnavailable,
    UnreadableSinkTransaction,
)

if TYPE_CHECKING:
    from dagster_checkpoints.sinks.delta.sink import DeltaSink
    from dagster_checkpoints.sinks.files.sink import FileSink, ParquetSink
    from dagster_checkpoints.sinks.iceberg.sink import IcebergSink
    from dagster_checkpoints.sinks.kafka.sink import KafkaSink
    from dagster_checkpoints.sinks.sql.sink import SqlSink

_WHERE = {
    "DeltaSink": "delta.sink",
    "FileSink": "files.sink",
    "IcebergSink": "iceberg.sink",
    "KafkaSink": "kafka.sink",
    "ParquetSink": "files.sink",
    "SqlSink": "sql.sink",
}

__all__ = [
    "AtNewStart",
    "DeltaSink",
    "FileSink",
    "IcebergSink",
    "InvalidSinkDatabase",
    "InvalidSinkPath",
    "InvalidSinkTopic",
    "KafkaSink",
    "ParquetSink",
    "ReservedSinkColumn",
    "SinkAheadOfStorage",
    "SinkCannotTakeBack",
    "SinkColumnsMismatch",
    "SinkCommit",
    "SinkContext",
    "SinkError",
    "SinkFenced",
    "SinkHoldsEarlierRows",
    "SinkLibraryMissing",
    "SinkNotOpen",
    "SinkPathInUse",
    "SinkRowsRefused",
    "SinkTargetChanged",
    "SinkTransactionConflict",
    "SinkTransactionLost",
    "SinkUnavailable",
    "SqlSink",
    "TwoPhaseCommitSink",
    "UnreadableSinkTransaction",
    "merged",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
