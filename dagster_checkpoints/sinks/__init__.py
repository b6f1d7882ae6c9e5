"""Sinks whose rows become visible exactly once.

:mod:`base` is the contract, :mod:`parquet` the sink that this package provides.
"""

from dagster_checkpoints.sinks.base import AtNewStart, SinkContext, TwoPhaseCommitSink
from dagster_checkpoints.sinks.errors import (
    InvalidSinkPath,
    ReservedSinkColumn,
    SinkError,
    SinkFenced,
    SinkHoldsEarlierRows,
    SinkNotOpen,
    SinkPathInUse,
    SinkTransactionConflict,
    SinkTransactionLost,
    UnreadableSinkTransaction,
)
from dagster_checkpoints.sinks.parquet import ParquetSink

__all__ = [
    "AtNewStart",
    "InvalidSinkPath",
    "ParquetSink",
    "ReservedSinkColumn",
    "SinkContext",
    "SinkError",
    "SinkFenced",
    "SinkHoldsEarlierRows",
    "SinkNotOpen",
    "SinkPathInUse",
    "SinkTransactionConflict",
    "SinkTransactionLost",
    "TwoPhaseCommitSink",
    "UnreadableSinkTransaction",
]
