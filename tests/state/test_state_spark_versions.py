"""Which version of Spark may restore what another one wrote."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dagster_checkpoints.state.errors import SparkVersionChanged
from dagster_checkpoints.state.metadata import CheckpointMetadata
from dagster_checkpoints.state.spark_versions import check_spark_version, is_supported_spark, rewrites_state

ROOT = Path(__file__).resolve().parents[2]


def written_by(version: str) -> CheckpointMetadata:
    return CheckpointMetadata("flights", 7, spark_version=version)


@pytest.mark.parametrize(
    ("written", "running"),
    [("4.1.4", "4.2.1"), ("4.1.4", "4.3.0"), ("4.2.1", "4.3.0"), ("4.3.0", "4.2.1"), ("", "4.3.0"), ("4.9.1", "4.9.0")],
)
def test_what_may_be_restored(written: str, running: str) -> None:
    check_spark_version(written_by(written), running)


@pytest.mark.parametrize("written", ["4.2.0", "4.3.0"])
def test_spark_4_1_does_not_read_state_of_later_versions(written: str) -> None:
    with pytest.raises(SparkVersionChanged, match=rf"Spark {re.escape(written)} has written .*Spark 4\.1\.4.*4\.2 or newer"):
        check_spark_version(written_by(written), "4.1.4")


@pytest.mark.parametrize("written", ["4.0.1", "4.10.0", "4.4.0.dev1", "5.1.0", "unknown"])
def test_state_of_a_version_that_was_not_tried_is_refused_by_name(written: str) -> None:
    with pytest.raises(SparkVersionChanged, match=f"Spark {re.escape(written)} has written checkpoint 7 of pipeline 'flights'"):
        check_spark_version(written_by(written), "4.3.0")


def test_the_plugin_runs_on_the_versions_that_it_requires() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (required,) = (Requirement(text) for text in project["dependencies"] if Requirement(text).name == "pyspark")
    versions = [f"{major}.{minor}.{patch}" for major in (3, 4, 5) for minor in range(12) for patch in (0, 5)]
    assert [v for v in versions if is_supported_spark(v)] == [v for v in versions if required.specifier.contains(v)]


@pytest.mark.parametrize(
    ("version", "can"), [("4.1.4", False), ("4.2.0", True), ("4.3.0", True), ("4.10.1", True), ("5.0.0", True)]
)
def test_which_versions_write_state_again(version: str, can: bool) -> None:
    assert rewrites_state(version) == can
