"""The errors of sinks."""

from __future__ import annotations

from typing import ClassVar

from dagster_checkpoints.errors import DagsterCheckpointsError


class SinkError(DagsterCheckpointsError):
    """Base of all errors of sinks.

    They repeat: the job fails at once, without a restart. If another attempt may succeed, a sink raises another exception, or a
    subclass with ``repeats = False``.
    """

    repeats: ClassVar[bool] = True


class InvalidSinkPath(SinkError):
    """A sink was given a path that it cannot write to."""


class SinkPathInUse(SinkError):
    """The path belongs to a sink of another stage or pipeline."""


class SinkHoldsEarlierRows(SinkError):
    """A new start found rows that an earlier job has committed, and the sink's ``at_new_start`` is ``refuse``."""


class SinkNotOpen(SinkError):
    """A sink was used before ``open`` or after ``close``."""


class ReservedSinkColumn(SinkError):
    """The rows have a column whose name the sink reserves."""


class UnreadableSinkTransaction(SinkError):
    """The text of a transaction in a checkpoint was not written by this kind of sink."""


class SinkFenced(SinkError):
    """A newer owner of the pipeline writes to the sink: this owner must change nothing."""


class SinkTransactionLost(SinkError):
    """A transaction that a checkpoint holds is neither staged nor committed any more."""


class SinkTransactionConflict(SinkError):
    """A transaction's target already holds rows of another transaction."""
