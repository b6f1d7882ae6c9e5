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


def check_unused(settings: CheckpointCoordinatorResource) -> None:
    """Refuse a setting that another one leaves without effect.

    Raises:
        ValueError: A setting has another value than its default, and nothing uses it.
    """
    strategy = settings.restart_strategy
    uses = {
        "restart_interval": strategy != "fixed_delay",
        "restart_delay_multiplier": strategy == "exponential_delay",
        "restart_delay_maximum": strategy == "exponential_delay",
        "termination_timeout": settings.savepoint_on_termination,
    }
    for name, used in uses.items():
        value = getattr(settings, name)
        if not used and value != type(settings).model_fields[name].default:
            other = "savepoint_on_termination=False" if name == "termination_timeout" else f"restart_strategy={strategy!r}"
            raise ValueError(f"{name}={value!r} has no effect with {other}. Leave it out, or change the other setting.")


def restart_strategy(settings: CheckpointCoordinatorResource) -> RestartStrategy:
    """The restart strategy after a task's failure.

    Raises:
        ValueError: Two settings do not go together.
    """
    if settings.restart_attempts == 0:
        return NoRestart()
    try:
        return _restart_strategy(settings)
    except InvalidCheckpointConfig as error:
        names = ("restart_attempts", "restart_delay", "restart_delay_multiplier", "restart_delay_maximum", "restart_interval")
        given = ", ".join(f"{name}={getattr(settings, name)!r}" for name in names)
        raise ValueError(f"restart_strategy={settings.restart_strategy!r} with {given}: {error}") from None


def _restart_strategy(settings: CheckpointCoordinatorResource) -> RestartStrategy:
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
