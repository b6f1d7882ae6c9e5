"""The elements of a channel between two tasks: marks, and between them the driver's own records.

Every element that is no `Mark` is a record, or a segment of records. The marks that can be in-flight data of a checkpoint are
defined with the metadata; the marks of barriers are never stored.
"""

from __future__ import annotations

from typing import Any

from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier
from dagster_checkpoints.state.metadata import EndOfData, EndOfPartition, Mark, WatermarkAt, WatermarkStatus

__all__ = ["BarrierMark", "CancelMark", "Element", "EndOfData", "EndOfPartition", "Mark", "WatermarkAt", "WatermarkStatus"]


class BarrierMark(Mark, frozen=True):
    """A barrier: the records in front of it belong to the checkpoint, those behind it do not."""

    barrier: CheckpointBarrier


class CancelMark(Mark, frozen=True):
    """A cancellation marker: no barrier of this checkpoint comes on the channel."""

    checkpoint_id: int


Element = Any
"""A `Mark`, or records; only the driver knows the type of records."""
