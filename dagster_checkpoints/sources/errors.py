"""The errors of sources."""

from __future__ import annotations

from typing import ClassVar

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.spark.errors import LostRows


class SourceError(DagsterCheckpointsError):
    """Base of all errors of sources.

    They repeat: the job fails at once, without a restart. If another attempt may succeed, a source raises a subclass with
    ``repeats = False``.
    """

    repeats: ClassVar[bool] = True


class InvalidSource(SourceError):
    """A source was given a place, a table, a column or an option that it cannot read."""


class SourceLibraryMissing(SourceError):
    """A library or a version of Spark that the source needs is not installed."""


class SourceUnavailable(SourceError):
    """The place that a source reads did not answer: another attempt may succeed."""

    repeats = False


class SourceRowsLost(SourceError, LostRows):
    """Rows that were not read yet are no longer there, or cannot be found any more."""


class SourceRowsChanged(SourceError):
    """Rows that were read, or that are to be read, were deleted or changed where only new rows were expected."""


class SourceColumnsUnreadable(SourceError):
    """Rows that are still to be read were written with columns that cannot be read as those that the table has now."""


class SourceColumnsChanged(SourceError):
    """A table has got other columns than when the run began: the next attempt reads it with the new ones."""

    repeats = False
