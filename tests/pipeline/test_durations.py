"""Durations are seconds, as a number, in every setting; another value is refused with the number to write."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import dagster_checkpoints as dc
from dagster_checkpoints.cli.app import app
from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline.errors import InvalidDurationError
from dagster_checkpoints.pipeline.setting_values import no_seconds
from dagster_checkpoints.plugin.resource import CheckpointCoordinatorResource
from dagster_checkpoints.plugin.sensors.recovery import Backoff


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("5s", "5"),
        ("5", "5"),
        ("5 seconds", "5"),
        ("250ms", "0.25"),
        ("1.5 min", "90"),
        ("2 hours", "7200"),
        ("PT5S", "5"),
        ("PT10M", "600"),
        ("1d", "86400"),
        (timedelta(minutes=1), "60"),
        ("soon", None),
        ("", None),
        ("1 fortnight", None),
        ([5], None),
        (True, None),
        (math.inf, "finite"),
        (math.nan, "finite"),
    ],
)
def test_a_value_that_is_no_number_of_seconds(value: Any, written: str | None) -> None:
    problem = no_seconds(value)
    assert problem.startswith("expected seconds, as a ")
    assert written is None or (problem.endswith(f"Write {written}") or (written == "finite" and "finite" in problem))


@pytest.mark.parametrize("value", [0, 0.5, 30, -1])
def test_numbers_are_seconds_whatever_their_range(value: float) -> None:
    assert no_seconds(value) == ""


NO_DURATIONS = {"restart_delay_multiplier"}
SETTINGS = [
    name
    for name, field in CheckpointCoordinatorResource.model_fields.items()
    if field.annotation in (float, float | None) and name not in NO_DURATIONS
]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("value", ["5s", timedelta(seconds=5)], ids=str)
def test_every_duration_of_the_resource(name: str, value: Any) -> None:
    with pytest.raises(InvalidDurationError, match=rf"^CheckpointCoordinatorResource\({name}=\.\.\.\): .* Write 5$"):
        CheckpointCoordinatorResource(storage="checkpoints", **{name: value})


def split_source(seconds: Any) -> None:
    @dc.split_source(discover=lambda context: [], schema="n long", discovery_interval=seconds)
    def splits(context: Any, split: str) -> Any:
        return None


def source(seconds: Any) -> None:
    @dc.unbounded_source(watermark=("ts", "1 hour"), idle_after=seconds)
    def live(context: Any) -> Any:
        return None


@pytest.mark.parametrize(
    "define",
    [
        source,
        split_source,
        lambda seconds: dc.SqlSink("sqlite:///x.db", "t", retry_for=seconds),
        lambda seconds: dc.KafkaSink("topic", "localhost:1", staging="s", retry_for=seconds),
        lambda seconds: Backoff(first=seconds),
    ],
    ids=["idle_after", "discovery_interval", "SqlSink", "KafkaSink", "Backoff"],
)
def test_every_duration_of_a_definition(define: Any) -> None:
    with pytest.raises(DagsterCheckpointsError, match=r"expected seconds, as a number, found '5s'\. Write 5"):
        define("5s")


@pytest.mark.parametrize(
    "given, told",
    [
        ("5s", "expected seconds, as a number, found '5s'. Write 5"),
        ("nan", "expected seconds, as a finite number, found nan"),
        ("inf", "expected seconds, as a finite number, found inf"),
    ],
)
@pytest.mark.parametrize("arguments", [["watch", "--interval"], ["savepoint", "--deadline"], ["stop", "--deadline"]])
def test_every_duration_of_the_command_line(tmp_path: Path, arguments: list[str], given: str, told: str) -> None:
    ran = CliRunner().invoke(app, [*arguments, given, "--storage", str(tmp_path)])
    assert ran.exit_code == 2 and told in " ".join(ran.output.split())
