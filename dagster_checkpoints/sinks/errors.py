"""What can go wrong with a sink."""

from __future__ import annotations

from typing import ClassVar

from dagster_checkpoints.errors import DagsterCheckpointsError


class SinkError(DagsterCheckpointsError):
    """Base of all errors of sinks.

    They repeat: the job fails at once, without a restart. A sink raises something else, or a subclass with ``repeats = False``,
    for what may go well in another attempt.
    """

    repeats: ClassVar[bool] = True


class InvalidSinkPath(SinkError):
    """A sink was given a path that it cannot write to."""


class SinkPathInUse(SinkError):
    """The path belongs to a sink of another stage or pipeline."""


class SinkHoldsEarlierRows(SinkError):
    """A new start found rows that an earlier job has committed, and the sink is not told what to do with them."""


class SinkNotOpen(SinkError):
    """A sink was used before ``open`` or after ``close``."""


class ReservedSinkColumn(SinkError):
    """The rows have a column whose name the sink needs for itself."""


class UnreadableSinkTransaction(SinkError):
    """The text of a transaction in a checkpoint was not written by this kind of sink."""


class SinkFenced(SinkError):
    """A newer owner of the pipeline writes to the sink: this one must leave everything as it is."""


class SinkTransactionLost(SinkError):
    """Of a transaction that a checkpoint holds nothing is left, neither staged nor committed."""


class SinkTransactionConflict(SinkError):
    """Where a transaction is to be committed lie rows of another one."""
