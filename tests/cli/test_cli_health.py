"""`health`: its exit codes, its output, and the options of its rules."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from dagster_checkpoints.cli import health as command
from dagster_checkpoints.control.status import SilenceStatus


def test_a_healthy_pipeline(world: Any) -> None:
    world.run()
    world.status(checkpoint_interval=60.0)
    assert world.cli("health").stdout.strip() == "healthy"
    assert world.json("health") == {"healthy": True, "running": True, "problems": []}


def test_a_status_that_cannot_be_read_is_none(local: Any) -> None:
    local.run()
    local.storage.store.put(local.storage.layout.status, b"{")
    assert local.cli("health").stdout.strip() == "healthy"


def test_an_unhealthy_pipeline_has_another_exit_code(local: Any) -> None:
    local.run()
    last = local.status().last_checkpoint
    late = msgspec.structs.replace(last, completed_at=datetime.now(UTC) - timedelta(seconds=400), duration=9.0)
    local.status(checkpoint_interval=60.0, last_checkpoint=late)
    text = " ".join(local.cli("health", "--slow-checkpoint", "5", code=1).stdout.split())
    assert "error checkpoint_intervals" in text and "expected one every 60 s" in text and "warning slow_checkpoint" in text
    assert [problem["name"] for problem in local.json("health", code=1)["problems"]] == ["checkpoint_intervals"]
    local.cli("health", "--checkpoint-intervals", "0")
    assert local.json("health", "--checkpoint-intervals", "9", "--slow-checkpoint", "5")["healthy"], "a warning is no error"


def test_a_source_that_does_not_answer(local: Any) -> None:
    local.run()
    stages = local.status().stages
    silence = SilenceStatus(seconds=400.0, doing="asking", words="Getting offsets")
    silent = tuple(msgspec.structs.replace(instance, silence=silence) for instance in stages[1].instances[:1])
    local.status(stages=(stages[0], msgspec.structs.replace(stages[1], instances=silent), *stages[2:]))
    assert "Source 'live' has not answered for 400 s" in " ".join(local.cli("health", code=1).stdout.split())


def test_a_pipeline_that_does_not_run(local: Any) -> None:
    assert "found none. Is it the right --storage?" in local.cli("health", code=6).output
    local.run()
    local.end("FINISHED", ended_by="drain")
    assert "drain" in local.cli("health", code=3).stdout
    local.run()
    local.end("FAILED")
    assert local.json("health", code=1)["problems"][0]["name"] == "failed"


def test_several_looks_see_what_one_does_not(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    local.run()
    attempts = itertools.count(1)

    def pass_a_minute(seconds: float) -> None:
        minutes = next(attempts)
        monkeypatch.setattr(command, "_now", lambda: datetime.now(UTC) + timedelta(minutes=minutes))
        assert local.ownership is not None
        state = local.storage.read_state()
        assert state is not None and state.lease is not None
        local.status(attempt=1 + minutes, updated_at=datetime.now(UTC) + timedelta(minutes=minutes))

    local.status(attempt=1)
    monkeypatch.setattr(command, "sleep", pass_a_minute)
    monkeypatch.setattr(command, "monotonic", lambda: float(next(clock)))
    clock = itertools.count(0, 60)
    found = local.json("health", "--during", "240", code=1)["problems"]
    assert "restarts" in {problem["name"] for problem in found}


@pytest.mark.parametrize("option", [("--late-rows", "-1"), ("--slow-checkpoint", "nan"), ("--growing-lag", "25")])
def test_a_threshold_that_is_no_threshold_is_wrong_usage_and_no_unhealthy_pipeline(local: Any, option: tuple[str, str]) -> None:
    local.run()
    name, value = option
    assert f"{name[2:].replace('-', '_')}={value}" in local.cli("health", name, value, code=2).output
