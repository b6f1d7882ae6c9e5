"""Settings out of their range: what a person reads."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints.coordination import CheckpointConfig, InvalidCheckpointConfig


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"interval": 0.0}, "interval is 0.0; expected a positive number or None."),
        ({"interval": -1.0}, "interval is -1.0; expected a positive number or None."),
        ({"timeout": 0.0}, "timeout is 0.0; expected a positive number."),
        ({"min_pause": -0.1}, "min_pause is -0.1; expected 0 or more."),
        ({"max_concurrent": 0}, "max_concurrent is 0; expected 1 or more."),
        ({"tolerable_failed_checkpoints": -1}, "tolerable_failed_checkpoints is -1; expected 0 or more."),
        ({"retained": 0}, "retained is 0; expected 1 or more."),
        ({"mode": "exactly-once"}, "mode is 'exactly-once'; expected exactly_once or at_least_once."),
        ({"mode": "at_least_once", "unaligned": True}, "unaligned is True; expected False with mode='at_least_once'."),
        ({"unaligned": True, "max_concurrent": 2}, "max_concurrent is 2; expected 1 with unaligned=True."),
        (
            {"aligned_checkpoint_timeout": 1.0},
            "aligned_checkpoint_timeout is 1.0; expected None, or 0 or more together with unaligned=True.",
        ),
        (
            {"unaligned": True, "aligned_checkpoint_timeout": -1.0},
            "aligned_checkpoint_timeout is -1.0; expected None, or 0 or more together with unaligned=True.",
        ),
        ({"initial_delay": -1.0}, "initial_delay is -1.0; expected 0 or more, or None."),
        ({"max_queued": 0}, "max_queued is 0; expected 1 or more."),
        ({"history": -1}, "history is -1; expected 0 or more."),
        (
            {"interval_during_backlog": 59.0},
            "interval_during_backlog is 59.0; expected 0, or at least `interval`, which must be set, or None.",
        ),
        (
            {"interval": None, "interval_during_backlog": 0.0},
            "interval_during_backlog is 0.0; expected 0, or at least `interval`, which must be set, or None.",
        ),
    ],
)
def test_a_setting_out_of_its_range(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidCheckpointConfig) as error:
        CheckpointConfig(**{"interval": 60.0, **settings})
    assert str(error.value) == f"Checkpoint setting {text}"


@pytest.mark.parametrize(
    "settings",
    [
        {"interval": 0.5, "timeout": 0.5, "min_pause": 0.5, "initial_delay": 0.5},
        {"interval": None, "min_pause": 0.0, "max_concurrent": 1, "tolerable_failed_checkpoints": 0, "retained": 1},
        {"mode": "at_least_once", "max_concurrent": 2, "initial_delay": 0.0, "max_queued": 1, "history": 0},
        {"unaligned": True, "aligned_checkpoint_timeout": 0.0},
        {"unaligned": True, "aligned_checkpoint_timeout": 0.5, "interval_during_backlog": 0.0},
        {"interval_during_backlog": 60.0},
    ],
)
def test_a_setting_at_the_edge_of_its_range(settings: dict[str, Any]) -> None:
    config = CheckpointConfig(**{"interval": 60.0, **settings})
    assert {name: getattr(config, name) for name in settings} == settings
