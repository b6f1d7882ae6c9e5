"""From the settings of the resource to those of the coordination floor: checkpoints, and restarts after a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_checkpoints.coordination import (
    CheckpointConfig,
    ExponentialDelayRestart,
    FailureRateRestart,
    FixedDelayRestart,
    InvalidCheckpointConfig,
    NoRestart,
    RestartStrategy,
)

if TYPE_CHECKING:
    from dagster_checkpoints.plugin.resource import CheckpointCoordinatorResource


def checkpoint_config(settings: CheckpointCoordinatorResource) -> CheckpointConfig:
    """The settings of checkpoints.

    Raises:
        ValueError: Two of them do not go together.
    """
    try:
        return CheckpointConfig(
            interval=settings.interval,
            interval_during_backlog=settings.interval_during_backlog,
            backlog_rows=settings.backlog_rows,
            timeout=settings.timeout,
            min_pause=settings.min_pause,
            max_concurrent=settings.max_concurrent,
            initial_delay=settings.initial_delay,
            tolerable_failed_checkpoints=settings.tolerable_failed_checkpoints,
            retained=settings.retained,
            mode=settings.mode,
            unaligned=settings.unaligned,
            aligned_checkpoint_timeout=settings.aligned_checkpoint_timeout,
        )
    except InvalidCheckpointConfig as error:
        raise ValueError(str(error)) from None


def restart_strategy(settings: CheckpointCoordinatorResource) -> RestartStrategy:
    """The restart strategy after a task's failure; the combination of settings was checked where they are defined."""
    if settings.restart_attempts == 0:
        return NoRestart()
    if settings.restart_strategy == "exponential_delay":
        return ExponentialDelayRestart(
            initial=settings.restart_delay,
            maximum=settings.restart_delay_maximum,
            multiplier=settings.restart_delay_multiplier,
            reset_after=settings.restart_interval,
            attempts=settings.restart_attempts,
        )
    assert settings.restart_attempts is not None, "checked where it is defined"
    if settings.restart_strategy == "failure_rate":
        return FailureRateRestart(settings.restart_attempts, settings.restart_interval, settings.restart_delay)
    return FixedDelayRestart(settings.restart_attempts, settings.restart_delay)
