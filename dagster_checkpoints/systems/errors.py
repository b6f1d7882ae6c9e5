"""The errors of sinks."""

from __future__ import annotations

from collections.abc import Iterable
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


class SinkAheadOfStorage(SinkError):
    """The job has committed checkpoints that the checkpoint storage does not know: the storage is an older copy."""


class SinkTransactionLost(SinkError):
    """A transaction that a checkpoint holds is neither staged nor committed any more."""


class SinkTransactionConflict(SinkError):
    """A transaction's target already holds rows of another transaction."""


class SinkLibraryMissing(SinkError):
    """A library that the sink needs is not installed."""


class InvalidSinkDatabase(SinkError):
    """A sink was given a database that it cannot write to: a wrong URL, wrong credentials, missing rights."""


class InvalidSinkTopic(SinkError):
    """A sink was given a Kafka topic that it cannot write to: there is none, wrong credentials or options, missing rights."""


class SinkColumnsMismatch(SinkError):
    """The columns of a sink's table do not fit the rows of the stage."""


class SinkRowsRefused(SinkError):
    """The sink's table cannot hold a value, or does not accept a row."""


class SinkTargetChanged(SinkError):
    """The sink's table or place was dropped, emptied or exchanged since the job has written to it, or changed while it ran."""


class SinkCannotTakeBack(SinkError):
    """A restore needs rows hidden or applied again that the sink cannot identify."""


class SinkUnavailable(SinkError):
    """The sink's target did not answer, or has no space: another attempt may succeed."""

    repeats = False


def few(names: Iterable[str], at_most: int = 3) -> str:
    """The first names in alphabetical order, for an error's text."""
    chosen = sorted(names)
    return ", ".join(chosen[:at_most]) + (", …" if len(chosen) > at_most else "") if chosen else "none"
