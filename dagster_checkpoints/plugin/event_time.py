"""The event time of a stage as metadata: its watermark, and how far that is behind the clock."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import dagster as dg

from dagster_checkpoints.control.status import watermark_moment
from dagster_checkpoints.pipeline import Pipeline


def event_time_metadata(pipeline: Pipeline, stage: str, watermark_ms: int | None, wall: Callable[[], datetime]) -> dict[str, Any]:
    """The watermark, and the lag of an unbounded stage; empty without a watermark, and at the end of event time.

    Args:
        pipeline: The stage's pipeline.
        stage: The stage's name.
        watermark_ms: Its output watermark, epoch ms; None if there is none.
        wall: Wall clock, against which the lag is measured.
    """
    watermark = watermark_moment(watermark_ms) if watermark_ms is not None else None
    if watermark is None:
        return {}
    shown: dict[str, Any] = {"watermark": dg.MetadataValue.timestamp(watermark)}
    if not pipeline.is_bounded(stage):  # a backfill has no meaningful lag
        shown["lag_seconds"] = round((wall() - watermark).total_seconds())
    return shown
