"""What flows on a channel between two tasks: marks, and between them the driver's own records.

Every element that is no `Mark` is a record, or a segment of records. The marks that can be in-flight data of a checkpoint are the
metadata's own; those of barriers serve when they are read, and are never stored.
"""

from __future__ import annotations

from typing import Any

from dagster_checkpoints.coordination import CheckpointBarrier
from dagster_checkpoints.state import EndOfData, EndOfPartition, Mark, WatermarkAt, WatermarkStatus

__all__ = ["BarrierMark", "CancelMark", "Element", "EndOfData", "EndOfPartition", "Mark", "WatermarkAt", "WatermarkStatus"]


class BarrierMark(Mark, frozen=True):
    """The records in front of it belong to the checkpoint, those behind it do not."""

    barrier: CheckpointBarrier


class CancelMark(Mark, frozen=True):
    """No barrier of this checkpoint comes on the channel."""

    checkpoint_id: int


Element = Any
"""A `Mark`, or else records: what these are is the driver's business."""
