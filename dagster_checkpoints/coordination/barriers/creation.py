"""The barrier handler for the settings of a job."""

from __future__ import annotations

from collections.abc import Iterable

from dagster_checkpoints.coordination.barriers.events import BarrierHandler
from dagster_checkpoints.coordination.barriers.single import (
    AlignedBarrierHandler,
    AlignedWithTimeoutBarrierHandler,
    UnalignedBarrierHandler,
)
from dagster_checkpoints.coordination.barriers.tracking import MOST_TRACKED, TrackingBarrierHandler
from dagster_checkpoints.coordination.config import CheckpointConfig


def create_barrier_handler(config: CheckpointConfig, channels: Iterable[str], *, ended: Iterable[str] = ()) -> BarrierHandler:
    """The handler of one task.

    Args:
        config: the settings of checkpointing; `mode`, `unaligned` and `aligned_checkpoint_timeout` decide.
        channels: the task's input channels.
        ended: those that had ended when the task was restored.

    Source: Flink's InputProcessorUtil.createCheckpointBarrierHandler.
    """
    if config.mode == "at_least_once":
        return TrackingBarrierHandler(channels, ended=ended, tracked=max(MOST_TRACKED, config.max_concurrent))
    if not config.unaligned:
        return AlignedBarrierHandler(channels, ended=ended)
    if config.overtakes_at_once:
        return UnalignedBarrierHandler(channels, ended=ended)
    assert config.aligned_checkpoint_timeout is not None
    return AlignedWithTimeoutBarrierHandler(channels, timeout=config.aligned_checkpoint_timeout, ended=ended)
